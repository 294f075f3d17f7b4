# SPDX-License-Identifier: Apache-2.0
"""What the order of free slots is worth: texts that come and go on SGLang's allocator, with and without it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts" / "bench"))

import allocation

SLOTS, BATCH, STEPS, LONGEST = 2000, 4, 1500, (200, 100)


def churn(ordered: bool, slots: int) -> tuple[allocation.Texts, float]:
    texts = allocation.Texts(slots, BATCH, LONGEST, "cpu")
    return texts, float(allocation.simulate(texts, STEPS, ordered, "cpu")["mean_run"])


@pytest.mark.parametrize("slots", [SLOTS, 2 * SLOTS])
def test_order_makes_runs_longer(slots: int) -> None:
    """In a pool that has been used up many times."""
    stock, ordered = (churn(order, slots)[1] for order in (False, True))
    assert ordered > 1.2 * stock > 1.2


def test_no_slot_is_lost_or_held_twice() -> None:
    texts, _ = churn(True, SLOTS)
    free = texts.allocator.free_pages.tolist()
    held = [slot for row, count in enumerate(texts._reserved) for slot in texts._table[row, :count].tolist()]
    assert sorted(free + held) == list(range(1, SLOTS + 1)) and len(held) == texts.held()
