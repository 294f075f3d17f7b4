# SPDX-License-Identifier: Apache-2.0
"""A verify window wider than the tree: the extra rows are padding that the walk never reaches."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.speculative.ddtree_tree import TreeBuffers, build_tree
from sglang.srt.speculative.ddtree_walk import WalkBuffers, walk_tree


def test_extra_rows_change_nothing() -> None:
    generator = torch.Generator().manual_seed(5)
    log_probs = torch.randn(3, 7, 4, generator=generator).log_softmax(-1).sort(-1, descending=True).values
    token_ids = torch.stack([torch.randperm(50, generator=generator)[:4] for _ in range(21)]).view(3, 7, 4)
    roots, committed = torch.tensor([1, 2, 3]), torch.tensor([10, 0, 7])
    narrow = TreeBuffers.allocate(3, budget=3, max_depth=7, device="cpu")
    wide = TreeBuffers.allocate(3, budget=3, max_depth=7, device="cpu", width=8)
    for buffers in (narrow, wide):
        build_tree(log_probs, token_ids, roots, committed, buffers)
    for name in ("token_ids", "positions", "parents", "depths"):
        assert torch.equal(getattr(wide, name)[:, :4], getattr(narrow, name)), name
    assert torch.equal(wide.mask[:, :4, :4], narrow.mask)
    assert torch.equal(wide.mask[:, 4:], torch.eye(8, dtype=torch.bool)[4:].expand(3, -1, -1))
    assert (wide.parents[:, 4:] == -1).all() and torch.equal(wide.positions[:, 4:], committed[:, None].expand(-1, 4))

    draws = torch.zeros(3, 8, dtype=torch.int64)
    draws[:, :4] = narrow.token_ids.roll(-1, 1)
    results = []
    for buffers, given in ((narrow, draws[:, :4]), (wide, draws)):
        walk = WalkBuffers.allocate(3, max_depth=7, device="cpu")
        walk_tree(given, buffers, walk)
        results.append((walk.accept_index, walk.accept_lens, walk.out_tokens, walk.bonus))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_width_must_hold_the_tree() -> None:
    with pytest.raises(ValueError, match="width must be at least 17 for budget 16, got 16"):
        TreeBuffers.allocate(1, budget=16, max_depth=7, device="cpu", width=16)
