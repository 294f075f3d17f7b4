# SPDX-License-Identifier: Apache-2.0
"""Sampling options reach every verify row, on the chain and on trees.

Each case has a text that is known in advance: that of plain decoding, or the greedy one that an extreme value forces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import requests

from serving.server import Server, generate

PROMPTS = ["def main(argv=None):\n", "import os\nimport ", "class Reader:\n    def __init__(self"]
NEW_TOKENS = 40
# The hash of a seeded draw is a Triton kernel, which takes minutes for more where Triton interprets it.
SEEDED_TOKENS = 16

Serve = Callable[..., Server]


@pytest.fixture(scope="module", params=["DFLASH", "DDTREE"])
def algorithm(request: pytest.FixtureRequest) -> str:
    """Of module scope, so that all tests of one algorithm run together on its server."""
    return request.param


def token_ids(server: Server, **sampling: Any) -> list[list[int]]:
    """Token ids of all prompts, sent as one batch."""
    sampling = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True} | sampling
    return [answer["output_ids"] for answer in generate(server, PROMPTS, **sampling)]


@pytest.mark.parametrize("narrow", [{"min_p": 1.0}, {"top_p": 1e-6}, {"min_p": 0.999, "top_k": 50}])
def test_a_filter_that_leaves_one_token_is_greedy(serve: Serve, algorithm: str, narrow: dict[str, float]) -> None:
    server = serve(algorithm)
    assert token_ids(server, temperature=1.5, **narrow) == token_ids(server)


def test_sampling_is_not_greedy(serve: Serve, algorithm: str) -> None:
    server = serve(algorithm)
    assert token_ids(server, temperature=1.5) != token_ids(server, temperature=1.5)


def test_logit_bias_equals_plain_decoding(serve: Serve, algorithm: str) -> None:
    server = serve(algorithm)
    banned = [token for token, _ in Counter(token for ids in token_ids(server) for token in ids).most_common(3)]
    bias = {str(token): -100.0 for token in banned}
    found = token_ids(server, logit_bias=bias)
    assert not set(banned) & {token for ids in found for token in ids}
    assert found == token_ids(serve(None), logit_bias=bias)


@pytest.mark.parametrize("overlap", [True, False])
def test_seeded_runs_repeat_under_penalties(serve: Serve, overlap: bool) -> None:
    """BUG-077: with deterministic inference a seed gives the same text each time, whatever else is in the batch."""
    flags = ["--enable-deterministic-inference"] + ([] if overlap else ["--disable-overlap-schedule"])
    server = serve("DDTREE", *flags)
    options: dict[str, Any] = {"temperature": 1.2, "frequency_penalty": 1.0, "repetition_penalty": 1.2, "top_p": 0.95}
    options["max_new_tokens"] = SEEDED_TOKENS
    first = token_ids(server, sampling_seed=7, **options)
    assert token_ids(server, sampling_seed=7, **options) == first
    assert token_ids(server, sampling_seed=8, **options) != first
    assert token_ids(server, sampling_seed=7, n=3, **options) == [ids for ids in first for _ in range(3)]


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"sampling_seed": 7}, 400),
        ({"min_p": 0.1}, 400),
        ({"sampling_seed": 7, "temperature": 0}, 200),
        ({}, 200),
    ],
)
def test_chain_refuses_a_seed_that_it_would_ignore(serve: Serve, options: dict[str, Any], status: int) -> None:
    server = serve("DFLASH", "--enable-deterministic-inference")
    body = {"text": PROMPTS[0], "sampling_params": {"max_new_tokens": 4} | options}
    response = requests.post(f"{server.url}/generate", json=body, timeout=300)
    assert response.status_code == status, response.text
    assert status == 200 or next(iter(options)) in response.text
