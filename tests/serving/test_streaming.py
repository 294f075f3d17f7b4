# SPDX-License-Identifier: Apache-2.0
"""A stream is the whole answer in parts, wherever a verify step cuts it.

The parsers of Kimi, DeepSeek and GLM get texts with reasoning and several tool calls, cut at every token and in runs
of 1 to 16 tokens. Special tokens are one token each, as in the models' own vocabularies.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from serving.replay import (
    PROMPT_TOKENS,
    Source,
    random_lengths,
    streamed_chat,
    streamed_completion,
    whole_chat,
    whole_completion,
)
from serving.tool_formats import deepseek, deepseek_v31, glm, kimi, read_stream, tokens_of
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.sm120.tool_stream import MarkerByMarker

NUM_SEEDS = 500


class Answer(NamedTuple):
    """A model's text and what it means."""

    tool_call_parser: str
    reasoning_parser: str
    text: str
    reasoning: str
    content: str
    calls: list[tuple[str, dict[str, Any]]]


PROPERTIES = {"city": {"type": "string"}, "days": {"type": "number"}, "units": {"type": "array"}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("get_weather", "get_time", "stop_all")
]
ARGUMENTS = [{"city": 'Zürich "x" \\ {1}', "days": 3, "units": ["C", "<b>"]}, {"city": "東京"}, {}]
CALLS = [(tool["function"]["name"], arguments) for tool, arguments in zip(TOOLS, ARGUMENTS, strict=True)]
REASONING = "The user asks for < 4 days.\n\nSo two calls."
CONTENT = "I look it up, 1 < 2."


def make_answer(tools: str, reasoning: str, text: str) -> Answer:
    return Answer(tools, reasoning, f"{REASONING}</think>{CONTENT}{text}", REASONING, CONTENT, CALLS)


ANSWERS = {
    "kimi_k2": make_answer("kimi_k2", "kimi_k2", kimi(CALLS)),
    "deepseekv3": make_answer("deepseekv3", "deepseek-r1", deepseek(CALLS)),
    "deepseekv31": make_answer("deepseekv31", "deepseek-r1", deepseek_v31(CALLS)),
    "glm45": make_answer("glm45", "glm45", glm(CALLS)),
    "glm47": make_answer("glm47", "glm45", glm(CALLS, line_break="")),
}


def check_stream(answer: Answer, events: Sequence[dict[str, Any]]) -> None:
    found = read_stream(events)
    assert found["reasoning"] == answer.reasoning
    # Line breaks between the calls are layout, which the whole answer leaves out.
    assert found["content"].rstrip("\n") == answer.content
    assert found["finish"] == "tool_calls"
    assert sorted(found["calls"]) == list(range(len(answer.calls)))
    calls = [found["calls"][index] for index in range(len(answer.calls))]
    assert [(call["names"], json.loads(call["arguments"])) for call in calls] == [
        ([name], arguments) for name, arguments in answer.calls
    ]
    ids = [identity for call in calls for identity in call["ids"]]
    assert len(ids) == len(set(ids)) == len(answer.calls)


def source_of(answer: Answer, lengths: Sequence[int] | None = None) -> Source:
    tokens = tokens_of(answer.text)
    return Source(tokens, lengths or [len(tokens)], answer.tool_call_parser, answer.reasoning_parser)


def options_of(answer: Answer) -> dict[str, Any]:
    """GLM and Kimi think when the template says so; here they do."""
    return {"tools": TOOLS, "chat_template_kwargs": {"thinking": True, "enable_thinking": True}}


@pytest.mark.scenario("BUG-044")
@pytest.mark.parametrize("name", ANSWERS)
def test_whole_answer_has_every_call(name: str) -> None:
    answer = ANSWERS[name]
    choice = whole_chat(source_of(answer), **options_of(answer))["choices"][0]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == (answer.reasoning, answer.content)
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert calls == answer.calls
    assert len({call["id"] for call in message["tool_calls"]}) == len(calls)
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.scenario("BUG-040")
@pytest.mark.parametrize("name", ANSWERS)
def test_stream_in_random_runs_has_every_call(name: str) -> None:
    answer = ANSWERS[name]
    num_tokens = len(tokens_of(answer.text))
    for seed in range(NUM_SEEDS):
        lengths = random_lengths(random.Random(seed), num_tokens)
        check_stream(answer, streamed_chat(source_of(answer, lengths), **options_of(answer)))


@pytest.mark.scenario("BUG-040")
@pytest.mark.parametrize("name", ANSWERS)
def test_stream_cut_once_anywhere_has_every_call(name: str) -> None:
    answer = ANSWERS[name]
    num_tokens = len(tokens_of(answer.text))
    for cut in range(1, num_tokens):
        check_stream(answer, streamed_chat(source_of(answer, [cut, num_tokens - cut]), **options_of(answer)))
    check_stream(answer, streamed_chat(source_of(answer, [num_tokens]), **options_of(answer)))
    check_stream(answer, streamed_chat(source_of(answer, [1] * num_tokens), **options_of(answer)))


