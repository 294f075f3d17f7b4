# SPDX-License-Identifier: Apache-2.0
"""Gaps between the parts of streamed answers, to compare servers that differ in one setting.

    build/env/bin/python scripts/bench/gaps.py OUT.json off http://127.0.0.1:30000 [--streams 8] [--prompt 16384]
    build/env/bin/python scripts/bench/gaps.py OUT.json auto http://127.0.0.1:30001 [--streams 8] [--prompt 16384]

Each call measures one server and adds its row; the first row is what the others are compared with. The second server is
started with SGLANG_SM120_DEFRAG=auto, say, and both with --enable-metrics. Before the measurement short answers of many
lengths cut the free slots into pieces. A step gives at most one part, so that a gap is what a client waits for a step.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import requests

WARM_PARTS = 20  # of a stream, while others still read their prompts
CUTTING_REQUESTS, CUTTING_TOKENS = 200, 60
SERIES = ("sm120_defrag_rows_moved_total", "sm120_kv_run_length")


def answer(url: str, ids: list[int], tokens: int) -> list[float]:
    """Arrival times of the parts of one answer, in seconds."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
    with requests.post(f"{url}/generate", json=body, stream=True, timeout=900) as response:
        response.raise_for_status()
        return [time.perf_counter() for line in response.iter_lines() if line.startswith(b"data: {")]


def gaps_of(streams: list[list[float]]) -> list[float]:
    """Milliseconds between neighbouring parts, from when all streams run until the first of them ends."""
    begin, end = max(times[WARM_PARTS] for times in streams), min(times[-1] for times in streams)
    return [
        1e3 * (after - before)
        for times in streams
        for before, after in pairwise(times)
        if begin <= before and after <= end
    ]


def summarise(gaps: list[float]) -> dict[str, float]:
    """Median, 99th percentile and longest gap in milliseconds."""
    ordered = sorted(gaps)
    at = {"median": len(ordered) // 2, "p99": len(ordered) * 99 // 100, "longest": len(ordered) - 1}
    return {f"{name}_ms": round(ordered[index], 2) for name, index in at.items()} | {"gaps": len(ordered)}


def growth(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Percent by which each row's gaps are longer than the first row's."""
    first, *others = rows
    names = [name for name in first if name.endswith("_ms")]
    return {row["label"]: {name: round(100 * (row[name] / first[name] - 1), 1) for name in names} for row in others}


def measure(url: str, streams: int, prompt: int, tokens: int) -> dict[str, Any]:
    """The row of one server."""
    chance = random.Random(0)
    cutting = [
        ([chance.randint(4, 90) for _ in range(chance.randint(4, 40))], chance.randint(1, CUTTING_TOKENS))
        for _ in range(CUTTING_REQUESTS)
    ]
    prompts = [[chance.randint(4, 90) for _ in range(prompt)] for _ in range(streams)]
    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(lambda job: answer(url, *job), cutting))
        list(
            pool.map(lambda ids: answer(url, ids, 1), prompts)
        )  # reads the prompts, so that the streams begin together
        found = list(pool.map(lambda ids: answer(url, ids, tokens), prompts))
    served = requests.get(f"{url}/metrics", timeout=60).text
    values = {name: re.search(rf"^sglang:{name}{{[^}}]*}} (\S+)", served, re.MULTILINE) for name in SERIES}
    return summarise(gaps_of(found)) | {name: float(value[1]) for name, value in values.items() if value}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("label")
    parser.add_argument("url")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=16_384)
    parser.add_argument("--tokens", type=int, default=1024)
    args = parser.parse_args()
    result = json.loads(args.out.read_text()) if args.out.exists() else {"rows": []}
    row = {"label": args.label, "streams": args.streams, "prompt": args.prompt}
    result["rows"].append(row | measure(args.url, args.streams, args.prompt, args.tokens))
    result["growth_percent"] = growth(result["rows"])
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
