# SPDX-License-Identifier: Apache-2.0
"""Where an answer ends: stop strings, stop tokens, end of text and length at every offset of an accepted run.

The whole answers of plain decoding give the stops. Each case is then asked of every server, and a rule that reads the
whole answer token by token says what must come.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from serving import soak
from serving.server import ModelPair, Server, generate, result, stream_generate

WHOLE_TOKENS = 40
WHOLE = {"max_new_tokens": WHOLE_TOKENS}
FIRST_OFFSET, LAST_OFFSET = 2, 23
CONCURRENCY = 16
EOS = 2
ALGORITHMS = [None, "DFLASH", "DDTREE"]


@dataclass(frozen=True)
class Case:
    """A request, and the tokens that it would give without an end."""

    prompt: str
    whole: tuple[int, ...]
    options: dict[str, Any]


@pytest.fixture(scope="module")
def tokenizer(demo_pair: ModelPair) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_pair.target)


def ask_all(server: Server, cases: list[Case]) -> list[tuple[str, list[int], Any, int]]:
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(lambda case: result(generate(server, case.prompt, **WHOLE | case.options)), cases))


@pytest.fixture(scope="module")
def cases(serve: Callable[..., Server], repo_root: Path, tokenizer: PreTrainedTokenizerBase) -> list[Case]:
    """Stops made from the answers themselves: each offset, alone and together with each neighbour of the length."""
    server = serve(None)
    texts = [
        prompt["text"] for prompt in json.loads((repo_root / "tests" / "models" / "demo" / "prompts.json").read_text())
    ]
    made = []
    for index, prompt in enumerate(texts[4:40:9]):
        whole = tuple(generate(server, prompt, **WHOLE, ignore_eos=True)["output_ids"])
        for offset in range(FIRST_OFFSET, LAST_OFFSET):
            made += [Case(prompt, whole, options) for options in stops_at(offset, whole, tokenizer, index)]
    assert len(made) > 400
    return made


def stops_at(
    offset: int, whole: tuple[int, ...], tokenizer: PreTrainedTokenizerBase, variant: int
) -> list[dict[str, Any]]:
    """Options that end the answer at the token `offset` or near it."""
    one, two = (tokenizer.decode(whole[offset : offset + count]) for count in (1, 2))
    straddling = tokenizer.decode(whole[offset - 1 : offset + 2])[1:-1] or two
    near = max(1, offset + (variant + offset) % 4 - 1)
    return [
        {"stop": [straddling]},
        {"stop": [two, "absent"], "max_new_tokens": near},
        {"stop_token_ids": [whole[offset]], "max_new_tokens": near + 1},
        {"stop": one, "stop_token_ids": [whole[offset + 1]], "no_stop_trim": True},
        [
            {"stop_token_ids": [whole[offset]], "ignore_eos": True, "max_new_tokens": offset + 3},
            {"stop": [two], "min_new_tokens": 5},
            {"stop_regex": "[a-z]{9}|\\n\\n", "max_new_tokens": offset + 1},
            {"stop": [one, two], "stop_token_ids": [whole[offset]], "skip_special_tokens": False},
        ][offset % 4],
    ]


def expected(case: Case, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], str, Any]:
    """Tokens, kind of finish and what matched: the first token after which something ends the answer."""
    options = case.options
    stops = [options["stop"]] if isinstance(options.get("stop"), str) else options.get("stop", [])
    limit = options.get("max_new_tokens", WHOLE_TOKENS)
    for count in range(1, limit + 1):
        tokens = list(case.whole[:count])
        text = tokenizer.decode(tokens)
        for stop in stops:
            if stop in text:
                return tokens, "stop", stop
        if not options.get("ignore_eos") and tokens[-1] in [EOS, *options.get("stop_token_ids", [])]:
            return tokens, "stop", tokens[-1]
    return list(case.whole[:limit]), "length", None


@pytest.fixture(scope="module")
def plain(serve: Callable[..., Server], cases: list[Case]) -> list[tuple[str, list[int], Any, int]]:
    return ask_all(serve(None), cases)


def test_plain_decoding_ends_where_the_rule_says(
    cases: list[Case], plain: list[Any], tokenizer: PreTrainedTokenizerBase
) -> None:
    """BUG-030, BUG-031, BUG-032: ids, count, reason and text of plain decoding, which the next test compares with."""
    for case, (text, token_ids, finish, count) in zip(cases, plain, strict=True):
        if "stop_regex" in case.options:
            continue
        tokens, kind, matched = expected(case, tokenizer)
        assert (token_ids, count, finish["type"], finish.get("matched")) == (tokens, len(tokens), kind, matched), case
        whole_text = tokenizer.decode(tokens)
        if isinstance(matched, str):
            end = whole_text.index(matched)
            assert text == whole_text[: end + len(matched) if case.options.get("no_stop_trim") else end], case


@pytest.mark.parametrize("algorithm", ["DFLASH", "DDTREE"])
def test_runs_end_where_plain_decoding_ends(
    serve: Callable[..., Server], cases: list[Case], plain: list[Any], algorithm: str
) -> None:
    """BUG-030, BUG-031, BUG-032: text, ids, count, finish reason and what matched."""
    wrong = [
        (case.options, found, wanted)
        for case, found, wanted in zip(cases, ask_all(serve(algorithm), cases), plain, strict=True)
        if found != wanted
    ]
    assert not wrong, f"{len(wrong)} of {len(cases)}, the first: {wrong[0]}"


@pytest.mark.parametrize("endpoint", ["generate", "completions"])
def test_streams_end_where_the_answer_ends(
    serve: Callable[..., Server], cases: list[Case], plain: list[Any], endpoint: str
) -> None:
    """BUG-032, BUG-039, BUG-041: stop strings that straddle runs; nothing of them is sent, and the usage is exact."""
    server = serve("DDTREE")
    chosen = list(range(0, len(cases), 7)) if endpoint == "generate" else list(range(1, len(cases), 7))
    ask = {"generate": stream_native, "completions": stream_completion}[endpoint]
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        found = list(pool.map(lambda index: ask(server, cases[index]), chosen))
    for index, (text, kind, count) in zip(chosen, found, strict=True):
        assert (text, kind, count) == (plain[index][0], plain[index][2]["type"], plain[index][3]), cases[index]


def stream_native(server: Server, case: Case) -> tuple[str, str, int]:
    text, token_ids, finish, count = result(stream_generate(server, case.prompt, **WHOLE | case.options))
    assert len(token_ids) == count
    return text, finish["type"], count


def stream_completion(server: Server, case: Case) -> tuple[str, str, int]:
    options = {**case.options}
    request = {"max_tokens": options.pop("max_new_tokens", WHOLE_TOKENS), "stop": options.pop("stop", None)}
    options["min_tokens"] = options.pop("min_new_tokens", 0)
    parts = list(
        server.client().completions.create(
            model="default", prompt=case.prompt, temperature=0, stream=True, stream_options={"include_usage": True},
            extra_body=options, **request,
        )
    )  # fmt: skip
    assert parts[-1].choices == [] and parts[-1].usage is not None
    choices = [part.choices[0] for part in parts[:-1]]
    reasons = [choice.finish_reason for choice in choices if choice.finish_reason]
    assert len(reasons) == 1
    return "".join(choice.text for choice in choices), reasons[0], parts[-1].usage.completion_tokens


@pytest.mark.scenario("BUG-053")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nothing_after_the_end_stays_in_the_prefix_cache(
    serve: Callable[..., Server], cases: list[Case], tokenizer: PreTrainedTokenizerBase, algorithm: str | None
) -> None:
    """A prompt that goes on where the run went on is cached up to the end of the answer, not beyond.

    The last token of an answer has no KV of its own, unless plain decoding has already begun the step after it.
    """
    server = serve(algorithm)
    for case in cases[3 : 5 * (LAST_OFFSET - FIRST_OFFSET) : 10]:
        soak.settle(server)
        prompt = tokenizer(case.prompt).input_ids
        answer = result(generate(server, prompt, **WHOLE | case.options))
        turn = generate(server, [*prompt, *case.whole, 5], max_new_tokens=1)
        without_kv = len(prompt) + answer[3] - turn["meta_info"]["cached_tokens"]
        assert without_kv == 1 or (without_kv == 0 and algorithm is None), case
