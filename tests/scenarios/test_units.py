# SPDX-License-Identifier: Apache-2.0
"""Scenarios of the bug log that one function, or one decode step without a model, can show."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.speculative import ddtree_worker
from sglang.srt.speculative.ddtree_info import expand_tree_mask
from sglang.srt.speculative.ddtree_ladder import Rung
from sglang.srt.speculative.ddtree_metrics import TreeMetrics, describe_request
from sglang.srt.speculative.ddtree_tree import TreeBuffers, build_tree
from sglang.srt.speculative.ddtree_walk import WalkBuffers, accepted_slots, walk_tree

KIMI_BATCH, KIMI_CONTEXT, MAX_BUDGET = 32, 131_072, 64


def random_tree(generator: torch.Generator, batch: int, depth: int, budget: int, vocab: int = 97) -> TreeBuffers:
    """Trees of distinct drafted tokens with random log-probabilities."""
    scores = torch.rand(batch, depth, vocab, generator=generator).log_softmax(-1)
    log_probs, token_ids = scores.topk(min(budget, vocab), dim=-1)
    tree = TreeBuffers.allocate(batch, budget, depth, "cpu")
    build_tree(log_probs, token_ids, torch.arange(batch), torch.arange(batch) * 10, tree)
    return tree


@pytest.mark.scenario("BUG-005")
@settings(deadline=None, max_examples=60)
@given(bs=st.integers(1, 9), width=st.integers(2, 65), slack=st.integers(0, 50), data=st.data())
def test_full_mask_holds_every_row_it_is_read_by(bs: int, width: int, slack: int, data: st.DataObject) -> None:
    """The buffer is sized from a bound on the host, the rows from lengths on the device."""
    lens = data.draw(st.lists(st.integers(0, 200), min_size=bs, max_size=bs))
    mask = expand_tree_mask(torch.ones(bs, width, width, dtype=torch.bool), torch.tensor(lens), sum(lens) + slack)
    assert mask.numel() >= sum(width * (length + width) for length in lens)


@pytest.mark.scenario("BUG-056")
def test_compact_mask_of_a_long_context_is_small() -> None:
    tree = TreeBuffers.allocate(KIMI_BATCH, MAX_BUDGET, 7, "cpu")
    assert tree.mask.numel() * tree.mask.element_size() < 2**20
    full = KIMI_BATCH * (MAX_BUDGET + 1) * (KIMI_CONTEXT + MAX_BUDGET + 1)
    assert full > 2**28, "the layout that this one replaces"


@pytest.mark.scenario("BUG-017")
def test_rows_are_addressed_with_64_bits() -> None:
    """Rows times vocabulary pass 2**31 with some thousand rows; what is multiplied must not be int32."""
    tree = random_tree(torch.Generator().manual_seed(0), 3, 4, 8)
    walk = WalkBuffers.allocate(3, 4, "cpu")
    seen = []

    def draw(rows: torch.Tensor, path: torch.Tensor, step: int) -> torch.Tensor:
        seen.append(rows.dtype)
        return torch.zeros(3, dtype=torch.int64)

    walk_tree(draw, tree, walk, 3)
    slots = torch.arange(3 * 9).view(3, 9)
    seen += [part.dtype for part in accepted_slots(slots, walk.accept_index)]
    assert set(seen) == {torch.int64}


@pytest.mark.scenario("BUG-028")
@pytest.mark.parametrize("seed", range(40))
def test_a_tree_with_the_chain_in_it_accepts_no_less(seed: int) -> None:
    generator, chance = torch.Generator().manual_seed(seed), random.Random(seed)
    depth, budget, batch = chance.randint(1, 7), chance.randint(7, 40), 4
    scores = torch.rand(batch, depth, 13, generator=generator).log_softmax(-1)
    log_probs, token_ids = scores.topk(13, dim=-1)
    tree = TreeBuffers.allocate(batch, budget, depth, "cpu")
    build_tree(
        log_probs[..., : min(budget, 13)],
        token_ids[..., : min(budget, 13)],
        torch.zeros(batch, dtype=torch.int64),
        torch.zeros(batch, dtype=torch.int64),
        tree,
    )
    # The target wants one token a depth, often the drafter's best.
    wanted = torch.where(
        torch.rand(batch, depth + 1, generator=generator) < 0.7,
        torch.cat([token_ids[..., 0], token_ids[:, :1, 0]], 1),
        torch.randint(13, (batch, depth + 1), generator=generator),
    )
    walk = WalkBuffers.allocate(batch, depth, "cpu")
    walk_tree(lambda rows, path, step: wanted[:, step], tree, walk, batch)
    for request in range(batch):
        matches = (wanted[request, :depth] == token_ids[request, :, 0]).tolist()
        chain = matches.index(False) if False in matches else depth
        assert int(walk.accept_lens[request]) >= chain + 1


@pytest.mark.scenario("BUG-052")
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), width=st.integers(1, 33), longest=st.integers(1, 9))
def test_accepted_rows_move_to_the_front_in_any_slot_order(seed: int, width: int, longest: int) -> None:
    """Physical slots are shuffled, so that sources lie below and above their destinations."""
    chance = random.Random(seed)
    batch, run = 3, min(longest, width)
    slots = torch.tensor(chance.sample(range(batch * width * 2), batch * width)).view(batch, width)
    paths = [[0, *sorted(chance.sample(range(1, width), chance.randint(0, run - 1)))] for _ in range(batch)]
    index = torch.full((batch, longest), -1)
    for request, path in enumerate(paths):
        index[request, : len(path)] = torch.tensor(path)
    pool = torch.arange(batch * width * 2) * 7 + 1
    before = pool.clone()
    destinations, sources = accepted_slots(slots, index)
    pool[destinations.flatten()] = pool[sources.flatten()]
    for request, path in enumerate(paths):
        front = [int(pool[slots[request, position]]) for position in range(len(path))]
        assert front == [int(before[slots[request, row]]) for row in path]
        assert torch.equal(destinations[request], sources[request]) == (path == list(range(len(path))))
    untouched = set(range(len(pool))) - set(destinations.flatten().tolist())
    assert all(int(pool[slot]) == int(before[slot]) for slot in untouched)


@pytest.mark.scenario("BUG-072")
def test_ranks_follow_rank_0_on_a_near_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has logits one step apart that flip a tie, and walks another path; both commit what rank 0 drew."""
    tree = random_tree(torch.Generator().manual_seed(3), 2, 4, 9, vocab=16)
    logits = torch.rand(2 * 10, 16, generator=torch.Generator().manual_seed(4))
    logits[:, 5] = logits[:, 9] = 2.0
    flipped = logits.clone()
    flipped[:, 9] = torch.nextafter(flipped[:, 9], torch.tensor(3.0))
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(ddtree_worker, "is_plain_greedy", lambda info: True)
    monkeypatch.setattr(ddtree_worker, "record_run", lambda *_: None, raising=False)

    def walk(rank: int, rank_logits: torch.Tensor) -> WalkBuffers:
        pending = iter(sent)

        def broadcast(part: torch.Tensor, src: int) -> None:
            assert src == 0
            if rank == 0:
                sent.append(part.clone())
            else:
                part.copy_(next(pending))

        group = SimpleNamespace(world_size=2, broadcast=broadcast)
        monkeypatch.setattr(ddtree_worker, "get_tp_group", lambda: group)
        own = WalkBuffers.allocate(2, 4, "cpu")
        walk_tree(rank_logits.argmax(-1).view(2, 10), tree, own)
        walks = [WalkBuffers.allocate(2, 4, "cpu") for _ in range(2)]
        rung = Rung(budget=9, tree=tree, captured_walk=own, attn_backend=None, graph_runner=None)
        worker = SimpleNamespace(_walks=walks, _ladder=SimpleNamespace(simulate=lambda *_: None))
        batch = SimpleNamespace(sampling_info=[None, None])
        found = ddtree_worker.DDTreeWorker._walk(worker, batch, rank_logits, rung, captured=True)
        assert torch.equal(found.out_tokens, own.out_tokens) == (rank == 0), "the tie must flip"
        return found

    first, second = walk(0, logits), walk(1, flipped)
    for name in ("accept_index", "accept_lens", "out_tokens", "bonus"):
        assert torch.equal(getattr(first, name), getattr(second, name))


