# SPDX-License-Identifier: Apache-2.0
"""Penalties, min_new_tokens and logit_bias give the tokens of plain decoding, on chains and on trees.

The values are extreme, so that a count which is one token late or one branch astray changes the text. All requests of a
server run at once, penalised next to others. Plain decoding without overlap is the reference: there the host knows each
token before it penalises the next one.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from serving.server import Server, generate

NEW_TOKENS = 40
LONG = {"max_new_tokens": NEW_TOKENS}
CONCURRENCY = 24
PROMPTS_PER_CASE = 4
EOS = 2  # of the demo pair
HELD_BACK = range(13)
Serve = Callable[..., Server]
Answers = dict[str, list[list[int]]]

PENALTIES: dict[str, dict[str, Any]] = {
    "none": {},
    "frequency 2": {"frequency_penalty": 2.0},
    "frequency -2": {"frequency_penalty": -2.0},
    "frequency 0.3": {"frequency_penalty": 0.3},
    "presence 2": {"presence_penalty": 2.0},
    "presence -2": {"presence_penalty": -2.0},
    "repetition 2": {"repetition_penalty": 2.0},
    "repetition 0.5": {"repetition_penalty": 0.5},
    "all": {"frequency_penalty": 1.3, "presence_penalty": 1.7, "repetition_penalty": 1.4},
    "opposed": {"frequency_penalty": -0.5, "presence_penalty": 2.0, "repetition_penalty": 0.8},
    "bias": {"logit_bias": {"20": 4.5, "30": 4.0, "40": -100.0}, "frequency_penalty": 1.1},
}


@pytest.fixture(scope="module")
def prompts(repo_root: Path) -> list[str]:
    texts = json.loads((repo_root / "tests" / "models" / "demo" / "prompts.json").read_text())
    return [prompt["text"] for prompt in texts]


def penalised(server: Server, prompts: list[str]) -> Answers:
    """Token ids by case; prompts differ between cases, and the cases are interleaved in every batch."""
    turns = itertools.cycle(prompts)
    asked = [(name, next(turns)) for _ in range(PROMPTS_PER_CASE) for name in PENALTIES]

    def ask(case: tuple[str, str]) -> list[int]:
        return generate(server, case[1], **LONG, ignore_eos=True, **PENALTIES[case[0]])["output_ids"]

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        answers = list(pool.map(ask, asked))
    return {name: [ids for (case, _), ids in zip(asked, answers, strict=True) if case == name] for name in PENALTIES}


def two_turns(server: Server, prompts: list[str]) -> list[list[int]]:
    """The answer to each prompt, and the one to the prompt and that answer."""
    options = {"ignore_eos": True, **PENALTIES["all"]}
    found = []
    for prompt in prompts[:4]:
        first = generate(server, prompt, **LONG, **options)
        found += [first["output_ids"], generate(server, prompt + first["text"], **LONG, **options)["output_ids"]]
    return found


@pytest.fixture(scope="module")
def reference(serve: Serve, prompts: list[str]) -> tuple[Answers, list[list[int]]]:
    """What plain decoding without overlap answers: by case, and in two turns."""
    server = serve(None, "--disable-overlap-schedule")
    return penalised(server, prompts), two_turns(server, prompts)


SERVERS: dict[str, tuple[Any, ...]] = {
    "plain": (None,),
    "chain": ("DFLASH",),
    "tree": ("DDTREE",),
    "tree-64": ("DDTREE", "--speculative-ddtree-budget", "64"),
}


@pytest.fixture(scope="module", params=SERVERS)
def arguments(request: pytest.FixtureRequest) -> tuple[Any, ...]:
    """Of module scope, so that all tests of one server run together."""
    return SERVERS[request.param]


def test_penalties_equal_plain_decoding(
    serve: Serve, prompts: list[str], reference: Any, arguments: tuple[Any, ...]
) -> None:
    """BUG-037: each penalty changes the text to exactly that of plain decoding."""
    assert penalised(serve(*arguments), prompts) == reference[0]


def test_second_turn_is_penalised_by_its_own_output(
    serve: Serve, prompts: list[str], reference: Any, arguments: tuple[Any, ...]
) -> None:
    """A turn whose prompt comes from the cache counts nothing of the turn before."""
    assert two_turns(serve(*arguments), prompts) == reference[1]


def test_stop_is_held_back_to_the_token(serve: Serve, prompts: list[str], arguments: tuple[Any, ...]) -> None:
    """BUG-037: a target that always wants to stop does so right after min_new_tokens, wherever in a run that is."""
    server = serve(*arguments)

    def ask(held_back: int) -> dict[str, Any]:
        return generate(server, prompts[held_back], **LONG, min_new_tokens=held_back, logit_bias={str(EOS): 100.0})

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        answers = list(pool.map(ask, HELD_BACK))
    for held_back, answer in zip(HELD_BACK, answers, strict=True):
        assert len(answer["output_ids"]) == held_back + 1
        assert EOS not in answer["output_ids"][:-1] and answer["output_ids"][-1] == EOS
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}


def test_stop_token_ids_are_held_back_too(serve: Serve, prompts: list[str], arguments: tuple[Any, ...]) -> None:
    """min_tokens of the OpenAI endpoint, with a stop of the request's own."""
    server = serve(*arguments)
    free = generate(server, prompts[1], **LONG, ignore_eos=True)["output_ids"]
    stop = free[5]
    for least in (free.index(stop) + 1, 9):
        answer = server.client().completions.create(
            model="default",
            prompt=prompts[1],
            max_tokens=NEW_TOKENS,
            temperature=0,
            extra_body={"min_tokens": least, "stop_token_ids": [stop]},
        )
        assert answer.usage is not None and answer.usage.completion_tokens > least


def test_prompt_lists_and_n_equal_single_requests(serve: Serve, prompts: list[str], arguments: tuple[Any, ...]) -> None:
    server = serve(*arguments)
    options = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True, **PENALTIES["all"]}
    single = [generate(server, prompt, **options)["output_ids"] for prompt in prompts[:3]]
    answers = generate(server, prompts[:3], **options, n=3)
    assert [answer["output_ids"] for answer in answers] == [ids for ids in single for _ in range(3)]


def test_penalties_change_the_text(serve: Serve, prompts: list[str], arguments: tuple[Any, ...]) -> None:
    """BUG-037: -2 and +2 must not give the same text, and the higher the penalty, the less repetition."""
    server = serve(*arguments)
    values = (-2.0, 0.0, 2.0)
    texts = [generate(server, prompts[0], **LONG, ignore_eos=True, frequency_penalty=v)["output_ids"] for v in values]
    repeated = [len(ids) - len(set(ids)) for ids in texts]
    assert repeated[0] > repeated[1] > repeated[2]


@pytest.mark.parametrize("algorithm", [None, "DDTREE"])
def test_retraction_keeps_the_counts(serve: Serve, prompts: list[str], reference: Any, algorithm: str | None) -> None:
    """BUG-048: a request that is retracted goes on as if nothing had happened."""
    server = serve(algorithm, environment={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"})
    assert penalised(server, prompts) == reference[0]
    assert "#retracted_reqs: " in server.output()
