# SPDX-License-Identifier: Apache-2.0
"""Sampling options in a verify pass: each changes the logits or probabilities as plain decoding would."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.sampling.penaltylib import BatchedMinNewTokensPenalizer
from sglang.srt.speculative import dflash_utils
from sglang.srt.speculative.verify_adjustments import accumulate_output_penalties, apply_min_p, row_headroom

ROWS, VOCABULARY = 3, 11


class SamplingInfo(SimpleNamespace):
    """What verification reads of SGLang's SamplingBatchInfo."""

    def __init__(self, **fields: Any) -> None:
        defaults = {
            "has_custom_logit_processor": False,
            "acc_additive_penalties": None,
            "acc_scaling_penalties": None,
            "penalizer_orchestrator": None,
            "grammar_mask": None,
            "logit_bias": None,
        }
        super().__init__(**defaults | fields)

    def __len__(self) -> int:
        return 2


def adjusted(logits: torch.Tensor, **fields: Any) -> torch.Tensor:
    result = logits.clone()
    dflash_utils.apply_dflash_verify_logits_adjustments(
        next_token_logits=result, sampling_info=SamplingInfo(**fields), draft_token_num=ROWS
    )
    return result


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(2 * ROWS, VOCABULARY, generator=torch.Generator().manual_seed(3))


def test_additive_penalties_reach_every_row_of_their_request(logits: torch.Tensor) -> None:
    penalties = torch.zeros(2, VOCABULARY)
    penalties[0, 4], penalties[1, 9] = -50.0, -70.0
    change = adjusted(logits, acc_additive_penalties=penalties) - logits
    expected = torch.zeros_like(logits)
    expected[:ROWS, 4], expected[ROWS:, 9] = -50.0, -70.0
    torch.testing.assert_close(change, expected, atol=1e-5, rtol=1e-5)


def test_repetition_penalty_lowers_both_signs(logits: torch.Tensor) -> None:
    factors = torch.ones(2, VOCABULARY)
    factors[1, 5] = 2.0
    logits[ROWS, 5], logits[ROWS + 1, 5] = 3.0, -3.0
    result = adjusted(logits, acc_scaling_penalties=factors)
    assert result[ROWS, 5] == 1.5 and result[ROWS + 1, 5] == -6.0
    factors[1, 5] = 1.0
    untouched = torch.ones_like(logits, dtype=torch.bool)
    untouched[ROWS:, 5] = False
    assert torch.equal(result[untouched], logits[untouched])


def test_logit_bias_is_added_after_the_penalties(logits: torch.Tensor) -> None:
    factors, bias = torch.full((2, VOCABULARY), 2.0), torch.full((2, VOCABULARY), 1.0)
    positive = logits.abs()
    result = adjusted(positive, acc_scaling_penalties=factors, logit_bias=bias)
    torch.testing.assert_close(result, positive / 2 + 1)


def test_no_penalty_changes_nothing(logits: torch.Tensor) -> None:
    assert torch.equal(adjusted(logits), logits)


def penalized_batch(required: bool, fed: list[int]) -> Any:
    counter = SimpleNamespace(is_prepared=lambda: True, len_output_tokens=torch.zeros(2, 1, dtype=torch.int32))
    orchestrator = SimpleNamespace(is_required=required, penalizers={BatchedMinNewTokensPenalizer: counter})
    return SimpleNamespace(
        device="cpu",
        reqs=[SimpleNamespace(output_ids=[1, 2, 3]), SimpleNamespace(output_ids=[])],
        sampling_info=SimpleNamespace(penalizer_orchestrator=orchestrator),
        cumulate_penalty_output_tokens=lambda: fed.append(1),
        counter=counter,
    )


@pytest.mark.parametrize("required", [True, False])
def test_generated_tokens_are_fed_once_a_step(required: bool) -> None:
    fed: list[int] = []
    batch = penalized_batch(required, fed)
    accumulate_output_penalties(batch)
    assert fed == [1] * required
    assert batch.counter.len_output_tokens.tolist() == ([[3], [0]] if required else [[0], [0]])


def test_min_p_keeps_what_reaches_the_threshold() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.4, 0.3, 0.2, 0.1]])
    info: Any = SimpleNamespace(need_min_p_sampling=True, min_ps=torch.tensor([0.3, 0.0]))
    result = apply_min_p(probs, info, rows_per_request=1)
    torch.testing.assert_close(result[0], torch.tensor([0.5, 0.3, 0.15, 0.0]) / 0.95)
    torch.testing.assert_close(result[1], probs[1])


def test_min_p_off_is_the_same_tensor() -> None:
    probs = torch.rand(4, VOCABULARY)
    info: Any = SimpleNamespace(need_min_p_sampling=False)
    assert apply_min_p(probs, info, rows_per_request=2) is probs


@pytest.mark.parametrize(
    ("algorithm", "expected"), [("DDTREE", 2 * 17 + 16 + 4), ("DFLASH", 54), (None, 0), ("NGRAM", 0)]
)
def test_row_holds_two_windows_and_a_page(algorithm: str | None, expected: int) -> None:
    args: Any = SimpleNamespace(
        speculative_algorithm=algorithm, max_speculative_num_draft_tokens=17, page_size=16, speculative_num_steps=1
    )
    assert row_headroom(args) == expected
