# SPDX-License-Identifier: Apache-2.0
"""The choice of a budget: tokens per second, from expected gains and measured costs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang.srt.speculative.ddtree_budget import BudgetController, auto_budgets, request_budget
from sglang.srt.speculative.ddtree_tree import TreeBuffers, build_tree

BUDGETS = (7, 16, 32)
# Alone a larger tree is nearly free; in a batch it costs what it computes.
COSTS = {1: [10.0, 10.2, 10.8], 8: [12.0, 15.0, 22.0], 32: [20.0, 40.0, 75.0]}
GAINS = [3.0, 3.8, 4.0]


def controller(gains: list[float] | None = GAINS) -> BudgetController:
    made = BudgetController(BUDGETS, COSTS)
    if gains is not None:
        made.observe_gains(gains)
    return made


def test_the_spine_is_a_choice_and_the_others_are_larger() -> None:
    assert auto_budgets(8) == (7, 16, 32)
    assert auto_budgets(16) == (15, 16, 32)
    assert auto_budgets(24) == (23, 32)
    assert auto_budgets(64) == (63,)


@pytest.mark.parametrize("batch_size, index", [(1, 1), (2, 0), (8, 0), (32, 0), (100, 0)])
def test_tokens_per_second_decide(batch_size: int, index: int) -> None:
    """1: 4 / 10, 4.8 / 10.2, 5 / 10.8; 8: 4 / 12, 4.8 / 15, 5 / 22. Two requests run in the graph for eight."""
    assert controller().choose(batch_size) == index


def test_without_figures_it_is_the_chain() -> None:
    assert controller(None).choose(1) == 0


@pytest.mark.parametrize("limit, index", [(None, 1), (32, 1), (16, 1), (15, 0), (3, 0)])
def test_requests_may_lower_it(limit: int | None, index: int) -> None:
    assert controller().choose(1, limit) == index


def test_a_drafter_that_promises_too_much_loses_its_tree() -> None:
    """Gains of 3.0 / 3.8 / 4.0 that turn out a tenth as large no longer pay for the second width at these costs."""
    costs = {1: [10.0, 11.0, 12.0]}
    made = BudgetController(BUDGETS, costs)
    made.observe_gains(GAINS)
    assert made.choose(1) == 1
    for _ in range(100):
        made.observe_accepted(1, 0.38)
    assert made.choose(1) == 0


def test_ranks_with_equal_figures_choose_alike() -> None:
    one, other = controller(), controller()
    for step in range(200):
        for made in (one, other):
            made.observe_gains([gain * (1 + step % 7) / 4 for gain in GAINS])
            made.observe_accepted(step % 3, step % 5)
        assert one.choose(1 + step % 40) == other.choose(1 + step % 40)


def test_gains_of_nothing_do_no_harm() -> None:
    made = controller([0.0, 0.0, 0.0])
    made.observe_accepted(0, 0.0)
    assert made.choose(4) == 0


@pytest.mark.parametrize("custom, budget", [(None, None), ({}, None), ({"other": 1}, None), ({"ddtree_budget": 5}, 5)])
def test_request_parameter(custom: dict[str, int] | None, budget: int | None) -> None:
    assert request_budget(SimpleNamespace(custom_params=custom)) == budget


def trees(budget: int, bs: int = 3) -> TreeBuffers:
    generator = torch.Generator().manual_seed(5)
    log_probs, order = (torch.randn(bs, 7, 40, generator=generator) * 2).log_softmax(-1).sort(-1, descending=True)
    buffers = TreeBuffers.allocate(bs + 1, budget, 7, "cpu")
    build_tree(log_probs[..., :budget], order[..., :budget], torch.arange(bs), torch.arange(bs) * 3, buffers)
    return buffers


@pytest.mark.parametrize("budget", [7, 8, 16, 31])
def test_a_smaller_tree_is_the_start_of_a_larger_one(budget: int) -> None:
    taken, expected = TreeBuffers.allocate(4, budget, 7, "cpu"), trees(budget)
    taken.copy_prefix_from(trees(32), 3)
    for name in ("token_ids", "positions", "parents", "mask"):
        assert torch.equal(getattr(taken, name), getattr(expected, name)), name


def test_expected_gain_is_the_sum_of_path_probabilities() -> None:
    tree = trees(16)
    for request in range(3):
        for row in range(1, 17):
            path = [column for column in range(1, 17) if tree.mask[request, row, column]]
            parent = int(tree.parents[request, row])
            step = float(tree.scores[request, row] - tree.scores[request, parent])
            assert len(path) == int(tree.depths[request, row]) and step <= 0
    assert float(tree.scores[:3, 0].abs().max()) == 0 and torch.isneginf(tree.scores[3, 1:]).all()


def test_cutting_leaves_the_first_nodes_of_each_request() -> None:
    tree = trees(16)
    before = tree.parents.clone()
    tree.cut(torch.tensor([3, 16, 1]))
    for request, limit in enumerate((3, 16, 1)):
        assert torch.equal(tree.parents[request, : limit + 1], before[request, : limit + 1])
        assert (tree.parents[request, limit + 1 :] == -1).all()
    assert torch.equal(tree.parents[3], before[3])
