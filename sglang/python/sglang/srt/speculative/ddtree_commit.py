# SPDX-License-Identifier: Apache-2.0
"""Move accepted rows of the target's KV cache to the front of their window, all layers of an MLA pool in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import KVCache

WORD_BYTES = 4


def move_accepted_rows(pool: KVCache, destinations: torch.Tensor, sources: torch.Tensor) -> None:
    """Copy slot ``sources[b, i]`` to slot ``destinations[b, i]`` in every layer; all reads of a request come first.

    Args:
        pool: the target's KV pool.
        destinations, sources: int64 [bs, D]; equal slots are left alone, which is the rule when the path is the spine.
    """
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    if not destinations.is_cuda or type(pool) is not MLATokenToKVPool:
        pool.move_kv_cache(destinations.flatten(), sources.flatten())
        return
    move_rows(pool.data_ptrs, destinations, sources, row_bytes=_row_bytes(pool))


def _row_bytes(pool: Any) -> int:
    layer = pool.kv_buffer[0]
    return int(layer.stride(0) * layer.element_size())


def move_rows(layers: torch.Tensor, destinations: torch.Tensor, sources: torch.Tensor, row_bytes: int) -> None:
    """Copy rows within each of several buffers.

    Args:
        layers: uint64 [num_layers], address of each buffer.
        destinations, sources: int64 [bs, D] row numbers. Within a request a destination may be another one's source;
            requests share no rows.
        row_bytes: bytes from row to row, all of them copied.

    Raises:
        ValueError: if a row is no whole number of words.
    """
    if row_bytes % WORD_BYTES:
        raise ValueError(f"KV rows: expected a multiple of {WORD_BYTES} bytes, got {row_bytes}; use move_kv_cache")
    batch_size, num_rows = destinations.shape
    _move_rows[(batch_size, layers.shape[0])](
        layers,
        destinations,
        sources,
        destinations.stride(0),
        sources.stride(0),
        num_rows,
        row_bytes // WORD_BYTES,
        ROWS=triton.next_power_of_2(num_rows),
        WORDS=triton.next_power_of_2(row_bytes // WORD_BYTES),
    )


@triton.jit
def _move_rows(  # type: ignore[no-untyped-def]
    layers,
    destinations,
    sources,
    destination_stride,
    source_stride,
    num_rows,
    num_words,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    request = tl.program_id(0)
    words = tl.load(layers + tl.program_id(1)).to(tl.pointer_type(tl.int32))
    row = tl.arange(0, ROWS)
    live = row < num_rows
    to = tl.load(destinations + request * destination_stride + row, mask=live, other=0)
    origin = tl.load(sources + request * source_stride + row, mask=live, other=0)
    moved = live & (to != origin)
    if tl.max(moved.to(tl.int32), 0) > 0:
        word = tl.arange(0, WORDS)
        mask = moved[:, None] & (word < num_words)[None, :]
        values = tl.load(words + origin[:, None] * num_words + word[None, :], mask=mask)
        # A destination may be the source of another row of this request: nobody writes before all have read.
        tl.debug_barrier()
        tl.store(words + to[:, None] * num_words + word[None, :], values, mask=mask)
