# SPDX-License-Identifier: Apache-2.0
"""Accepted KV rows move to the front of their window in all layers: read all, then write all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import UnquantizedKVCacheMethod
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.speculative.ddtree_commit import _row_bytes, move_accepted_rows, move_rows

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


@pytest.mark.gpu
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


def keys_and_values(device: str, heads: int, value_dim: int = 128) -> tuple[Any, list[torch.Tensor]]:
    """A pool of keys and values without the rest of a server, and its buffers; the pool's own move notes its call."""
    keys = [torch.randn(SLOTS, heads, 128, device=device) for _ in range(LAYERS)]
    values = [torch.randn(SLOTS, heads, value_dim, device=device) for _ in range(LAYERS)]
    pool: Any = object.__new__(MHATokenToKVPool)
    pool.k_buffer, pool.v_buffer, pool.use_hnd, pool.quant_method = keys, values, False, UnquantizedKVCacheMethod()
    pool.data_ptrs = torch.tensor([buffer.data_ptr() for buffer in keys + values], dtype=torch.uint64, device=device)
    pool.moved = []
    pool.move_kv_cache = lambda *slots: pool.moved.append(slots)
    return pool, keys + values


@pytest.mark.gpu
def test_keys_and_values_arrive() -> None:
    pool, buffers = keys_and_values("cuda", heads=2)
    for seed in range(20):
        destinations, sources = (slots.cuda() for slots in accepted_paths(7, 33, 8, seed))
        expected = [buffer.clone() for buffer in buffers]
        for buffer in expected:
            buffer[destinations.flatten()] = buffer[sources.flatten()].clone()
        move_accepted_rows(pool, destinations, sources)
        assert all(torch.equal(buffer, wanted) for buffer, wanted in zip(buffers, expected, strict=True))
    assert not pool.moved


@pytest.mark.gpu
@pytest.mark.parametrize("heads, value_dim", [(2, 64), (33, 128)], ids=["unlike", "large"])
def test_rows_that_are_unlike_or_large_are_left_to_the_pool(heads: int, value_dim: int) -> None:
    pool, _ = keys_and_values("cuda", heads, value_dim)
    slots = torch.arange(16, device="cuda").view(2, 8)
    move_accepted_rows(pool, slots, slots + 1)
    assert [[each.tolist() for each in moved] for moved in pool.moved] == [[list(range(16)), list(range(1, 17))]]


def test_without_a_card_rows_are_left_to_the_pool() -> None:
    pool, _ = keys_and_values("cpu", heads=1)
    slots = torch.arange(16).view(2, 8)
    move_accepted_rows(pool, slots, slots + 1)
    assert len(pool.moved) == 1


@pytest.mark.parametrize(
    "heads, value_dim, expected", [(2, 128, 1024), (16, 128, 8192), (17, 128, None), (2, 64, None)]
)
def test_rows_that_one_program_moves(heads: int, value_dim: int, expected: int | None) -> None:
    """Eight rows of fp32 keys and values: 64 KiB are the most."""
    pool, _ = keys_and_values("cpu", heads, value_dim)
    assert _row_bytes(pool, 8) == expected
    pool.use_hnd = True
    assert _row_bytes(pool, 8) is None


@pytest.mark.gpu
def test_a_strange_row_is_refused() -> None:
    slots = torch.ones(1, 2, dtype=torch.int64, device="cuda")
    with pytest.raises(ValueError, match="expected a multiple of 4 bytes, got 6"):
        move_rows(torch.zeros(1, dtype=torch.uint64, device="cuda"), slots, slots, 6)
