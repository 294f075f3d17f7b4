# SPDX-License-Identifier: Apache-2.0
"""The oracle of mla_tree_verify: masked softmax attention, one request at a time, on plain tensors."""

from __future__ import annotations

import torch

DIM_V = 512


def attention(
    q: torch.Tensor, keys: torch.Tensor, tree_mask: torch.Tensor, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """[T, H, 512] fp32 of one request, with products in `dtype`.

    q [T, H, 576]; keys [prefix + T, 576], the tree last; tree_mask [T, T] bool. Rows that see nothing are zero, and a
    key that no row sees has no influence, whatever it holds.
    """
    num_tokens, num_heads, _ = q.shape
    prefix_len = len(keys) - num_tokens
    sees = torch.ones(num_tokens, len(keys), dtype=torch.bool, device=q.device)
    sees[:, prefix_len:] = tree_mask
    keys = torch.where(sees.any(0)[:, None], keys, torch.zeros_like(keys)).to(dtype)
    result = torch.zeros(num_tokens, num_heads, DIM_V, device=q.device)
    for token in range(num_tokens):
        if not sees[token].any():
            continue
        score = (q[token].to(dtype) @ keys.T).float() * scale
        score.masked_fill_(~sees[token], float("-inf"))
        weight = torch.softmax(score, -1).to(dtype)
        result[token] = (weight @ keys[:, :DIM_V]).float()
    return result
