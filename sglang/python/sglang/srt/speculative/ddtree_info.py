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
    full = torch.ones(width * (max_total_prefix + batch_size * width), dtype=torch.bool, device=mask.device)
    full[_tree_columns(prefix_lens, width)] = mask.flatten()
    return full


def fill_tree_columns(mask: torch.Tensor, prefix_lens: torch.Tensor, full: torch.Tensor) -> None:
    """Write compact tree masks into a static buffer of the full layout, for a reader that skips the prefix columns.

    Args:
        mask: bool [max_bs, T, T]; entries from the batch size on belong to the padding of a captured batch.
        prefix_lens: [bs] integer, bs at most max_bs. Padding has the length 1 that SGLang captures with.
        full: uint8, flat; columns of the prefix keep what they hold.
    """
    max_bs, width, _ = mask.shape
    lens = torch.ones(max_bs, dtype=torch.int64, device=mask.device)
    lens[: prefix_lens.shape[0]] = prefix_lens
    full[_tree_columns(lens, width)] = mask.flatten().to(full.dtype)


def _tree_columns(prefix_lens: torch.Tensor, width: int) -> torch.Tensor:
    """Where the last T columns of each row lie in the full layout, int64 [bs * T * T]."""
    prefix_lens = prefix_lens.to(torch.int64)
    row_lens = prefix_lens + width
    first = torch.cumsum(row_lens * width, 0) - row_lens * width
    rows = torch.arange(width, device=prefix_lens.device)
    columns = first[:, None, None] + rows[None, :, None] * row_lens[:, None, None] + prefix_lens[:, None, None] + rows
    return columns.flatten()
