# SPDX-License-Identifier: Apache-2.0
"""Planning on slot numbers alone, against plain Python."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from sglang.srt.sm120.defrag import ROWS_A_COPY, move_slots
from sglang.srt.sm120.kv_extents import breaks_by_chunk, sort_free, take_extent
from slots.toy import MLATokenToKVPool


def num_runs(slots: list[int]) -> int:
    return 1 + sum(after != before + 1 for before, after in pairwise(slots))


@st.composite
def pools(draw: Any) -> tuple[list[int], list[int]]:
    """(slots of a text, free slots), in pieces of any length and order."""
    size = draw(st.integers(2, 60))
    cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=8)))
    ends = [0, *cuts, size]
    pieces = [list(range(1 + begin, 1 + end)) for begin, end in pairwise(ends)]
    order = [slot for piece in draw(st.permutations(pieces)) for slot in piece]
    num_slots = draw(st.integers(1, size // 2))
    first = draw(st.integers(0, size - num_slots))
    return order[first : first + num_slots], order[:first] + order[first + num_slots :]


@settings(max_examples=200, deadline=None)
@given(pools(), st.booleans())
@pytest.mark.scenario("BUG-052")
def test_the_stretch_with_the_fewest_runs_is_exchanged(pool: tuple[list[int], list[int]], always: bool) -> None:
    slots, free = pool
    windows = [free[first : first + len(slots)] for first in range(len(free) - len(slots) + 1)]
    best = min(map(num_runs, windows))
    rest = torch.tensor(free)
    taken, moved = take_extent(rest, torch.tensor(slots), always)
    assert bool(moved) == (always or 2 * best <= num_runs(slots))
    if bool(moved):
        assert taken.tolist() in windows and num_runs(taken.tolist()) == best
        assert set(taken.tolist()).isdisjoint(slots)
    else:
        assert taken.tolist() == slots
    assert sorted(rest.tolist() + taken.tolist()) == sorted(free + slots)


def test_a_text_that_is_whole_stays() -> None:
    free = torch.arange(100, 200)
    taken, moved = take_extent(free, torch.arange(10, 26))
    assert not bool(moved) and taken.tolist() == list(range(10, 26))


def test_slices_that_were_handed_out_keep_their_values() -> None:
    store = torch.tensor([9, 3, 7, 1, 8, 2, 6])
    handed_out, free = store[:3], store[3:]
    sort_free(free)
    take_extent(free, torch.tensor([20, 30]))
    assert handed_out.tolist() == [9, 3, 7]
    assert sorted(store[3:].tolist()) == [6, 8, 20, 30]
    assert free.data_ptr() == store[3:].data_ptr()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=20), min_size=1, max_size=4), st.integers(1, 6))
def test_ends_of_runs_are_counted_where_they_are(texts: list[list[int]], chunk: int) -> None:
    lengths = [len(text) for text in texts]
    table = torch.full((len(texts), max(lengths) + 3), -5)
    for row, text in enumerate(texts):
        table[row, : len(text)] = torch.tensor(text)
    found = breaks_by_chunk(table, torch.tensor(lengths), chunk)
    expected = torch.zeros_like(found)
    for row, text in enumerate(texts):
        for position in range(len(text) - 1):
            expected[row, position // chunk] += text[position + 1] != text[position] + 1
    assert torch.equal(found, expected)


@pytest.mark.scenario("BUG-052")
def test_every_layer_of_every_pool_moves() -> None:
    pools = (MLATokenToKVPool(3, "cpu"), MLATokenToKVPool(1, "cpu"))
    layers = [layer for pool in pools for layer in pool.kv_buffer]
    for number, layer in enumerate(layers):
        layer[:] = torch.arange(len(layer))[:, None] * 10 + number
    order = torch.randperm(4 * ROWS_A_COPY, generator=torch.Generator().manual_seed(0)) + 5
    sources, destinations = order[: 2 * ROWS_A_COPY], order[2 * ROWS_A_COPY :]
    move_slots(pools, destinations, sources)
    for number, layer in enumerate(layers):
        assert layer[destinations, 0].tolist() == (sources * 10 + number).tolist()
        assert layer[sources, 0].tolist() == (sources * 10 + number).tolist()
