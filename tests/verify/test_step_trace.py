# SPDX-License-Identifier: Apache-2.0
"""The benchmark's reading of a profiler's trace, on a trace made by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from step_trace import read, summarise

STEP = 1000.0


def step(begin: float) -> list[dict[str, Any]]:
    """Two graphs, one launch and a copy, of which the host waits 300 us; the device runs 920 of 1,000 us."""

    def event(cat: str, name: str, at: float, dur: float, **args: Any) -> dict[str, Any]:
        return {"cat": cat, "name": name, "ts": begin + at, "dur": dur, "args": args}

    return [
        event("cuda_runtime", "cudaGraphLaunch", 0, 10),
        event("cuda_runtime", "cudaLaunchKernelExC", 20, 5),
        event("cuda_driver", "cudaGraphLaunch", 30, 10),
        event("cuda_runtime", "cudaMemcpyAsync", 50, 5),
        event("cuda_runtime", "cudaEventSynchronize", 100, 300),
        event("cpu_op", "aten::add", 10, 5),
        event("kernel", "draft", 0, 200),
        event("kernel", "void verify<32>", 100, 500),  # overlaps the other: counted once
        event("gpu_memcpy", "Memcpy DtoH", 650, 300, bytes=640),
        event("gpu_memset", "Memset", 960, 20),
    ]


def test_figures_are_those_of_whole_steps() -> None:
    events = [event for number in range(4) for event in step(number * STEP)]
    # The fourth step begins but does not end: it only closes the third.
    assert summarise(reversed(events), graphs_per_step=2) == {
        "steps": 3,
        "step_us": 1000.0,
        "step_host_us": 700.0,
        "launches_per_step": 3.0,
        "copies_per_step": 1.0,
        "copied_bytes_per_step": 640,
        "kernels_per_step": 2.0,
        "device_idle_percent": 8.0,
        "device_us": {"verify": 500.0, "Memcpy DtoH": 300.0, "draft": 200.0, "Memset": 20.0},
    }


def test_a_step_that_the_device_begins_late_leaves_no_gap() -> None:
    """The host runs a step ahead: the trace has nothing of what the device did while the first step was asked for."""
    events = [event for number in range(5) for event in step(number * STEP)]
    late = [event | {"ts": event["ts"] + STEP} if "gpu" in event["cat"] or event["cat"] == "kernel" else event
            for event in events]  # fmt: skip
    assert summarise(late, graphs_per_step=2) == summarise(events, graphs_per_step=2)


def test_a_short_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at least two whole steps of 2 graphs, got 1"):
        summarise(step(0) + step(STEP), graphs_per_step=2)
    with pytest.raises(ValueError, match="got 0"):
        summarise([], graphs_per_step=2)


def test_traces_are_read_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "one.trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": step(0)}, file)
    assert read(path) == step(0)
