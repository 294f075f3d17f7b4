# SPDX-License-Identifier: Apache-2.0
"""The ladder of verify widths without a card: what auto learns from passes, and what it measures at the start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.sm120.verify_route import Kernel, VerifyRoute
from sglang.srt.speculative import ddtree_budget, ddtree_ladder
from sglang.srt.speculative.ddtree_budget import BudgetController, StepCosts
from sglang.srt.speculative.ddtree_ladder import Ladder
from sglang.srt.speculative.ddtree_tree import build_tree
from sglang.srt.speculative.ddtree_walk import WalkBuffers, walk_tree

BUDGETS = (7, 16, 32)
FREE = StepCosts(short={4: [1.0, 1.0, 1.0]}, per_token={4: [0.0, 0.0, 0.0]})
ALONE = SimpleNamespace(world_size=1, broadcast_object=lambda value, src: value)


class Event:
    """Stands for torch.cuda.Event; `order` lists what was waited for."""

    order: list[Event]

    def __init__(self, enable_timing: bool = False) -> None:
        self.recorded = False

    def record(self) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded
        Event.order.append(self)


class Controller(BudgetController):
    """Takes one rung after the other and keeps what it is told."""

    def __init__(self, *rungs: int) -> None:
        super().__init__(BUDGETS, FREE)
        self._rungs = list(rungs)
        self.asked: list[tuple[Any, float]] = []
        self.seen: list[tuple[Any, ...]] = []
        self.rests: list[float] = []

    def choose(self, limits: Any, context: float) -> int:
        self.asked.append((limits, context))
        return self._rungs.pop(0)

    def observe(self, *figures: Any) -> None:
        self.seen.append(figures[:-1])
        self.rests.append(figures[-1])


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    Event.order = []
    monkeypatch.setattr(torch.cuda, "Event", Event)


def runner(**fields: Any) -> Any:
    return SimpleNamespace(
        device="cpu", req_to_token_pool=SimpleNamespace(size=4), attn_backend=SimpleNamespace(), **fields
    )


def requests(*limits: int | None) -> list[Any]:
    asked = [None if limit is None else {"ddtree_budget": limit} for limit in limits]
    return [SimpleNamespace(sampling_params=SimpleNamespace(custom_params=custom)) for custom in asked]


def draft(ladder: Ladder, seed: int, bs: int = 3) -> torch.Tensor:
    """Build the largest trees; returns a text [bs, 7] that lies in some of them."""
    generator = torch.Generator().manual_seed(seed)
    log_probs, order = (torch.randn(bs, 7, 40, generator=generator) * 2).log_softmax(-1).sort(-1, descending=True)
    build_tree(log_probs[..., :32], order[..., :32], torch.arange(bs), torch.arange(bs), ladder.largest.tree)
    ladder.foretell(bs)
    ranks = torch.randint(0, 3, (bs, 7, 1), generator=generator)
    return order.gather(2, ranks).squeeze(2)


def walk(rung: Any, text: torch.Tensor) -> WalkBuffers:
    """The target draws the same text at each depth, whatever the path."""
    bs = text.shape[0]
    out = WalkBuffers.allocate(4, 7, "cpu")
    padded = torch.cat([text, torch.full((bs, 1), 39)], 1)
    # The draw at a row of depth d is the token of depth d + 1.
    walk_tree(padded.gather(1, rung.tree.depths[:bs].clamp(max=7)), rung.tree, out)
    return out


def test_a_pass_tells_what_each_smaller_tree_accepts() -> None:
    """The figures of a tree of 32 nodes are the accept lengths that walks of the smaller trees give."""
    ladder = Ladder(runner(), BUDGETS, 8, ALONE)
    ladder._controller = controller = Controller(*[2] * 12)
    expected = []
    for seed in range(12):
        text = draft(ladder, seed)
        taken = walk(ladder.choose(requests(None, None, None), 30), text)
        each = []
        for rung in ladder.rungs:
            if rung is not ladder.largest:
                rung.tree.copy_prefix_from(ladder.largest.tree, 3)
                rung.tree.depths[:3] = ladder.largest.tree.depths[:3, : rung.width]
            each.append(int(walk(rung, text).accept_lens[:3].sum()) - 3)
        scores = ladder.largest.tree.scores[:3]
        gains = [float(scores[:, 1 : budget + 1].exp().sum()) for budget in BUDGETS]
        expected.append((2, 3, pytest.approx(gains), each))
        ladder.record(ladder.largest, taken, 3)
        ladder._passes[-1].foretold = ladder._passes[-1].foretold.clone()  # on a card the copy does that
    assert controller.seen == expected[:-2], "the last pass still runs, the one before is read with the next choice"
    assert len(Event.order) == len(controller.seen)
    lengths = [accepted for *_, accepted in expected]
    assert any(a < b for a, b, _ in lengths) and any(b < c for _, b, c in lengths)
    assert controller.asked[0] == ([None, None, None], 10)


def test_a_smaller_tree_tells_nothing_of_larger_ones() -> None:
    ladder = Ladder(runner(), BUDGETS, 8, ALONE)
    ladder._controller = controller = Controller(1, 0, 2)
    for seed in range(3):
        text = draft(ladder, seed)
        rung = ladder.choose(requests(None, None, None), 0)
        rung.tree.depths[:3] = ladder.largest.tree.depths[:3, : rung.width]
        ladder.record(rung, walk(rung, text), 3)
    assert [(index, len(accepted)) for index, _, _, accepted in controller.seen] == [(1, 2)]


def test_requests_that_cut_their_trees_tell_nothing() -> None:
    ladder = Ladder(runner(), BUDGETS, 8, ALONE)
    ladder._controller = controller = Controller(2, 2, 2, 2)
    for limits in ((None, 16, 3), (7, 7, 7), (32, None, 1), (None, None, None)):
        text = draft(ladder, 0)
        ladder.record(ladder.largest, walk(ladder.choose(requests(*limits), 0), text), 3)
    assert [num_trees for _, num_trees, *_ in controller.seen] == [1]
    assert controller.asked[0][0] == [None, 16, 3]


def test_the_time_of_steps_beside_their_graphs_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes take a second in the table, steps 1.5; a prefill, another budget and a clock of another rank do not count."""
    now = [0.0]
    monkeypatch.setattr(ddtree_budget.time, "perf_counter", lambda: now[0])
    ladder = Ladder(runner(), BUDGETS, 8, ALONE)
    ladder._controller = controller = Controller(2, 2, 2, 2, 0, 0, 2, 2, 2, 2, 2)
    for step in range(11):
        rung = ladder.choose(requests(None, None, None), 0)
        ladder.record(rung, walk(rung, draft(ladder, step)), 3)
        ladder._passes[-1].foretold = ladder._passes[-1].foretold.clone()
        now[0] += 1.5
        if step in (7, 10):
            ladder.interrupt()
            now[0] += 100
    assert controller.rests == [0.0, 0.0] + [0.5] * 7


