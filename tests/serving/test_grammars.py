# SPDX-License-Identifier: Apache-2.0
"""Grammars give the same tokens whatever drafts them: nothing, the DFLASH chain, or a tree; and every answer is valid.

The tokenizer is the demo pair's with one frequent token renamed to the end of reasoning, so that drafts run across it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import requests

from serving.server import ModelPair, Server, generate, generate_body, result, stream
from serving.tool_formats import MARKER, kimi
from serving.vocabulary import rarest_tokens, rename_tokens

NEW_TOKENS = 112
LONG = {"max_new_tokens": NEW_TOKENS}
CONCURRENCY = 12
PROMPTS = range(0, 36, 12)
RENAMED, THINK_END = "\u0120=", "</think>"  # the token " ="


def closed(**properties: Any) -> str:
    """An object with these properties and no others."""
    return json.dumps(
        {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    )


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
NAME = {"enum": ["self", "args", "None"]}
SCHEMAS = {
    "integer": closed(n={"type": "integer", "minimum": 0, "maximum": 99}),
    "enum": json.dumps({"enum": ["leaf", "node"]}),
    "const": json.dumps({"const": {"a": [1, 2]}}),
    "boolean": closed(name=NAME, b={"type": "boolean"}),
    "null": closed(a={"type": "null"}),
    "string": closed(a={"type": "string", "maxLength": 8}),
    "pattern": json.dumps({"type": "string", "pattern": "^def [a-z]{1,5}$"}),
    "array": closed(l={"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 4}),
    "tuple": json.dumps({"type": "array", "prefixItems": [DIGIT, NAME], "items": False, "minItems": 2}),
    "nested": closed(a=json.loads(closed(b=json.loads(closed(c=DIGIT))))),
    "any of": closed(v={"anyOf": [DIGIT, {"type": "null"}, NAME]}),
    "reference": json.dumps(
        {"$defs": {"d": DIGIT}, "type": "array", "items": {"$ref": "#/$defs/d"}, "minItems": 1, "maxItems": 3}
    ),
    "range": closed(x={"type": "integer", "minimum": -5, "maximum": 12}),
}
REGEXES = {
    "digits": r"[0-9]{3}-[a-f]{4}",
    "method": r"    def [a-z_]{1,12}\(self\):\n        return self\._[a-z]{1,8}",
    "words": r"(return|raise|self)( [a-z]{1,4}){0,3}",
    "unicode": "(\u20ac|\u00e9){2}[0-9]",
}
EBNFS = {
    "statement": (
        'root ::= "if " name ":" | "for " name " in " name ":"\nname ::= [a-z]{1,8}',
        r"if [a-z]{1,8}:|for [a-z]{1,8} in [a-z]{1,8}:",
    ),
    "assignment": (
        'root ::= "self." [a-z_]{1,10} " = " ("None" | "0" | "[]")',
        r"self\.[a-z_]{1,10} = (None|0|\[\])",
    ),
}
TAGS = {
    "tag": (
        {"type": "tag", "begin": "<t>", "content": {"type": "json_schema", "json_schema": {"enum": [1, 20]}}, "end": "</t>"},
        r"<t>(1|20)</t>",
    ),
    "or": (
        {"type": "or", "elements": [{"type": "const_string", "value": "yes"}, {"type": "regex", "pattern": "no{1,3}"}]},
        r"yes|no{1,3}",
    ),
}  # fmt: skip
# Case name: option, its value, and what checks the text.
CASES: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    **{
        f"json_schema {name}": ("json_schema", text, lambda answer, text=text: jsonschema.validate(json.loads(answer), json.loads(text)))
        for name, text in SCHEMAS.items()
    },
    **{f"regex {name}": ("regex", text, re.compile(text).fullmatch) for name, text in REGEXES.items()},
    **{f"ebnf {name}": ("ebnf", text, re.compile(pattern).fullmatch) for name, (text, pattern) in EBNFS.items()},
    **{
        f"structural_tag {name}": ("structural_tag", json.dumps({"type": "structural_tag", "format": tag}), re.compile(pattern).fullmatch)
        for name, (tag, pattern) in TAGS.items()
    },
}  # fmt: skip
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "parameters": json.loads(closed(a=DIGIT, b=DIGIT))}},
    {"type": "function", "function": {"name": "get", "strict": True, "parameters": json.loads(closed(key=NAME))}},
]
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": json.loads(SCHEMAS["integer"])}}
# Each is one token, as in Kimi's own vocabulary: the demo pair's tokens of the highest ids, from 1023 down,
# in the order in which a call has them.
MARKERS = MARKER.findall(kimi([("add", {})]))
# The demo model writes a call's number, and calls, without end. So the next marker, `}` and `"` follow as soon as the
# grammar allows them.
CALL = {"tools": TOOLS, "logit_bias": {"96": 60, "5": 40, "1019": 90} | {str(token): 70 for token in range(1020, 1024)}}
CHATS: dict[str, dict[str, Any]] = {
    "json_schema": {"response_format": JSON_FORMAT},
    "structural tag": {
        "response_format": {
            "type": "structural_tag",
            "structures": [{"begin": "<f>", "schema": {"enum": [1]}, "end": "</f>"}],
            "triggers": ["<f>"],
        },
        "max_tokens": 24,
    },
    "required": {**CALL, "tool_choice": "required"},
    "one call": {**CALL, "tool_choice": "required", "parallel_tool_calls": False},
    "named": {**CALL, "tool_choice": {"type": "function", "function": {"name": "get"}}},
    "named, not strict": {**CALL, "tool_choice": {"type": "function", "function": {"name": "add"}}},
    "auto": {"tools": TOOLS, "max_tokens": 24},
}
MESSAGES = ["A function.", "class Stack:", "for name in args:", "x"]
ALGORITHMS = [None, "DFLASH", "DDTREE"]
HELD_BACK: dict[str, Any] = {"regex": "[0-9]{3}", "max_new_tokens": 20}
Answers = dict[str, Any]


@pytest.fixture(scope="module")
def options(demo_pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Server arguments: parsers, and the tokenizer in which a frequent token ends the reasoning."""
    folder = tmp_path_factory.mktemp("tokenizer")
    markers = dict(zip(rarest_tokens(demo_pair.target, len(MARKERS)), MARKERS, strict=True))
    rename_tokens(demo_pair.target, folder, {RENAMED: THINK_END} | markers)
    parsers = ("--reasoning-parser", "deepseek-v3", "--tool-call-parser", "kimi_k2")
    # A small model fills free white space without end.
    return ("--tokenizer-path", str(folder), *parsers, "--constrained-json-disable-any-whitespace")


