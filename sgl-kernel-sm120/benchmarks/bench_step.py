# SPDX-License-Identifier: Apache-2.0
"""Measures what the sm_120 model needs, cycles of a step with its keys in the L2, and what a call costs the host.

python benchmarks/bench_step.py OUT.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_mla_tree_verify import (
    DIM_QK,
    DIM_V,
    SCALE,
    Cell,
    copy_bandwidth,
    environment,
    make_inputs,
    median_us,
    ours,
)

import sgl_kernel_sm120 as kernels
from sgl_kernel_sm120 import _mla_tree_verify

KEYS_PER_STEP = 32
# Rows of a block: shapes of which an H200 takes one block per multiprocessor, and what the context is a multiple of.
SHAPES = {32: (1, 8, 4, 132), 64: (1, 16, 16, 33)}
STEPS = 24, 48  # of a block


def cells(rows: int, num_sms: int) -> list[Cell]:
    """Two cells whose blocks take the number of steps in STEPS. Errors: SystemExit on a GPU that plans otherwise."""
    batch, heads, tokens, splits = SHAPES[rows]
    plan = kernels.plan(batch, tokens, heads, num_sms)
    if (plan.block_rows, plan.num_splits) != (rows, splits):
        sys.exit(f"blocks of {rows} rows: expected {splits} splits of {rows} rows, got {plan}; choose another shape")
    return [Cell(batch, heads, tokens, steps * KEYS_PER_STEP * splits - tokens) for steps in STEPS]


def clock_mhz(cell: Cell, pool: torch.Tensor, slots: torch.Tensor) -> float:
    """The multiprocessor clock while the kernel runs."""
    call = ours(make_inputs(cell, pool, slots)[:1])[0]
    for _ in range(20_000):
        call()
    card = f"GPU-{torch.cuda.get_device_properties(0).uuid}"  # nvidia-smi knows nothing of CUDA_VISIBLE_DEVICES
    query = ["nvidia-smi", f"--id={card}", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    clock = float(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
    torch.cuda.synchronize()
    return clock


def host_us(call: Callable[[], Any]) -> float:
    """Microseconds that a call keeps Python busy, outside a graph."""
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


def host_times(pool: torch.Tensor, slots: torch.Tensor) -> dict[str, float]:
    """Of mla_tree_verify, of a prepared call, and of the two launches in C that both end in."""
    x = make_inputs(Cell(1, 8, 9, 64), pool, slots)[0]
    workspace = torch.empty(1 << 24, dtype=torch.uint8, device="cuda")
    out = torch.empty(9, 8, DIM_V, dtype=torch.bfloat16, device="cuda")
    tensors = (x.q, x.pool, x.kv_indptr, x.kv_indices, x.qo_indptr, x.out_cache_loc, None, None, out, workspace)
    prepared = kernels.PreparedCall(*tensors, scale=SCALE)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    launch = prepared._launch
    assert launch is not None, "expected CUDA tensors"
    arguments = _mla_tree_verify._ADDRESSES.pack(*addresses) + launch._tail
    stream = torch.cuda.current_stream().cuda_stream
    return {
        "host_us": host_us(lambda: kernels.mla_tree_verify(*tensors, scale=SCALE)),
        "host_prepared_us": host_us(lambda: prepared(x.q, x.pool, out)),
        "host_launches_us": host_us(lambda: launch._function(arguments, stream)),
    }


def main() -> None:
    torch.manual_seed(0)
    pool = torch.empty(4096, 1, DIM_QK, dtype=torch.bfloat16, device="cuda").normal_()
    slots = torch.randint(1, len(pool), (2_000_000,), device="cuda")  # 4.7 MB of keys: they stay in the L2
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    result: dict[str, Any] = {"env": environment(copy_bandwidth()), **host_times(pool, slots), "blocks": {}}
    for rows in SHAPES:
        short, long = cells(rows, num_sms)
        times = [median_us(ours(make_inputs(cell, pool, slots)[:6])) for cell in (short, long)]
        clock = clock_mhz(long, pool, slots)
        result["blocks"][rows] = {
            "us": times,
            "clock_mhz": clock,
            "cycles_per_step": (times[1] - times[0]) / (STEPS[1] - STEPS[0]) * clock,
            "fixed_us": 2 * times[0] - times[1],
        }
    result["cycles_per_step"] = result["blocks"][32]["cycles_per_step"]
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1))
    print(json.dumps({key: value for key, value in result.items() if key != "env"}))


if __name__ == "__main__":
    main()
