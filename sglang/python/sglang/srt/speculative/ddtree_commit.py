# SPDX-License-Identifier: Apache-2.0
"""What follows a walk: the numbers that a step hands on, and the accepted rows of the target's KV cache.

On a GPU each is one launch: the numbers of all requests, and the rows of all layers of a pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from sglang.srt.speculative.ddtree_walk import WalkBuffers, accepted_slots

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import KVCache

WORD_BYTES = 4
# The rows of a request in registers, 128 of each thread.
LARGEST_PROGRAM_BYTES = 2**16


@dataclass(frozen=True)
class Settled:
    """What a step commits, in dense tensors of its own; D is the longest run. SGLang's kernels read vectors.

    accept_lens   int32 [bs]     tokens to commit
    bonus         int64 [bs]     the next roots
    seq_lens      int64 [bs]     committed lengths with this step
    out_tokens    int64 [bs * D]
    destinations  int64 [bs, D]  slots of the front of the window
    sources       int64 [bs, D]  slots of the accepted rows; behind the run those of `destinations`
    rows          int64 [bs * D] accepted rows among all bs * T; behind the run the root's
    positions     int64 [bs * D] of `destinations` in their text
    """

    accept_lens: torch.Tensor
    bonus: torch.Tensor
    seq_lens: torch.Tensor
    out_tokens: torch.Tensor
    destinations: torch.Tensor
    sources: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor


def settle(walk: WalkBuffers, window_slots: torch.Tensor, committed: torch.Tensor) -> Settled:
    """Work out what a step commits; call it again for the next one, since nothing is static here.

    Args:
        walk: results of the first bs requests.
        window_slots: int64 [bs, T], slots of the tree rows, T >= D.
        committed: int64 [bs], lengths before the step.
    """
    if not window_slots.is_cuda:
        return _settle_with_tensors(walk, window_slots, committed)
    batch_size, longest = window_slots.shape[0], walk.accept_index.shape[1]
    vectors = torch.empty((5, batch_size, longest), dtype=torch.int64, device=window_slots.device)
    scalars = torch.empty((2, batch_size), dtype=torch.int64, device=window_slots.device)
    accept_lens = torch.empty(batch_size, dtype=torch.int32, device=window_slots.device)
    settle_on_device(walk, window_slots, committed, vectors, scalars, accept_lens)
    out_tokens, destinations, sources, rows, positions = vectors
    return Settled(
        accept_lens,
        scalars[0],
        scalars[1],
        out_tokens.view(-1),
        destinations,
        sources,
        rows.view(-1),
        positions.view(-1),
    )


def _settle_with_tensors(walk: WalkBuffers, window_slots: torch.Tensor, committed: torch.Tensor) -> Settled:
    """`settle` with tensor operations, which take some fifteen launches."""
    batch_size, width = window_slots.shape
    accept_index = walk.accept_index[:batch_size]
    destinations, sources = accepted_slots(window_slots, accept_index)
    first_rows = torch.arange(batch_size)[:, None] * width
    accept_lens = walk.accept_lens[:batch_size]
    return Settled(
        accept_lens=accept_lens.to(torch.int32),
        bonus=walk.bonus[:batch_size].contiguous(),
        seq_lens=committed + accept_lens,
        out_tokens=walk.out_tokens[:batch_size].flatten(),
        destinations=destinations.contiguous(),
        sources=sources,
        rows=(first_rows + accept_index.clamp(min=0)).flatten(),
        positions=(committed[:, None] + torch.arange(accept_index.shape[1])).flatten(),
    )


def settle_on_device(
    walk: WalkBuffers,
    window_slots: torch.Tensor,
    committed: torch.Tensor,
    vectors: torch.Tensor,
    scalars: torch.Tensor,
    accept_lens: torch.Tensor,
) -> None:
    """`settle` in one launch.

    Args:
        walk, window_slots, committed: as there.
        vectors: int64 [5, bs, D], receives out_tokens, destinations, sources, rows and positions.
        scalars: int64 [2, bs], receives bonus and seq_lens.
        accept_lens: int32 [bs].
    """
    _, batch_size, longest = vectors.shape
    _settle[(batch_size,)](
        walk.packed, walk.packed.stride(0), window_slots, window_slots.stride(0), committed, committed.stride(0),
        vectors, scalars, accept_lens, window_slots.shape[1], longest, vectors.stride(0), batch_size,
        LANES=triton.next_power_of_2(longest), num_warps=1,
    )  # fmt: skip


@triton.jit
def _settle(  # type: ignore[no-untyped-def]
    packed,
    packed_stride,
    window_slots,
    window_stride,
    committed,
    committed_stride,
    vectors,
    scalars,
    accept_lens,
    width,
    longest,
    vector_stride,
    batch_size,
    LANES: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    live = lane < longest
    walked = packed + request * packed_stride  # accept_index, out_tokens, accept_len, bonus
    slots = window_slots + request * window_stride
    row = tl.load(walked + lane, mask=live, other=-1)
    length = tl.load(walked + 2 * longest)
    before = tl.load(committed + request * committed_stride)
    to = vectors + request * longest + lane
    tl.store(to, tl.load(walked + longest + lane, mask=live, other=0), mask=live)
    tl.store(to + vector_stride, tl.load(slots + lane, mask=live, other=0), mask=live)
    source = tl.load(slots + tl.where(row < 0, lane, row), mask=live, other=0)
    tl.store(to + 2 * vector_stride, source, mask=live)
    tl.store(to + 3 * vector_stride, request * width + tl.maximum(row, 0), mask=live)
    tl.store(to + 4 * vector_stride, before + lane, mask=live)
    tl.store(scalars + request, tl.load(walked + 2 * longest + 1))
    tl.store(scalars + batch_size + request, before + length)
    tl.store(accept_lens + request, length.to(tl.int32))


def move_accepted_rows(pool: KVCache, destinations: torch.Tensor, sources: torch.Tensor) -> None:
    """Copy slot ``sources[b, i]`` to slot ``destinations[b, i]`` in every layer; all reads of a request come first.

    Args:
        pool: the target's KV pool.
        destinations, sources: int64 [bs, D]; equal slots are left alone, which is the rule when the path is the spine.
    """
    row_bytes = _row_bytes(pool, destinations.shape[1]) if destinations.is_cuda else None
    if row_bytes is None:
        pool.move_kv_cache(destinations.flatten(), sources.flatten())
    else:
        move_rows(pool.data_ptrs, destinations, sources, row_bytes)


def _row_bytes(pool: Any, num_rows: int) -> int | None:
    """Bytes of a row of every buffer of a pool; None where buffers differ, or `num_rows` of them do not fit a program.

    The pool's own way for keys and values has no barrier between its reads and writes.
    """
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    if type(pool) is MLATokenToKVPool:
        return _bytes_of_row(pool.kv_buffer[0])
    if type(pool) is not MHATokenToKVPool or pool.use_hnd or pool.is_quantized_kv_cache:
        return None
    keys, values = _bytes_of_row(pool.k_buffer[0]), _bytes_of_row(pool.v_buffer[0])
    return keys if keys == values and num_rows * keys <= LARGEST_PROGRAM_BYTES else None


def _bytes_of_row(buffer: torch.Tensor) -> int:
    return int(buffer.stride(0) * buffer.element_size())


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
