# SPDX-License-Identifier: Apache-2.0
"""``--speculative-ddtree-budget auto``: how many nodes the next verify pass checks.

A larger tree accepts more and costs more, and what it costs depends on the batch and its contexts. Trees are nested, so a
verified tree tells what each smaller one would have accepted. What a larger one would accept beyond it is foretold by the
drafter's probabilities along the paths, corrected by how often they came true. Costs are measured at start-up on the
captured graphs; what a step takes beside them, on the host above all, is measured while it serves. The spine alone, which
is the DFLASH chain, is always among the choices.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

AUTO = "auto"
# Budgets beside the spine. With the root they have 16 and 32 rows, which the tiles of matrix products take whole: the
# blocks of `mla_tree_verify` hold 32 rows of tokens and heads, for eight heads 4 of them instead of 5 for 16 nodes.
# On the demo pair a tree of 64 nodes accepts 5 % more than one of 32 (tests/models/demo).
AUTO_BUDGETS = (15, 31)
REQUEST_PARAMETER = "ddtree_budget"
# Verified trees (one a request and pass) that count: a stream's last 300 tokens or so, and as many in a batch.
WINDOW = 64
# The drafter is trusted as if so many drafts had come true as foretold.
TRUST = 2.0
# Nodes that are not verified tell nothing of themselves: every so many passes the next larger budget is tried, and what is
# known of nodes fades over eight times as many without them.
PASSES_BETWEEN_TRIALS = 64
FADING = 1 - 1 / (8 * PASSES_BETWEEN_TRIALS)


def auto_budgets(block_size: int) -> tuple[int, ...]:
    """The budgets that auto chooses from, ascending; the first is the spine of a block."""
    spine = block_size - 1
    return (spine, *(budget for budget in AUTO_BUDGETS if budget > spine))


def request_budget(params: Any) -> int | None:
    """The budget that a request asks for in ``custom_params``, or None."""
    custom = params.custom_params
    return None if not custom else custom.get(REQUEST_PARAMETER)


@dataclass(frozen=True)
class StepCosts:
    """Seconds of one step, by captured batch size, one number per budget.

    short           at the shortest context
    per_token       beyond it, for each token that the contexts of the batch have on average
    """

    short: Mapping[int, Sequence[float]]
    per_token: Mapping[int, Sequence[float]]

    def seconds(self, batch_size: int, context: float) -> list[float]:
        """Costs of a batch, which runs in the graph of the next captured size; beyond the largest as that one."""
        sizes = sorted(self.short)
        size = next((size for size in sizes if size >= batch_size), sizes[-1])
        return [short + context * slope for short, slope in zip(self.short[size], self.per_token[size], strict=True)]


class Pace:
    """What steps take beside their captured passes: work of the host that nothing hides, and of the device between them.

    Measured from step to step while like follows like, the median of the last 15: a pause in between is none of it.
    """

    def __init__(self) -> None:
        self._began = 0.0
        self._kind: Hashable = None
        self._alike = 0
        self._rests: deque[float] = deque(maxlen=15)

    def interrupt(self) -> None:
        """Something else than a decode step runs next."""
        self._kind = None

    def step(self, kind: Hashable, seconds: float) -> None:
        """A step begins whose captured passes take `seconds`; steps of one kind take equally long.

        While steps overlap the host waits for the one before the last, so that three alike must follow each other.
        """
        now = time.perf_counter()
        self._alike = self._alike + 1 if kind == self._kind else 0
        if self._alike >= 2:
            self._rests.append(now - self._began - seconds)
        self._began, self._kind = now, kind

    def rest(self) -> float:
        """Seconds of a step beside its captured passes."""
        return max(statistics.median(self._rests), 0.0) if self._rests else 0.0


class BudgetController:
    """Chooses among budgets by tokens per second. Ranks that feed it the same numbers choose the same.

    Args:
        budgets: ascending.
        costs: of a step.
    """

    def __init__(self, budgets: Sequence[int], costs: StepCosts) -> None:
        self.budgets = budgets
        self._costs = costs
        self._trees = 0.0
        # Of the nodes that each budget adds to the one before it, weighted by age: drafts foretold in all trees, and in
        # those trees that were verified with them; and drafts accepted there.
        self._foretold = [0.0] * len(budgets)
        self._tried = [0.0] * len(budgets)
        self._came_true = [0.0] * len(budgets)
        self._passes_since_trial = 0
        self._rest = 0.0

    def choose(self, limits: Sequence[int | None], context: float) -> int:
        """Index of the budget for the next pass.

        Args:
            limits: for each request the largest budget that it wants, None without one.
            context: tokens in the cache per request, on average.
        """
        caps = [self._cap(limit) for limit in limits]
        last = max(caps)
        if not self._trees:
            return 0
        tokens, costs = self.expected_tokens(), self.costs(len(limits), context)
        speeds = [
            sum(tokens[min(index, cap)] for cap in caps) / (costs[index] + self._rest) for index in range(last + 1)
        ]
        best = speeds.index(max(speeds))
        self._passes_since_trial = 0 if best == last else self._passes_since_trial + 1
        if self._passes_since_trial < PASSES_BETWEEN_TRIALS:
            return best
        self._passes_since_trial = 0
        return best + 1

    def costs(self, batch_size: int, context: float) -> list[float]:
        """Seconds of the captured passes of one step, per budget."""
        return self._costs.seconds(batch_size, context)

    def expected_tokens(self) -> list[float]:
        """Tokens that a pass yields for one request, the bonus included, per budget; after at least one pass."""
        tokens, found = 1.0, []
        for foretold, tried, came_true in zip(self._foretold, self._tried, self._came_true, strict=True):
            tokens += foretold / self._trees * (came_true + TRUST) / (tried + TRUST)
            found.append(tokens)
        return found

    def observe(
        self, index: int, num_trees: int, foretold: Sequence[float], accepted: Sequence[int], rest: float = 0.0
    ) -> None:
        """Take one verified pass.

        Args:
            index: of its budget.
            num_trees: requests of the pass whose trees had all of its nodes, at least 1.
            foretold: per budget, the drafts that the drafter expected to be accepted in all of these trees.
            accepted: the drafts that were, for each budget up to the pass's own: those among its first nodes.
            rest: what steps take beside their captured passes.
        """
        self._rest = rest
        keep = (1 - 1 / WINDOW) ** num_trees
        self._trees = self._trees * keep + num_trees
        foretold_before, accepted_before = 0.0, 0
        for step, total in enumerate(foretold):
            added, foretold_before = total - foretold_before, total
            self._foretold[step] = self._foretold[step] * keep + added
            if step > index:
                self._tried[step] *= FADING
                self._came_true[step] *= FADING
                continue
            self._tried[step] = self._tried[step] * keep + added
            self._came_true[step] = self._came_true[step] * keep + accepted[step] - accepted_before
            accepted_before = accepted[step]

    def _cap(self, limit: int | None) -> int:
        """Index of the largest budget within a request's limit; the smallest is cut for lower ones."""
        if limit is None:
            return len(self.budgets) - 1
        return max(sum(budget <= limit for budget in self.budgets) - 1, 0)
