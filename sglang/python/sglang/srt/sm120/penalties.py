# SPDX-License-Identifier: Apache-2.0
"""Penalties of plain decoding, so that each token is penalised by all that were generated before it.

SGLang 0.5.17 counts an output token when the host has seen it. While steps overlap that is one step late, and the
first step counts the last token of the prompt instead. A retracted request starts again with no counts at all. And
without overlap a repetition penalty comes before or after the others, as the memory addresses of classes have it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.sampling import penaltylib

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.penaltylib.orchestrator import _BatchedPenalizer


def counted_at_launch(batch: ScheduleBatch) -> bool:
    """Whether `count_drawn_tokens` counts this batch's tokens, so that the scheduler must not."""
    from sglang.srt.runtime_context import get_schedule

    # A batch that mixes prefill and decode has no input token per request.
    return batch.enable_overlap and batch.spec_algorithm.is_none() and not get_schedule().enable_mixed_chunk


def count_drawn_tokens(batch: ScheduleBatch) -> None:
    """Count the tokens that a decode step is launched with: the device has them before the host."""
    if not batch.forward_mode.is_decode() or batch.sampling_info is None or not counted_at_launch(batch):
        return
    orchestrator = batch.sampling_info.penalizer_orchestrator
    if orchestrator is not None and orchestrator.is_required:
        orchestrator.cumulate_output_tokens(batch.input_ids.to(torch.int64))


def prepare_penalizers(orchestrator: penaltylib.BatchedPenalizerOrchestrator, batch: ScheduleBatch) -> None:
    """Put the penalizers of a new batch in order and let them see what its requests had generated before."""
    orchestrator.penalizers = in_order(orchestrator.penalizers)
    count_earlier_output(orchestrator, batch)


def in_order(penalizers: dict[type, _BatchedPenalizer]) -> dict[type, _BatchedPenalizer]:
    """The penalizers in the order in which they apply: what scales logits comes after what is added to them."""
    return dict(sorted(penalizers.items(), key=lambda item: (item[1].is_multiplicative, item[0].__name__)))


def count_earlier_output(orchestrator: penaltylib.BatchedPenalizerOrchestrator, batch: ScheduleBatch) -> None:
    """Count what requests had generated before they were retracted, in the penalizers of their new prefill."""
    earlier = [(row, list(req.output_ids)) for row, req in enumerate(batch.reqs) if req.retraction_count > 0]
    if not orchestrator.is_required or not batch.forward_mode.is_extend():
        return
    frequency = orchestrator.penalizers[penaltylib.BatchedFrequencyPenalizer]
    presence = orchestrator.penalizers[penaltylib.BatchedPresencePenalizer]
    repetition = orchestrator.penalizers[penaltylib.BatchedRepetitionPenalizer]
    min_new_tokens = orchestrator.penalizers[penaltylib.BatchedMinNewTokensPenalizer]
    for row, ids in earlier:
        tokens = torch.tensor(ids, dtype=torch.int64).to(orchestrator.device, non_blocking=True)
        if frequency.is_prepared():
            share = frequency.frequency_penalties[row].expand(len(ids))
            frequency.cumulated_frequency_penalties[row].index_add_(0, tokens, share)
        if presence.is_prepared():
            presence.cumulated_presence_penalties[row, tokens] = presence.presence_penalties[row]
        if repetition.is_prepared():
            repetition.cumulated_repetition_penalties[row, tokens] = repetition.repetition_penalties[row]
        if min_new_tokens.is_prepared():
            min_new_tokens.len_output_tokens[row] = len(ids)
