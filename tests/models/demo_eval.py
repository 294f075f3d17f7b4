# SPDX-License-Identifier: Apache-2.0
"""Accept lengths of chain and tree drafting, by a reference that needs no server.

Greedy decoding emits the target's own continuation whatever is drafted, so the continuation is generated once, blocks
are drafted at all of its positions in one pass, and the rounds are then walked through on paper.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from demo_models import Drafter, KVCache, Target
from torch import Tensor

Tree = dict[tuple[int, ...], float]


def grow_tree(log_probs: Sequence[Sequence[float]], budget: int) -> Tree:
    """Best-first tree over per-depth marginals, with the rank-0 spine seeded first.

    Args:
        log_probs: for each depth the log-probabilities by rank, descending.
        budget: number of nodes under the root.

    Returns:
        Nodes in the order of selection: path of ranks from the root, and the sum of its log-probabilities. Equal sums
        are taken in the order of the paths.
    """
    tree: Tree = {}
    total = 0.0
    for depth, row in enumerate(log_probs[:budget], start=1):
        total += row[0]
        tree[(0,) * depth] = total
    heap: list[tuple[float, tuple[int, ...]]] = [(-log_probs[0][0], (0,))]
    while heap and len(tree) < budget:
        cost, path = heapq.heappop(heap)
        tree.setdefault(path, -cost)
        depth, rank = len(path), path[-1]
        row = log_probs[depth - 1]
        if rank + 1 < len(row):
            heapq.heappush(heap, (cost + row[rank] - row[rank + 1], (*path[:-1], rank + 1)))
        if depth < len(log_probs):
            heapq.heappush(heap, (cost - log_probs[depth][0], (*path, 0)))
    return tree


def match_tree(tree: Tree, tokens: Sequence[Sequence[int]], truth: Sequence[int]) -> int:
    """Length of the longest path of `tree` that spells a prefix of `truth`; `tokens` are by depth and rank."""
    path: tuple[int, ...] = ()
    for row, token in zip(tokens, truth, strict=True):
        if token not in row or (*path, row.index(token)) not in tree:
            break
        path = (*path, row.index(token))
    return len(path)


@torch.no_grad()
def generate(target: Target, ids: Tensor, new_tokens: int, temperature: float = 0.0) -> tuple[Tensor, Tensor]:
    """Continues `ids` `[batch, tokens]` by `new_tokens`, greedily at temperature 0.

    Returns the whole sequences and, per sequence, the smallest gap between the best two logits on the way.
    """
    cache = KVCache()
    step, sequences = ids, [ids]
    smallest = torch.full((ids.shape[0],), float("inf"), device=ids.device)
    for _ in range(new_tokens):
        hidden, _ = target(step, cache)
        logits = target.lm_head(hidden[:, -1]).float()
        best, order = logits.topk(2)
        smallest = torch.minimum(smallest, best[:, 0] - best[:, 1])
        step = torch.multinomial((logits / temperature).softmax(-1), 1) if temperature else order[:, :1]
        sequences.append(step)
    return torch.cat(sequences, 1), smallest


@dataclass(frozen=True)
class Rounds:
    """Verify rounds of one prompt: tokens gained (the target's own token included) and number of rounds."""

    tokens: int
    rounds: int

    @property
    def accept_length(self) -> float:
        return self.tokens / self.rounds


def walk_rounds(gains: Sequence[int]) -> Rounds:
    """Plays the rounds over a continuation; `gains[i]` is what a round anchored at its token i gains."""
    position = rounds = 0
    while position < len(gains):
        position += gains[position]
        rounds += 1
    return Rounds(position, rounds)


@torch.no_grad()
def measure(
    target: Target, drafter: Drafter, sequences: Tensor, prompt_length: int, budgets: Sequence[int]
) -> list[dict[int, Rounds]]:
    """Rounds of greedy decoding for each sequence: the chain under key 0, and each tree under its budget.

    `sequences` `[batch, tokens]` are prompts of `prompt_length` tokens with the target's greedy continuations. The last
    `block_size - 1` tokens only serve as the truth for blocks that start before them.
    """
    depth = target.config.block_size - 1
    count, length = sequences.shape
    _, captured = target(sequences)
    anchors = torch.arange(prompt_length, length - depth, device=sequences.device).expand(count, -1)
    log_probs = drafter(target, sequences, captured, anchors).float().log_softmax(-1)
    values, tokens = (part.tolist() for part in log_probs.topk(max(1, *budgets), -1))
    truths = sequences.unfold(1, depth, 1)[:, prompt_length + 1 :].tolist()
    results = []
    for of_sequence in zip(values, tokens, truths, strict=True):
        rounds = {}
        for budget in (0, *budgets):
            gains = [1 + match(*block, budget) for block in zip(*of_sequence, strict=True)]
            rounds[budget] = walk_rounds(gains)
        results.append(rounds)
    return results


def match(
    log_probs: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]], truth: Sequence[int], budget: int
) -> int:
    """Accepted drafted tokens of one block; budget 0 stands for the chain of the best token of each depth."""
    if budget == 0:
        log_probs, tokens = [row[:1] for row in log_probs], [row[:1] for row in tokens]
    return match_tree(grow_tree(log_probs, budget or len(log_probs)), tokens, truth)


def mean_accept_length(results: Sequence[Rounds]) -> float:
    """Tokens gained per round over all prompts."""
    return sum(result.tokens for result in results) / sum(result.rounds for result in results)
