# SPDX-License-Identifier: Apache-2.0
"""Attention in plain torch behind the Triton backend's name.

A batch is cut into groups of requests with the same number of new rows and prefixes of similar length. Per group and
layer the keys are gathered once into ``[requests, prefix + rows, kv_heads, head_dim]`` and two batched matrix products
do the rest. Slots, masks and row numbers do not depend on the layer and are made once per forward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention as Layer
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch as Batch
    from sglang.srt.model_executor.model_runner import ModelRunner

# Prefixes up to this many tokens share a group; longer ones share one with prefixes of the same power of two.
SHORT_PREFIX = 64
# Query rows are processed in blocks, so that one score matrix holds at most this many float32 elements.
MAX_SCORE_ELEMENTS = 1 << 24


@dataclass
class Group:
    """Requests that attend together: ``n`` requests, ``T`` new rows each, prefixes padded to ``P`` tokens."""

    rows: Tensor  # [n, T] int64: row numbers of the new tokens in the batch
    prefix_slots: Tensor  # [n, P] int64: pool slots of the prefix, padded with slot 0, which is always finite
    prefix_lens: Tensor  # [n] int64
    tree: Tensor | None = None  # [n, T, P + T] bool: what each row may see, instead of the causal rule
    biases: dict[tuple[bool, int], Tensor | None] = field(default_factory=dict)

    def bias(self, causal: bool, window: int) -> Tensor | None:
        """Additive float32 mask [n, T, P + T] (0 or -inf); None when every row sees every column."""
        key = (causal, window)
        if key not in self.biases:
            self.biases[key] = self._make_bias(causal, window)
        return self.biases[key]

    def _make_bias(self, causal: bool, window: int) -> Tensor | None:
        (_, num_rows), width = self.rows.shape, self.prefix_slots.shape[1]
        if self.tree is not None:
            if window >= 0:
                raise ValueError("reference attention: a tree mask expects full attention, got a sliding window layer")
            visible = self.tree
        else:
            column, offset = torch.arange(width), torch.arange(num_rows)
            prefix = self.prefix_lens[:, None, None]
            # Positions: a prefix column is its own position, a new row sits after its request's prefix.
            key_position = torch.cat([column.expand(len(prefix), -1), self.prefix_lens[:, None] + offset], dim=1)[
                :, None
            ]
            query_position = prefix + offset[:, None]
            is_live = torch.cat([column < prefix, torch.ones_like(prefix, dtype=torch.bool).expand(-1, 1, num_rows)], 2)
            visible = is_live.expand(-1, num_rows, -1)
            if causal:
                visible = visible & (key_position <= query_position)
            if window >= 0:
                visible = visible & (query_position - key_position <= window)
        if bool(visible.all()):
            return None
        return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))


def make_groups(req_to_token: Tensor, request_rows: Tensor, prefix_lens: list[int], new_lens: list[int]) -> list[Group]:
    """Cut a batch into groups.

    Args:
        req_to_token: [requests, tokens] int32 table of pool slots.
        request_rows: [bs] row of each request in that table.
        prefix_lens: [bs] tokens already in the pool, without the new rows.
        new_lens: [bs] new rows; the batch holds them request by request.
    """
    members: dict[tuple[int, int], list[int]] = {}
    for request, (prefix_len, new_len) in enumerate(zip(prefix_lens, new_lens, strict=True)):
        if new_len:
            members.setdefault((new_len, max(prefix_len, SHORT_PREFIX).bit_length()), []).append(request)
    ends = torch.tensor(new_lens, dtype=torch.int64).cumsum(0)
    groups = []
    for (new_len, _), requests in members.items():
        index = torch.tensor(requests)
        lens = torch.tensor([prefix_lens[request] for request in requests])
        width = int(lens.max())
        slots = req_to_token[request_rows[index], :width].to(torch.int64)
        slots.masked_fill_(torch.arange(width) >= lens[:, None], 0)
        rows = (ends[index] - new_len)[:, None] + torch.arange(new_len)
        groups.append(Group(rows, slots, lens))
    return groups


def attach_tree_mask(
    groups: list[Group], mask: Tensor, prefix_lens: list[int], num_rows: int, full_layout: bool
) -> None:
    """Give every group its part of a flat tree mask.

    Full layout: per request ``T`` rows of ``prefix + T`` columns, one request after the other. Compact layout:
    ``T x T`` per request, and the whole prefix is visible. Raises ValueError when the number of elements does not fit.
    """
    row_sizes = [num_rows * ((prefix if full_layout else 0) + num_rows) for prefix in prefix_lens]
    if mask.numel() != sum(row_sizes):
        layout = "full (prefix + T columns)" if full_layout else "compact (T columns)"
        raise ValueError(
            f"tree mask: {sum(row_sizes)} elements expected for the {layout} layout of {len(prefix_lens)} requests with "
            f"T={num_rows}, got {mask.numel()}; set tree_mask_mode to the layout of custom_mask"
        )
    tiles = mask.reshape(-1).to(torch.bool).split(row_sizes)
    for group in groups:
        width = group.prefix_slots.shape[1]
        group.tree = torch.zeros(len(group.rows), num_rows, width + num_rows, dtype=torch.bool)
        requests = (group.rows[:, 0] // num_rows).tolist()
        for tree, request, prefix in zip(group.tree, requests, group.prefix_lens.tolist(), strict=True):
            tile = tiles[request].view(num_rows, -1)
            tree[:, :prefix] = tile[:, :-num_rows] if full_layout else True
            tree[:, width:] = tile[:, -num_rows:]


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scaling: float, logit_cap: float = 0.0
) -> Tensor:
    """Softmax attention of one group in float32.

    Args:
        query: [n, T, heads, head_dim].
        key: [n, S, kv_heads, head_dim]; ``heads`` is a multiple of ``kv_heads``.
        value: [n, S, kv_heads, value_dim].
        bias: [n, T, S] float32 added to the scores, or None.
        scaling: factor on the scores.
        logit_cap: scores are bounded to +-cap by tanh when positive.

    Returns:
        [n, T, heads, value_dim] float32.
    """
    num_requests, num_rows, num_heads, head_dim = query.shape
    num_keys, num_kv_heads = key.shape[1:3]
    # [n, kv_heads, S, dim]: the query heads that share a KV head become rows of the same matrix product.
    key, value = key.transpose(1, 2).float(), value.transpose(1, 2).float()
    out = torch.empty(num_requests, num_rows, num_heads, value.shape[-1])
    block = max(1, MAX_SCORE_ELEMENTS // (num_requests * num_heads * num_keys))
    for start in range(0, num_rows, block):
        part = query[:, start : start + block].float() * scaling
        rows = part.shape[1]
        part = part.view(num_requests, rows, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        scores = part.reshape(num_requests, num_kv_heads, -1, head_dim) @ key.transpose(2, 3)
        if logit_cap > 0:
            scores = torch.tanh(scores / logit_cap) * logit_cap
        if bias is not None:
            scores.view(num_requests, -1, rows, num_keys).add_(bias[:, None, start : start + block])
        result = torch.softmax(scores, dim=-1) @ value
        result = result.view(num_requests, num_heads, rows, -1).transpose(1, 2)
        out[:, start : start + block] = result
    return out


class ReferenceAttnBackend(AttentionBackend):
    """Plain, chunked and speculative attention over MLA and MHA pools; reads lengths from device tensors only."""

    needs_cpu_seq_lens = False
    accepts_compact_tree_mask = True

    def __init__(self, model_runner: "ModelRunner"):
        super().__init__()
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.groups: list[Group] = []

    def init_forward_metadata(self, forward_batch: "Batch") -> None:
        """Group the requests of a batch; called once before its layers run."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.groups = []
            return
        lens = forward_batch.seq_lens.tolist()
        if mode.is_decode():
            prefix_lens, new_lens = [length - 1 for length in lens], [1] * len(lens)
        elif mode.is_target_verify():
            prefix_lens, new_lens = lens, [_verify_width(forward_batch)] * len(lens)
        elif mode.is_extend():
            prefix_lens = forward_batch.extend_prefix_lens.tolist()
            new_lens = forward_batch.extend_seq_lens.tolist()
        else:
            raise ValueError(f"reference attention: decode, extend or target-verify expected, got {mode.name}")
        self.groups = make_groups(self.req_to_token, forward_batch.req_pool_indices, prefix_lens, new_lens)
        if mode.is_target_verify():
            self._attach_tree(forward_batch.spec_info, prefix_lens, new_lens[0] if new_lens else 0)

    def _attach_tree(self, spec_info: Any, prefix_lens: list[int], num_rows: int) -> None:
        mask = getattr(spec_info, "custom_mask", None)
        if mask is None:
            return
        mode = getattr(spec_info, "tree_mask_mode", None)
        layout = "FULL_MASK" if mode is None else mode.name
        if layout not in ("FULL_MASK", "QLEN_ONLY"):
            raise ValueError(f"tree mask: layout FULL_MASK or QLEN_ONLY expected, got {layout}")
        attach_tree_mask(self.groups, mask, prefix_lens, num_rows, full_layout=layout == "FULL_MASK")

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: "Layer",
        forward_batch: "Batch",
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Write the new rows to the pool and return the attention output [tokens, heads * value_dim]."""
        _refuse_unknown(layer, kwargs)
        out_cache_loc = forward_batch.out_cache_loc
        new_kv: tuple[Tensor, Tensor] | None = None
        if k is not None and v is not None:
            if save_kv_cache:
                self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(out_cache_loc), k, v)
            else:
                new_kv = k, v
        causal = layer.attn_type != AttentionType.ENCODER_ONLY and not layer.is_cross_attention
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_zeros(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        for group in self.groups:
            key, value = self._gather(group, layer, out_cache_loc, new_kv)
            bias = group.bias(causal, layer.sliding_window_size)
            result = attend(query[group.rows], key, value, bias, layer.scaling, layer.logit_cap)
            out[group.rows.flatten()] = result.flatten(0, 1).to(out.dtype)
        return out.flatten(1)

    # A decode step is the case of one new row per request.
    forward_decode = forward_extend

    def _gather(
        self,
        group: Group,
        layer: "Layer",
        out_cache_loc: Tensor,
        new_kv: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of a group, [n, P + T, kv_heads, dim]; new rows that are not in the pool come as arguments."""
        slots = group.prefix_slots
        if new_kv is None:
            return self._read_pool(torch.cat([slots, out_cache_loc[group.rows]], dim=1), layer)
        key, value = (tensor[group.rows] for tensor in new_kv)
        if slots.shape[1]:
            prefix_key, prefix_value = self._read_pool(slots, layer)
            key, value = torch.cat([prefix_key, key], dim=1), torch.cat([prefix_value, value], dim=1)
        return key, value

    def _read_pool(self, slots: Tensor, layer: "Layer") -> tuple[Tensor, Tensor]:
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        key = keys.index_select(0, slots.flatten()).unflatten(0, slots.shape)
        if values.data_ptr() == keys.data_ptr():
            # MLA: the value of a latent row is its first part, and one gather serves both.
            return key, key[..., : layer.v_head_dim]
        return key, values.index_select(0, slots.flatten()).unflatten(0, slots.shape)


def _verify_width(forward_batch: "Batch") -> int:
    width = getattr(forward_batch.spec_info, "draft_token_num", None)
    if width is None:
        raise ValueError("reference attention: target-verify expects spec_info.draft_token_num, got none")
    return int(width)


def _refuse_unknown(layer: "Layer", kwargs: dict[str, Any]) -> None:
    given = sorted(name for name, value in kwargs.items() if value is not None)
    if given:
        raise ValueError(f"reference attention: no extra arguments expected, got {', '.join(given)}; serve on a GPU")
    if layer.k_scale is not None or layer.xai_temperature_len > 0:
        raise ValueError("reference attention: a layer without KV scales or temperature expected; serve on a GPU")


def register() -> None:
    """Put this backend behind the name ``triton`` in SGLang's registry."""
    factory: Callable[[Any], AttentionBackend] = ReferenceAttnBackend
    register_attention_backend("triton")(factory)
