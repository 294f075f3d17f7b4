# SPDX-License-Identifier: Apache-2.0
"""Times mla_tree_verify by how the slots of a request lie in the pool, on the current GPU.

    python benchmarks/bench_slots.py OUT.json [--contexts 16384,65536,200000] [--batches 1,8]

Run length n: the slots come in runs of n consecutive numbers that lie anywhere, in any order; whole: each request is one
run. The same keys are read in every case. Numbers are microseconds per call, taken as bench_mla_tree_verify.py does;
`gain` is what whole saves of a call with runs of one slot.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from bench_mla_tree_verify import DIM_QK, Cell, Inputs, copy_bandwidth, environment, make_inputs, median_us, ours

CONTEXTS = (16_384, 65_536, 200_000)
BATCHES = (1, 8)
RUNS = (1, 4, 16, 64, None)  # None: whole
HEADS = 8
TREE = 9
# Slots that several calls of a graph together need so that their keys come from DRAM.
MIN_SLOTS = 1_800_000


def slot_order(num_slots: int, run: int) -> torch.Tensor:
    """int64 [at most num_slots]: the slots from 1 on in runs of `run` consecutive ones, the runs in random order."""
    starts = torch.randperm(num_slots // run, generator=torch.Generator().manual_seed(0)) * run + 1
    return (starts[:, None] + torch.arange(run)).flatten()


def mean_run(inputs: Inputs) -> float:
    """Mean run length of the prefixes of a call, as found in its slots."""
    prefix = inputs.kv_indices.view(inputs.cell.batch, inputs.cell.context)
    ends = int((prefix[:, 1:] != prefix[:, :-1] + 1).sum())
    return prefix.numel() / (ends + inputs.cell.batch)


def measure(cell: Cell, pool: torch.Tensor, run: int | None) -> dict[str, Any]:
    """One row of the table."""
    order = slot_order(len(pool) - 1, run or cell.context).to(pool.device)
    inputs = make_inputs(cell, pool, order) if run is not None else make_whole(cell, pool, order)
    return {
        "bs": cell.batch,
        "context": cell.context,
        "run": "whole" if run is None else run,
        "mean_run": mean_run(inputs[0]),
        "us": median_us(ours(inputs)),
    }


def make_whole(cell: Cell, pool: torch.Tensor, order: torch.Tensor) -> list[Inputs]:
    """Inputs whose prefixes are whole runs of `order`; the trees have the last slots of the pool."""
    whole = make_inputs(Cell(cell.batch, cell.heads, 0, cell.context), pool, order)
    q = torch.randn(cell.batch * cell.tokens, cell.heads, DIM_QK, device=pool.device).to(torch.bfloat16)
    tree = torch.arange(len(pool) - cell.batch * cell.tokens, len(pool), device=pool.device)
    return [Inputs(cell, q, pool, x.kv_indptr, x.kv_indices, tree) for x in whole]


def print_table(rows: list[dict[str, Any]]) -> None:
    names = ["whole" if run is None else str(run) for run in RUNS]
    print("bs  context   " + "".join(f"{name:>9}" for name in names) + "    gain")
    for batch, context in dict.fromkeys((row["bs"], row["context"]) for row in rows):
        us = {str(row["run"]): row["us"] for row in rows if (row["bs"], row["context"]) == (batch, context)}
        gain = 100 * (1 - us["whole"] / us["1"])
        print(f"{batch:<3} {context:<9} " + "".join(f"{us[name]:9.1f}" for name in names) + f"{gain:7.1f}%")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    options = parser.parse_args()
    contexts = [int(text) for text in options.contexts.split(",")]
    batches = [int(text) for text in options.batches.split(",")]
    torch.manual_seed(0)
    num_slots = max(MIN_SLOTS, max(batches) * (max(contexts) + TREE) + max(contexts))
    pool = torch.empty(num_slots + 1, 1, DIM_QK, dtype=torch.bfloat16, device="cuda")
    for begin in range(0, len(pool), 200_000):
        pool[begin : begin + 200_000].normal_()
    bandwidth = copy_bandwidth()
    rows = []
    for batch in batches:
        for context in contexts:
            rows += [measure(Cell(batch, HEADS, TREE, context), pool, run) for run in RUNS]
            result = {"env": environment(bandwidth), "heads": HEADS, "tree": TREE, "rows": rows}
            options.out.write_text(json.dumps(result, indent=1))
    print_table(rows)


if __name__ == "__main__":
    main()
