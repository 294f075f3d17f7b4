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

from serving.server import Server

PROMPTS = ["def main(argv=None):\n", "import os\nimport ", "class Reader:\n    def __init__(self"]
NEW_TOKENS = 40

Serve = Callable[..., Server]


@pytest.fixture(scope="module", params=["DFLASH", "DDTREE"])
def algorithm(request: pytest.FixtureRequest) -> str:
    """Of module scope, so that all tests of one algorithm run together on its server."""
    return request.param


def generate(server: Server, **sampling: Any) -> list[list[int]]:
    """Token ids of all prompts, sent as one batch."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True} | sampling
    body = {"text": PROMPTS, "sampling_params": sampling}
    response = requests.post(f"{server.url}/generate", json=body, timeout=300)
    assert response.status_code == 200, response.text
    return [answer["output_ids"] for answer in response.json()]


@pytest.mark.parametrize("narrow", [{"min_p": 1.0}, {"top_p": 1e-6}, {"min_p": 0.999, "top_k": 50}])
def test_a_filter_that_leaves_one_token_is_greedy(serve: Serve, algorithm: str, narrow: dict[str, float]) -> None:
    server = serve(algorithm)
    assert generate(server, temperature=1.5, **narrow) == generate(server)


def test_sampling_is_not_greedy(serve: Serve, algorithm: str) -> None:
    server = serve(algorithm)
    assert generate(server, temperature=1.5) != generate(server, temperature=1.5)


def test_logit_bias_equals_plain_decoding(serve: Serve, algorithm: str) -> None:
    server = serve(algorithm)
    banned = [token for token, _ in Counter(token for ids in generate(server) for token in ids).most_common(3)]
    bias = {str(token): -100.0 for token in banned}
    found = generate(server, logit_bias=bias)
    assert not set(banned) & {token for ids in found for token in ids}
    assert found == generate(serve(None), logit_bias=bias)


@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 2.0}]
)
def test_penalties_lower_repetition(serve: Serve, algorithm: str, penalty: dict[str, float]) -> None:
    server = serve(algorithm)

    def repeated(answers: list[list[int]]) -> int:
        return sum(len(ids) - len(set(ids)) for ids in answers)

    assert repeated(generate(server, **penalty)) < repeated(generate(server))
