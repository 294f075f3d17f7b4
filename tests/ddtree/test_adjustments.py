# SPDX-License-Identifier: Apache-2.0
"""Sampling options in a verify pass: each changes the logits or probabilities as plain decoding would."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sm120.memory import row_headroom
from sglang.srt.speculative import dflash_utils
from sglang.srt.speculative.verify_adjustments import (
    add_logprobs,
    adjust_chain,
    apply_min_p,
    finish_chain,
    record_first_tokens,
)

ROWS, VOCABULARY = 3, 11
BLOCK = torch.tensor([[4, 5, 6], [9, 9, 9]])
POSITIONS = torch.tensor([10, 11, 12, 20, 21, 22])


def request(**options: Any) -> Any:
    defaults = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
    return SimpleNamespace(
        sampling_params=SimpleNamespace(**defaults | options),
        origin_input_ids=[1] * 10,
        output_ids=[],
    )


def batch_of(reqs: list[Any], **fields: Any) -> Any:
    """What verification reads of SGLang's ScheduleBatch; penalties are announced as its scheduler does."""
    defaults: dict[str, Any] = {
        "temperatures": torch.ones(2, 1),
        "top_ps": torch.ones(2),
        "top_ks": torch.ones(2, dtype=torch.int32),
        "min_ps": torch.zeros(2),
        "is_all_greedy": True,
        "is_any_greedy": True,
        "need_top_p_sampling": False,
        "need_top_k_sampling": False,
        "need_min_p_sampling": False,
        "vocab_size": VOCABULARY,
        "acc_additive_penalties": torch.full((2, VOCABULARY), 7.0),
    }
    return SimpleNamespace(
        reqs=reqs,
        req_pool_indices=torch.tensor([2, 0]),
        sampling_info=SamplingBatchInfo(**defaults | fields),
        return_logprob=False,
        seq_lens=torch.tensor([10, 20]),
        top_logprobs_nums=[2, 0],
        token_ids_logprobs=[None, [3, 1]],
    )


@pytest.fixture
def worker() -> Any:
    return SimpleNamespace(
        device="cpu",
        block_size=ROWS,
        model_runner=SimpleNamespace(
            model_config=SimpleNamespace(vocab_size=VOCABULARY),
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(4, 30)),
        ),
    )


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(2 * ROWS, VOCABULARY, generator=torch.Generator().manual_seed(3))


def test_each_chain_row_is_penalised_by_the_rows_before_it(worker: Any, logits: torch.Tensor) -> None:
    batch = batch_of([request(frequency_penalty=1.0), request(presence_penalty=2.0)])
    record_first_tokens(worker, batch, torch.tensor([5, 9]))
    finish_chain(worker, batch, SimpleNamespace(), torch.tensor([[6, 4, 0], [9, 0, 0]]), torch.tensor([2, 1]))
    before = logits.clone()
    adjust_chain(worker, batch, BLOCK, POSITIONS, logits)
    change = (before - logits).round(decimals=4)
    assert change[:ROWS, 4:7].tolist() == [[1, 1, 1], [1, 2, 1], [1, 2, 2]]
    assert change[ROWS:, 9].tolist() == [2, 2, 2]
    assert change.count_nonzero() == 12


def test_logit_bias_is_added_after_the_penalties(worker: Any, logits: torch.Tensor) -> None:
    bias = torch.full((2, VOCABULARY), 1.0)
    batch = batch_of([request(repetition_penalty=2.0), request(repetition_penalty=2.0)], logit_bias=bias)
    record_first_tokens(worker, batch, torch.tensor([0, 0]))
    every_token = torch.arange(VOCABULARY).expand(2, -1)
    finish_chain(worker, batch, SimpleNamespace(), every_token, torch.tensor([VOCABULARY] * 2))
    positive = logits.abs()
    expected = positive / 2 + 1
    adjust_chain(worker, batch, BLOCK, POSITIONS, positive)
    torch.testing.assert_close(positive, expected)


def test_nothing_is_left_for_the_release_to_apply(worker: Any, logits: torch.Tensor) -> None:
    batch = batch_of([request(), request()], logit_bias=torch.ones(2, VOCABULARY))
    left = adjust_chain(worker, batch, BLOCK, POSITIONS, logits)
    adjusted = logits.clone()
    dflash_utils.apply_dflash_verify_logits_adjustments(
        next_token_logits=logits, sampling_info=left, draft_token_num=ROWS
    )
    assert torch.equal(logits, adjusted)
    assert left.temperatures is batch.sampling_info.temperatures


def test_without_options_nothing_changes_and_nothing_is_kept(worker: Any, logits: torch.Tensor) -> None:
    batch = batch_of([request(), request()], acc_additive_penalties=None)
    before = logits.clone()
    record_first_tokens(worker, batch, torch.tensor([5, 9]))
    adjust_chain(worker, batch, BLOCK, POSITIONS, logits)
    finish_chain(worker, batch, SimpleNamespace(), BLOCK, torch.tensor([2, 1]))
    assert torch.equal(logits, before)
    assert all(table is None for table in vars(vars(worker)["_verify_outputs"]).values())


@pytest.mark.parametrize("temperature", [None, 0.5])
def test_logprobs_are_read_where_each_token_was_drawn(logits: torch.Tensor, temperature: float | None) -> None:
    """BUG-033: an entry for each token of a run, from rows that are scattered over the tree."""
    batch = batch_of([request(), request()], is_all_greedy=temperature is None)
    batch.sampling_info.temperatures.fill_(temperature or 1.0)
    batch.return_logprob = True
    accept_index, runs = torch.tensor([[0, 2], [0, -1]]), torch.tensor([[7, 8], [10, 0]])
    output: Any = SimpleNamespace(next_token_logits=logits)
    add_logprobs(batch, output, accept_index, runs)
    expected = (logits / (temperature or 1.0)).log_softmax(-1)
    found = output.next_token_logprobs
    assert found.shape == (2, 2)
    torch.testing.assert_close(found[0], torch.stack([expected[0, 7], expected[2, 8]]))
    torch.testing.assert_close(found[1, 0], expected[ROWS, 10])
    top, ids = output.next_token_top_logprobs_val, output.next_token_token_ids_logprobs_val
    torch.testing.assert_close(top[1], expected[2].sort(descending=True).values[:2])
    torch.testing.assert_close(ids[2], expected[ROWS, [3, 1]])


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
