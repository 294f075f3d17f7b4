# SPDX-License-Identifier: Apache-2.0
"""Forced acceptance for step-time benchmarks on dummy weights, by SGLang's own ``SGLANG_SIMULATE_ACC_*`` variables.

Under the automatic budget each budget may have an accept length of its own.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang.srt.sm120.startup import StartupError
from sglang.srt.speculative.ddtree_args import LENGTHS_VARIABLE
from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN, SIMULATE_ACC_METHOD, _sample_simulated_acc_len

if TYPE_CHECKING:
    from sglang.srt.speculative.ddtree_walk import WalkBuffers

# The token that SGLang's simulation emits for DFLASH and EAGLE.
FIXED_TOKEN = 100


def simulated_lengths(budgets: Sequence[int], block_size: int) -> tuple[float, ...] | None:
    """Tokens per step, the bonus included, to force for each budget; None without simulation. The text is meaningless.

    Raises:
        StartupError: when the variable does not hold one length a budget, none below the one before it.
    """
    text = os.environ.get(LENGTHS_VARIABLE)
    if not text:
        return (float(SIMULATE_ACC_LEN),) * len(budgets) if SIMULATE_ACC_LEN > 0 else None
    try:
        lengths = tuple(float(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    ascending = all(low <= high for low, high in itertools.pairwise((1.0, *lengths, float(block_size))))
    if len(lengths) != len(budgets) or not ascending:
        raise StartupError(
            f"{LENGTHS_VARIABLE}: expected {len(budgets)} ascending numbers from 1 to {block_size}, one for each of the "
            f"budgets {', '.join(map(str, budgets))}, got {text!r}"
        )
    return lengths


def simulate_acceptance(
    walk: WalkBuffers, batch_size: int, lengths: Sequence[float], budgets: Sequence[int], max_accept: int
) -> None:
    """Overwrite the results of a walk with a run of the same drawn length for all requests.

    The run follows the spine, and ends in nodes of larger budgets by as much as those accept beyond the smaller ones.

    Args:
        walk: results, of which the first `batch_size` are overwritten.
        lengths: of `simulated_lengths`, up to the pass's own budget.
        budgets: those that they are for.
        max_accept: the longest run that the tree allows, bonus included.
    """
    length = _sample_simulated_acc_len(lengths[-1], SIMULATE_ACC_METHOD, max_accept)
    path: list[int] = []
    for (smaller, fewer), (_, more) in itertools.pairwise(zip(budgets, lengths, strict=True)):
        drafts = _sample_simulated_acc_len(1 + more - fewer, SIMULATE_ACC_METHOD, max_accept) - 1
        path.extend(range(smaller + 1, smaller + 1 + drafts))
    path = path[: length - 1]
    walk.set_run(batch_size, [*range(length - len(path)), *path], FIXED_TOKEN)
