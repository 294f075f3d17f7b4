# SPDX-License-Identifier: Apache-2.0
"""Sampled verification of a chain: the emitted tokens have the target's distribution."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from sglang.srt.platforms.reference import sampling

NUM_DRAWS = 20_000
PROBABILITIES = st.lists(st.floats(0.01, 1.0), min_size=2, max_size=12)


def naive_top_k(probs: list[float], top_k: int) -> list[float]:
    kept = sorted(probs, reverse=True)[: max(1, top_k)]
    values = [p if p >= kept[-1] else 0.0 for p in probs]
    return [value / sum(values) for value in values]


def naive_top_p(probs: list[float], top_p: float) -> list[float]:
    kept, total = set(), 0.0
    for token in sorted(range(len(probs)), key=lambda token: -probs[token]):
        if total >= top_p and kept:
            break
        kept.add(token)
        total += probs[token]
    return [p / total if token in kept else 0.0 for token, p in enumerate(probs)]


@given(PROBABILITIES, st.integers(0, 20), st.floats(0.05, 1.0))
@settings(max_examples=100, deadline=None)
def test_renormalisation(weights: list[float], top_k: int, top_p: float) -> None:
    probs = torch.tensor([weights, weights], dtype=torch.float64)
    probs = probs / probs.sum(-1, keepdim=True)
    row = probs[0].tolist()
    result = sampling.top_k_renorm(probs, torch.tensor([top_k, len(weights)]))
    torch.testing.assert_close(result, torch.tensor([naive_top_k(row, top_k), row], dtype=torch.float64))
    result = sampling.top_p_renorm(probs, torch.tensor([top_p, 1.0], dtype=torch.float64))
    limits = [naive_top_p(row, top_p), naive_top_p(row, 1.0)]
    torch.testing.assert_close(result, torch.tensor(limits, dtype=torch.float64))


def draw_pairs(target: torch.Tensor, candidates: torch.Tensor, threshold: float = 1.0) -> torch.Tensor:
    """Two emitted tokens per draw of a chain over ``target`` [T, vocab]; -1 where the chain ended after one."""
    generator = torch.Generator().manual_seed(7)
    num_rows, draws = len(target), NUM_DRAWS
    predicts = torch.full((draws * num_rows,), -2, dtype=torch.int32)
    accept_index = torch.full((draws, num_rows), -2, dtype=torch.int32)
    length = torch.full((draws,), -2, dtype=torch.int32)
    rows = torch.arange(draws * num_rows).view(draws, num_rows)
    sampling.sample_chain(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=length,
        candidates=candidates.expand(draws, -1),
        retrive_index=rows,
        retrive_next_token=rows,
        retrive_next_sibling=torch.full_like(rows, -1),
        uniform_samples=torch.rand(draws, num_rows, generator=generator),
        uniform_samples_for_final_sampling=torch.rand(draws, generator=generator),
        target_probs=target.expand(draws, -1, -1),
        draft_probs=torch.zeros(1),
        threshold_single=threshold,
        threshold_acc=1.0,
        deterministic=True,
    )
    on_path = torch.arange(num_rows) <= length[:, None]
    assert torch.equal(accept_index, torch.where(on_path, rows, -1).int())
    emitted = predicts.view(draws, num_rows)[:, :2].long()
    return torch.where(on_path[:, :2], emitted, -1)


TARGET = torch.tensor([[0.5, 0.2, 0.2, 0.1, 0.0], [0.1, 0.4, 0.3, 0.1, 0.1], [0.3, 0.3, 0.2, 0.1, 0.1]])
CANDIDATES = torch.tensor([4, 0, 1])


def p_value(pairs: torch.Tensor) -> float:
    """Chi-square of (first, second) tokens; the second exists only when the first is the drafted token."""
    counts, expected = [], []
    for first in range(5):
        hits = pairs[:, 0] == first
        if first == int(CANDIDATES[1]):
            counts += [int((hits & (pairs[:, 1] == second)).sum()) for second in range(5)]
            expected += (TARGET[0, first] * TARGET[1]).tolist()
        elif TARGET[0, first] > 0:
            counts.append(int(hits.sum()))
            expected.append(float(TARGET[0, first]))
    assert sum(counts) == NUM_DRAWS
    return float(stats.chisquare(counts, [share * NUM_DRAWS / sum(expected) for share in expected]).pvalue)


def test_emitted_tokens_follow_the_target() -> None:
    assert p_value(draw_pairs(TARGET, CANDIDATES)) > 0.01


def test_a_biased_acceptance_is_seen() -> None:
    """Accepting every likely candidate without a draw, as a lower threshold does, is not the target's distribution."""
    assert p_value(draw_pairs(TARGET, CANDIDATES, threshold=0.45)) < 1e-6


def test_certain_rows_are_followed_to_the_end() -> None:
    target = torch.eye(5)[[0, 1, 3]]
    assert draw_pairs(target, CANDIDATES).unique(dim=0).tolist() == [[0, 1]]


OTHERS = (
    *("uniform_samples", "uniform_samples_for_final_sampling", "target_probs"),
    *("accept_token_num", "accept_index", "predicts"),
)


def test_trees_are_refused() -> None:
    rows = torch.arange(4).view(1, 4)
    nothing = torch.zeros(1)
    with pytest.raises(ValueError, match="a chain expected, got a tree"):
        sampling.sample_chain(
            candidates=rows,
            retrive_index=rows,
            retrive_next_sibling=torch.tensor([[-1, 2, -1, -1]]),
            threshold_single=1.0,
            threshold_acc=1.0,
            **dict.fromkeys(OTHERS, nothing),
        )
