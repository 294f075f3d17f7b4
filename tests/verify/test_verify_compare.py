# SPDX-License-Identifier: Apache-2.0
"""The comparison of validate mode: what it counts, what it overlooks on purpose, and that a graph can hold it."""

from __future__ import annotations

import pytest
import torch
from prometheus_client import REGISTRY

from sglang.srt.sm120.verify_compare import (
    FAULT_VARIABLE,
    ROW_TOLERANCE,
    ComparisonReport,
    VerifyComparison,
    publish_report,
)

ROWS, HEADS, DIM = 6, 4, 512


def outputs(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two equal outputs and slots of live rows."""
    drawn = torch.randn(ROWS, HEADS, DIM, device=device).to(torch.bfloat16)
    return drawn.clone(), drawn, torch.arange(1, ROWS + 1, device=device)


def test_equal_outputs_are_no_error() -> None:
    comparison = VerifyComparison.allocate("cpu")
    for layer in range(3):
        comparison.add(layer, *outputs())
    report = comparison.read()
    assert (report.calls, report.bad_rows, report.max_error, report.first_bad) == (3, 0, 0.0, None)
    assert report.min_cosine > 1 - 1e-5


def test_the_first_bad_coordinate_stays() -> None:
    comparison = VerifyComparison.allocate("cpu")
    comparison.add(0, *outputs())
    got, expected, slots = outputs()
    got[4, 2, 77] += 3 * expected[4, 2].abs().amax()
    comparison.add(5, got, expected, slots)
    got, expected, slots = outputs()
    got[0, 0, 0] += 3 * expected[0, 0].abs().amax()
    comparison.add(6, got, expected, slots)
    report = comparison.read()
    assert report.first_bad == (5, 4, 2, 77)
    assert report.bad_rows == 2 and report.max_error == pytest.approx(3, rel=0.02)


@pytest.mark.parametrize("factor, bad", [(0.9, 0), (1.1, 1)])
def test_tolerance_is_relative_to_the_row(factor: float, bad: int) -> None:
    comparison = VerifyComparison.allocate("cpu")
    expected = torch.full((ROWS, HEADS, DIM), 1e-3)
    got = expected.clone()
    got[1, 1, 5] += factor * ROW_TOLERANCE * 1e-3
    comparison.add(0, got, expected, torch.ones(ROWS, dtype=torch.int64))
    assert comparison.read().bad_rows == bad


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_output_is_bad(value: float) -> None:
    comparison = VerifyComparison.allocate("cpu")
    got, expected, slots = outputs()
    got[3, 0, 9] = value
    comparison.add(1, got, expected, slots)
    report = comparison.read()
    assert report.bad_rows == 1 and report.first_bad == (1, 3, 0, 9)


def test_padded_rows_are_left_out() -> None:
    comparison = VerifyComparison.allocate("cpu")
    got, expected, slots = outputs()
    slots[2:] = 0
    got[2:] = float("nan")
    comparison.add(0, got, expected, slots)
    report = comparison.read()
    assert (report.bad_rows, report.max_error) == (0, 0.0) and report.min_cosine > 1 - 1e-5


def test_rows_of_zeros_agree() -> None:
    """A row that sees no key is zero in both kernels and has no direction."""
    comparison = VerifyComparison.allocate("cpu")
    zeros = torch.zeros(ROWS, HEADS, DIM, dtype=torch.bfloat16)
    comparison.add(0, zeros, zeros.clone(), torch.ones(ROWS, dtype=torch.int64))
    report = comparison.read()
    assert (report.bad_rows, report.min_cosine) == (0, 1.0)


def test_the_test_switch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULT_VARIABLE, "1")
    comparison = VerifyComparison.allocate("cpu")
    comparison.add(7, *outputs())
    report = comparison.read()
    assert report.bad_rows == 1 and report.first_bad == (7, 0, 0, 0)


def test_the_gauges_have_the_report() -> None:
    report = ComparisonReport(calls=7, bad_rows=2, max_error=0.25, min_cosine=0.5, first_bad=(1, 2, 3, 4))
    publish_report(report, {"model_name": "compared"})
    for name, expected in (("calls", 7), ("bad_rows", 2), ("max_error", 0.25), ("min_cosine", 0.5)):
        value = REGISTRY.get_sample_value(f"sglang:verify_comparison_{name}", {"model_name": "compared"})
        assert value == expected, name


@pytest.mark.gpu
def test_a_graph_accumulates_without_the_host() -> None:
    comparison = VerifyComparison.allocate("cuda")
    got, expected, slots = outputs("cuda")
    comparison.add(3, got, expected, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comparison.add(3, got, expected, slots)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            graph.replay()
        got[5, 1].fill_(100.0)
        graph.replay()
        assert comparison.poll() == ""
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert comparison.poll().startswith("verify error: ")
    report = comparison.read()
    assert (report.calls, report.bad_rows) == (12, 1)
    assert report.first_bad is not None and report.first_bad[:3] == (3, 5, 1)
