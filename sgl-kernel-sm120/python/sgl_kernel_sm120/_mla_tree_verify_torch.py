# SPDX-License-Identifier: Apache-2.0
"""mla_tree_verify in plain PyTorch: the contract in readable form, and the implementation without a GPU."""

from __future__ import annotations

import itertools

import torch

_KEYS_PER_CHUNK = 8192


def mla_tree_verify_torch(
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    qo_indptr: torch.Tensor,
    out_cache_loc: torch.Tensor,
    custom_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    out: torch.Tensor,
    *,
    scale: float,
    mask_is_full: bool = True,
) -> None:
    """Same arguments and result as mla_tree_verify, without a workspace; fp32 throughout, one rounding at the end.

    Reads lengths on the host, so it cannot be captured in a CUDA graph. For the same reason it can check what the kernel
    must trust. Errors: ValueError for offsets, rows or slots that lie outside what they index.
    """
    pool = kv_pool.view(kv_pool.shape[0], kv_pool.shape[-1])
    prefix_ends = kv_indptr.tolist()
    first_rows = qo_indptr.tolist()
    num_requests = len(prefix_ends) - 1
    num_tokens = q.shape[0] // num_requests
    _check_offsets(prefix_ends, first_rows, len(kv_indices), q.shape[0] - num_tokens)
    _check_slots("kv_indices", kv_indices[prefix_ends[0] : prefix_ends[-1]], len(pool))
    _check_slots("out_cache_loc", out_cache_loc, len(pool))
    if custom_mask is not None and mask_indptr is not None:
        widths = [(end - begin if mask_is_full else 0) + num_tokens for begin, end in itertools.pairwise(prefix_ends)]
        _check_mask_offsets(mask_indptr.tolist(), [num_tokens * width for width in widths], custom_mask.numel())
    for request in range(num_requests):
        rows = slice(first_rows[request], first_rows[request] + num_tokens)
        prefix = kv_indices[prefix_ends[request] : prefix_ends[request + 1]]
        visible = _tree_mask(custom_mask, mask_indptr, request, len(prefix), num_tokens, mask_is_full, q.device)
        slots = torch.cat([prefix, out_cache_loc[rows]])
        out[rows] = _attend(q[rows], pool, slots, visible, out.shape[-1], scale).to(out.dtype)


def _check_offsets(prefix_ends: list[int], first_rows: list[int], num_entries: int, last_row: int) -> None:
    if prefix_ends[0] < 0 or prefix_ends != sorted(prefix_ends) or prefix_ends[-1] > num_entries:
        expected = f"offsets that do not fall, within the {num_entries} entries of kv_indices"
        raise ValueError(f"kv_indptr: expected {expected}, got {_some(prefix_ends)}; take the sums of the prefixes")
    starts = first_rows[:-1]
    if min(starts) < 0 or max(starts) > last_row:
        raise ValueError(f"qo_indptr: expected rows from 0 to {last_row}, got {_some(starts)}; count in rows of q")


def _check_slots(name: str, slots: torch.Tensor, num_slots: int) -> None:
    outside = slots[(slots < 0) | (slots >= num_slots)]
    if len(outside):
        raise ValueError(
            f"{name}: expected slots from 0 to {num_slots - 1}, got {_some(outside.tolist())}; pass slots of kv_pool"
        )


def _check_mask_offsets(begins: list[int], sizes: list[int], num_bytes: int) -> None:
    for begin, size in zip(begins, sizes, strict=False):  # the last offset is the end
        if begin < 0 or begin + size > num_bytes:
            raise ValueError(
                f"mask_indptr: expected {size} bytes of custom_mask from each offset, got {num_bytes - begin} bytes "
                f"from {begin}; see mask_is_full"
            )


def _some(numbers: list[int]) -> str:
    return f"{numbers[:4]}{' and more' if len(numbers) > 4 else ''}"


def _tree_mask(
    custom_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    request: int,
    prefix_len: int,
    num_tokens: int,
    mask_is_full: bool,
    device: torch.device,
) -> torch.Tensor:
    """[T, T] bool of one request: the last T columns of its mask rows."""
    if custom_mask is None or mask_indptr is None:
        return torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()
    width = prefix_len + num_tokens if mask_is_full else num_tokens
    begin = int(mask_indptr[request])
    rows = custom_mask[begin : begin + num_tokens * width].view(num_tokens, width)
    return rows[:, -num_tokens:] != 0


def _attend(
    q: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, visible: torch.Tensor, dim_v: int, scale: float
) -> torch.Tensor:
    """[T, H, dim_v] fp32; the keys are taken in chunks with a running maximum, so that memory stays bounded."""
    num_tokens, num_heads, _ = q.shape
    prefix_len = len(slots) - num_tokens
    query = q.float().flatten(0, 1) * scale
    top = query.new_full((len(query), 1), float("-inf"))
    total = torch.zeros_like(top)
    result = query.new_zeros(len(query), dim_v)
    for begin in range(0, len(slots), _KEYS_PER_CHUNK):
        chunk = slots[begin : begin + _KEYS_PER_CHUNK]
        key = pool[chunk].float()
        columns = torch.arange(begin, begin + len(chunk), device=q.device) - prefix_len
        sees = (columns < 0) | visible[:, columns.clamp(min=0)]
        hidden = ~sees.repeat_interleave(num_heads, 0)
        value = key[:, :dim_v].masked_fill(~sees.any(0)[:, None], 0.0)
        score = (query @ key.T).masked_fill(hidden, float("-inf"))
        new_top = torch.maximum(top, score.amax(1, keepdim=True))
        reference = new_top.masked_fill(new_top == float("-inf"), 0.0)
        weight = torch.exp(score - reference)
        factor = torch.exp(top - reference)
        total = total * factor + weight.sum(1, keepdim=True)
        result = result * factor + weight @ value
        top = new_top
    result = torch.where(total == 0, torch.zeros_like(result), result / total)
    return result.view(num_tokens, num_heads, dim_v)
