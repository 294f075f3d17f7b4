# SPDX-License-Identifier: Apache-2.0
"""The walk against plain Python: known draws, draws step by step, slots of the commit."""

from __future__ import annotations

import oracle
import pytest
import torch
from ddtree_tree import TreeBuffers, build_tree
from ddtree_walk import TOP_K_ALL, SamplingRows, WalkBuffers, accepted_slots, draw_tokens, walk_logits, walk_tree
from hypothesis import example, given, settings
from hypothesis import strategies as st

PROPERTY = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def random_tree(bs: int, budget: int, max_depth: int, vocab: int, seed: int, extra_rows: int = 0) -> TreeBuffers:
    """Trees over a vocabulary so small that siblings may share a token; every second one is short of nodes."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = torch.randn((bs, max_depth, 8), generator=generator).log_softmax(-1).sort(-1, descending=True).values
    log_probs[1::2, :, 2:] = -torch.inf
    token_ids = torch.randint(0, vocab, log_probs.shape, generator=generator)
    buffers = TreeBuffers.allocate(bs, budget, max_depth, "cpu", width=budget + 1 + extra_rows)
    build_tree(log_probs, token_ids, torch.zeros(bs, dtype=torch.int64), torch.full((bs,), 30), buffers)
    return buffers


def poisoned(bs: int, max_depth: int) -> WalkBuffers:
    out = WalkBuffers.allocate(bs, max_depth, "cpu")
    for tensor in (out.accept_index, out.accept_lens, out.out_tokens, out.bonus):
        tensor.fill_(-99)
    return out


def greedy_rows(bs: int) -> SamplingRows:
    return SamplingRows(
        temperatures=torch.ones(bs, 1),
        top_ks=torch.ones(bs, dtype=torch.int32),
        top_ps=torch.ones(bs),
        min_ps=torch.zeros(bs),
        seeds=None,
        all_greedy=True,
        any_greedy=True,
        need_top_k=True,
        need_top_p=False,
        need_min_p=False,
    )


def assert_walked(out: WalkBuffers, tree: TreeBuffers, draws: torch.Tensor) -> int:
    """Compare with the walk in Python; returns the longest run."""
    longest = 0
    for b, row_draws in enumerate(draws.tolist()):
        rows, tokens = oracle.walk(tree.parents[b].tolist(), tree.token_ids[b].tolist(), row_draws)
        padding = out.accept_index.shape[1] - len(rows)
        assert out.accept_index[b].tolist() == rows + [-1] * padding
        assert out.out_tokens[b].tolist() == tokens + [0] * padding
        assert int(out.accept_lens[b]) == len(rows)
        assert int(out.bonus[b]) == tokens[-1]
        longest = max(longest, len(rows))
    return longest


@PROPERTY
@given(budget=st.integers(1, 40), max_depth=st.integers(1, 10), vocab=st.integers(1, 5), seed=st.integers(0, 2**20))
@example(budget=10, max_depth=10, vocab=1, seed=0)  # everything is accepted down to the deepest level
@example(budget=3, max_depth=7, vocab=1, seed=0)  # fewer rows than positions of a run
def test_walk_equals_python(budget: int, max_depth: int, vocab: int, seed: int) -> None:
    tree = random_tree(3, budget, max_depth, vocab, seed, extra_rows=seed % 3)
    draws = torch.randint(0, vocab, (3, tree.width), generator=torch.Generator().manual_seed(seed + 1))
    at_once, by_steps = poisoned(3, max_depth), poisoned(3, max_depth)
    walk_tree(draws, tree, at_once)
    walk_tree(lambda rows, path, step: draws.gather(1, rows[:, None]).squeeze(1), tree, by_steps, 3)
    assert_walked(at_once, tree, draws)
    assert_walked(by_steps, tree, draws)


def test_token_zero_is_no_padding() -> None:
    # All tokens are 0, as padding is: counts and links must tell them apart.
    tree = random_tree(2, 16, 4, 1, 0)
    out = poisoned(2, 4)
    walk_tree(torch.zeros((2, 17), dtype=torch.int64), tree, out)
    assert out.accept_lens.tolist() == [5, 5]
    assert out.accept_index[1].tolist() == [0, 1, 2, 3, 4]


def test_greedy_logits_walk_the_argmax() -> None:
    tree = random_tree(4, 16, 7, 3, 2)
    logits = torch.randn((4 * 17, 3), generator=torch.Generator().manual_seed(3))
    out = poisoned(4, 7)
    walk_logits(logits, tree, greedy_rows(4), out)
    assert assert_walked(out, tree, logits.argmax(-1).view(4, 17)) >= 3


def test_first_requests_of_larger_buffers() -> None:
    tree = random_tree(4, 16, 7, 3, 2)
    logits = torch.randn((2 * 17, 3), generator=torch.Generator().manual_seed(3))
    out = poisoned(4, 7)
    walk_logits(logits, tree, greedy_rows(2), out)
    assert out.accept_lens[:2].min() >= 1
    assert out.accept_lens[2:].tolist() == [-99, -99] and out.bonus[2:].tolist() == [-99, -99]


def test_rows_that_do_not_fit_the_batch_are_refused() -> None:
    tree = random_tree(2, 16, 7, 3, 2)
    with pytest.raises(ValueError, match=r"logits must have 3 \* 17 rows, got 34"):
        walk_logits(torch.zeros(34, 3), tree, greedy_rows(3), poisoned(3, 7))
    with pytest.raises(ValueError, match="a drawing function needs bs, got None"):
        walk_tree(lambda rows, path, step: rows, tree, poisoned(2, 7))


def test_walk_needs_no_values_on_the_host() -> None:
    # Tensors on the meta device have shapes and no values: a host read or a shape that depends on data raises.
    tree = TreeBuffers.allocate(2, 16, 7, "meta")
    out = WalkBuffers.allocate(2, 7, "meta")
    logits = torch.empty((2 * 17, 50), device="meta")
    greedy = greedy_rows(2)
    walk_logits(logits, tree, greedy, out)
    sampled = SamplingRows(
        temperatures=torch.empty((2, 1), device="meta"),
        top_ks=torch.empty(2, dtype=torch.int32, device="meta"),
        top_ps=torch.empty(2, device="meta"),
        min_ps=torch.empty(2, device="meta"),
        seeds=None,
        all_greedy=False,
        any_greedy=True,
        need_top_k=True,
        need_top_p=True,
        need_min_p=True,
    )
    walk_logits(logits, tree, sampled, out)
    accepted_slots(torch.empty((2, 17), dtype=torch.int64, device="meta"), out.accept_index)


@pytest.mark.parametrize("garbage", [float("nan"), float("-inf"), float("inf")])
def test_garbage_logits_draw_tokens_in_range(garbage: float) -> None:
    params = SamplingRows(
        temperatures=torch.ones(2, 1),
        top_ks=torch.tensor([5, TOP_K_ALL], dtype=torch.int32),
        top_ps=torch.tensor([0.9, 1.0]),
        min_ps=torch.tensor([0.0, 0.1]),
        seeds=None,
        all_greedy=False,
        any_greedy=False,
        need_top_k=True,
        need_top_p=True,
        need_min_p=True,
    )
    drawn = draw_tokens(torch.full((2, 9), garbage), params, torch.zeros(2, dtype=torch.int64))
    assert 0 <= int(drawn.min()) and int(drawn.max()) < 9


def test_accepted_slots_move_to_the_front_of_the_window() -> None:
    slots = torch.tensor([[50, 51, 52, 53, 54, 55], [10, 30, 20, 40, 60, 70], [80, 81, 82, 83, 84, 85]])
    accept_index = torch.tensor([[0, 3, 5, -1], [0, 2, -1, -1], [0, 1, 2, 3]])
    destinations, sources = accepted_slots(slots, accept_index)
    assert destinations.tolist() == [[50, 51, 52, 53], [10, 30, 20, 40], [80, 81, 82, 83]]
    assert sources.tolist() == [[50, 53, 55, 53], [10, 20, 20, 40], [80, 81, 82, 83]]
    assert (destinations == sources).all(1).tolist() == [False, False, True]
    cache = torch.arange(100)
    cache[destinations.flatten()] = cache[sources.flatten()]
    assert cache[slots[0, :3]].tolist() == [50, 53, 55] and cache[slots[1, :2]].tolist() == [10, 20]


def test_accepted_slots_of_a_tree_smaller_than_a_run() -> None:
    destinations, sources = accepted_slots(torch.tensor([[5, 6]]), torch.tensor([[0, -1, -1, -1]]))
    assert destinations.tolist() == sources.tolist() == [[5, 6]]
    assert (destinations == sources).all(1).tolist() == [True]
