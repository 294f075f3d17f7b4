# SPDX-License-Identifier: Apache-2.0
"""The input of a DDTREE verify pass: DFLASH's, with a tree mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.eagle_utils import TreeMaskMode


@dataclass
class DDTreeVerifyInput(DFlashVerifyInput):
    """One verify pass over trees of `draft_token_num` rows.

    ``custom_mask`` is flat: per request a [T, T] tile under `QLEN_ONLY`, a [T, prefix + T] tile under `FULL_MASK`.
    """

    tree_mask_mode: TreeMaskMode = TreeMaskMode.QLEN_ONLY


def expand_tree_mask(mask: torch.Tensor, prefix_lens: torch.Tensor, max_total_prefix: int) -> torch.Tensor:
    """Prepend the prefix, which every row sees, to compact tree masks.

    Args:
        mask: bool [bs, T, T].
        prefix_lens: [bs] integer, on the device; only the device knows them while steps overlap.
        max_total_prefix: an upper bound of their sum, known to the host, which sizes the result.

    Returns:
        bool [T * (max_total_prefix + bs * T)]: request b's rows of ``prefix_lens[b] + T`` columns, one after another;
        the slack at the end is True.
    """
    batch_size, width, _ = mask.shape
    prefix_lens = prefix_lens.to(torch.int64)
    row_lens = prefix_lens + width
    first = torch.cumsum(row_lens * width, 0) - row_lens * width
    rows = torch.arange(width, device=mask.device)
    columns = first[:, None, None] + rows[None, :, None] * row_lens[:, None, None] + prefix_lens[:, None, None] + rows
    full = torch.ones(width * (max_total_prefix + batch_size * width), dtype=torch.bool, device=mask.device)
    full[columns.flatten()] = mask.flatten()
    return full
