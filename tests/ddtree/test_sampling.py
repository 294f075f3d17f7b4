# SPDX-License-Identifier: Apache-2.0
"""Sampled text from a tree is distributed as the target's own, and seeded text is the same text.

The toy target is a second-order Markov chain over five tokens, so that all texts of three tokens can be enumerated. Its
drafter knows only the last token and the depth, hence most texts leave the spine somewhere.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import ddtree_walk
import numpy as np
import oracle
import pytest
import torch
from ddtree_tree import TreeBuffers, build_tree, tree_links
from ddtree_walk import TOP_K_ALL, SamplingRows, WalkBuffers, draw_tokens, walk_logits, walk_tree
from scipy import stats
from verify_penalties import OutputCounts, Penalties, VerifyRows, penalize

VOCAB, DEPTH, BUDGET, LENGTH = 5, 3, 7, 3
START = (2, 4)  # the two tokens before the text
COMMITTED = 20  # position of the last of them
NUM_TEXTS = 6_000

TARGET = torch.randn((VOCAB, VOCAB, VOCAB), generator=torch.Generator().manual_seed(0)) * 1.5
DRAFT = torch.randn((VOCAB, DEPTH, VOCAB), generator=torch.Generator().manual_seed(1)) + TARGET.mean(0)[:, None]


@dataclass
class Filter:
    """Options of one request; `penalty` is frequency, presence, repetition."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    penalty: tuple[float, float, float] | None = None

    def rows(self, n: int, seeds: torch.Tensor | None = None) -> SamplingRows:
        greedy = self.top_k == 1
        return SamplingRows(
            temperatures=torch.full((n, 1), self.temperature),
            top_ks=torch.full((n,), self.top_k or TOP_K_ALL, dtype=torch.int32),
            top_ps=torch.full((n,), self.top_p),
            min_ps=torch.full((n,), self.min_p),
            seeds=seeds,
            all_greedy=greedy,
            any_greedy=greedy,
            need_top_k=self.top_k is not None,
            need_top_p=self.top_p != 1.0,
            need_min_p=self.min_p > 0.0,
        )

    def penalties(self, n: int) -> Penalties:
        frequency, presence, repetition = (torch.full((n, 1), value) for value in self.penalty or (0.0, 0.0, 1.0))
        nothing = torch.zeros((n, 0), dtype=torch.int64)
        return Penalties(frequency, presence, repetition, nothing, nothing, torch.zeros((n, 1)), True, True)

    def exact(self, before: int, last: int, text: tuple[int, ...] = ()) -> np.ndarray:
        """Probabilities of the token after `before`, `last`, of which `text` has been generated."""
        logits = TARGET[before, last].double().numpy().copy()
        if self.penalty is not None:
            frequency, presence, repetition = self.penalty
            for token in set(text):
                logits[token] -= frequency * text.count(token) + presence
                logits[token] *= repetition if logits[token] < 0 else 1 / repetition
        return oracle.distribution(logits, self.temperature, self.top_k, self.top_p, self.min_p)


FILTERS = {
    "temperature 1": Filter(),
    "temperature 0.7": Filter(temperature=0.7),
    "top-k": Filter(top_k=3),
    "top-p": Filter(top_p=0.8),
    "min-p": Filter(min_p=0.2),
    "all": Filter(temperature=1.3, top_k=4, top_p=0.9, min_p=0.1),
    "penalties": Filter(penalty=(0.8, 0.6, 1.5)),
    "all and penalties": Filter(temperature=1.3, top_k=4, top_p=0.9, min_p=0.1, penalty=(1.2, -0.5, 1.3)),
}

# (logits [n * T, V], tree, out) -> None: fills `out`
Walk = Callable[[torch.Tensor, TreeBuffers, WalkBuffers], None]


