# SPDX-License-Identifier: Apache-2.0
"""Acceptance as operators see it: rates of at most 1, depth as the denominator, node use and verify time beside it."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from sglang.srt.sm120 import metrics
from sglang.srt.speculative import ddtree_metrics
from sglang.srt.speculative.ddtree_metrics import (
    TreeMetrics,
    VerifyTimer,
    describe_request,
    describe_steps,
    drafts_per_step,
    max_depth,
)

LABELS = {"model_name": "a-model", "engine_type": "unified", "tp_rank": 0, "pp_rank": 0, "moe_ep_rank": 0}


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {key: str(label) for key, label in (LABELS | labels).items()})


def arguments(algorithm: str = "DDTREE", budget: int | str = 16) -> Any:
    return SimpleNamespace(
        speculative_algorithm=algorithm,
        speculative_ddtree_budget=str(budget),
        speculative_dflash_block_size=8,
        speculative_num_draft_tokens=17,
    )


@pytest.mark.parametrize(("budget", "depth"), [(1, 1), (6, 6), (7, 7), (64, 7)])
def test_depth_is_bounded_by_block_and_budget(budget: int, depth: int) -> None:
    assert max_depth(budget, block_size=8) == depth
    assert drafts_per_step(arguments(budget=budget), default=99) == depth


def test_other_algorithms_keep_their_denominator() -> None:
    meta_info: dict[str, Any] = {}
    assert drafts_per_step(arguments("EAGLE"), default=99) == 99
    assert describe_request(meta_info, arguments("DFLASH"), verify_steps=3, accepted=6) == 3 * 16
    assert meta_info == {}


def test_request_reports_node_use() -> None:
    meta_info: dict[str, Any] = {}
    drafted = describe_request(meta_info, arguments(), verify_steps=10, accepted=70)
    assert drafted == 70, "all seven levels accepted in ten steps is an accept rate of 1"
    assert meta_info == {"spec_node_use": 70 / 160}


def test_auto_has_the_depth_of_a_block_and_no_node_use() -> None:
    meta_info: dict[str, Any] = {}
    assert describe_request(meta_info, arguments(budget="auto"), verify_steps=10, accepted=70) == 70
    assert meta_info == {}


def test_series_count_depths_and_nodes() -> None:
    tree_metrics = TreeMetrics(LABELS, depth=7)
    tree_metrics.observe([0, 7, 3], budget=16)
    tree_metrics.observe([7], budget=32, verify_seconds=[0.004, 0.25])
    assert value("sglang:spec_tree_nodes_verified_total") == 80
    assert value("sglang:spec_tree_budget") == 32
    assert value("sglang:spec_tree_nodes_accepted_total") == 17
    assert value("sglang:spec_accepted_depth_bucket", le="0.0") == 1
    assert value("sglang:spec_accepted_depth_bucket", le="6.0") == 2
    assert value("sglang:spec_accepted_depth_bucket", le="7.0") == 4
    assert value("sglang:sm120_verify_seconds_sum") == pytest.approx(0.254)
    assert value("sglang:sm120_verify_seconds_bucket", le="0.005") == 1


def test_an_undeclared_series_is_refused() -> None:
    with pytest.raises(StopIteration):
        metrics.series("sglang:sm120_unheard_of", LABELS)


def test_host_passes_are_timed_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 10.5, 20.0, 20.25])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    timer = VerifyTimer("cpu")
    for _ in range(2):
        timer.start()
        timer.stop()
    assert timer.finished() == [0.5, 0.25]
    assert timer.finished() == []


class Event:
    """Stands for a CUDA event: over when the test says so, never waited for."""

    over = 0
    recorded = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.recorded += 1
        self.number = Event.recorded

    def query(self) -> bool:
        return self.number <= Event.over

    def elapsed_time(self, end: Event) -> float:
        return 1000.0 * (end.number - self.number)


def test_device_passes_are_read_when_they_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.over = Event.recorded = 0
    timer = VerifyTimer("cuda")
    for _ in range(VerifyTimer.MOST_IN_FLIGHT + 1):  # the last one is not timed
        timer.start()
        timer.stop()
    assert timer.finished() == []
    Event.over = 5  # of the third pass only the start
    assert timer.finished() == [1.0, 1.0]
    Event.over = Event.recorded
    assert len(timer.finished()) == VerifyTimer.MOST_IN_FLIGHT - 2
    timer.start()
    timer.stop()
    Event.over = Event.recorded
    assert timer.finished() == [1.0], "events are used again"


@pytest.mark.parametrize(("algorithm", "published"), [("DDTREE", []), ("EAGLE", [17])])
def test_the_decode_log_says_who_verifies_for_workers_of_sglang(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, published: list[int]
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(ddtree_metrics, "publish_routes", lambda backends, labels: seen.extend(backends))
    runner = SimpleNamespace(attn_backend=SimpleNamespace())
    collector = SimpleNamespace(labels=LABELS)
    reporter = SimpleNamespace(metrics_collector=collector, current_scheduler_metrics_enabled=True)
    scheduler = SimpleNamespace(
        metrics_reporter=reporter,
        server_args=arguments(algorithm),
        tp_worker=SimpleNamespace(model_runner=runner),
        draft_worker=SimpleNamespace(
            describe_budgets=lambda: "budgets, ", defragmenter=SimpleNamespace(describe=lambda: "run lengths, ")
        ),
    )
    assert describe_steps(scheduler, 16) == ((7, "budgets, run lengths, ") if algorithm == "DDTREE" else (16, ""))
    assert seen == published
    reporter.current_scheduler_metrics_enabled = False
    describe_steps(scheduler, 16)
    assert seen == published
