# SPDX-License-Identifier: Apache-2.0
"""Draws the benchmark's figure: microseconds over context for one shape, both axes logarithmic.

python benchmarks/draw.py results/h200/mla_tree_verify.json OUT.svg [--shape 1x8x9]
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 780, 420, 90, 40, 230, 50
LINES = (
    ("us", "mla_tree_verify", "#0b7a3b", 3),
    ("fa2_us", "FlashInfer fa2 (no tree)", "#1f5fbf", 1.5),
    ("fa3_us", "FlashInfer fa3, wgmma (no tree)", "#8a4fbf", 1.5),
    ("flashmla_us", "FlashMLA, wgmma (no tree)", "#c46a00", 1.5),
    ("triton_us", "SGLang Triton", "#b3202a", 1.5),
    ("floor_us", "keys / copy bandwidth", "#777777", 1),
)


class Axes:
    """Maps contexts and microseconds to the canvas."""

    def __init__(self, contexts: list[int], times: list[float]) -> None:
        self.x_range = math.log10(min(contexts)), math.log10(max(contexts))
        self.y_range = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))

    def x(self, context: float) -> float:
        low, high = self.x_range
        return LEFT + (math.log10(context) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, time: float) -> float:
        low, high = self.y_range
        return HEIGHT - BOTTOM - (math.log10(time) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def text(x: float, y: float, content: str, anchor: str = "start", color: str = "#222222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{content}</text>'


def draw(rows: list[dict[str, Any]], title: str) -> str:
    """The figure as SVG."""
    contexts = [row["context"] for row in rows]
    axes = Axes(contexts, [row[key] for row in rows for key, *_ in LINES if row.get(key)])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 22, title),
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "prefix length, tokens", "middle"),
    ]
    for power in range(axes.y_range[0], axes.y_range[1] + 1):
        y = axes.y(10**power)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        parts.append(text(LEFT - 8, y + 4, f"{10**power:,g} us", "end"))
    for context in contexts:
        label = f"{context // 1000}k" if context % 1024 else f"{context // 1024}k"
        parts.append(text(axes.x(context), HEIGHT - BOTTOM + 18, label, "middle"))
    ends = []
    for key, name, color, width in LINES:
        points = [(axes.x(row["context"]), axes.y(row[key])) for row in rows if row.get(key)]
        if points:
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="{width}"/>')
            ends.append((points[-1][1], name, color))
    bottom = -math.inf
    for y, name, color in sorted(ends):
        bottom = max(y, bottom + 15)  # labels never overlap
        parts.append(text(WIDTH - RIGHT + 8, bottom + 4, name, color=color))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="1x8x9", help="requests x heads x tree tokens")
    options = parser.parse_args()
    result = json.loads(options.results.read_text())
    batch, heads, tokens = map(int, options.shape.split("x"))
    rows = [row for row in result["rows"] if (row["bs"], row["heads"], row["tree"]) == (batch, heads, tokens)]
    title = f"One attention layer on {result['env']['gpu']}: {batch} request, {heads} heads, {tokens} tree tokens"
    options.out.write_text(draw(sorted(rows, key=lambda row: row["context"]), title))


if __name__ == "__main__":
    main()
