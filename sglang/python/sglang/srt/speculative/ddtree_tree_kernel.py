# SPDX-License-Identifier: Apache-2.0
"""The best-first tree in one launch: one program per request, one warp, a frontier of open nodes in registers.

`ddtree_tree.build_tree` says what a tree is and does the same with tensor operations, which take some 150 launches;
the two are compared bit for bit. A node on the frontier opens two others when it is taken: its first child and its
next sibling. Whatever the heap of the paper holds is therefore at most one node per row of the tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from sglang.srt.speculative.ddtree_tree import TreeBuffers

# Ancestors of a row are a mask of this many bits; the rows behind it are leaves or padding.
ANCESTOR_BITS = 64


def build_tree_on_device(
    log_probs: torch.Tensor,
    token_ids: torch.Tensor,
    root_ids: torch.Tensor,
    committed: torch.Tensor,
    buffers: TreeBuffers,
) -> None:
    """Write the tree of each request into the first `bs` entries of `buffers`.

    log_probs fp32 [bs, L, K], contiguous, descending, without NaN or values above 0; token_ids int64 [bs, L, K],
    contiguous; root_ids and committed int64 [bs], of any stride. Raises ValueError for a budget above `ANCESTOR_BITS`.
    """
    if buffers.budget > ANCESTOR_BITS:
        raise ValueError(f"draft tree: expected a budget of at most {ANCESTOR_BITS}, got {buffers.budget}")
    batch_size, depths, ranks = log_probs.shape
    _build_tree[(batch_size,)](
        log_probs, token_ids, root_ids, root_ids.stride(0), committed, committed.stride(0),
        buffers.token_ids, buffers.positions, buffers.parents, buffers.depths, buffers.num_nodes,
        buffers.scores, buffers.mask,
        depths, ranks, buffers.budget, buffers.width,
        ROWS=triton.next_power_of_2(buffers.width), FRONTIER=triton.next_power_of_2(buffers.budget),
        num_warps=1,
    )  # fmt: skip


@triton.jit
def _at(values, index, lanes):  # type: ignore[no-untyped-def]
    """One element of a vector in registers."""
    return tl.sum(tl.where(lanes == index, values, 0), 0)


@triton.jit
def _log_prob(log_probs, depth, rank, num_depths, num_ranks):  # type: ignore[no-untyped-def]
    """Of the token of this rank at this depth (1 is the first); -inf where there is none."""
    exists = (depth <= num_depths) & (rank < num_ranks)
    return tl.load(log_probs + (depth - 1) * num_ranks + rank, mask=exists, other=float("-inf"))


@triton.jit
def _build_tree(  # type: ignore[no-untyped-def]
    log_probs, token_ids, root_ids, root_stride, committed, committed_stride,
    out_tokens, out_positions, out_parents, out_depths, out_num_nodes, out_scores, out_mask,
    num_depths, num_ranks, budget, width,
    ROWS: tl.constexpr, FRONTIER: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    log_probs += request * num_depths * num_ranks
    token_ids += request * num_depths * num_ranks
    row = tl.arange(0, ROWS)
    slot = tl.arange(0, FRONTIER)

    # What is known of each row. The spine is there from the start: row d at depth d, child of row d - 1.
    spine = tl.minimum(num_depths, budget)
    on_spine = (row > 0) & (row <= spine)
    parent = tl.where(on_spine, row - 1, -1)
    depth = tl.where(on_spine, row, 0)
    rank = tl.zeros([ROWS], tl.int32)
    ancestors = tl.where(on_spine, (tl.full([ROWS], 1, tl.int64) << row.to(tl.int64)) - 1, 0)

    # The frontier: the next sibling of each spine node. `base` is the score of the parent's path.
    open_depth = slot + 1
    open_parent = slot
    open_rank = tl.full([FRONTIER], 1, tl.int32)
    is_open = slot < spine
    first = tl.load(log_probs + slot * num_ranks, mask=is_open, other=0.0)
    base = tl.zeros([FRONTIER], tl.float32)
    path = 0.0
    row_score = tl.where(row == 0, 0.0, float("-inf"))
    for level in range(spine):
        base = tl.where(slot == level, path, base)
        path += _at(first, level, slot)
        row_score = tl.where(row == level + 1, path, row_score)
    second = tl.load(log_probs + slot * num_ranks + 1, mask=is_open & (num_ranks > 1), other=float("-inf"))
    score = tl.where(is_open, base + second, float("-inf"))

    used = spine
    num_rows = spine + 1
    for _ in range(spine, budget):
        best = tl.max(score, 0)
        if best > float("-inf"):
            # Among equal scores the shallower node, then the smaller parent row, then the smaller rank.
            order = (open_depth * ROWS + open_parent) * 128 + open_rank
            order = tl.where(score == best, order, 0x7FFFFFFF)
            chosen = tl.sum(tl.where(order == tl.min(order, 0), slot, 0), 0)
            node_depth = _at(open_depth, chosen, slot)
            node_parent = _at(open_parent, chosen, slot)
            node_rank = _at(open_rank, chosen, slot)
            node_base = _at(tl.where(slot == chosen, base, 0.0), chosen, slot)

            new = row == num_rows
            parent = tl.where(new, node_parent, parent)
            depth = tl.where(new, node_depth, depth)
            rank = tl.where(new, node_rank, rank)
            row_score = tl.where(new, best, row_score)
            line = _at(ancestors, node_parent, row) | (tl.full([], 1, tl.int64) << node_parent.to(tl.int64))
            ancestors = tl.where(new, line, ancestors)

            # Its next sibling takes its place, its first child a new one.
            next_score = node_base + _log_prob(log_probs, node_depth, node_rank + 1, num_depths, num_ranks)
            child_score = best + _log_prob(log_probs, node_depth + 1, 0, num_depths, num_ranks)
            replaced = slot == chosen
            open_rank = tl.where(replaced, node_rank + 1, open_rank)
            score = tl.where(replaced, next_score, score)
            added = slot == used
            open_depth = tl.where(added, node_depth + 1, open_depth)
            open_parent = tl.where(added, num_rows, open_parent)
            open_rank = tl.where(added, 0, open_rank)
            base = tl.where(added, best, base)
            score = tl.where(added, child_score, score)
            used += 1
            num_rows += 1

    in_width = row < width
    is_node = (row > 0) & (row < num_rows)
    token = tl.load(token_ids + (depth - 1) * num_ranks + rank, mask=is_node, other=0)
    token = tl.where(row == 0, tl.load(root_ids + request * root_stride), token)
    position = tl.load(committed + request * committed_stride) + depth
    here = request * width + row
    tl.store(out_tokens + here, token, mask=in_width)
    tl.store(out_positions + here, position, mask=in_width)
    tl.store(out_parents + here, parent.to(tl.int64), mask=in_width)
    tl.store(out_depths + here, depth.to(tl.int64), mask=in_width)
    tl.store(out_scores + here, row_score, mask=in_width)
    tl.store(out_num_nodes + request, num_rows.to(tl.int64))
    tile = out_mask + request * width * width + row * width
    for column in range(width):
        # Row 64 has no bit: at a budget of 64 it is the last row, and nobody's ancestor.
        seen = ((ancestors >> tl.minimum(column, 63)) & 1) != 0
        visible = (row == column) | (seen & (column < 64))
        tl.store(tile + column, visible, mask=in_width)