def test_the_log_counts_passes_by_budget() -> None:
    ladder = Ladder(runner(), BUDGETS, 8, ALONE)
    assert ladder.describe() == ""
    ladder._controller = Controller(0, 2, 2)
    for _ in range(3):
        draft(ladder, 0)
        ladder.choose(requests(None), 0)
    assert ladder.describe() == "passes with budget 7/16/32: 1/0/2, "
    assert ladder.describe() == "passes with budget 7/16/32: 0/0/0, "
    assert [ladder.observe() for _ in range(3)] == [7, 32, 32]


def kernel_backend(width: int) -> Any:
    kernel = Kernel(torch.zeros(1), torch.zeros(9), 8, width)
    return SimpleNamespace(
        sm120_route=VerifyRoute(kernel, None),
        cuda_graph_kv_indices=torch.full((100_000,), -1),
        kv_indptr=torch.full((9,), 77, dtype=torch.int32),
        width=width,
    )


def test_costs_are_measured_with_and_without_a_context(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pass costs width milliseconds, and width microseconds for each key that a request's context has."""

    def seconds(graph_runner: Any, size: int) -> float:
        backend = graph_runner.attn_backend
        if backend is None:
            return 0.5
        ids = graph_runner.buffers.input_ids
        assert ids.unique().numel() == ids.numel() and 0 <= int(ids.min()) and int(ids.max()) < 1000
        context = 0.0
        if hasattr(backend, "kv_indptr"):
            starts = backend.kv_indptr[: size + 1]
            if starts[0] == 0:  # else nobody has set lengths yet
                lengths = starts.diff()
                assert (lengths == lengths[0]).all()
                slots = backend.cuda_graph_kv_indices[: int(starts[-1])]
                assert slots.numel() == 0 or (0 <= int(slots.min()) and int(slots.max()) < 20_000)
                context = float(lengths[0])
        return 1e-3 * backend.width + 1e-6 * backend.width * context

    monkeypatch.setattr(ddtree_ladder, "_median_seconds", seconds)
    caplog.set_level("INFO")
    pool, config = SimpleNamespace(size=20_000), SimpleNamespace(vocab_size=1000)
    ladder = Ladder(runner(token_to_kv_pool=pool, model_config=config), BUDGETS, 8, ALONE)
    for rung in ladder.rungs:
        rung.attn_backend = kernel_backend(rung.width)
        rung.graph_runner = SimpleNamespace(
            capture_bs=[1, 8],
            attn_backend=rung.attn_backend,
            buffers=SimpleNamespace(input_ids=torch.zeros(8 * rung.width, dtype=torch.int64)),
        )
    ladder.rungs[0].attn_backend.sm120_route = VerifyRoute(None, None)
    ladder.measure(SimpleNamespace(capture_bs=[1, 8], attn_backend=None))
    assert ladder._controller is not None
    costs = ladder._controller._costs
    for size in (1, 8):
        assert costs.short[size] == pytest.approx([0.508, 0.517, 0.533])
        assert costs.per_token[size] == pytest.approx([0.0, 17e-6, 33e-6]), "Triton's is not measured"
    assert costs.seconds(3, 1000) == pytest.approx([0.508, 0.534, 0.566])
    assert "budgets 7/16/32; by batch size 1: 508.00/517.00/533.00" in caplog.text
    assert "1,000 tokens of context beyond it 1: 0.00/17.00/33.00" in caplog.text