@pytest.fixture(scope="module")
def prompts(repo_root: Path) -> list[str]:
    texts = json.loads((repo_root / "tests" / "models" / "demo" / "prompts.json").read_text())
    return [prompt["text"] for prompt in texts]


def chat(server: Server, content: str, **request: Any) -> Any:
    request = {"max_tokens": NEW_TOKENS, "temperature": 0, **request}
    messages = [{"role": "user", "content": content}]
    return server.client().chat.completions.create(model="default", messages=messages, **request)


def refusal(server: Server, body: dict[str, Any]) -> tuple[int, str]:
    response = requests.post(f"{server.url}/generate", json=body, timeout=300)
    return response.status_code, response.text


def last_of_stream(server: Server, body: dict[str, Any]) -> tuple[list[int], Any]:
    last = list(stream(server, "/generate", body))[-1]
    return last["output_ids"], last["meta_info"]["finish_reason"]


def collect(server: Server, prompts: list[str]) -> Answers:
    """All answers of one server; requests with and without a grammar share its batches."""
    jobs: dict[str, Callable[[], Any]] = {}
    for name, (option, text, _) in CASES.items():
        for index in PROMPTS:
            request = {option: text}
            jobs[f"{name}/{index}"] = lambda index=index, request=request: result(
                generate(server, prompts[index], **LONG | request)
            )
    for index in range(0, 60, 2):
        request = {"json_schema": SCHEMAS["integer"]}
        jobs[f"reasoning/{index}"] = lambda index=index, request=request: result(
            generate(server, prompts[index], fields={"require_reasoning": True}, **LONG | request)
        )
        jobs[f"free/{index}"] = lambda index=index: result(generate(server, prompts[index], max_new_tokens=24))
    for option in ("ignore_eos", "no_stop_trim"):
        jobs[option] = lambda option=option: result(generate(server, "x = ", regex="[0-9]{3}", **LONG | {option: True}))
    for limit in range(1, 6):
        jobs[f"limit/{limit}"] = lambda limit=limit: result(
            generate(server, "x = ", regex="[0-9]{3}", max_new_tokens=limit)
        )
    jobs["held back/3"] = lambda: result(generate(server, "x = ", **HELD_BACK, min_new_tokens=3))
    for least in (4, 9):
        for kind, temperature in (("held back", 0), ("drawn", 1)):
            body = generate_body("x = ", **HELD_BACK, min_new_tokens=least, temperature=temperature)
            jobs[f"{kind}/{least}"] = lambda body=body: refusal(server, body)
    jobs["held back/stream"] = lambda: last_of_stream(server, generate_body("x = ", **HELD_BACK, min_new_tokens=9))
    for name, request in CHATS.items():
        for content in MESSAGES:
            jobs[f"chat {name}/{content}"] = lambda content=content, request=request: chat(server, content, **request)
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return dict(zip(jobs, pool.map(lambda job: job(), jobs.values()), strict=True))