def generate(walk: Walk, n: int, length: int = LENGTH, budget: int = BUDGET) -> tuple[torch.Tensor, float]:
    """n texts [n, length] by rounds of draft, tree, target and walk; and the mean accept length."""
    tree, out = TreeBuffers.allocate(n, budget, DEPTH, "cpu"), WalkBuffers.allocate(n, DEPTH, "cpu")
    history = torch.zeros((n, 2 + length + DEPTH + 1), dtype=torch.int64)
    history[:, :2] = torch.tensor(START)
    ends = torch.full((n,), 2)
    runs = []
    while int(ends.min()) < 2 + length:
        before, last = history.gather(1, ends[:, None] - 2), history.gather(1, ends[:, None] - 1)
        log_probs, token_ids = DRAFT[last[:, 0]].log_softmax(-1).sort(-1, descending=True)
        build_tree(log_probs, token_ids, last[:, 0], COMMITTED + ends - 2, tree)
        parent_tokens = tree.token_ids.gather(1, tree.parents.clamp(min=0))
        parent_tokens[:, :1] = before
        walk(TARGET[parent_tokens, tree.token_ids].flatten(0, 1), tree, out)
        going = ends < 2 + length
        for j in range(DEPTH + 1):
            emitted = going & (out.accept_lens > j)
            history[emitted, ends[emitted] + j] = out.out_tokens[emitted, j]
        ends += torch.where(going, out.accept_lens, 0)
        runs.append(out.accept_lens[going].double().mean().item())
    return history[:, 2 : 2 + length], sum(runs) / len(runs)


@functools.cache
def text_probabilities(name: str) -> np.ndarray:
    """Exact probabilities of all texts, in the order of their number in base VOCAB."""
    draw = functools.cache(FILTERS[name].exact)
    probabilities = [
        draw(*START)[a] * draw(START[1], a, (a,))[b] * draw(a, b, (a, b))[c]
        for a, b, c in itertools.product(range(VOCAB), repeat=3)
    ]
    return np.array(probabilities)


def p_value(texts: torch.Tensor, name: str) -> float:
    """Chi-square test of texts [n, 3] against the exact distribution; rare texts share a cell, impossible ones fail."""
    numbers = (texts * torch.tensor([VOCAB**2, VOCAB, 1])).sum(1)
    counts = np.bincount(numbers.numpy(), minlength=VOCAB**LENGTH)
    expected = text_probabilities(name) * len(texts)
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5
    cells, expected_cells = counts[~rare], expected[~rare]
    if expected[rare].sum() > 0:
        cells = np.append(cells, counts[rare].sum())
        expected_cells = np.append(expected_cells, expected[rare].sum())
    assert len(cells) >= 5, "too few cells to test anything"
    return float(stats.chisquare(cells, expected_cells).pvalue)


def walk_of(
    sampling: Filter,
    n: int,
    generator: torch.Generator | None = None,
    seeds: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
) -> Walk:
    """A step of the worker for n texts that have nothing generated yet; `visible` replaces the tree's own mask."""
    counts = OutputCounts(n, VOCAB, "cpu")
    slots = torch.arange(n)

    def walk(logits: torch.Tensor, tree: TreeBuffers, out: WalkBuffers) -> None:
        rows = VerifyRows(tree.token_ids, tree.positions, tree.mask if visible is None else visible)
        if sampling.penalty is not None:
            penalize(logits, rows, sampling.penalties(n), counts.take(slots))
        walk_logits(logits, tree, sampling.rows(n, seeds), out, generator=generator)
        counts.add(slots, out.out_tokens, out.accept_lens)

    return walk


def correct_walk(sampling: Filter, seed: int) -> Walk:
    return walk_of(sampling, NUM_TEXTS, torch.Generator().manual_seed(seed))


def committed_counts_walk(sampling: Filter, seed: int) -> Walk:
    """Wrong on purpose: penalties do not see the tokens between the root and a row."""
    blind = torch.zeros((1, BUDGET + 1, BUDGET + 1), dtype=torch.bool)
    return walk_of(sampling, NUM_TEXTS, torch.Generator().manual_seed(seed), visible=blind)


def argmax_path_walk(sampling: Filter, seed: int) -> Walk:
    """Wrong on purpose: argmax along the path, a sample only for the bonus token."""
    generator = torch.Generator().manual_seed(seed)

    def walk(logits: torch.Tensor, tree: TreeBuffers, out: WalkBuffers) -> None:
        n, width = tree.max_bs, tree.width
        positions = torch.zeros(n * width, dtype=torch.int64)
        sampled = draw_tokens(logits, sampling.rows(n * width), positions, generator=generator).view(n, width)
        walk_tree(logits.argmax(-1).view(n, width), tree, out)
        tip = out.accept_lens.long()[:, None] - 1
        out.out_tokens.scatter_(1, tip, sampled.gather(1, out.accept_index.gather(1, tip)))

    return walk


