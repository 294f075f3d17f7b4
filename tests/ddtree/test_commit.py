# SPDX-License-Identifier: Apache-2.0
"""Accepted KV rows move to the front of their window in all layers: read all, then write all."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.speculative.ddtree_commit import move_rows

pytestmark = pytest.mark.gpu

LAYERS, SLOTS, DIM = 5, 4000, 576


def accepted_paths(batch_size: int, width: int, longest: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of random windows: the first rows, and the rows of an ascending path; equal beyond the path."""
    generator = torch.Generator().manual_seed(seed)
    windows = torch.randperm(SLOTS - 1, generator=generator)[: batch_size * width].view(batch_size, width) + 1
    rows = torch.arange(longest).repeat(batch_size, 1)
    for request in range(batch_size):
        length = int(torch.randint(1, longest + 1, (1,), generator=generator))
        picked = torch.randperm(width - 1, generator=generator)[: length - 1].sort().values + 1
        rows[request, 1:length] = picked
    return windows[:, :longest], windows.gather(1, rows)


@pytest.mark.parametrize("batch_size, width, longest", [(1, 17, 8), (7, 65, 8), (3, 9, 3), (4, 65, 16)])
@pytest.mark.parametrize("dtype, dim", [(torch.bfloat16, DIM), (torch.uint8, 656)])
def test_rows_arrive_whatever_overlaps(batch_size: int, width: int, longest: int, dtype: torch.dtype, dim: int) -> None:
    pools = [torch.randint(0, 255, (SLOTS, 1, dim), device="cuda").to(dtype) for _ in range(LAYERS)]
    addresses = torch.tensor([pool.data_ptr() for pool in pools], dtype=torch.uint64, device="cuda")
    for seed in range(20):
        destinations, sources = (slots.cuda() for slots in accepted_paths(batch_size, width, longest, seed))
        expected = [pool.clone() for pool in pools]
        for pool in expected:
            pool[destinations.flatten()] = pool[sources.flatten()].clone()
        move_rows(addresses, destinations, sources, pools[0].stride(0) * pools[0].element_size())
        assert all(torch.equal(pool, wanted) for pool, wanted in zip(pools, expected, strict=True))


def test_a_strange_row_is_refused() -> None:
    slots = torch.ones(1, 2, dtype=torch.int64, device="cuda")
    with pytest.raises(ValueError, match="expected a multiple of 4 bytes, got 6"):
        move_rows(torch.zeros(1, dtype=torch.uint64, device="cuda"), slots, slots, 6)
