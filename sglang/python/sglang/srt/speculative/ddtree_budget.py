# SPDX-License-Identifier: Apache-2.0
"""``--speculative-ddtree-budget auto``: how many nodes the next verify pass checks.

A larger tree accepts more and costs more, and what it costs depends on the batch. The gain of each budget is known
before the pass: the drafter's probabilities along the paths add up to the drafts that it expects to be accepted, and
trees are nested, so that one tree tells the gain of every smaller one. The cost is measured at start-up on the captured
graphs. The spine alone, which is the DFLASH chain, is always among the choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

AUTO = "auto"
# Budgets beside the spine. On the demo pair a tree of 64 nodes accepts 5 % more than one of 32 (tests/models/demo).
AUTO_BUDGETS = (16, 32)
REQUEST_PARAMETER = "ddtree_budget"
SMOOTHING = 0.1


def auto_budgets(block_size: int) -> tuple[int, ...]:
    """The budgets that auto chooses from, ascending; the first is the spine of a block."""
    spine = block_size - 1
    return (spine, *(budget for budget in AUTO_BUDGETS if budget > spine))


def request_budget(params: Any) -> int | None:
    """The budget that a request asks for in ``custom_params``, or None."""
    custom = params.custom_params
    return None if not custom else custom.get(REQUEST_PARAMETER)


@dataclass
class BudgetController:
    """Chooses among budgets by tokens per second. Ranks that feed it the same numbers choose the same.

    budgets  ascending
    costs    captured batch size -> seconds of one step, per budget
    """

    budgets: Sequence[int]
    costs: Mapping[int, Sequence[float]]
    _gains: list[float] | None = field(default=None, init=False)
    _calibration: float = field(default=1.0, init=False)

    def choose(self, batch_size: int, limit: int | None = None) -> int:
        """Index of the budget for the next pass; `limit` is the largest that any of its requests wants."""
        allowed = [index for index, budget in enumerate(self.budgets) if limit is None or budget <= limit] or [0]
        if self._gains is None:
            return allowed[0]
        sizes = sorted(self.costs)
        costs = self.costs[next((size for size in sizes if size >= batch_size), sizes[-1])]
        tokens = [1 + self._calibration * gain for gain in self._gains]
        return max(allowed, key=lambda index: tokens[index] / costs[index])

    def observe_gains(self, gains: Sequence[float]) -> None:
        """Take a step's expected accepted drafts, one number per budget, averaged over the batch."""
        if self._gains is None:
            self._gains = list(gains)
        else:
            self._gains = [old + SMOOTHING * (new - old) for old, new in zip(self._gains, gains, strict=True)]

    def observe_accepted(self, index: int, accepted: float) -> None:
        """Take what a pass with budget `index` accepted on average: the drafter's probabilities may be off."""
        if self._gains is not None and self._gains[index] > 0:
            self._calibration += SMOOTHING * (accepted / self._gains[index] - self._calibration)