def ratio_walk(sampling: Filter, seed: int) -> Walk:
    """Wrong on purpose: a child is taken with min(1, p / q), q the drafter's softmax, as if it had been sampled."""
    generator = torch.Generator().manual_seed(seed)

    def walk(logits: torch.Tensor, tree: TreeBuffers, out: WalkBuffers) -> None:
        n, width = tree.max_bs, tree.width
        probs = logits.view(n, width, VOCAB).softmax(-1)
        next_child = tree_links(tree.parents)[0]

        def draw(rows: torch.Tensor, path: torch.Tensor, step: int) -> torch.Tensor:
            current = probs.gather(1, rows[:, None, None].expand(-1, 1, VOCAB)).squeeze(1)
            own = torch.multinomial(current, 1, generator=generator).squeeze(1)
            child = next_child.gather(1, rows[:, None]).squeeze(1)
            token = tree.token_ids.gather(1, child.clamp(min=0)[:, None])
            q = DRAFT[tree.token_ids[:, 0], min(step, DEPTH - 1)].softmax(-1).gather(1, token)
            ratio = (current.gather(1, token) / q).squeeze(1)
            taken = (torch.rand(n, generator=generator) < ratio) & (child >= 0)
            return torch.where(taken, token.squeeze(1), own)

        walk_tree(draw, tree, out, n)

    return walk


@functools.cache
def correct_texts(name: str) -> tuple[torch.Tensor, float]:
    return generate(correct_walk(FILTERS[name], seed=7), NUM_TEXTS)


@pytest.mark.parametrize("name", FILTERS)
def test_texts_have_the_exact_distribution(name: str) -> None:
    """BUG-022: a request with temperature is drawn from the target, whatever filters and penalties it has."""
    texts, accept_length = correct_texts(name)
    assert accept_length > 1.5, "the tree must accept drafts for this test to say anything"
    assert p_value(texts, name) > 1e-3


@pytest.mark.parametrize(
    ("wrong", "name"),
    [(argmax_path_walk, "temperature 1"), (ratio_walk, "temperature 1"), (committed_counts_walk, "penalties")],
)
def test_wrong_walks_fail_the_same_test(wrong: Callable[[Filter, int], Walk], name: str) -> None:
    texts, _ = generate(wrong(FILTERS[name], 7), NUM_TEXTS)
    assert p_value(texts, name) < 1e-9


@pytest.mark.parametrize("name", FILTERS)
def test_the_statistic_tells_filters_apart(name: str) -> None:
    texts, _ = correct_texts(name)
    for other in FILTERS.keys() - {name}:
        assert p_value(texts, other) < 1e-9, other


def test_mixed_batch_keeps_greedy_rows_greedy() -> None:
    n = 2_000
    kinds = [Filter(top_k=1), Filter(), Filter(top_p=0.8), Filter(min_p=0.2, temperature=0.7)]
    parts = [kind.rows(n) for kind in kinds]
    params = SamplingRows(
        temperatures=torch.cat([part.temperatures for part in parts]),
        top_ks=torch.cat([part.top_ks for part in parts]),
        top_ps=torch.cat([part.top_ps for part in parts]),
        min_ps=torch.cat([part.min_ps for part in parts]),
        seeds=None,
        all_greedy=False,
        any_greedy=True,
        need_top_k=True,
        need_top_p=True,
        need_min_p=True,
    )
    logits = TARGET[1, 3].repeat(4 * n, 1)
    positions = torch.zeros(4 * n, dtype=torch.int64)
    drawn = draw_tokens(logits, params, positions, generator=torch.Generator().manual_seed(3)).view(4, n)
    assert (drawn[0] == TARGET[1, 3].argmax()).all()
    for kind, tokens in zip(kinds[1:], drawn[1:], strict=True):
        expected = kind.exact(1, 3) * n
        counts = np.bincount(tokens.numpy(), minlength=VOCAB)
        assert (counts[expected == 0] == 0).all()
        assert stats.chisquare(counts[expected > 0], expected[expected > 0]).pvalue > 1e-3


