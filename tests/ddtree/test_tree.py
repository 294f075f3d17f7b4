# SPDX-License-Identifier: Apache-2.0
"""The tensor tree builder against a heap, and the properties that verification relies on."""

from __future__ import annotations

import math
from pathlib import Path

import oracle
import pytest
import torch
from ddtree_tree import (
    TreeBuffers,
    build_tree,
    draft_log_probs,
    local_top_k,
    merge_vocab_shards,
    ranks_needed,
    tree_links,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

PROPERTY = settings(max_examples=100, deadline=None, derandomize=True, database=None)

SHAPES = {
    "budget": st.integers(1, 64),
    "max_depth": st.integers(1, 15),
    "num_ranks": st.integers(1, 66),
    "kind": st.sampled_from(["smooth", "ties", "flat", "peaked", "nan", "-inf"]),
    "seed": st.integers(0, 2**20),
    "extra_rows": st.integers(0, 4),
}


def marginals(bs: int, max_depth: int, num_ranks: int, kind: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Descending log-probabilities fp32 and distinct token ids, [bs, L, K]."""
    generator = torch.Generator().manual_seed(seed)
    vocab = num_ranks + 3
    logits = torch.randn((bs, max_depth, vocab), generator=generator) * (12 if kind == "peaked" else 2)
    if kind == "flat":
        logits.zero_()
    log_probs, order = logits.log_softmax(-1).sort(-1, descending=True)
    if kind == "ties":
        log_probs = (log_probs * 2).round() / 2  # halves add up exactly, so that whole paths tie
    log_probs, order = log_probs[..., :num_ranks].clone(), order[..., :num_ranks].clone()
    if kind in ("nan", "-inf"):
        hit = torch.rand(log_probs.shape, generator=generator) < 0.1
        log_probs[hit] = float(kind)
    return log_probs, order


def build(
    log_probs: torch.Tensor, token_ids: torch.Tensor, budget: int, spare: int = 1, extra_rows: int = 0
) -> TreeBuffers:
    """Build over the left-overs of another tree, in buffers with room for `spare` more requests."""
    bs, max_depth, _ = log_probs.shape
    buffers = TreeBuffers.allocate(bs + spare, budget, max_depth, "cpu", width=budget + 1 + extra_rows)
    stale = torch.randn((bs, max_depth, 70), generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    stale, order = stale.sort(-1, descending=True)
    build_tree(stale, order, torch.full((bs,), 99), torch.full((bs,), 1000), buffers)
    build_tree(log_probs, token_ids, torch.arange(bs) + 7, torch.arange(bs) * 10 + 40, buffers)
    return buffers


@PROPERTY
@given(**SHAPES)
@example(budget=1, max_depth=1, num_ranks=1, kind="smooth", seed=0, extra_rows=0)
@example(budget=64, max_depth=1, num_ranks=3, kind="smooth", seed=0, extra_rows=0)
@example(budget=64, max_depth=15, num_ranks=66, kind="flat", seed=0, extra_rows=0)
@example(budget=7, max_depth=15, num_ranks=4, kind="nan", seed=3, extra_rows=8)
def test_tree_equals_the_heap_node_for_node(
    budget: int, max_depth: int, num_ranks: int, kind: str, seed: int, extra_rows: int
) -> None:
    log_probs, token_ids = marginals(2, max_depth, num_ranks, kind, seed)
    buffers = build(log_probs, token_ids, budget, extra_rows=extra_rows)
    for b in range(2):
        nodes = oracle.best_first(log_probs[b].numpy(), budget)
        padding = budget + 1 + extra_rows - len(nodes)
        tokens = [7 + b] + [int(token_ids[b, node.depth - 1, node.rank]) for node in nodes[1:]]
        assert buffers.num_nodes[b] == len(nodes)
        assert buffers.parents[b].tolist() == [node.parent for node in nodes] + [-1] * padding
        assert buffers.depths[b].tolist() == [node.depth for node in nodes] + [0] * padding
        assert buffers.token_ids[b].tolist() == tokens + [0] * padding
        assert buffers.positions[b].tolist() == [40 + 10 * b + node.depth for node in nodes] + [40 + 10 * b] * padding


@PROPERTY
@given(**{name: values for name, values in SHAPES.items() if name not in ("num_ranks", "extra_rows")})
@example(budget=64, max_depth=7, kind="flat", seed=0)
@example(budget=3, max_depth=7, kind="nan", seed=0)
def test_ranks_that_no_tree_needs_change_nothing(budget: int, max_depth: int, kind: str, seed: int) -> None:
    log_probs, token_ids = marginals(2, max_depth, budget + 2, kind, seed)
    needed = ranks_needed(budget, max_depth)
    buffers = build(log_probs[..., :needed], token_ids[..., :needed], budget)
    for b in range(2):
        nodes = oracle.best_first(log_probs[b].numpy(), budget)
        tokens = [7 + b] + [int(token_ids[b, node.depth - 1, node.rank]) for node in nodes[1:]]
        assert buffers.token_ids[b, : len(nodes)].tolist() == tokens
        assert buffers.parents[b].tolist() == [node.parent for node in nodes] + [-1] * (budget + 1 - len(nodes))


@pytest.mark.parametrize(("budget", "max_depth", "needed"), [(15, 7, 9), (64, 15, 50), (7, 7, 1), (5, 7, 1), (1, 1, 1)])
def test_the_last_rank_can_be_needed(budget: int, max_depth: int, needed: int) -> None:
    # Off the first depth nothing but the spine is worth anything, so that all other nodes are siblings at depth 1.
    log_probs = torch.zeros(1, max_depth, budget + 2).log_softmax(-1)
    log_probs[:, 1:] -= 50.0
    nodes = oracle.best_first(log_probs[0].numpy(), budget)
    assert max(node.rank for node in nodes[1:]) + 1 == needed == ranks_needed(budget, max_depth)


@PROPERTY
@given(**SHAPES)
def test_links_and_mask_follow_from_parents(
    budget: int, max_depth: int, num_ranks: int, kind: str, seed: int, extra_rows: int
) -> None:
    log_probs, token_ids = marginals(1, max_depth, num_ranks, kind, seed)
    buffers = build(log_probs, token_ids, budget, extra_rows=extra_rows)
    parents = buffers.parents[0].tolist()
    count = int(buffers.num_nodes[0])
    children: list[list[int]] = [[] for _ in parents]
    for row in range(1, count):
        assert 0 <= parents[row] < row, "parents come before children"
        children[parents[row]].append(row)
    next_child, next_sibling = (links[0].tolist() for links in tree_links(buffers.parents))
    for row in range(len(parents)):
        linked, child = [], next_child[row]
        while child >= 0:
            linked.append(child)
            child = next_sibling[child]
        assert linked == children[row]

        seen, ancestor = {row}, parents[row]
        while ancestor >= 0:
            seen.add(ancestor)
            ancestor = parents[ancestor]
        assert set(buffers.mask[0, row].nonzero().flatten().tolist()) == seen
    assert next_sibling[0] == -1


@pytest.mark.parametrize("budget", [1, 3, 7, 16, 64])
def test_spine_is_seeded_first(budget: int) -> None:
    # The second rank at depth 1 outscores every longer path, so that a pure best-first tree would be all siblings.
    log_probs = torch.tensor([-0.7, -0.8, -0.9, -1.0]).log_softmax(-1).repeat(1, 7, 1)
    log_probs[:, 1:] -= 50.0
    buffers = build(log_probs, torch.arange(4).repeat(1, 7, 1), budget)
    spine = min(7, budget)
    assert buffers.parents[0, 1 : spine + 1].tolist() == list(range(spine))
    assert buffers.token_ids[0, 1 : spine + 1].tolist() == [0] * spine


def test_entries_beyond_the_batch_keep_their_content() -> None:
    log_probs, token_ids = marginals(2, 7, 16, "smooth", 5)
    buffers = build(log_probs, token_ids, 16, spare=3)
    fresh = TreeBuffers.allocate(5, 16, 7, "cpu")
    for name in ("token_ids", "positions", "parents", "depths", "num_nodes", "mask"):
        assert torch.equal(getattr(buffers, name)[2:], getattr(fresh, name)[2:]), name
    assert torch.equal(fresh.mask, torch.eye(17, dtype=torch.bool).expand(5, -1, -1))


def test_all_garbage_gives_a_spine_with_tokens_in_range() -> None:
    log_probs = torch.full((1, 7, 8), math.nan)
    buffers = build(log_probs, torch.arange(8).repeat(1, 7, 1), 16)
    assert buffers.num_nodes[0] == 8
    assert buffers.parents[0].tolist() == [-1, *range(7)] + [-1] * 9
    assert int(buffers.token_ids.min()) >= 0


def test_build_needs_no_values_on_the_host() -> None:
    # Tensors on the meta device have shapes and no values: a host read or a shape that depends on data raises.
    buffers = TreeBuffers.allocate(4, 16, 7, "meta")
    logits = torch.empty((2, 7, 100), device="meta")
    log_probs, token_ids = draft_log_probs(logits, 16, vocab_size=90)
    one_each = torch.empty(2, dtype=torch.int64, device="meta")
    build_tree(log_probs, token_ids, one_each, one_each, buffers)
    with pytest.raises((RuntimeError, NotImplementedError)):
        buffers.num_nodes[0].item()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_probs": torch.zeros(2, 6, 4)}, r"log_probs must be \[bs, 7, K >= 1\], got \[2, 6, 4\]"),
        ({"log_probs": torch.zeros(5, 7, 4)}, "at most 4 requests fit the buffers, got 5"),
        ({"token_ids": torch.zeros(2, 7, 3)}, r"token_ids must be \[2, 7, 4\], got \[2, 7, 3\]"),
        ({"root_ids": torch.zeros(3)}, r"root_ids must be \[2\], got \[3\]"),
        ({"committed": torch.zeros(1)}, r"committed must be \[2\], got \[1\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    inputs = {
        "log_probs": torch.zeros(2, 7, 4),
        "token_ids": torch.zeros(2, 7, 4, dtype=torch.int64),
        "root_ids": torch.zeros(2, dtype=torch.int64),
        "committed": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        build_tree(**(inputs | change), buffers=TreeBuffers.allocate(4, 16, 7, "cpu"))


def test_buffers_of_no_size_are_refused() -> None:
    with pytest.raises(ValueError, match="budget must be at least 1, got 0"):
        TreeBuffers.allocate(4, 0, 7, "cpu")
    with pytest.raises(ValueError, match="width must be at least 17 for budget 16, got 16"):
        TreeBuffers.allocate(4, 16, 7, "cpu", width=16)


def reference_top_k(logits: torch.Tensor, k: int) -> tuple[list[int], list[float]]:
    """Ids by logit descending then id, and log-probabilities in float64, of one row."""
    row = [float(value) for value in logits]
    total = max(row) + math.log(sum(math.exp(value - max(row)) for value in row))
    ids = sorted(range(len(row)), key=lambda token: (-row[token], token))[:k]
    return ids, [row[token] - total for token in ids]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 5, 16])
def test_draft_log_probs_are_global_and_skip_padding(dtype: torch.dtype, k: int) -> None:
    # Distinct multiples of 1/4, exact in both types.
    order = torch.rand((2, 3, 30), generator=torch.Generator().manual_seed(0)).argsort(-1)
    logits = torch.full((2, 3, 40), 100.0)  # padded columns hold the largest values
    logits[..., :30] = order / 4 - 3
    log_probs, token_ids = draft_log_probs(logits.to(dtype), k, vocab_size=30)
    assert log_probs.dtype == torch.float32 and token_ids.dtype == torch.int64
    for b in range(2):
        for depth in range(3):
            ids, expected = reference_top_k(logits[b, depth, :30], k)
            assert token_ids[b, depth].tolist() == ids
            torch.testing.assert_close(log_probs[b, depth], torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_equal_logits_come_in_the_order_of_argmax() -> None:
    logits = torch.zeros(1, 2, 50)
    logits[0, 1, [9, 31, 44]] = 2.0
    _, token_ids = draft_log_probs(logits, 3)
    assert token_ids[0, 1].tolist() == [9, 31, 44]
    assert token_ids[0, 1, 0] == logits[0, 1].argmax()


def test_more_ranks_than_tokens_stay_out_of_the_tree() -> None:
    log_probs, token_ids = draft_log_probs(torch.randn(1, 1, 8), 16, vocab_size=5)
    assert log_probs.shape == (1, 1, 16)
    assert sorted(token_ids[0, 0, :5].tolist()) == [0, 1, 2, 3, 4]
    buffers = build(log_probs, token_ids, 16)
    assert buffers.num_nodes[0] == 6
    assert sorted(buffers.token_ids[0, 1:6].tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("sizes", [(20, 20), (30, 10), (38, 2), (40, 0), (3, 4, 33)])
@pytest.mark.parametrize("k", [1, 4, 16])
def test_merged_vocabulary_shards_equal_the_whole(sizes: tuple[int, ...], k: int) -> None:
    logits = (torch.randn((2, 3, 40), generator=torch.Generator().manual_seed(4)) * 4).round() / 2
    parts, first = [], 0
    for size in sizes:
        shard = torch.full((2, 3, 41), 1000.0)  # every rank's shard has the same width; the rest is padding
        shard[..., :size] = logits[..., first : first + size]
        parts.append(local_top_k(shard, k, first_id=first, num_valid=size))
        first += size
    log_probs, token_ids = merge_vocab_shards(*(torch.stack(items) for items in zip(*parts, strict=True)))
    for b in range(2):
        for depth in range(3):
            ids, expected = reference_top_k(logits[b, depth], k)
            values = logits[b, depth]
            assert values[token_ids[b, depth]].tolist() == values[ids].tolist()
            assert len(set(token_ids[b, depth].tolist())) == k
            torch.testing.assert_close(log_probs[b, depth], torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_bad_top_k_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="num_valid 0 to 8, got k = 4, num_valid = 9"):
        local_top_k(torch.zeros(2, 8), 4, first_id=0, num_valid=9)


@pytest.mark.parametrize("budget, size", [(15, "840"), (64, "6,573")])
def test_design_note_has_the_bytes_of_a_tree(budget: int, size: str) -> None:
    def total(requests: int) -> int:
        tensors = vars(TreeBuffers.allocate(requests, budget, 7, "cpu")).values()
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))

    assert f"{total(3) - total(2):,}" == size  # what all trees share is left out
    assert f"{size} bytes" in (Path(__file__).parents[2] / "sglang" / "DDTREE.md").read_text()
