# SPDX-License-Identifier: Apache-2.0
"""Sampling options that a verify pass must honour, for the DFLASH chain and for DDTREE.

SGLang 0.5.17 drops penalties and min-p in DFLASH verification: it reads a penalty field that no longer exists, never
feeds generated tokens to the penalizers, and no speculative path reads ``min_ps``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.server_args import ServerArgs


def accumulate_output_penalties(batch: ScheduleBatch) -> None:
    """Feed the penalizers once per decode step with what the host knows of the generated tokens.

    Same approximation as EAGLE's: the last token of each request, a step late. Only the count for ``min_new_tokens``
    is set to the tokens that exist, since a step commits several.
    """
    from sglang.srt.sampling.penaltylib import BatchedMinNewTokensPenalizer

    orchestrator = batch.sampling_info.penalizer_orchestrator
    if not orchestrator.is_required:
        return
    batch.cumulate_penalty_output_tokens()
    min_new_tokens = orchestrator.penalizers.get(BatchedMinNewTokensPenalizer)
    if min_new_tokens is not None and min_new_tokens.is_prepared():
        lens = torch.tensor([[len(req.output_ids)] for req in batch.reqs], dtype=torch.int32)
        min_new_tokens.len_output_tokens = lens.to(batch.device, non_blocking=True)


def apply_penalties(logits: torch.Tensor, sampling_info: SamplingBatchInfo, rows_per_request: int) -> None:
    """Apply accumulated penalties to every verify row in place.

    Args:
        logits: [bs * rows_per_request, vocab], floating point.
        sampling_info: its additive and scaling accumulators are [bs, vocab] or None.
        rows_per_request: verify rows of one request; all of them get that request's penalties.
    """
    rows = logits.view(len(sampling_info), rows_per_request, -1)
    additive, scaling = sampling_info.acc_additive_penalties, sampling_info.acc_scaling_penalties
    if additive is not None:
        rows.add_(additive.to(rows.dtype).unsqueeze(1))
    if scaling is not None:
        factor = scaling.to(rows.dtype).unsqueeze(1)
        # A repetition penalty moves a logit away from the top whatever its sign.
        rows.copy_(torch.where(rows > 0, rows / factor, rows * factor))


def apply_min_p(probs: torch.Tensor, sampling_info: SamplingBatchInfo, rows_per_request: int) -> torch.Tensor:
    """Zero the tokens below ``min_p`` times the row's largest probability and normalise again.

    Args:
        probs: [bs * rows_per_request, vocab] after temperature, top-k and top-p.

    Returns:
        The same shape; `probs` itself when no request asks for min-p.
    """
    if not sampling_info.need_min_p_sampling:
        return probs
    threshold = probs.amax(-1) * sampling_info.min_ps.repeat_interleave(rows_per_request)
    kept = torch.where(probs >= threshold.unsqueeze(-1), probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def is_plain_greedy(sampling_info: SamplingBatchInfo) -> bool:
    """Whether every request takes the argmax of the target's own logits, with nothing that adjusts them."""
    penalizers = sampling_info.penalizer_orchestrator
    adjusted = (
        sampling_info.has_custom_logit_processor
        or (penalizers is not None and penalizers.is_required)
        or any(grammar is not None for grammar in sampling_info.grammars or ())
    )
    tables = sampling_info.acc_additive_penalties, sampling_info.acc_scaling_penalties, sampling_info.logit_bias
    return sampling_info.is_all_greedy and not adjusted and all(table is None for table in tables)


def row_headroom(server_args: ServerArgs) -> int:
    """Slots that a request's row needs beyond the context length for the DFLASH family's reserve, else 0.

    A decode step reserves two verify windows past the committed length and may round up to whole pages. A narrower
    row spills into the next request's row, since nothing checks the bound.
    """
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    if not SpeculativeAlgorithm.from_string(server_args.speculative_algorithm).is_dflash_family():
        return 0
    return 2 * int(server_args.max_speculative_num_draft_tokens or 0) + server_args.page_size + 4