@pytest.mark.scenario("BUG-074")
def test_the_tree_does_not_depend_on_threads_or_repetition() -> None:
    """Tied and denormal scores included: every rank builds its own tree from the same numbers."""
    generator = torch.Generator().manual_seed(5)
    log_probs = -torch.randint(1, 4, (6, 7, 64), generator=generator).float().sort(-1).values
    log_probs[:, :, 40:] = -torch.finfo(torch.float32).max * torch.rand(6, 7, 24, generator=generator).sort(-1).values
    log_probs[0, :, 3:] = -1e-42
    log_probs = log_probs.sort(-1, descending=True).values
    token_ids = torch.arange(64).expand(6, 7, 64).contiguous()
    threads, trees = torch.get_num_threads(), []
    try:
        for count in (1, 2, 4, 1, 3):
            torch.set_num_threads(count)
            for _ in range(20):
                tree = TreeBuffers.allocate(6, 48, 7, "cpu")
                build_tree(log_probs, token_ids, torch.arange(6), torch.arange(6), tree)
                trees.append((tree.parents.clone(), tree.token_ids.clone()))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for tree in trees[1:] for a, b in zip(tree, trees[0], strict=True))


@pytest.mark.scenario("BUG-084")
def test_trees_of_any_shape_use_the_same_buffers() -> None:
    generator = torch.Generator().manual_seed(6)
    tree = TreeBuffers.allocate(4, 24, 7, "cpu")
    walk = WalkBuffers.allocate(4, 7, "cpu")
    parts = [*vars(tree).values(), *vars(walk).values()]
    places = [part.data_ptr() for part in parts if isinstance(part, torch.Tensor)]
    shapes = set()
    for _ in range(50):
        scores = (torch.randn(4, 7, 97, generator=generator) * 4).log_softmax(-1)
        build_tree(*scores.topk(24, dim=-1), torch.arange(4), torch.arange(4), tree)
        walk_tree(torch.randint(97, (4, 25), generator=generator), tree, walk)
        shapes.add(tuple(tree.parents.flatten().tolist()))
        parts = [*vars(tree).values(), *vars(walk).values()]
        assert [part.data_ptr() for part in parts if isinstance(part, torch.Tensor)] == places
    assert len(shapes) == 50, "the trees must differ"


@pytest.mark.scenario("BUG-089")
def test_metrics_of_nothing_are_numbers() -> None:
    from prometheus_client import REGISTRY

    labels = {"engine_type": "unified", "tp_rank": 0, "pp_rank": 0, "moe_ep_rank": 0}
    metrics = TreeMetrics({"model_name": "toy-without-steps"} | labels, depth=7)
    metrics.observe([], budget=16)
    metrics.observe([0, 0], budget=16)
    values = {
        sample.name: sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.labels.get("model_name") == "toy-without-steps" and "bucket" not in sample.name
    }
    assert values["sglang:spec_tree_nodes_verified_total"] == 32
    assert values["sglang:spec_tree_nodes_accepted_total"] == 0 and values["sglang:spec_accepted_depth_count"] == 2
    assert all(math.isfinite(value) for value in values.values())
    meta: dict[str, Any] = {}
    arguments = SimpleNamespace(
        speculative_algorithm="DDTREE",
        speculative_ddtree_budget="16",
        speculative_dflash_block_size=8,
        speculative_num_draft_tokens=17,
    )
    assert describe_request(meta, arguments, 1, 0) == 7
    assert meta == {"spec_node_use": 0.0}
