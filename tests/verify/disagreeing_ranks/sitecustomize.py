# SPDX-License-Identifier: Apache-2.0
"""Makes all ranks but the first draw other tokens; Python runs it in every process that has this folder on its path.

Sums that round differently on two ranks can tip a near tie. Here every draw is tipped, so that nothing is left of a
text unless the first rank's draws count.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

WORKER = "sglang.srt.speculative.ddtree_worker"


def tip_draws(worker: ModuleType) -> None:
    """Wraps the greedy walk, captured or not, of a rank that is not the first."""
    walk_tree = worker.walk_tree

    def tipped(draws: Any, *arguments: Any) -> None:
        import torch

        first = torch.distributed.get_rank() == 0
        walk_tree(draws if first else (draws + 1) % 1000, *arguments)

    worker.walk_tree = tipped  # type: ignore[attr-defined]


class _Finder(importlib.abc.MetaPathFinder):
    """Calls `tip_draws` as soon as the worker's module has been imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != WORKER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                tip_draws(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
