# SPDX-License-Identifier: Apache-2.0
"""How much text a KV pool has room for; what a server makes of it is in `test_allocator.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.sm120.pool_limit import PoolLimit, limit_length

LIMITS = [
    PoolLimit(pool, page, reserve) for pool in (640, 645, 1500) for page in (1, 16, 64) for reserve in (0, 16, 34, 130)
]


def ceil_pages(tokens: int, page: int) -> int:
    return (tokens + page - 1) // page * page


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: "-".join(map(str, limit)))
def test_a_text_that_fills_its_room_fits_in_every_step(limit: PoolLimit) -> None:
    usable = limit.pool // limit.page * limit.page
    for prompt in range(1, limit.pool):
        room = limit.room(prompt)
        if room < 1:
            continue
        # SGLang prefills when this holds, a text that was retracted just before its end included.
        for cached in (prompt, prompt + room - 1):
            assert ceil_pages(cached, limit.page) - limit.page < limit.pool - (prompt + room - cached) - limit.page
        # The last step is launched with all but one of the tokens, and reserves from there.
        assert ceil_pages(prompt + room - 1 + limit.reserve, limit.page) <= usable
        assert room >= limit.pool - prompt - limit.reserve - 2 * limit.page, "the pool is there to be used"


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: "-".join(map(str, limit)))
@pytest.mark.parametrize("new_tokens", [0, 1, 7])
def test_the_longest_prompt_is_the_last_with_room(limit: PoolLimit, new_tokens: int) -> None:
    longest = limit.longest_prompt(new_tokens)
    assert limit.room(longest) >= new_tokens > limit.room(longest + 1)


class Admission:
    """The part of a scheduler that admits requests, with plain decoding on a pool of 128 tokens in pages of 16."""

    def __init__(self, truncates: bool) -> None:
        self.server_args = SimpleNamespace(allow_auto_truncate=truncates, dcp_size=1)
        self.spec_algorithm = SimpleNamespace(is_none=lambda: True)
        self.max_total_num_tokens, self.page_size = 128, 16


def make_request(num_prompt: int, max_new_tokens: int | None) -> Any:
    params = SimpleNamespace(max_new_tokens=max_new_tokens)
    return SimpleNamespace(rid="r", origin_input_ids=list(range(num_prompt)), sampling_params=params)


@pytest.mark.parametrize(
    ("num_prompt", "asked", "given"),
    [(20, None, 79), (20, 500, 79), (20, 79, 79), (20, 78, 78), (96, 9, 9), (96, 0, 0), (95, None, 15)],
)
def test_the_length_is_capped_by_the_room(num_prompt: int, asked: int | None, given: int) -> None:
    req = make_request(num_prompt, asked)
    assert limit_length(Admission(truncates=False), req) is None  # type: ignore[arg-type]
    assert req.sampling_params.max_new_tokens == given


@pytest.mark.parametrize(("num_prompt", "asked", "longest"), [(97, 5, 96), (97, None, 96), (97, 0, 96)])
def test_a_prompt_without_room_is_refused_with_both_lengths(num_prompt: int, asked: int | None, longest: int) -> None:
    message = limit_length(Admission(truncates=False), make_request(num_prompt, asked))  # type: ignore[arg-type]
    assert message is not None and "verify" not in message
    assert message.startswith(f"prompt: expected at most {longest} tokens")
    assert "pool of 128" in message and f"got {num_prompt}" in message


def test_a_prompt_without_room_is_cut_where_the_operator_says_so() -> None:
    req = make_request(120, 5)
    assert limit_length(Admission(truncates=True), req) is None  # type: ignore[arg-type]
    assert req.origin_input_ids == list(range(96)) and req.sampling_params.max_new_tokens == 5
