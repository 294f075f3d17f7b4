# SPDX-License-Identifier: Apache-2.0
"""What decode steps cost the host and the device, from a trace of torch's profiler."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
COPIES = ("cudaMemcpyAsync", "cudaMemsetAsync")
WAITS = ("cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize")
NUM_NAMES = 40
HOST, DEVICE = ("cuda_runtime", "cuda_driver"), ("kernel", "gpu_memcpy", "gpu_memset")


def summarise(events: Iterable[dict[str, Any]], graphs_per_step: int) -> dict[str, Any]:
    """Averages over the whole steps between the first and the last graph launch of a trace.

    Args:
        events: ``traceEvents`` of a Chrome trace; times in microseconds.
        graphs_per_step: CUDA graphs that a step launches; they tell where a step begins.

    Returns, per step:
        step_us, of which step_host_us is not spent waiting for the device; launches_per_step (graphs count as one) and
        copies_per_step as the host asks for them; copied_bytes_per_step, kernels_per_step and device_idle_percent on
        the device, which begins with the second step: it is still busy with the step before the trace in the first;
        device_us, microseconds by name of those kernels and copies that take the most together.

    Raises:
        ValueError: when the trace holds fewer than two whole steps.
    """
    events = list(events)
    host = [event for event in events if event.get("cat") in HOST]
    device = [event for event in events if event.get("cat") in DEVICE]
    starts = sorted(event["ts"] for event in host if event["name"] == "cudaGraphLaunch")[::graphs_per_step]
    steps = len(starts) - 1
    if steps < 2:
        raise ValueError(f"trace: expected at least two whole steps of {graphs_per_step} graphs, got {max(steps, 0)}")
    begin, end = starts[0], starts[-1]
    asked = [event for event in host if begin <= event["ts"] < end]
    # What a step asks for runs up to a step later; the trace holds what was asked for while it was taken, no more.
    ran = [event for event in device if starts[1] <= event["ts"] < end]

    def count(names: tuple[str, ...]) -> float:
        return sum(event["name"] in names for event in asked) / steps

    waited = sum(event["dur"] for event in asked if event["name"] in WAITS)
    copied = sum(event.get("args", {}).get("bytes", 0) for event in ran if event["cat"] == "gpu_memcpy")
    return {
        "steps": steps,
        "step_us": round((end - begin) / steps, 1),
        "step_host_us": round((end - begin - waited) / steps, 1),
        "launches_per_step": round(count(LAUNCHES), 2),
        "copies_per_step": round(count(COPIES), 2),
        "copied_bytes_per_step": round(copied / (steps - 1)),
        "kernels_per_step": round(sum(event["cat"] == "kernel" for event in ran) / (steps - 1), 1),
        "device_idle_percent": round(100 * (1 - _covered(ran, starts[1], end) / (end - starts[1])), 2),
        "device_us": _longest(ran, steps - 1),
    }


def _longest(events: list[dict[str, Any]], steps: int) -> dict[str, float]:
    """Microseconds a step by name, the longest first; what templates take is no part of a name."""
    total: Counter[str] = Counter()
    for event in events:
        total[event["name"].partition("<")[0].removeprefix("void ")] += event["dur"]
    return {name: round(duration / steps, 1) for name, duration in total.most_common(NUM_NAMES)}


def _covered(events: list[dict[str, Any]], begin: float, end: float) -> float:
    """Microseconds between `begin` and `end` in which at least one event runs."""
    covered, reached = 0.0, begin
    for start, stop in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        stop = min(stop, end)
        if stop > reached:
            covered += stop - max(start, reached)
            reached = stop
    return covered


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a gzipped trace."""
    with gzip.open(path) as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events
