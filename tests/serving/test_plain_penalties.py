# SPDX-License-Identifier: Apache-2.0
"""The penalizers of plain decoding see all that was generated, and apply in one order."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.penaltylib.orchestrator import BatchedPenalizerOrchestrator
from sglang.srt.sm120.penalties import count_drawn_tokens, prepare_penalizers

VOCABULARY = 8
KINDS: list[Any] = [
    penaltylib.BatchedFrequencyPenalizer,
    penaltylib.BatchedPresencePenalizer,
    penaltylib.BatchedMinNewTokensPenalizer,
    penaltylib.BatchedRepetitionPenalizer,
]


class Batch(SimpleNamespace):
    """What the penalizers and the scheduler's hooks read of a ScheduleBatch; it can be referenced weakly."""

    def __init__(self, mode: str, outputs: list[list[int]], **options: Any) -> None:
        params = {"frequency_penalty": 0.5, "presence_penalty": 1.0, "repetition_penalty": 2.0, "min_new_tokens": 3}
        tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=7)
        reqs = [
            SimpleNamespace(
                sampling_params=SimpleNamespace(stop_token_ids=None, **params | options),
                tokenizer=tokenizer,
                output_ids=ids,
                retraction_count=len(ids),
            )
            for ids in outputs
        ]
        forward_mode = SimpleNamespace(is_extend=lambda: mode == "extend", is_decode=lambda: mode == "decode")
        super().__init__(reqs=reqs, device="cpu", forward_mode=forward_mode)


def orchestrator(batch: Batch, kinds: Any = KINDS) -> BatchedPenalizerOrchestrator:
    return BatchedPenalizerOrchestrator(VOCABULARY, batch, kinds)  # type: ignore[arg-type]


def applied(penalizers: BatchedPenalizerOrchestrator, rows: int) -> torch.Tensor:
    logits = torch.full((rows, VOCABULARY), 4.0)
    penalizers.apply(logits)
    return logits


@pytest.mark.parametrize("kinds", list(itertools.permutations(KINDS)))
def test_order_does_not_depend_on_the_set(kinds: Any) -> None:
    batch = Batch("extend", [[2]])
    penalizers = orchestrator(batch, kinds)
    prepare_penalizers(penalizers, batch)  # type: ignore[arg-type]
    assert applied(penalizers, 1)[0, 2] == (4.0 - 0.5 - 1.0) / 2


def test_counts_survive_a_retraction() -> None:
    """BUG-048: the prefill after a retraction is penalised as the step that it replaces would have been."""
    outputs = [[1, 3, 1, 1], [], [5]]
    batch = Batch("extend", outputs)
    after = orchestrator(batch)
    prepare_penalizers(after, batch)  # type: ignore[arg-type]
    for row, ids in enumerate(outputs):
        alone = Batch("decode", [[]])
        one_by_one = orchestrator(alone)
        prepare_penalizers(one_by_one, alone)  # type: ignore[arg-type]
        for token in ids:
            one_by_one.cumulate_output_tokens(torch.tensor([token]))
        torch.testing.assert_close(applied(after, 3)[row], applied(one_by_one, 1)[0])


def test_decode_batches_are_left_alone() -> None:
    batch = Batch("decode", [[1]])
    penalizers = orchestrator(batch)
    prepare_penalizers(penalizers, batch)  # type: ignore[arg-type]
    assert applied(penalizers, 1)[0, 1] == 4.0


@pytest.mark.parametrize(("overlap", "mixed", "counted"), [(True, False, 1), (False, False, 0), (True, True, 0)])
def test_drawn_token_is_counted_at_launch(
    overlap: bool, mixed: bool, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt import runtime_context

    monkeypatch.setattr(runtime_context, "get_schedule", lambda: SimpleNamespace(enable_mixed_chunk=mixed))
    batch = Batch("decode", [[]], presence_penalty=0.0, repetition_penalty=1.0, min_new_tokens=0)
    batch.sampling_info = SimpleNamespace(penalizer_orchestrator=orchestrator(batch))
    batch.enable_overlap, batch.spec_algorithm = overlap, SimpleNamespace(is_none=lambda: True)
    batch.input_ids = torch.tensor([6], dtype=torch.int32)
    count_drawn_tokens(batch)  # type: ignore[arg-type]
    assert applied(batch.sampling_info.penalizer_orchestrator, 1)[0, 6] == 4.0 - 0.5 * counted