@pytest.fixture(scope="module")
def answers(
    serve: Callable[..., Server], options: tuple[str, ...], prompts: list[str]
) -> Callable[[str | None], Answers]:
    """Function that gives the answers with an algorithm, asked once."""
    known: dict[str | None, Answers] = {}

    def ask(algorithm: str | None) -> Answers:
        if algorithm not in known:
            known[algorithm] = collect(serve(algorithm, *options), prompts)
        return known[algorithm]

    return ask


def of(answers: Answers, kind: str) -> Iterator[tuple[str, Any]]:
    found = [(name, answer) for name, answer in answers.items() if name.startswith(kind)]
    assert found
    yield from found


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_answer_is_valid(answers: Callable[..., Answers], algorithm: str | None) -> None:
    """BUG-034: more than 20 schemas, regexes, EBNF grammars and structural tags."""
    for name, (_, _, check) in CASES.items():
        for case, (text, _, finish, _) in of(answers(algorithm), f"{name}/"):
            assert finish["type"] == "stop", case
            assert check(text) is not None or name.startswith("json_schema"), (case, text)


@pytest.mark.parametrize("algorithm", ["DFLASH", "DDTREE"])
def test_tokens_are_those_of_plain_decoding(answers: Callable[..., Answers], algorithm: str) -> None:
    """BUG-034: token for token, alone and beside requests without a grammar; the finish and the count too."""
    plain, speculative = answers(None), answers(algorithm)
    for name, answer in speculative.items():
        if not name.startswith(("chat", "drawn")):
            assert answer == plain[name], name


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_grammar_begins_after_the_reasoning(answers: Callable[..., Answers], algorithm: str | None) -> None:
    """BUG-038: drafts run across the end of reasoning, which comes at many offsets of an accepted run."""
    offsets = set()
    for case, (text, token_ids, finish, _) in of(answers(algorithm), "reasoning/"):
        thought, end, rest = text.partition(THINK_END)
        if end and finish["type"] == "stop":
            jsonschema.validate(json.loads(rest), json.loads(SCHEMAS["integer"]))
            offsets.add(len(thought))
        assert end or finish["type"] == "length" or token_ids[-1] == 2, case
    assert len(offsets) > 5, "too few prompts reach the end of reasoning to say anything"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_grammar_ends_the_answer(answers: Callable[..., Answers], algorithm: str | None) -> None:
    """BUG-030: the end of the grammar and the limit in one run; an ignored end-of-text token ends it all the same."""
    found = answers(algorithm)
    text, token_ids, finish, count = found["ignore_eos"]
    assert re.fullmatch("[0-9]{3}", text) and token_ids[-1] == 2 and (finish["type"], count) == ("stop", len(token_ids))
    for limit in range(1, 6):
        text, token_ids, finish, count = found[f"limit/{limit}"]
        assert count == len(token_ids) == min(limit, 4)
        assert finish["type"] == ("stop" if limit >= 4 else "length")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_grammar_that_ends_too_early_is_refused(answers: Callable[..., Answers], algorithm: str | None) -> None:
    """`min_new_tokens` holds the end back where the grammar allows nothing else; it has too many answers to know before."""
    found = answers(algorithm)
    assert found["held back/3"][2:] == ({"type": "stop", "matched": 2}, 4)
    for least in (4, 9):
        status, message = found[f"held back/{least}"]
        assert status == 400 and "min_new_tokens (min_tokens): expected at most 3, after which" in message
        assert f"got {least};" in message
        # A drawn digit may be part of a longer token, and sampling from no token at all would end the server.
        status, message = found[f"drawn/{least}"]
        assert status == 400 and "min_new_tokens (min_tokens): expected at most" in message
    token_ids, finish = found["held back/stream"]
    assert finish["type"] == "abort" and "min_new_tokens" in finish["message"]
    assert len(token_ids) == 3, "no token that the grammar forbids"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_tool_calls_are_complete(answers: Callable[..., Answers], algorithm: str | None) -> None:
    """BUG-034, BUG-044: forced and named calls have an id, a name and arguments, valid ones where the tool is strict."""
    strict = {
        tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS if "strict" in tool["function"]
    }
    for kind, name in (("required", None), ("one call", None), ("named", "get"), ("named, not strict", "add")):
        for case, answer in of(answers(algorithm), f"chat {kind}/"):
            choice = answer.choices[0]
            calls = choice.message.tool_calls
            assert calls and choice.finish_reason == "tool_calls", case
            assert len({call.id for call in calls}) == len(calls) and all(call.id for call in calls)
            assert kind == "required" or len(calls) == 1
            for call in calls:
                assert name in (None, call.function.name)
                jsonschema.validate(
                    json.loads(call.function.arguments), strict.get(call.function.name, {"type": "object"})
                )


