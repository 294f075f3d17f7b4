# SPDX-License-Identifier: Apache-2.0
"""From the drafter's hidden states to a tree: the target's LM head, the best tokens of each depth, best-first build."""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.sm120.startup import StartupError
from sglang.srt.speculative.ddtree_tree import (
    TreeBuffers,
    build_tree,
    draft_log_probs,
    local_top_k,
    merge_vocab_shards,
    pack_shard,
    ranks_needed,
    unpack_shards,
)


class TreeDrafter:
    """Scores drafted tokens with the target's LM head and builds one tree per request.

    Draft logits are used raw: a request's temperature shapes the target's draws, never the tree.

    Args:
        lm_head: the target's head; a vocabulary-parallel shard under tensor parallelism.
        tp_group: the tensor-parallel group of the target.
        block_size: positions of one drafter block; position 0 is the root.
        budget: nodes under the root.

    Raises:
        StartupError: if the head has no floating-point weight.
    """

    def __init__(self, lm_head: Any, tp_group: Any, block_size: int, budget: int) -> None:
        weight = getattr(lm_head, "weight", None)
        if weight is None or not weight.is_floating_point():
            raise StartupError(
                "DDTREE: expected a target LM head with a floating-point weight; use an unquantised lm_head"
            )
        shard = getattr(lm_head, "shard_indices", None)
        # The rows past num_org_elements are padding, which must never become token ids.
        self._num_tokens = int(weight.shape[0] if shard is None else shard.num_org_elements)
        self._first_token = 0 if shard is None else int(shard.org_vocab_start_index)
        self._weight = weight
        self._tp_group = tp_group if tp_group.world_size > 1 else None
        self._block_size = block_size
        self._num_ranks = ranks_needed(budget, block_size - 1)

    def build(self, hidden: torch.Tensor, roots: torch.Tensor, committed: torch.Tensor, buffers: TreeBuffers) -> None:
        """Write one tree per request into `buffers`.

        Args:
            hidden: [bs * block_size, hidden_size], the drafter's output.
            roots: [bs] int64, the last committed token of each request.
            committed: [bs] int64 on the device, committed length, the root's position.
            buffers: static tensors; the first bs requests are overwritten.
        """
        batch_size = roots.shape[0]
        drafted = hidden.view(batch_size, self._block_size, -1)[:, 1:].to(self._weight.dtype)
        # Flat, so that it is one product: with a gap between requests matmul would read the weight once for each.
        logits = torch.mm(drafted.flatten(0, 1), self._weight[: self._num_tokens].T).unflatten(0, (batch_size, -1))
        log_probs, token_ids = self._best_tokens(logits)
        build_tree(log_probs, token_ids, roots, committed, buffers)

    def _best_tokens(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest tokens of each depth that a tree can use, over the whole vocabulary: log-probabilities and ids."""
        if self._tp_group is None:
            return draft_log_probs(logits, self._num_ranks)
        shard = local_top_k(logits, self._num_ranks, self._first_token, self._num_tokens)
        return merge_vocab_shards(*unpack_shards(self._tp_group.all_gather(pack_shard(*shard).unsqueeze(0), dim=0)))
