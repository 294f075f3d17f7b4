# SPDX-License-Identifier: Apache-2.0
"""Makes all ranks but the first draw other tokens, where this folder and tests/ are on Python's path.

Sums that round differently on two ranks can tip a near tie. Here every draw is tipped, so that nothing is left of a
text unless the first rank's draws count.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from serving.after_import import after_import


def tip_draws(worker: ModuleType) -> None:
    """Wraps the greedy walk, captured or not, of a rank that is not the first."""
    walk_tree = worker.walk_tree

    def tipped(draws: Any, *arguments: Any) -> None:
        import torch

        first = torch.distributed.get_rank() == 0
        walk_tree(draws if first else (draws + 1) % 1000, *arguments)

    worker.walk_tree = tipped  # type: ignore[attr-defined]


after_import("sglang.srt.speculative.ddtree_worker", tip_draws)
