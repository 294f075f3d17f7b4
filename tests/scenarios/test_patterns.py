# SPDX-License-Identifier: Apache-2.0
"""Every accept pattern, forced: accept lengths from 0 to the depth, along the spine and leaving it at every depth."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from scenarios.patterns import ALL_PATTERNS, DEPTH, Pattern, propose
from sglang.srt.speculative.ddtree_tree import TreeBuffers, build_tree
from sglang.srt.speculative.ddtree_walk import WalkBuffers, accepted_slots, walk_tree

VOCAB, BUDGET, STEPS = 101, 16, 60


def next_token(position: int, token: int) -> int:
    """The target: a fixed rule."""
    return (token * 31 + position * 17 + 5) % VOCAB


def plain_text(first: int, length: int) -> list[int]:
    text = [first]
    while len(text) < length:
        text.append(next_token(len(text) - 1, text[-1]))
    return text


def test_there_is_a_pattern_for_every_length_and_branch() -> None:
    assert len(ALL_PATTERNS) == len(set(ALL_PATTERNS)) == 36
    assert {pattern.accepted for pattern in ALL_PATTERNS} == set(range(DEPTH + 1))
    assert {pattern.branch for pattern in ALL_PATTERNS} == set(range(DEPTH + 1))


class Decoder:
    """DDTREE's step on a batch of texts: build, verify with the rule above, walk, commit to a pool of slots."""

    def __init__(self, firsts: list[int], seed: int) -> None:
        self.texts = [[first] for first in firsts]
        self.accepted: list[list[int]] = [[] for _ in firsts]
        self.chance = random.Random(seed)
        self.tree = TreeBuffers.allocate(len(firsts), BUDGET, DEPTH, "cpu")
        self.walk = WalkBuffers.allocate(len(firsts), DEPTH, "cpu")
        self.pool = torch.full((len(firsts) * 1000,), -1)
        order = self.chance.sample(range(len(self.pool)), len(self.pool))
        self.slots = torch.tensor(order).view(len(firsts), -1)

    def step(self, patterns: list[Pattern]) -> None:
        bs, width = len(self.texts), self.tree.width
        committed = torch.tensor([len(text) - 1 for text in self.texts])
        roots = torch.tensor([text[-1] for text in self.texts])
        wanted = [plain_text(text[0], len(text) + DEPTH)[len(text) :] for text in self.texts]
        proposals = [propose(pattern, tokens, VOCAB) for pattern, tokens in zip(patterns, wanted, strict=True)]
        log_probs, token_ids = (torch.stack(part) for part in zip(*proposals, strict=True))
        build_tree(log_probs, token_ids, roots, committed, self.tree)
        window = torch.stack([self.slots[b, int(start) : int(start) + width] for b, start in enumerate(committed)])
        self.pool[window] = self.tree.token_ids[:bs]
        draws = torch.tensor(
            [
                [next_token(int(self.tree.positions[b, row]), int(self.tree.token_ids[b, row])) for row in range(width)]
                for b in range(bs)
            ]
        )
        walk_tree(draws, self.tree, self.walk)
        destinations, sources = accepted_slots(window, self.walk.accept_index[:bs])
        self.pool[destinations.flatten()] = self.pool[sources.flatten()]
        for b in range(bs):
            length = int(self.walk.accept_lens[b])
            self.texts[b] += self.walk.out_tokens[b, :length].tolist()
            self.accepted[b].append(length - 1)
            kept = self.pool[self.slots[b, : len(self.texts[b]) - 1]].tolist()
            assert kept == self.texts[b][:-1], "the cache holds the text up to the new root, in its order"


@pytest.mark.scenario("BUG-021")
@pytest.mark.parametrize("pattern", ALL_PATTERNS, ids=lambda pattern: f"{pattern.accepted}-branch-{pattern.branch}")
def test_a_step_accepts_the_forced_path(pattern: Pattern) -> None:
    decoder = Decoder([3, 50], seed=pattern.accepted)
    for _ in range(4):
        decoder.step([pattern, pattern])
        for b in range(2):
            rows = decoder.walk.accept_index[b, : pattern.accepted + 1].tolist()
            on_spine = pattern.accepted if pattern.branch == 0 else pattern.branch - 1
            assert rows[: on_spine + 1] == list(range(on_spine + 1))
            assert all(row > DEPTH for row in rows[on_spine + 1 :]), "behind the branch no row is the spine's"
    assert decoder.accepted == [[pattern.accepted] * 4] * 2
    assert decoder.texts == [plain_text(text[0], len(text)) for text in decoder.texts]


@pytest.mark.scenario("BUG-021")
@pytest.mark.scenario("BUG-026")
@pytest.mark.parametrize("seed", range(3))
def test_mixed_batches_write_the_plain_text(seed: int) -> None:
    """Each request follows a pattern of its own in every step, and all pairs of neighbours occur."""
    firsts = [3, 50, 77, 9, 20]
    decoder = Decoder(firsts, seed)
    expected: list[list[int]] = [[] for _ in firsts]
    for _ in range(STEPS):
        patterns = [decoder.chance.choice(ALL_PATTERNS) for _ in firsts]
        decoder.step(patterns)
        for forced, pattern in zip(expected, patterns, strict=True):
            forced.append(pattern.accepted)
    assert decoder.accepted == expected
    assert decoder.texts == [plain_text(text[0], len(text)) for text in decoder.texts]
    assert set(itertools.chain(*expected)) == set(range(DEPTH + 1))
