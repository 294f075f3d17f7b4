# SPDX-License-Identifier: Apache-2.0
"""Draws the figure of README.md from the results of scripts/bench: tokens per second of one stream over context.

    build/env/bin/python scripts/bench/draw.py scripts/bench/results/h200/decode.json

The figure lies beside the results, with the suffix .svg.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 780, 340, 60, 84, 20, 52
BAR, GAP = 62, 6
SERVERS = (("stock-dflash", "SGLang 0.5.17, DFLASH", "#8b949e"), ("sm120-ddtree", "this fork, DDTREE", "#0b7a3b"))


def text(x: float, y: float, content: str, anchor: str = "middle", color: str = "#222222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{content}</text>'


def bar(x: float, height: float, content: str, color: str) -> list[str]:
    top = HEIGHT - BOTTOM - height
    box = f'<rect x="{x:.1f}" y="{top:.1f}" width="{BAR}" height="{height:.1f}" fill="{color}"/>'
    return [box, text(x + BAR / 2, top - 6, content)]


def draw(results: dict[str, Any]) -> str:
    """The figure as SVG: for each context a bar a server, of single streams."""
    speeds = {(row["label"], row["context"]): row["tok_s"] for row in results["rows"] if row["concurrency"] == 1}
    contexts = sorted({context for _, context in speeds})
    scale = (HEIGHT - TOP - BOTTOM) / max(speeds.values())
    step = (WIDTH - LEFT - RIGHT) / len(contexts)
    title = f"Decode of one stream, tokens per second, {results['env']['card']}, rank shape of Kimi K2.6"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 22, title, "start"),
    ]
    for number, (_, name, color) in enumerate(SERVERS):
        x = LEFT + number * 200
        parts += [f'<rect x="{x}" y="34" width="12" height="12" fill="{color}"/>', text(x + 18, 45, name, "start")]
    for number, context in enumerate(contexts):
        center = LEFT + (number + 0.5) * step
        for side, (label, _, color) in enumerate(SERVERS):
            if (speed := speeds.get((label, context))) is not None:
                x = center - BAR - GAP / 2 + side * (BAR + GAP)
                parts += bar(x, speed * scale, f"{speed:.1f}", color)
        parts.append(text(center, HEIGHT - BOTTOM + 20, f"{context:,}"))
    parts.append(f'<path d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}" stroke="#222222"/>')
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "tokens of context"))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    results = parser.parse_args().results
    results.with_suffix(".svg").write_text(draw(json.loads(results.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()
