# SPDX-License-Identifier: Apache-2.0
"""Forced acceptance: runs of the asked lengths, which tell the automatic budget what it was asked to believe."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from sglang.srt.sm120.startup import StartupError
from sglang.srt.speculative import ddtree_simulate
from sglang.srt.speculative.ddtree_args import LENGTHS_VARIABLE
from sglang.srt.speculative.ddtree_budget import BudgetController, StepCosts
from sglang.srt.speculative.ddtree_simulate import simulate_acceptance, simulated_lengths
from sglang.srt.speculative.ddtree_walk import WalkBuffers

BUDGETS, BLOCK = (7, 16, 32), 8
PASSES = 2000


def run(lengths: Sequence[float], budgets: Sequence[int], device: str = "cpu") -> list[int]:
    """The accepted rows of one forced pass over poisoned results, the root among them."""
    walk = WalkBuffers.allocate(4, BLOCK - 1, device)
    walk.packed.fill_(-99)
    simulate_acceptance(walk, 3, lengths, budgets, BLOCK)
    length = int(walk.accept_lens[0])
    assert walk.accept_lens[:3].tolist() == [length] * 3 and walk.bonus[:3].tolist() == [100] * 3
    assert walk.out_tokens[:3].tolist() == [[100] * length + [0] * (BLOCK - length)] * 3
    assert (walk.accept_index[:3] == walk.accept_index[0]).all() and (walk.packed[3] == -99).all()
    rows: list[int] = walk.accept_index[0].tolist()
    assert rows[length:] == [-1] * (BLOCK - length)
    return rows[:length]


@pytest.mark.parametrize("rung", [0, 1, 2])
@pytest.mark.parametrize("lengths", [(4.7, 5.4, 5.9), (1.0, 1.0, 8.0), (3.0, 3.0, 3.0), (1.5, 4.0, 4.25)])
def test_runs_have_the_asked_lengths(lengths: tuple[float, ...], rung: int) -> None:
    """On average, in the tree that is verified and in the smaller ones, whose nodes are its first."""
    torch.manual_seed(0)
    runs = [run(lengths[: rung + 1], BUDGETS[: rung + 1]) for _ in range(PASSES)]
    assert all(rows[0] == 0 and rows == sorted(set(rows)) and rows[-1] <= BUDGETS[rung] for rows in runs)
    for budget, length in zip(BUDGETS[: rung + 1], lengths, strict=False):
        tokens = sum(sum(row <= budget for row in rows) for rows in runs) / PASSES
        assert tokens == pytest.approx(length, abs=0.1)


def test_one_budget_follows_the_spine() -> None:
    assert run((3.0,), (16,)) == [0, 1, 2]


@pytest.mark.gpu
def test_a_card_gets_the_same() -> None:
    for length in range(1, BLOCK + 1):
        assert run((length,), (16,), "cuda") == list(range(length))


def test_auto_believes_what_is_forced() -> None:
    torch.manual_seed(0)
    lengths = (4.7, 5.4, 5.9)
    costs = StepCosts(short={1: [1.0, 1.1, 1.3]}, per_token={1: [0.0] * 3})
    controller, used = BudgetController(BUDGETS, costs), [0, 0, 0]
    for _ in range(PASSES):
        index = controller.choose([None], 0)
        used[index] += 1
        rows = run(lengths[: index + 1], BUDGETS[: index + 1])
        accepted = [sum(0 < row <= budget for row in rows) for budget in BUDGETS[: index + 1]]
        controller.observe(index, 1, [length - 1 for length in lengths], accepted)
    assert used[1] > 0.8 * PASSES, "4.7 / 1.0 and 5.9 / 1.3 are less than 5.4 / 1.1"
    assert controller.expected_tokens() == pytest.approx(lengths, abs=0.4)


def test_lengths_come_from_either_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LENGTHS_VARIABLE, raising=False)
    monkeypatch.setattr(ddtree_simulate, "SIMULATE_ACC_LEN", -1.0)
    assert simulated_lengths(BUDGETS, BLOCK) is None
    monkeypatch.setattr(ddtree_simulate, "SIMULATE_ACC_LEN", 3.0)
    assert simulated_lengths(BUDGETS, BLOCK) == (3.0, 3.0, 3.0)
    monkeypatch.setenv(LENGTHS_VARIABLE, "4.7,5.4, 5.9")
    assert simulated_lengths(BUDGETS, BLOCK) == (4.7, 5.4, 5.9)


@pytest.mark.parametrize("text", ["4.7", "4.7,5.4,x", "5.4,4.7,5.9", "0.5,5,6", "4,5,8.5", "4,5,nan", "1,2,3,4", ","])
def test_other_lengths_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(LENGTHS_VARIABLE, text)
    with pytest.raises(
        StartupError, match=f"{LENGTHS_VARIABLE}: expected 3 ascending numbers from 1 to 8, one for each"
    ):
        simulated_lengths(BUDGETS, BLOCK)
