# SPDX-License-Identifier: Apache-2.0
"""Sampling options that a verify pass must honour, for the DFLASH chain and for DDTREE.

SGLang 0.5.17 drops penalties and min-p in DFLASH verification, hands custom logit processors one history for all rows
of a request, and refuses log-probabilities. Here every row has what plain decoding has after the same text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.speculative.verify_penalties import OutputCounts, Penalties, VerifyRows, needs_counts, penalize

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
    from sglang.srt.speculative.verify_processors import RecentRuns


@dataclass
class _Outputs:
    """What a worker knows of the tokens its requests have generated; a table exists from its first use on."""

    counts: OutputCounts | None = None
    runs: RecentRuns | None = None

    @classmethod
    def of(cls, worker: DFlashWorkerV2) -> _Outputs:
        # Not by getattr, which the worker forwards to another one.
        return vars(worker).setdefault("_verify_outputs", cls())


def record_first_tokens(worker: DFlashWorkerV2, batch: ScheduleBatch, drawn: torch.Tensor) -> None:
    """Begin the output of requests whose prefill has drawn a token, int [bs]; a chunk before the last is undone later."""
    slots = batch.req_pool_indices
    outputs = _Outputs.of(worker)
    if needs_counts(batch.reqs):
        if outputs.counts is None:
            outputs.counts = OutputCounts(
                _num_slots(worker), worker.model_runner.model_config.vocab_size, worker.device
            )
        outputs.counts.restart(slots, [req.output_ids for req in batch.reqs], drawn.to(torch.int64))
    if batch.sampling_info.has_custom_logit_processor:
        if outputs.runs is None:
            from sglang.srt.speculative.verify_processors import RecentRuns

            outputs.runs = RecentRuns(_num_slots(worker), int(worker.block_size), worker.device)
        outputs.runs.record(slots, drawn[:, None], torch.ones_like(slots))


def record_run(worker: DFlashWorkerV2, batch: ScheduleBatch, runs: torch.Tensor, lens: torch.Tensor) -> None:
    """Add a step's tokens to the output of its requests: runs int64 [bs, D], of which the first `lens` [bs] count."""
    outputs = _Outputs.of(worker)
    if outputs.counts is not None and needs_counts(batch.reqs):
        outputs.counts.add(batch.req_pool_indices, runs, lens)
    if outputs.runs is not None and batch.sampling_info.has_custom_logit_processor:
        outputs.runs.record(batch.req_pool_indices, runs, lens)


def adjust_logits(
    worker: DFlashWorkerV2, batch: ScheduleBatch, rows: VerifyRows, logits: torch.Tensor
) -> SamplingBatchInfo:
    """Apply penalties, biases and custom processors in place, in the order of plain decoding.

    Args:
        logits: fp32 [bs * T, vocab].

    Returns:
        The batch's sampling parameters without what has been applied.
    """
    info = batch.sampling_info
    slots = batch.req_pool_indices
    outputs = _Outputs.of(worker)
    if info.acc_additive_penalties is not None:  # set when a request of the batch has a penalty
        penalties = Penalties.of(batch.reqs, logits.device)
        counts = outputs.counts.take(slots) if outputs.counts is not None and penalties.needs_counts else None
        penalize(logits, rows, penalties, counts)
    if info.logit_bias is not None:
        logits.view(len(info), -1, logits.shape[-1]).add_(info.logit_bias[:, None, :])
    if info.has_custom_logit_processor:
        from sglang.srt.speculative.verify_processors import apply_processors

        assert outputs.runs is not None
        generated = outputs.runs.outputs(batch.reqs, slots, rows.positions[:, 0])
        apply_processors(logits, rows, info, batch.reqs, generated)
    return replace(
        info,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        has_custom_logit_processor=False,
    )


def adjust_chain(
    worker: DFlashWorkerV2, batch: ScheduleBatch, block: torch.Tensor, positions: torch.Tensor, logits: torch.Tensor
) -> SamplingBatchInfo:
    """`adjust_logits` for a drafted block: tokens int64 [bs, D], positions int64 [bs * D]."""
    return adjust_logits(worker, batch, VerifyRows.chain(block, positions), logits)


def finish_chain(
    worker: DFlashWorkerV2,
    batch: ScheduleBatch,
    logits_output: LogitsProcessorOutput,
    runs: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    """Record a chain's tokens, int64 [bs, D], of which the first `lens` count, and their log-probabilities."""
    record_run(worker, batch, runs, lens)
    row_indices = torch.arange(runs.shape[1], device=runs.device).expand_as(runs)
    add_logprobs(batch, logits_output, row_indices, runs)


def add_logprobs(
    batch: ScheduleBatch, logits_output: LogitsProcessorOutput, accept_index: torch.Tensor, runs: torch.Tensor
) -> None:
    """Compute what the batch asks of log-probabilities, from the adjusted logits [bs * T, vocab].

    Args:
        accept_index: int64 [bs, D], the row of its own request at which each token was drawn; -1 past the run.
        runs: int64 [bs, D], the tokens.
    """
    if not batch.return_logprob:
        return
    from sglang.srt.layers.logprob_processor import compute_spec_v2_logprobs

    num_rows = logits_output.next_token_logits.shape[0]
    first_rows = torch.arange(0, num_rows, num_rows // len(runs), device=runs.device)[:, None]
    # SGLang reads the tokens by row; those past the run go to an element of their own, at the end, which -1 names.
    indices = torch.where(accept_index < 0, -1, accept_index + first_rows)
    drawn = torch.zeros(num_rows + 1, dtype=torch.int64, device=runs.device)
    drawn[indices.flatten()] = runs.flatten()
    compute_spec_v2_logprobs(batch, logits_output, drawn, indices, runs.shape[1] - 1)


def _num_slots(worker: Any) -> int:
    return int(worker.model_runner.req_to_token_pool.req_to_token.shape[0])


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
