# SPDX-License-Identifier: Apache-2.0
"""The choice of a budget: tokens per second, from expected gains and measured costs."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from sglang.srt.speculative import ddtree_budget
from sglang.srt.speculative.ddtree_budget import (
    PASSES_BETWEEN_TRIALS,
    BudgetController,
    Pace,
    StepCosts,
    auto_budgets,
    request_budget,
)
from sglang.srt.speculative.ddtree_tree import TreeBuffers, build_tree

BUDGETS = (7, 16, 32)
# Alone a larger tree is nearly free; in a batch it costs what it computes. Long contexts cost a large tree more.
COSTS = StepCosts(
    short={1: [10.0, 10.2, 10.8], 8: [12.0, 15.0, 22.0], 32: [20.0, 40.0, 75.0]},
    per_token={1: [0.0001, 0.0003, 0.0008], 8: [0.0, 0.0, 0.0], 32: [0.0, 0.0, 0.0]},
)
# Drafts that the drafter expects a tree of each budget to yield.
GAINS = (3.0, 3.8, 4.0)


def controller(costs: StepCosts = COSTS, passes: int = 1) -> BudgetController:
    """One whose largest trees have yielded what the drafter expected."""
    made = BudgetController(BUDGETS, costs)
    for _ in range(passes):
        made.observe(2, 5, [5 * gain for gain in GAINS], [15, 19, 20])
    return made


def choose(made: BudgetController, batch_size: int, context: float = 0.0) -> int:
    return made.choose([None] * batch_size, context)


def test_the_spine_is_a_choice_and_the_others_are_larger() -> None:
    assert auto_budgets(8) == (7, 15, 31)
    assert auto_budgets(16) == (15, 31)
    assert auto_budgets(24) == (23, 31)
    assert auto_budgets(64) == (63,)


@pytest.mark.parametrize("batch_size, index", [(1, 1), (2, 0), (8, 0), (32, 0), (100, 0)])
def test_tokens_per_second_decide(batch_size: int, index: int) -> None:
    """1: 4 / 10, 4.8 / 10.2, 5 / 10.8; 8: 4 / 12, 4.8 / 15, 5 / 22. Two requests run in the graph for eight."""
    assert choose(controller(), batch_size) == index


@pytest.mark.parametrize("context, index", [(0, 1), (9_000, 1), (16_000, 0), (200_000, 0)])
def test_a_long_context_costs_a_large_tree_more(context: int, index: int) -> None:
    """4 / (10 + 0.1 k) and 4.8 / (10.2 + 0.3 k) for k thousand tokens of context are equal at k = 10."""
    assert choose(controller(), 1, context) == index


def test_what_a_step_takes_beside_its_graphs_favours_larger_trees() -> None:
    """Of a host that needs 40 for each step: 4 / 52, 4.8 / 55, 5 / 62."""
    made = controller()
    assert choose(made, 8) == 0
    made.observe(2, 5, [5 * gain for gain in GAINS], [15, 19, 20], 40.0)
    assert choose(made, 8) == 1


def test_the_pace_is_that_of_like_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 8.0, 11.0, 14.0, 80.0, 83.0, 90.0, 91.0, 1000.0, 1003.0, 1006.0])
    monkeypatch.setattr(ddtree_budget.time, "perf_counter", lambda: next(clock))
    pace = Pace()
    assert pace.rest() == 0.0
    rests = []
    for kind in "aaaaaaabb":
        pace.step(kind, 1.0)
        rests.append(pace.rest())
    # The second step may still wait for another one. Of 2, 2, 2, 65, 2 the median is 2; kind b is too young.
    assert rests == [0.0, 0.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    pace.interrupt()
    for _ in range(3):
        pace.step("b", 20.0)
    assert pace.rest() == 2.0, "of one more rest, -17, and five others"


def test_without_figures_it_is_the_chain() -> None:
    assert choose(BudgetController(BUDGETS, COSTS), 1) == 0


@pytest.mark.parametrize("limit, index", [(None, 1), (32, 1), (16, 1), (15, 0), (3, 0)])
def test_requests_may_lower_it(limit: int | None, index: int) -> None:
    assert controller().choose([limit], 0) == index


def test_a_tree_that_few_want_must_pay_for_all() -> None:
    """Costs of 10 and 11.5: a larger tree pays when all four want it, 4.8 / 11.5, but not when one does, 4.2 / 11.5."""
    made = controller(StepCosts(short={4: [10.0, 11.5, 99.0]}, per_token={4: [0.0, 0.0, 0.0]}))
    assert made.choose([None] * 4, 0) == 1
    assert made.choose([7, 7, 7, None], 0) == 0


@pytest.mark.parametrize("share, index", [(1.0, 1), (0.0, 0)])
def test_side_branches_are_judged_by_what_they_yielded(share: float, index: int) -> None:
    """The spine is as good as foretold. 16 nodes at 11 against 10: 4.8 tokens if side branches are too, 4 if not."""
    made = BudgetController(BUDGETS, StepCosts(short={1: [10.0, 11.0, 99.0]}, per_token={1: [0.0, 0.0, 0.0]}))
    for _ in range(40):
        made.observe(2, 5, [5 * gain for gain in GAINS], [15, 15 + round(4 * share), 15 + round(5 * share)])
    assert made.expected_tokens()[0] == pytest.approx(4.0)
    assert made.expected_tokens()[1] == pytest.approx(4.0 + 0.8 * share, abs=0.08)
    assert choose(made, 1) == index


def test_a_larger_tree_is_tried_now_and_then() -> None:
    """Side branches that once failed are not given up for ever, and cost next to nothing while they keep failing."""
    made = BudgetController(BUDGETS, StepCosts(short={1: [10.0, 11.0, 99.0]}, per_token={1: [0.0, 0.0, 0.0]}))
    made.observe(2, 500, [1500.0, 1900.0, 2000.0], [1500, 1500, 1500])
    chosen = []
    for _ in range(2000):
        chosen.append(choose(made, 1))
        made.observe(chosen[-1], 1, GAINS, [3, 3, 3][: chosen[-1] + 1])
    assert chosen.count(1) == 2000 // PASSES_BETWEEN_TRIALS and chosen.count(2) == 0
    for _ in range(2000):
        chosen.append(choose(made, 1))
        made.observe(chosen[-1], 1, GAINS, [3, 5, 5][: chosen[-1] + 1])
    assert chosen[-500:].count(1) > 480
    assert made.choose([7], 0) == 0, "a trial keeps within what requests allow"


class Text:
    """Passes over a text that is the same whatever is verified. Per request and pass: nodes that spell the text.

    Args:
        spine, side, far: probability that the text leaves the tree's first 7, 16, 32 nodes one draft later.
        boast: what the drafter foretells of the nodes behind the spine, as a multiple of the truth.
    """

    def __init__(self, side: float, far: float, boast: float) -> None:
        self._random, self._side, self._far, self._boast = random.Random(1), side, far, boast

    def foretold(self, requests: int) -> list[float]:
        mean = 2.6
        return [requests * (mean + self._boast * added) for added in (0, self._side, self._side + self._far)]

    def accepted(self, requests: int) -> list[int]:
        spine = sum(self._random.choice((0, 1, 2, 3, 3, 4, 5)) for _ in range(requests))  # 2.57 on average
        side = sum(self._random.random() < self._side for _ in range(requests))
        return [spine, spine + side, spine + side + sum(self._random.random() < self._far for _ in range(requests))]

    def seconds_per_token(self, requests: int, made: BudgetController | int, costs: StepCosts) -> float:
        """Of 1,500 passes with a fixed rung, or with those that a controller chooses two passes ahead."""
        seconds, tokens, waiting = 0.0, 0, []
        for _ in range(1500):
            index = made if isinstance(made, int) else choose(made, requests)
            seconds += costs.seconds(requests, 0)[index]
            accepted = self.accepted(requests)
            tokens += requests + accepted[index]
            waiting.append((index, requests, self.foretold(requests), accepted[: index + 1]))
            if len(waiting) > 1 and not isinstance(made, int):
                made.observe(*waiting.pop(0))
        return seconds / tokens


@pytest.mark.parametrize("boast", [0.3, 1.0, 3.0], ids=["modest", "honest", "boasting"])
@pytest.mark.parametrize("requests", [1, 8, 32])
@pytest.mark.parametrize("side, far", [(0.8, 0.3), (0.1, 0.02)])
@pytest.mark.parametrize("steepness", [0.02, 0.1, 0.5])
def test_it_is_as_fast_as_the_best_budget(
    boast: float, requests: int, side: float, far: float, steepness: float
) -> None:
    """Whatever the drafter says of its side branches and whatever a row costs, within what trials take."""
    row = [1.0, 1 + steepness, 1 + 2.8 * steepness]
    costs = StepCosts(short={requests: row}, per_token={requests: [0.0] * 3})
    fixed = [Text(side, far, boast).seconds_per_token(requests, index, costs) for index in range(3)]
    chosen = Text(side, far, boast).seconds_per_token(requests, BudgetController(BUDGETS, costs), costs)
    assert chosen < 1.025 * min(fixed)


def test_ranks_with_equal_figures_choose_alike() -> None:
    one, other = controller(), controller()
    for step in range(200):
        for made in (one, other):
            made.observe(step % 3, 2, [gain * (1 + step % 7) / 4 for gain in GAINS], [step % 5] * (1 + step % 3))
        assert choose(one, 1 + step % 40) == choose(other, 1 + step % 40)


def test_gains_of_nothing_do_no_harm() -> None:
    made = BudgetController(BUDGETS, COSTS)
    for _ in range(3000):
        made.observe(0, 64, [0.0, 0.0, 0.0], [0])
    assert choose(made, 4) == 0 and made.expected_tokens() == [1.0, 1.0, 1.0]


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
