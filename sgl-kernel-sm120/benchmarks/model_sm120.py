# SPDX-License-Identifier: Apache-2.0
"""Models mla_tree_verify on sm_120 cards from its machine code and from what was measured on an H200.

    python benchmarks/model_sm120.py [--step results/h200/step.json] [--json OUT.json]

Nothing here was run on an sm_120 card: every figure is modelled. Both GPUs execute the same instructions per step but for
the rate of the matrix products, so the H200's cycles of a step are taken apart into the two phases of products and the
rest (exponentials, barrier, waiting), and a phase takes the longer of its H200 cycles and its products on the new card.
`most` adds the slower products without any overlap, `least` overlaps everything. All with blocks of 32 rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "build" / "site"), str(ROOT / "build_tools")]

import toolchain

KEYS_PER_STEP, BLOCK_ROWS, ROW_BYTES = 32, 32, 1152
FLOP_PER_ROW_AND_KEY = 2 * (576 + 512)
DRAM_EFFICIENCY = 0.92
H200_PRODUCT_CYCLES = 6.5  # of one m16n8k16 on one of the four schedulers, through mma.sync
# Share of a step in each phase on the H200, by stall samples of the step loop.
SCORES, VALUES = 551 / 1682, 546 / 1682
SCORE_PRODUCTS, VALUE_PRODUCTS = 72, 64  # per scheduler and step: two warps of 36 and 32


@dataclass(frozen=True)
class Card:
    """Public figures of a card; product_cycles as H200_PRODUCT_CYCLES."""

    name: str
    multiprocessors: int
    clock_ghz: float
    dram_bytes_per_second: float
    product_cycles: float

    @property
    def dram_cycles(self) -> float:
        """Cycles in which the DRAM delivers the keys of one step to every multiprocessor."""
        per_multiprocessor = self.dram_bytes_per_second * DRAM_EFFICIENCY / self.multiprocessors
        return KEYS_PER_STEP * ROW_BYTES / per_multiprocessor * self.clock_ghz * 1e9


CARDS = (
    Card("RTX PRO 6000", 188, 2.4, 1.792e12, 16),
    Card("RTX 5090", 170, 2.407, 1.792e12, 32),
    Card("GB10", 48, 2.14, 0.237e12, 16),
)
SHAPES = ((8, 9), (8, 12), (8, 16), (8, 17), (16, 9), (64, 9))


def step_cycles(card: Card, measured: float) -> dict[str, float]:
    """Modelled cycles of a step of one block: most, likely and least."""
    scores = max(measured * SCORES, SCORE_PRODUCTS * card.product_cycles)
    values = max(measured * VALUES, VALUE_PRODUCTS * card.product_cycles)
    products = SCORE_PRODUCTS + VALUE_PRODUCTS
    return {
        "most": measured + products * (card.product_cycles - H200_PRODUCT_CYCLES),
        "likely": measured * (1 - SCORES - VALUES) + scores + values,
        "least": max(measured, products * card.product_cycles),
    }


def shape_figures(card: Card, cycles: float, heads: int, tokens: int) -> tuple[float, float]:
    """(share of the DRAM's rate, useful TFLOPS) at long contexts, from cycles per step."""
    rows = heads * tokens
    blocks = -(-rows // BLOCK_ROWS)
    per_step = max(blocks * cycles, card.dram_cycles)  # blocks of one request read each key from DRAM once
    flop = rows * KEYS_PER_STEP * FLOP_PER_ROW_AND_KEY
    return card.dram_cycles / per_step, flop * card.multiprocessors * card.clock_ghz * 1e9 / per_step / 1e12


def model(measured: float) -> list[dict[str, Any]]:
    """One entry per card and shape."""
    result = []
    for card in CARDS:
        cycles = step_cycles(card, measured)
        for heads, tokens in SHAPES:
            entry: dict[str, Any] = {"card": asdict(card), "heads": heads, "tokens": tokens, "cycles": cycles}
            for name, value in cycles.items():
                share, tflops = shape_figures(card, value, heads, tokens)
                entry[f"{name}_dram_share"], entry[f"{name}_tflops"] = share, tflops
            result.append(entry)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=Path, default=Path(__file__).parent / "results" / "h200" / "step.json")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    toolchain.build_in_place(ROOT, ROOT / "build" / "site")
    from sgl_kernel_sm120 import _library, inspect

    for kernel in inspect.read_library(_library.LIBRARY_PATH):
        if kernel.name == "split_kernel_32" and 2 * kernel.loop["HMMA"] != SCORE_PRODUCTS + VALUE_PRODUCTS:
            sys.exit(f"{kernel.architecture}: expected {SCORE_PRODUCTS + VALUE_PRODUCTS} products, got {kernel.loop}")
    measured = json.loads(options.step.read_text())["cycles_per_step"]
    print(f"H200, measured: {measured:.0f} cycles per step of {KEYS_PER_STEP} keys, keys in the L2, one block per SM")
    entries = model(measured)
    for entry in entries:
        card, cycles = entry["card"]["name"], entry["cycles"]
        if (entry["heads"], entry["tokens"]) == SHAPES[0]:
            budget = next(c.dram_cycles for c in CARDS if c.name == card)
            print(
                f"{card}, modelled: {cycles['likely']:.0f} cycles per step (least {cycles['least']:.0f}, most "
                f"{cycles['most']:.0f}); DRAM delivers one in {budget:.0f}"
            )
        print(
            f"  {card}, modelled, H {entry['heads']:2} T {entry['tokens']:2}: "
            f"{100 * entry['likely_dram_share']:4.0f} % of DRAM (at most-cycles {100 * entry['most_dram_share']:4.0f} %), "
            f"{entry['likely_tflops']:4.0f} TFLOPS (at most-cycles {entry['most_tflops']:4.0f})"
        )
    if options.json:
        options.json.write_text(json.dumps(entries, indent=1))


if __name__ == "__main__":
    main()
