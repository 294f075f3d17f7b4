# SPDX-License-Identifier: Apache-2.0
"""What it costs an allocation to keep the free KV slots in order, and how long the order makes runs.

    build/env/bin/python scripts/bench/allocation.py OUT.json [--slots 120000] [--steps 20000] [--batch 8]

Texts of random lengths come and go on SGLang's own allocator, as under DDTREE: each step reserves two verify windows for
every text and commits three tokens. Once with the free list as SGLang keeps it and once sorted now and then, as the fork
does. The pool must be used up several times before the two differ. An allocation is taking the slots of a step and writing
them to the texts' rows; what the order costs is spread over the steps between two sorts. Times are microseconds, on the
host alone and until the device is done.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.sm120.defrag import CHUNK, LOOKAHEAD, MEASURE_EVERY
from sglang.srt.sm120.kv_extents import breaks_by_chunk, sort_free
from sglang.srt.speculative.ddtree_args import DEFAULT_BUDGET

WINDOW, ACCEPTED = DEFAULT_BUDGET + 1, 3
LONGEST_PROMPT, LONGEST_ANSWER = 8192, 2048


class Texts:
    """A batch of texts on one pool; one that ends is followed by another.

    Args:
        slots: of the pool.
        batch: texts at a time.
        longest: tokens of the longest prompt and of the longest answer.
    """

    def __init__(self, slots: int, batch: int, longest: tuple[int, int], device: str) -> None:
        self._chance, self._longest, self._device = random.Random(0), longest, device
        self.allocator = TokenToKVPoolAllocator(slots, torch.int64, device, None, need_sort=False)
        self._table = torch.zeros(batch, sum(longest) + 4 * WINDOW, dtype=torch.int32, device=device)
        self._lengths, self._reserved, self._ends = [0] * batch, [0] * batch, [0] * batch

    def end_and_begin(self) -> None:
        """Free the texts that are complete, and give others their place."""
        for row, end in enumerate(self._ends):
            if self._lengths[row] >= end:
                self.allocator.free(self._table[row, : self._reserved[row]].clone())
                prompt, answer = (self._chance.randint(1, most) for most in self._longest)
                self._lengths[row], self._ends[row] = prompt, prompt + answer
                self._table[row, :prompt] = self.allocator.alloc(prompt).to(torch.int32)
                self._reserved[row] = prompt

    def allocate(self) -> None:
        """What a step does: slots up to two windows behind each text, written to its row."""
        wanted = [max(held, length + 2 * WINDOW) for held, length in zip(self._reserved, self._lengths, strict=True)]
        places = [range(held, end) for held, end in zip(self._reserved, wanted, strict=True)]
        rows = [row for row, positions in enumerate(places) for _ in positions]
        where = torch.tensor([rows, [position for positions in places for position in positions]])
        row, position = where.to(self._device, non_blocking=True)
        self._table[row, position] = self.allocator.alloc(len(rows)).to(torch.int32)
        self._reserved = wanted

    def commit(self) -> None:
        """Each text grows by what a step accepts."""
        self._lengths = [length + ACCEPTED for length in self._lengths]

    def mean_run(self) -> float:
        """Neighbouring positions whose slots are neighbours, on average."""
        lengths = torch.tensor(self._lengths, device=self._device)
        ends = int(breaks_by_chunk(self._table[:, : max(self._lengths)], lengths, CHUNK).sum())
        return sum(self._lengths) / (ends + len(self._lengths))

    def held(self) -> int:
        """Slots that the texts hold."""
        return sum(self._reserved)


def timed(work: Callable[[], None], device: str) -> tuple[float, float]:
    """Microseconds until `work` returns, and until the device is done with it."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    wait()
    begin = time.perf_counter()
    work()
    returned = time.perf_counter()
    wait()
    return 1e6 * (returned - begin), 1e6 * (time.perf_counter() - begin)


def simulate(texts: Texts, steps: int, ordered: bool, device: str) -> dict[str, Any]:
    """Medians over `steps`: an allocation and the share of a sort in it [host, total], and the mean run length."""
    allocations, sorts, runs = [], [], []
    for step in range(steps):
        texts.end_and_begin()
        if ordered and step % MEASURE_EVERY == 1:
            sorts.append(timed(lambda: sort_free(texts.allocator.free_pages[:LOOKAHEAD]), device))
        allocations.append(timed(texts.allocate, device))
        texts.commit()
        if step % MEASURE_EVERY == 2:
            runs.append(texts.mean_run())
    late = runs[len(runs) // 2 :]  # the pool begins in order
    return {
        "allocation_us": [round(median(column), 2) for column in zip(*allocations, strict=True)],
        "sort_us": [round(median(column) / MEASURE_EVERY, 2) for column in zip(*sorts, strict=True)],
        "mean_run": round(sum(late) / len(late), 1),
    }


def median(values: tuple[float, ...]) -> float:
    return sorted(values)[len(values) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--slots", type=int, default=120_000)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    card = torch.cuda.get_device_name() if device == "cuda" else None
    result: dict[str, Any] = {"card": card, "slots": args.slots, "steps": args.steps, "batch": args.batch}
    for name, ordered in (("stock", False), ("ordered", True)):
        texts = Texts(args.slots, args.batch, (LONGEST_PROMPT, LONGEST_ANSWER), device)
        result[name] = simulate(texts, args.steps, ordered, device)
    sort, allocation = (result["ordered"][name] for name in ("sort_us", "allocation_us"))
    result["percent"] = [round(100 * part / whole, 1) for part, whole in zip(sort, allocation, strict=True)]
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
