# SPDX-License-Identifier: Apache-2.0
"""A scripted drafter: what it proposes so that a verify step accepts exactly a given path of the tree.

A pattern is (accepted, branch): how many drafted tokens the step accepts, and at which depth the accepted path leaves the
spine (0: it stays on it). The drafter knows the target's own continuation; the tree is built by the product's own builder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

DEPTH = 7
NUM_RANKS = 4


class Pattern(NamedTuple):
    """`accepted` drafted tokens, the first `branch - 1` of them on the spine; branch 0 is the spine alone."""

    accepted: int
    branch: int


ALL_PATTERNS = [Pattern(accepted, branch) for accepted in range(DEPTH + 1) for branch in range(accepted + 1)]


def propose(pattern: Pattern, continuation: Sequence[int], vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and token ids [DEPTH, NUM_RANKS], ranks best first, as the drafter would give them.

    Args:
        pattern: what the step shall accept.
        continuation: the target's next tokens, at least DEPTH of them.
        vocab: every other token comes from below it.
    """
    log_probs = torch.tensor([[-0.01, -9.0, -9.5, -10.0]]).repeat(DEPTH, 1)
    token_ids = torch.empty(DEPTH, NUM_RANKS, dtype=torch.int64)
    for depth in range(1, DEPTH + 1):
        right = int(continuation[depth - 1])
        wrong = [(right + offset) % vocab for offset in range(1, NUM_RANKS + 1)]
        ranks = wrong[:NUM_RANKS]
        if depth <= pattern.accepted:
            ranks = [right, *wrong[: NUM_RANKS - 1]]
        if depth == pattern.branch:
            # The second best here leads the best path off the spine.
            ranks = [wrong[0], right, *wrong[1 : NUM_RANKS - 1]]
            log_probs[depth - 1, 1] = -0.02
        token_ids[depth - 1] = torch.tensor(ranks)
    return log_probs, token_ids
