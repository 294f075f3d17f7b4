# SPDX-License-Identifier: Apache-2.0
"""The full layout of a tree mask, as SGLang's Triton backend reads it: ragged, one request after another."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.speculative.ddtree_info import expand_tree_mask, fill_tree_columns


def masks(batch_size: int, width: int) -> torch.Tensor:
    drawn = torch.rand(batch_size, width, width, generator=torch.Generator().manual_seed(width)) < 0.4
    return drawn.tril() | torch.eye(width, dtype=torch.bool)


@pytest.mark.parametrize("prefix_lens", [[0], [5], [7, 0, 300, 1], [16, 16]])
@pytest.mark.parametrize("width", [2, 17])
@pytest.mark.parametrize("slack", [0, 40])
def test_rows_are_prefix_then_tree(prefix_lens: list[int], width: int, slack: int) -> None:
    compact = masks(len(prefix_lens), width)
    full = expand_tree_mask(compact, torch.tensor(prefix_lens, dtype=torch.int64), sum(prefix_lens) + slack)
    expected = []
    for mask, prefix_len in zip(compact, prefix_lens, strict=True):
        expected += [torch.cat([torch.ones(prefix_len, dtype=torch.bool), row]) for row in mask]
    flat = torch.cat(expected)
    assert torch.equal(full[: len(flat)], flat)
    assert full.numel() == len(flat) + slack * width and full[len(flat) :].all()


def test_lengths_stay_on_the_device() -> None:
    """The host's lengths lag while steps overlap, so nothing may depend on their values."""
    full = expand_tree_mask(
        torch.empty(3, 9, 9, dtype=torch.bool, device="meta"), torch.empty(3, dtype=torch.int32, device="meta"), 100
    )
    assert full.shape == (9 * (100 + 27),)


@pytest.mark.parametrize("prefix_lens", [[5], [7, 2, 300]])
@pytest.mark.parametrize("padding", [0, 2])
def test_filled_columns_are_those_of_the_tree(prefix_lens: list[int], padding: int) -> None:
    """A captured batch may have requests of padding behind the live ones: length 1, their own masks in place."""
    width, lens = 9, prefix_lens + [1] * padding
    compact = masks(len(lens), width)
    buffer = torch.full((width * (sum(lens) + len(lens) * width) + 50,), 7, dtype=torch.uint8)
    fill_tree_columns(compact, torch.tensor(prefix_lens, dtype=torch.int32), buffer)
    start = 0
    for mask, length in zip(compact, lens, strict=True):
        tile = buffer[start : start + width * (length + width)].view(width, length + width)
        assert (tile[:, :length] == 7).all() and torch.equal(tile[:, length:].bool(), mask)
        start += tile.numel()
    assert (buffer[start:] == 7).all()
