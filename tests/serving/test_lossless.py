# SPDX-License-Identifier: Apache-2.0
"""Greedy text in fp32 is the same token for token, whatever drafts it: nothing, the DFLASH chain, or a tree.

Every configuration answers the same 200 prompts: most in one wave of concurrent requests, some one after another,
some streamed. Plain decoding of the same server is the reference.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from serving.server import Server, generate, stream_generate
from sglang.srt.speculative.ddtree_args import DEFAULT_BUDGET

NUM_PROMPTS = 200
SHORT = {"max_new_tokens": 24}
CONCURRENCY = 16
BLOCK_SIZE = 8
# The first prompts are sent alone, the next ones streamed, the rest all at once.
NUM_SINGLE, NUM_STREAMED = 12, 28

Serve = Callable[..., Server]


@pytest.fixture(scope="module")
def prompts(repo_root: Path) -> list[str]:
    texts = json.loads((repo_root / "tests" / "models" / "demo" / "prompts.json").read_text())
    chosen = [prompt["text"] for prompt in texts][:NUM_PROMPTS]
    assert len(chosen) == NUM_PROMPTS
    return chosen


def answers(server: Server, prompts: list[str]) -> list[list[int]]:
    """Token ids of all prompts: some sent alone, some streamed, the rest concurrently."""
    single = [generate(server, prompt, **SHORT) for prompt in prompts[:NUM_SINGLE]]
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        streamed = pool.map(lambda prompt: stream_generate(server, prompt, **SHORT), prompts[NUM_SINGLE:NUM_STREAMED])
        batched = pool.map(lambda prompt: generate(server, prompt, **SHORT), prompts[NUM_STREAMED:])
        return [answer["output_ids"] for answer in (*single, *streamed, *batched)]


@pytest.fixture(scope="module")
def plain(serve: Serve, prompts: list[str]) -> list[list[int]]:
    """What the target says without any drafter."""
    return answers(serve(None), prompts)


def test_chain_is_lossless(serve: Serve, prompts: list[str], plain: list[list[int]]) -> None:
    assert answers(serve("DFLASH"), prompts) == plain


@pytest.mark.parametrize("budget", [1, 7, DEFAULT_BUDGET, 16, 32, 64])
def test_tree_is_lossless(serve: Serve, prompts: list[str], plain: list[list[int]], budget: int) -> None:
    # The default budget goes without the flag, so that other tests can share the server.
    server = serve("DDTREE", *(["--speculative-ddtree-budget", str(budget)] if budget != DEFAULT_BUDGET else []))
    assert answers(server, prompts) == plain
    check_meta_info(generate(server, prompts[0], max_new_tokens=96)["meta_info"], budget)


def test_tree_takes_the_steps_of_the_reference(serve: Serve, prompts: list[str], repo_root: Path) -> None:
    """A drafter that read the wrong hidden rows or positions would still be lossless, but accept less.

    The reference tree is that of the demo pair's own script, in plain torch. Its last step may go beyond the tokens that
    are asked for.
    """
    figures = json.loads((repo_root / "tests" / "models" / "demo" / "figures.json").read_text())["evaluation"]
    expected = [rounds for _, rounds in figures["tokens_and_rounds"]["tree_16"]][:NUM_SINGLE]
    server, new_tokens = serve("DDTREE", "--speculative-ddtree-budget", "16"), figures["new_tokens"]
    asked = [generate(server, prompt, max_new_tokens=new_tokens, ignore_eos=True) for prompt in prompts[:NUM_SINGLE]]
    steps = [answer["meta_info"]["spec_verify_ct"] for answer in asked]
    assert all(abs(found - wanted) <= 1 for found, wanted in zip(steps, expected, strict=True)), (steps, expected)


def test_second_turn_reuses_what_was_accepted(serve: Serve, prompts: list[str]) -> None:
    """Accepted rows are where the radix tree finds them; a rejected one among them would change the text."""
    server, reference = serve("DDTREE"), serve(None)
    for prompt in prompts[:6]:
        first = generate(server, prompt, ignore_eos=True, **SHORT)
        assert generate(reference, prompt, ignore_eos=True, **SHORT)["output_ids"] == first["output_ids"]
        turn = prompt + first["text"]
        second = generate(server, turn, ignore_eos=True, **SHORT)
        assert second["output_ids"] == generate(reference, turn, ignore_eos=True, **SHORT)["output_ids"]
        prompt_tokens = first["meta_info"]["prompt_tokens"]
        assert second["meta_info"]["cached_tokens"] > prompt_tokens


def check_meta_info(meta: dict[str, Any], budget: int) -> None:
    """The speculative figures of one answer agree with each other, and drafts were accepted at all."""
    accepted, steps, depth = meta["spec_num_correct_drafts"], meta["spec_verify_ct"], min(budget, BLOCK_SIZE - 1)
    assert meta["spec_accept_length"] > 1.2, "a tree that accepts next to nothing would be lossless too"
    assert meta["spec_accept_rate"] == pytest.approx(accepted / (steps * depth)) and meta["spec_accept_rate"] <= 1
    assert meta["spec_node_use"] == pytest.approx(accepted / (steps * budget))
    histogram = meta["spec_accept_histogram"]
    assert len(histogram) <= depth + 1 and sum(histogram) == steps
    assert sum(count * times for count, times in enumerate(histogram)) == accepted


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--page-size", "16"], id="pages-of-16"),
        pytest.param(["--chunked-prefill-size", "16", "--disable-overlap-schedule"], id="chunked-without-overlap"),
        pytest.param(["--speculative-draft-window-size", "16", "--disable-radix-cache"], id="draft-window-no-radix"),
    ],
)
def test_tree_is_lossless_under_other_schedules(
    serve: Serve, prompts: list[str], plain: list[list[int]], options: list[str]
) -> None:
    subset = slice(NUM_STREAMED, NUM_STREAMED + 48)
    server = serve("DDTREE", *options)
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        found = [
            answer["output_ids"]
            for answer in pool.map(lambda prompt: generate(server, prompt, **SHORT), prompts[subset])
        ]
    assert found == plain[subset]
