# SPDX-License-Identifier: Apache-2.0
"""A server whose drafter follows a script: every accept pattern leaves the text as it is, and a bad drafter shows."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from scenarios.patterns import ALL_PATTERNS, DEPTH, Pattern
from scenarios.scripted_server import ScriptedServer
from serving.server import ModelPair, Server

PROMPTS = ["def read_lines(path):\n", "import os\nimport sys\n", "class Stack:\n    def __init__(self):\n"]
NUM_STEPS = 3
NEW_TOKENS = 100


@pytest.fixture(scope="module")
def prompts(demo_pair: ModelPair) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_pair.target)
    return [tokenizer(prompt).input_ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def texts(scripted: ScriptedServer, prompts: list[list[int]]) -> list[list[int]]:
    """Whole texts that the target writes when no draft is accepted, which is plain decoding."""
    scripted.play([], [])
    answers = [scripted.generate(ids, NEW_TOKENS) for ids in prompts]
    return [ids + answer["output_ids"] for ids, answer in zip(prompts, answers, strict=True)]


@pytest.mark.scenario("BUG-088")
def test_a_drafter_that_is_never_right_shows_in_the_figures(scripted: ScriptedServer, prompts: list[list[int]]) -> None:
    scripted.play([], [])
    before = totals(scripted.server)
    meta = scripted.generate(prompts[0], 20)["meta_info"]
    # SGLang divides all tokens, that of the prefill too, by the steps.
    assert meta["spec_accept_length"] == pytest.approx(20 / 19) and meta["spec_accept_rate"] == 0.0
    assert meta["spec_accept_histogram"] == [19]
    after = totals(scripted.server)
    steps, depths, nodes = (
        after.get(name, 0.0) - before.get(name, 0.0)
        for name in (
            "sglang:spec_accepted_depth_count",
            "sglang:spec_accepted_depth_sum",
            "sglang:spec_tree_nodes_accepted_total",
        )
    )
    assert steps >= 19 and depths == nodes == 0


def totals(server: Server) -> dict[str, float]:
    """Sums and counts in /metrics, by name."""
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.name: sample.value for sample in samples if "_bucket" not in sample.name}


def test_plain_text_is_the_server_s_without_a_drafter(
    serve: Callable[..., Server], texts: list[list[int]], prompts: list[list[int]]
) -> None:
    plain = ScriptedServer(serve(None), Path(), 0)
    assert [ids + plain.generate(ids, NEW_TOKENS)["output_ids"] for ids in prompts] == texts


@pytest.mark.scenario("BUG-021")
@pytest.mark.parametrize("pattern", ALL_PATTERNS, ids=lambda pattern: f"{pattern.accepted}-branch-{pattern.branch}")
def test_each_pattern_is_accepted_as_forced(
    pattern: Pattern, scripted: ScriptedServer, texts: list[list[int]], prompts: list[list[int]]
) -> None:
    new_tokens = 1 + NUM_STEPS * (pattern.accepted + 1)
    for ids, text in zip(prompts, texts, strict=True):
        scripted.play([text], [pattern])
        answer = scripted.generate(ids, new_tokens)
        assert ids + answer["output_ids"] == text[: len(ids) + new_tokens]
        meta = answer["meta_info"]
        assert meta["spec_verify_ct"] == NUM_STEPS
        assert meta["spec_accept_histogram"] == [0] * pattern.accepted + [NUM_STEPS]
        assert meta["spec_accept_rate"] == pytest.approx(pattern.accepted / DEPTH)


def test_mixed_batches_of_patterns_write_the_same_texts(
    scripted: ScriptedServer, texts: list[list[int]], prompts: list[list[int]]
) -> None:
    """Requests of one batch accept different lengths in every step, on and off the spine."""
    for offset in (0, 7, 19):
        scripted.play(texts, ALL_PATTERNS[offset:] + ALL_PATTERNS[:offset])
        with ThreadPoolExecutor(9) as pool:
            answers = list(pool.map(lambda ids: scripted.generate(ids, NEW_TOKENS - DEPTH - 1), prompts * 3))
        for ids, text, answer in zip(prompts * 3, texts * 3, answers, strict=True):
            assert ids + answer["output_ids"] == text[: len(ids) + NEW_TOKENS - DEPTH - 1]
        assert len([count for count in answers[0]["meta_info"]["spec_accept_histogram"] if count]) > 3


@pytest.mark.parametrize("accepted", range(DEPTH + 1))
def test_the_limit_cuts_every_run(
    accepted: int, scripted: ScriptedServer, texts: list[list[int]], prompts: list[list[int]]
) -> None:
    """max_new_tokens falls on each token of an accepted run; nothing beyond it is reported."""
    scripted.play([texts[0]], [Pattern(accepted, 0)])
    for new_tokens in range(1, accepted + 4):
        answer = scripted.generate(prompts[0], new_tokens)
        assert prompts[0] + answer["output_ids"] == texts[0][: len(prompts[0]) + new_tokens]
        assert answer["meta_info"]["completion_tokens"] == new_tokens
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": new_tokens}
