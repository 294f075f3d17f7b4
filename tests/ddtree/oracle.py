# SPDX-License-Identifier: Apache-2.0
"""Plain Python counterparts of the tree builder, the walk and the sampler; they share no code with them."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Node:
    """A tree node; `children` are rows in rank order."""

    parent: int
    depth: int
    rank: int
    score: np.float32
    children: list[int] = field(default_factory=list)


def best_first(log_probs: np.ndarray, budget: int) -> list[Node]:
    """Tree of at most `budget` nodes under the root from fp32 log-probabilities [L, K], by a heap; index is the row.

    A rank counts up to the first NaN or -inf of its depth.
    """
    max_depth, max_rank = log_probs.shape
    usable = [0] * max_depth
    for depth in range(max_depth):
        while usable[depth] < max_rank and log_probs[depth, usable[depth]] > -math.inf:
            usable[depth] += 1

    nodes = [Node(-1, 0, 0, np.float32(0.0))]
    heap: list[tuple[float, int, int, int]] = []

    def add(parent: int, rank: int) -> int:
        depth = nodes[parent].depth + 1
        gain = log_probs[depth - 1, rank] if rank < usable[depth - 1] else np.float32(-math.inf)
        nodes.append(Node(parent, depth, rank, np.float32(nodes[parent].score + gain)))
        nodes[parent].children.append(len(nodes) - 1)
        return len(nodes) - 1

    def offer(parent: int, rank: int) -> None:
        depth = nodes[parent].depth + 1
        if depth <= max_depth and rank < usable[depth - 1]:
            score = np.float32(nodes[parent].score + log_probs[depth - 1, rank])
            if score > -math.inf:
                heapq.heappush(heap, (-float(score), depth, parent, rank))

    tip = 0
    for _ in range(min(max_depth, budget)):
        tip = add(tip, 0)
    for row in range(len(nodes)):
        offer(row, 1)
    while heap and len(nodes) <= budget:
        _, _, parent, rank = heapq.heappop(heap)
        row = add(parent, rank)
        offer(parent, rank + 1)
        offer(row, 0)
    return nodes


def walk(parents: list[int], tokens: list[int], draws: list[int]) -> tuple[list[int], list[int]]:
    """Accepted rows with the root, and the tokens drawn at them (the last is the bonus)."""
    rows, out = [0], []
    while True:
        drawn = draws[rows[-1]]
        out.append(drawn)
        matches = [row for row in range(len(parents)) if parents[row] == rows[-1] and tokens[row] == drawn]
        if not matches:
            return rows, out
        rows.append(matches[0])


def distribution(
    logits: np.ndarray, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Exact probabilities [V] of one draw in float64.

    A token stays when fewer than top_k tokens and a mass of at most top_p are more likely, and when it has at least
    min_p of the best one's probability; all three look at the distribution after temperature.
    """
    weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    probs = weights / weights.sum()
    kept = np.zeros_like(probs)
    for token, prob in enumerate(probs):
        above = probs[probs > prob]
        if (top_k is None or len(above) < top_k) and above.sum() <= top_p and prob >= min_p * probs.max():
            kept[token] = prob
    return kept / kept.sum()