@functools.cache
def noise(seed: int, position: int, column: int) -> float:
    """Gumbel noise of a seeded draw, here from numpy in place of SGLang's hash."""
    return float(np.random.default_rng([seed, position, column]).gumbel())


@pytest.fixture
def numpy_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def multinomial(log_probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        keys = zip(seeds.tolist(), positions.tolist(), strict=True)
        gumbel = [[noise(*key, column) for column in range(log_probs.shape[1])] for key in keys]
        return (log_probs.double() + torch.tensor(gumbel, dtype=torch.float64)).argmax(1, keepdim=True)

    monkeypatch.setattr(ddtree_walk, "_multinomial_with_seed", multinomial)


def plain_text(sampling: Filter, seed: int, length: int) -> list[int]:
    """Seeded decoding without speculation: noise by token id, or by rank as soon as anything is filtered."""
    history = list(START)
    for step in range(length):
        probs = sampling.exact(history[-2], history[-1], tuple(history[2:]))
        filtered = sampling.top_k is not None or sampling.top_p != 1.0 or sampling.min_p > 0.0
        columns = np.argsort(-probs) if filtered else np.arange(VOCAB)
        scores = {
            int(token): np.log(probs[token]) + noise(seed, COMMITTED + step, column)
            for column, token in enumerate(columns)
            if probs[token] > 0
        }
        history.append(max(scores, key=lambda token: scores[token]))
    return history[2:]


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("budget", [1, 7, 16])
def test_seeded_text_is_the_text_without_speculation(name: str, budget: int, numpy_noise: None) -> None:
    sampling, seeds = FILTERS[name], torch.tensor([1, 2, 3, 2, 77, 123_456_789])
    texts, _ = generate(walk_of(sampling, len(seeds), seeds=seeds), len(seeds), length=12, budget=budget)
    assert texts.tolist() == [plain_text(sampling, seed, 12) for seed in seeds.tolist()]
    assert len({tuple(text) for text in texts.tolist()}) == 5, "different seeds, different texts"


def test_seeded_row_does_not_depend_on_its_neighbours(numpy_noise: None) -> None:
    seeds, positions = torch.arange(40), torch.arange(40) + 9
    logits = TARGET[1, 3].repeat(40, 1)
    alone = draw_tokens(logits, Filter().rows(40, seeds), positions)
    params = Filter().rows(40, seeds)
    top_ps = params.top_ps.clone()
    top_ps[::2] = 0.6
    mixed = SamplingRows(**{**vars(params), "top_ps": top_ps, "need_top_p": True})
    assert torch.equal(draw_tokens(logits, mixed, positions)[1::2], alone[1::2])
    filtered = draw_tokens(logits, Filter(top_p=0.6).rows(40, seeds), positions)
    assert torch.equal(draw_tokens(logits, mixed, positions)[::2], filtered[::2])
    assert not torch.equal(filtered, alone)


def test_same_generator_state_gives_the_same_texts() -> None:
    first, second, other = (
        generate(walk_of(FILTERS["all and penalties"], 200, torch.Generator().manual_seed(seed)), 200)[0]
        for seed in (5, 5, 6)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


class BatchInfo:
    """The fields of SGLang's SamplingBatchInfo that a walk reads."""

    temperatures = torch.tensor([[0.5], [1.0]])
    top_ks = torch.tensor([TOP_K_ALL, 1], dtype=torch.int32)
    top_ps = torch.tensor([0.9, 1.0])
    min_ps = torch.tensor([0.1, 0.0])
    sampling_seed = torch.tensor([3, 4])
    is_all_greedy = False
    is_any_greedy = True
    need_top_k_sampling = True
    need_top_p_sampling = True
    need_min_p_sampling = True


def test_parameters_come_from_the_batch() -> None:
    params = SamplingRows.from_batch(BatchInfo())
    assert params.temperatures.flatten().tolist() == [0.5, 1.0]
    assert params.top_ks.tolist() == [TOP_K_ALL, 1]
    assert params.top_ps.tolist() == pytest.approx([0.9, 1.0])
    assert params.min_ps.tolist() == pytest.approx([0.1, 0.0])
    assert params.seeds is not None and params.seeds.tolist() == [3, 4]
    assert (params.all_greedy, params.any_greedy) == (False, True)
    assert params.need_top_k and params.need_top_p and params.need_min_p
