# SPDX-License-Identifier: Apache-2.0
"""Measures what the sm_120 model needs: cycles of a step with its keys in the L2, and the cost of a call.

python benchmarks/bench_step.py OUT.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from bench_mla_tree_verify import DIM_QK, Cell, copy_bandwidth, environment, make_inputs, median_us, ours

KEYS_PER_STEP = 32
# One block of 32 rows: as many splits as multiprocessors, one block on each.
SHORT, LONG = Cell(1, 8, 4, 101_376), Cell(1, 8, 4, 202_752)


def clock_mhz(pool: torch.Tensor, slots: torch.Tensor) -> float:
    """The multiprocessor clock while the kernel runs."""
    call = ours(make_inputs(LONG, pool, slots)[:1])[0]
    for _ in range(20_000):
        call()
    query = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    clock = float(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])
    torch.cuda.synchronize()
    return clock


def host_us(pool: torch.Tensor, slots: torch.Tensor) -> float:
    """Microseconds that a call keeps Python busy, outside a graph."""
    call = ours(make_inputs(Cell(1, 8, 9, 64), pool, slots)[:1])[0]
    for _ in range(200):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(50):
            call()
        times.append((time.perf_counter() - begin) / 50 * 1e6)
        torch.cuda.synchronize()
    return sorted(times)[len(times) // 2]


def main() -> None:
    torch.manual_seed(0)
    pool = torch.empty(4096, 1, DIM_QK, dtype=torch.bfloat16, device="cuda").normal_()
    slots = torch.randint(1, len(pool), (LONG.context * 8,), device="cuda")  # 4.7 MB of keys: they stay in the L2
    times = [median_us(ours(make_inputs(cell, pool, slots)[:6])) for cell in (SHORT, LONG)]
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    steps = (LONG.context - SHORT.context) / KEYS_PER_STEP / num_sms
    clock = clock_mhz(pool, slots)
    result = {
        "env": environment(copy_bandwidth()),
        "us": times,
        "clock_mhz": clock,
        "cycles_per_step": (times[1] - times[0]) / steps * clock,
        "fixed_us": 2 * times[0] - times[1],
        "host_us": host_us(pool, slots),
    }
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1))
    print(json.dumps({key: value for key, value in result.items() if key != "env"}))


if __name__ == "__main__":
    main()
