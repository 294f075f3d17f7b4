# SPDX-License-Identifier: Apache-2.0
"""From hidden states to trees: the LM head's own vocabulary, whole or in shards, read once for the whole batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang.srt.sm120.startup import StartupError
from sglang.srt.speculative.ddtree_draft import TreeDrafter
from sglang.srt.speculative.ddtree_tree import TreeBuffers, pack_shard, unpack_shards

ALONE = SimpleNamespace(world_size=1)
BLOCK, BUDGET, HIDDEN, TOKENS, ROWS = 4, 6, 16, 40, 48  # rows of the head from TOKENS on are padding


class Readings(TorchDispatchMode):
    """The operations that take a whole weight, views aside."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self._storage = weight.untyped_storage().data_ptr()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = [
            arg
            for arg in args
            if isinstance(arg, torch.Tensor) and arg.untyped_storage().data_ptr() == self._storage and not func.is_view
        ]
        self.found += [func.overloadpacket.__name__] * len(reads)
        return func(*args, **(kwargs or {}))


def drafter(weight: torch.Tensor) -> TreeDrafter:
    head = SimpleNamespace(
        weight=weight, shard_indices=SimpleNamespace(num_org_elements=TOKENS, org_vocab_start_index=0)
    )
    return TreeDrafter(head, ALONE, BLOCK, BUDGET)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_trees_follow_the_head(batch_size: int) -> None:
    """Padding of the head would win if it counted; position 0 of a block is the root's and drafts nothing."""
    generator = torch.Generator().manual_seed(batch_size)
    weight = torch.randn((ROWS, HIDDEN), generator=generator)
    weight[TOKENS:] *= 100
    hidden = torch.randn((batch_size * BLOCK, HIDDEN), generator=generator)
    roots, committed = torch.arange(batch_size) + 3, torch.arange(batch_size) * 10
    buffers = TreeBuffers.allocate(batch_size, BUDGET, BLOCK - 1, "cpu")
    with Readings(weight) as readings:
        drafter(weight).build(hidden, roots, committed, buffers)
    assert readings.found == ["mm"], "the weight is read once, however many requests there are"
    for request in range(batch_size):
        drafted = hidden[request * BLOCK + 1 : (request + 1) * BLOCK].double()
        log_probs = (drafted @ weight[:TOKENS].double().T).log_softmax(-1)
        ordered, tokens = log_probs.sort(-1, descending=True)
        nodes = oracle.best_first(ordered.float().numpy(), BUDGET)
        expected = [int(roots[request])] + [int(tokens[node.depth - 1, node.rank]) for node in nodes[1:]]
        assert buffers.token_ids[request].tolist() == expected
        assert buffers.parents[request].tolist() == [node.parent for node in nodes]


class Group:
    """The tensor-parallel group of one rank: what the others give to a gathering is made of their logits by sorting."""

    def __init__(self, rank: int, shards: list[torch.Tensor], num_ranks: int) -> None:
        self.world_size, self._rank = len(shards), rank
        self.gatherings = 0
        self._messages: list[torch.Tensor] = []
        first = 0
        for logits in shards:
            best = logits.sort(dim=-1, descending=True, stable=True)
            values, token_ids = best.values[..., :num_ranks], best.indices[..., :num_ranks] + first
            self._messages.append(pack_shard(values, token_ids, logits.logsumexp(-1)))
            first += logits.shape[-1]

    def all_gather(self, message: torch.Tensor, dim: int) -> torch.Tensor:
        self.gatherings += 1
        self._messages[self._rank] = message.squeeze(dim)
        return torch.stack(self._messages, dim)


def test_a_shard_travels_unchanged() -> None:
    """Ids are no numbers on the way: small ones would be subnormal, some large ones NaN."""
    token_ids = torch.tensor([[0, 1, 163_839], [2**23, 2**31 - 1, 0x7FC00001]])
    values, log_sums = torch.tensor([[3.0, -0.0, -torch.inf], [1e-40, 2.0, 1.0]]), torch.tensor([4.0, torch.nan])
    gathered = torch.stack([pack_shard(values, token_ids, log_sums)] * 2)
    found = unpack_shards(gathered)
    assert torch.equal(found[1], token_ids.expand(2, -1, -1)) and found[1].dtype == torch.int64
    for part, expected in ((found[0], values), (found[2], log_sums)):
        assert torch.equal(part.contiguous().view(torch.int32), torch.stack([expected] * 2).view(torch.int32))


@pytest.mark.parametrize(("budget", "num_ranks"), [(1, 1), (3, 1), (8, 6), (16, 14)])
@pytest.mark.parametrize("rank", [0, 1])
def test_shards_give_the_trees_of_the_whole(budget: int, num_ranks: int, rank: int) -> None:
    """From no more tokens a shard than a tree can use, here one for each node that is not on the spine, and one."""
    generator = torch.Generator().manual_seed(budget)
    hidden = torch.randn((2 * BLOCK, HIDDEN), generator=generator)
    weight = torch.randn((TOKENS, HIDDEN), generator=generator)
    logits = hidden.view(2, BLOCK, HIDDEN)[:, 1:] @ weight.T
    group = Group(rank, [logits[..., :24], logits[..., 24:]], num_ranks)
    own = (weight[:24], weight[24:])[rank]
    indices = SimpleNamespace(num_org_elements=len(own), org_vocab_start_index=24 * rank)
    head = SimpleNamespace(weight=torch.cat([own, own[:3] * 100]), shard_indices=indices)
    buffers = TreeBuffers.allocate(2, budget, BLOCK - 1, "cpu")
    TreeDrafter(head, group, BLOCK, budget).build(hidden, torch.tensor([3, 4]), torch.tensor([50, 60]), buffers)
    assert group.gatherings == 1

    log_probs, tokens = logits.log_softmax(-1).sort(-1, descending=True)
    for request in range(2):
        nodes = oracle.best_first(log_probs[request].numpy(), budget)
        expected = [3 + request] + [int(tokens[request, node.depth - 1, node.rank]) for node in nodes[1:]]
        assert buffers.token_ids[request].tolist() == expected
        assert buffers.parents[request].tolist() == [node.parent for node in nodes]


def test_a_quantised_head_is_refused() -> None:
    with pytest.raises(StartupError, match="expected a target LM head with a floating-point weight"):
        TreeDrafter(SimpleNamespace(weight=torch.zeros((4, 4), dtype=torch.int8)), ALONE, BLOCK, BUDGET)
