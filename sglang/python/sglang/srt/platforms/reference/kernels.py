# SPDX-License-Identifier: Apache-2.0
"""Torch bodies for the small device kernels of SGLang.

Each takes, under their names, those arguments of the function it stands in for that it needs.
"""

from typing import Any

import torch
import xgrammar
from torch import Tensor


def _ragged(lens: Tensor) -> tuple[Tensor, Tensor]:
    """For runs of the given lengths: which run each element belongs to, and its place within the run ([sum] int64)."""
    lens = lens.to(torch.int64)
    run = torch.repeat_interleave(torch.arange(len(lens)), lens)
    return run, torch.arange(len(run)) - (lens.cumsum(0) - lens)[run]


def gather_extend_slots(
    req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, draft_token_num: int
) -> Tensor:
    """Slots of table columns ``start .. start + draft_token_num`` per request: [bs * draft_token_num] int64."""
    columns = start_offset.to(torch.int64)[:, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices[:, None], columns].flatten().to(torch.int64)


def write_slots(
    req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor, out_cache_loc: Tensor
) -> None:
    """Store ``out_cache_loc``, request by request, into table columns ``start .. end``."""
    request, step = _ragged(end_offset - start_offset)
    columns = start_offset.to(torch.int64)[request] + step
    req_to_token[req_pool_indices.to(torch.int64)[request], columns] = out_cache_loc[: len(step)].to(req_to_token.dtype)


def write_request_slots(
    req_to_token_pool: Any,
    req_pool_indices_cpu: Tensor,
    prefix_lens_cpu: Tensor,
    prefix_tensors: list[Tensor],
    seq_lens_cpu: Tensor,
    out_cache_loc: Tensor,
) -> None:
    """Store the slots of a prefill: the cached prefix of each request, then its new tokens."""
    table = req_to_token_pool.req_to_token
    rows = zip(req_pool_indices_cpu.tolist(), prefix_lens_cpu.tolist(), prefix_tensors, strict=True)
    for row, prefix_len, prefix in rows:
        table[row, :prefix_len] = prefix[:prefix_len].to(table.dtype)
    write_slots(req_pool_indices_cpu, table, prefix_lens_cpu, seq_lens_cpu, out_cache_loc)


def last_prefix_slot(req_to_token: Tensor, req_pool_indices_tensor: Tensor, prefix_lens_tensor: Tensor) -> Tensor:
    """Slot of the last prefix token per request, -1 where there is no prefix; dtype of ``prefix_lens_tensor``."""
    last = req_to_token[req_pool_indices_tensor, (prefix_lens_tensor - 1).clamp(min=0)].to(prefix_lens_tensor.dtype)
    return last.masked_fill(prefix_lens_tensor <= 0, -1)


def extend_positions(
    extend_prefix_lens: Tensor, extend_seq_lens: Tensor, extend_seq_lens_sum: int
) -> tuple[Tensor, Tensor]:
    """Positions of all new tokens ([sum] int64) and the first row of each request ([bs] int32)."""
    request, positions = _ragged(extend_seq_lens)
    if len(positions) != extend_seq_lens_sum:
        raise ValueError(f"extend positions: {extend_seq_lens_sum} tokens expected, got lengths for {len(positions)}")
    if len(extend_prefix_lens) == len(extend_seq_lens):
        positions = positions + extend_prefix_lens.to(torch.int64)[request]
    return positions, (extend_seq_lens.cumsum(0) - extend_seq_lens).to(torch.int32)


def allocate_bitmask(vocab_size: int, batch_size: int) -> Tensor:
    """An all-ones token bitmask in pageable memory: [batch_size, ceil(vocab_size / 32)] int32."""
    return xgrammar.allocate_token_bitmask(batch_size, vocab_size)


def apply_bitmask(logits: Tensor, vocab_mask: Tensor) -> None:
    """Set the logits ([rows, vocab], in place) of tokens whose bit is 0 to -inf."""
    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)
