# SPDX-License-Identifier: Apache-2.0
"""Acceptance as operators see it: rates of at most 1, depth as the denominator, node use beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from sglang.srt.speculative.ddtree_metrics import TreeMetrics, describe_request, drafts_per_step, max_depth


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
    metrics = TreeMetrics("a-model", depth=7)
    metrics.observe([0, 7, 3], budget=16)
    metrics.observe([7], budget=32)

    def value(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(name, {"model_name": "a-model"} | labels)

    assert value("sglang:spec_tree_nodes_verified_total") == 80
    assert value("sglang:spec_tree_budget") == 32
    assert value("sglang:spec_tree_nodes_accepted_total") == 17
    assert value("sglang:spec_accepted_depth_bucket", le="0.0") == 1
    assert value("sglang:spec_accepted_depth_bucket", le="6.0") == 2
    assert value("sglang:spec_accepted_depth_bucket", le="7.0") == 4
