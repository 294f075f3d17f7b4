# SPDX-License-Identifier: Apache-2.0
"""Gathers what the host does per call and per step from the results of one folder.

    build/env/bin/python scripts/bench/host_path.py scripts/bench/results/h200

Reads decode.json and steps.json there, and step.json and slots.json of the kernel's benchmarks for the same card; writes
host_path.json there.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

KERNEL_RESULTS = Path(__file__).resolve().parents[2] / "sgl-kernel-sm120" / "benchmarks" / "results"
FORK = "sm120-ddtree"


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def per_step(rows: list[dict[str, Any]], figure: str) -> dict[str, dict[str, float]]:
    """One figure by server, then by context and streams."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row["label"], {})[f"{row['context']}x{row['concurrency']}"] = row[figure]
    return found


def slot_gains(slots: list[dict[str, Any]], steps: list[dict[str, Any]], layers: int) -> dict[str, dict[str, float]]:
    """Percent of a call, and of the fork's whole step, that contexts in neighbouring slots save, by context and requests."""
    us = {(row["context"], row["bs"], row["run"]): row["us"] for row in slots}
    calls = {(context, batch): us[context, batch, 1] for context, batch, run in us if run == "whole"}
    saved = {key: call - us[*key, "whole"] for key, call in calls.items()}
    whole = {(row["context"], row["concurrency"]): row["step_us"] for row in steps if row["label"] == FORK}
    return {
        "percent_of_a_call": {f"{c}x{b}": round(100 * saved[c, b] / calls[c, b], 1) for c, b in calls},
        "percent_of_a_step": {
            f"{c}x{b}": round(100 * layers * saved[c, b] / whole[c, b], 1) for c, b in calls if (c, b) in whole
        },
    }


def gather(folder: Path) -> dict[str, Any]:
    """The content of host_path.json."""
    kernel = KERNEL_RESULTS / folder.name
    calls, slots, steps = read(kernel / "step.json"), read(kernel / "slots.json"), read(folder / "steps.json")
    (line,) = (text for text in read(folder / "decode.json")["env"]["start_up"][FORK] if "workspace" in text)
    sizes = re.search(r"workspace (\d+) bytes, compact mask (\d+) bytes", line)
    layers = re.search(r"(\d+) layers", steps["env"]["model"])
    assert sizes and layers, line
    return {
        "env": {"decode": steps["env"], "kernel": calls["env"]},
        "call_us": round(calls["host_prepared_us"], 1),
        "call_of_which_launches_us": round(calls["host_launches_us"], 1),
        "step_host_us": per_step(steps["rows"], "step_host_us"),
        "launches_per_step": per_step(steps["rows"], "launches_per_step"),
        "copies_per_step": per_step(steps["rows"], "copies_per_step"),
        "workspace_bytes_bs8_t9": int(sizes[1]),
        "mask_bytes_bs8_t9": int(sizes[2]),
        "defrag": slot_gains(slots["rows"], steps["rows"], int(layers[1])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.resolve()
    (folder / "host_path.json").write_text(json.dumps(gather(folder), indent=1) + "\n")


if __name__ == "__main__":
    main()