PLAIN = tokens_of("if x <| y:\n    return '<tool' <")


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("end", range(1, len(PLAIN) + 1))
def test_text_that_looks_like_a_marker_is_not_lost(name: str, end: int) -> None:
    """A detector holds back what may become a marker; at the end of the stream it is text."""
    answer = ANSWERS[name]
    tokens = [*tokens_of(f"{REASONING}</think>"), *PLAIN[:end]]
    for seed in range(4):
        lengths = random_lengths(random.Random(seed), len(tokens), longest=4)
        source = Source(tokens, lengths, answer.tool_call_parser, answer.reasoning_parser)
        found = read_stream(streamed_chat(source, **options_of(answer)))
        assert (found["reasoning"], found["content"]) == (REASONING, "".join(PLAIN[:end]))
        assert found["finish"] == "stop" and not found["calls"]


@pytest.mark.scenario("BUG-039")
@pytest.mark.parametrize("name", ANSWERS)
def test_usage_counts_tokens_not_chunks(name: str) -> None:
    answer = ANSWERS[name]
    num_tokens = len(tokens_of(answer.text))
    whole = whole_chat(source_of(answer), **options_of(answer))["usage"]
    assert (whole["prompt_tokens"], whole["completion_tokens"]) == (PROMPT_TOKENS, num_tokens)
    for seed in range(10):
        lengths = random_lengths(random.Random(seed), num_tokens)
        asked = {"include_usage": True, "continuous_usage_stats": True}
        events = streamed_chat(source_of(answer, lengths), **options_of(answer), stream_options=asked)
        assert events[-1]["choices"] == [] and events[-1]["usage"] == whole
        assert all(event["choices"] for event in events[:-1])
        counts = [event["usage"]["completion_tokens"] for event in events if event.get("usage")]
        assert counts == sorted(counts) and set(counts) <= {sum(lengths[: index + 1]) for index in range(len(lengths))}
        assert len(counts) > 2
        for quiet in (None, {"include_usage": False}):
            events = streamed_chat(source_of(answer, lengths), **options_of(answer), stream_options=quiet)
            assert all(event["choices"] and not event.get("usage") for event in events)


@pytest.mark.scenario("BUG-032")
@pytest.mark.parametrize("parsed", [False, True])
def test_each_chat_token_has_its_own_logprobs(parsed: bool) -> None:
    answer = ANSWERS["kimi_k2"]
    tokens = tokens_of(answer.text)
    expected = [(token, -float(index)) for index, token in enumerate(tokens)]
    for seed in range(20):
        lengths = random_lengths(random.Random(seed), len(tokens))
        source = source_of(answer, lengths) if parsed else Source(tokens, lengths)
        asked = options_of(answer) if parsed else {}
        events = streamed_chat(source, **asked, logprobs=True, top_logprobs=1)
        entries = read_stream(events)["logprobs"]
        assert [(entry["token"], entry["logprob"]) for entry in entries] == expected
        assert [
            (entry["top_logprobs"][0]["token"], entry["top_logprobs"][0]["logprob"]) for entry in entries
        ] == expected


@pytest.mark.scenario("BUG-032")
def test_tokens_without_text_keep_their_logprobs() -> None:
    """The end token has no text, and half of a character has none yet."""
    tokens = ["if", "", " x", "", "", ":", ""]
    whole = whole_chat(Source(tokens, [len(tokens)]), logprobs=True, top_logprobs=1)
    expected = whole["choices"][0]["logprobs"]["content"]
    assert len(expected) == len(tokens)
    usage = {"include_usage": True, "continuous_usage_stats": True}
    for seed in range(20):
        lengths = random_lengths(random.Random(seed), len(tokens), longest=3)
        events = streamed_chat(Source(tokens, lengths), logprobs=True, top_logprobs=1, stream_options=usage)
        found = read_stream(events)
        assert found["logprobs"] == expected and found["content"] == "if x:"
        carrying = [event for event in events if event["choices"] and event["choices"][0]["logprobs"]]
        ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
        assert [event["usage"]["completion_tokens"] for event in carrying] == ends


@pytest.mark.scenario("BUG-041")
def test_completion_stream_is_the_whole_answer() -> None:
    tokens = tokens_of(CONTENT * 5)
    whole = whole_completion(Source(tokens, [len(tokens)]), logprobs=1)
    for seed in range(50):
        source = Source(tokens, random_lengths(random.Random(seed), len(tokens)))
        events = streamed_completion(source, logprobs=1, stream_options={"include_usage": True})
        assert events[-1]["choices"] == []
        assert {name: count for name, count in whole["usage"].items() if count is not None} == events[-1]["usage"]
        choices = [event["choices"][0] for event in events[:-1]]
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"] == "".join(tokens)
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            streamed = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"][name]]
            assert streamed == whole["choices"][0]["logprobs"][name]
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]


@pytest.mark.parametrize(("tokens", "wrapped"), [([1], True), ([1, 2, 3], False)])
def test_markers_of_several_tokens_are_left_to_the_detector(tokens: list[int], wrapped: bool) -> None:
    """A chunk may end inside such a marker; what marks a call must not be shown as text then."""
    tokenizer = SimpleNamespace(encode=lambda text: [0, *tokens] if text else [0])
    tool = Tool(function=Function(name="add", parameters={"type": "object"}))
    parser = FunctionCallParser([tool], "kimi_k2", tokenizer=tokenizer)
    assert isinstance(parser.detector, MarkerByMarker) is wrapped
    if not wrapped:
        shown = [parser.parse_stream_chunk(part)[0] for part in ("hi <|tool_calls_sec", "tion_begin|>")]
        assert "".join(shown).strip() == "hi"