@pytest.mark.parametrize("algorithm", ["DFLASH", "DDTREE"])
def test_chat_answers_are_those_of_plain_decoding(answers: Callable[..., Answers], algorithm: str) -> None:
    for case, answer in of(answers(algorithm), "chat "):
        seen, expected = (
            [
                (choice.message.content, choice.finish_reason, spoken(choice.message.tool_calls))
                for choice in one.choices
            ]
            for one in (answer, answers(None)[case])
        )
        assert seen == expected, case
        assert answer.usage == answers(None)[case].usage, case


def test_sampled_answers_are_valid(serve: Callable[..., Server], options: tuple[str, ...], prompts: list[str]) -> None:
    """BUG-034: a walk that draws never leaves the grammar either."""
    server = serve("DDTREE", *options)
    for index, (name, (option, text, check)) in enumerate(CASES.items()):
        request = {option: text, "temperature": 1.0, "top_p": 0.95}
        answer, _, finish, _ = result(generate(server, prompts[index], **LONG | request))
        assert finish["type"] == "stop", name
        assert check(answer) is not None or name.startswith("json_schema"), (name, answer)


def test_streams_are_the_whole_answer_in_parts(
    serve: Callable[..., Server], options: tuple[str, ...], answers: Callable[..., Answers]
) -> None:
    """BUG-035, BUG-040, BUG-041: content, tool calls, finish and usage of streams with a grammar."""
    server = serve("DDTREE", *options)
    for name, request in CHATS.items():
        for content in MESSAGES[:2]:
            whole = answers("DDTREE")[f"chat {name}/{content}"]
            parts = list(chat(server, content, **request, stream=True, stream_options={"include_usage": True}))
            assert parts[-1].choices == [] and parts[-1].usage.completion_tokens == whole.usage.completion_tokens
            choices = [part.choices[0] for part in parts[:-1] if part.choices]
            assert "".join(choice.delta.content or "" for choice in choices) == (whole.choices[0].message.content or "")
            assert [choice.finish_reason for choice in choices if choice.finish_reason] == [
                whole.choices[0].finish_reason
            ]
            calls: dict[int, list[str]] = {}
            for choice in choices:
                for call in choice.delta.tool_calls or []:
                    call_parts = calls.setdefault(call.index, ["", ""])
                    call_parts[0] += call.function.name or ""
                    call_parts[1] += call.function.arguments or ""
            expected = [(name, json.loads(text)) for name, text in spoken(whole.choices[0].message.tool_calls)]
            assert [(name, json.loads(text)) for name, text in calls.values()] == expected, (name, content)


def test_grammars_hold_without_overlap_and_on_pages(serve: Callable[..., Server], prompts: list[str]) -> None:
    """BUG-034: also where a batch loses its last grammar at once, since one token completes it."""
    server = serve("DDTREE", "--page-size", "16", "--disable-overlap-schedule")
    cases = [
        (option, text, check) for name, (option, text, check) in CASES.items() if not name.startswith("json_schema")
    ]
    cases.append(("ebnf", 'root ::= ""', re.compile("").fullmatch))
    free = result(generate(server, prompts[0], max_new_tokens=24))
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        asked = [pool.submit(generate, server, prompts[0], max_new_tokens=24)]
        asked += [pool.submit(generate, server, prompts[1], **LONG | {option: text}) for option, text, _ in cases]
        found = [result(future.result()) for future in asked]
    assert found[0] == free
    for (_, text, check), (answer, _, finish, _) in zip(cases, found[1:], strict=True):
        assert finish["type"] == "stop" and check(answer), (text, answer)


def spoken(calls: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in calls or []]
