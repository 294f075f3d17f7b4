# SPDX-License-Identifier: Apache-2.0
"""From hidden states to trees: the LM head's own vocabulary, and one reading of its weight for the whole batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang.srt.sm120.startup import StartupError
from sglang.srt.speculative.ddtree_draft import TreeDrafter
from sglang.srt.speculative.ddtree_tree import TreeBuffers

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


def test_a_quantised_head_is_refused() -> None:
    with pytest.raises(StartupError, match="expected a target LM head with a floating-point weight"):
        TreeDrafter(SimpleNamespace(weight=torch.zeros((4, 4), dtype=torch.int8)), ALONE, BLOCK, BUDGET)
