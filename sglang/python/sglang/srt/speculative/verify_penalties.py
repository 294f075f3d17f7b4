# SPDX-License-Identifier: Apache-2.0
"""Penalties of a verify pass, exact for every row: each counts the tokens of its own path.

A row of a draft chain or tree stands for the text that ends at its token, so a frequency, presence or repetition penalty
there counts the committed output and the row's drafted ancestors, and a stop is held back until ``min_new_tokens``
tokens exist on that path. The committed part is the same for all rows of a request and is applied to whole rows; a path
changes only the tokens that were drafted, and these few columns are computed apart.

Nothing here reads a value back to the host, and every shape follows from shapes of the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

# Below every logit, but finite: a grammar may leave nothing else, and no token can be drawn from a row of -inf.
_HELD_BACK = -1e30


@dataclass(frozen=True)
class VerifyRows:
    """The rows of one verify pass, T a request; row 0 is the root, the last committed token.

    tokens     int64 [bs, T]
    positions  int64 [bs, T]     of the row's token in its sequence
    visible    bool  [bs, T, T]  row i sees row j: itself and its ancestors; [1, T, T] when all requests share it
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    visible: torch.Tensor

    @classmethod
    def chain(cls, tokens: torch.Tensor, positions: torch.Tensor) -> Self:
        """Rows of a drafted block, int64 [bs, T], in which each row follows the one before."""
        width = tokens.shape[1]
        causal = torch.ones((1, width, width), dtype=torch.bool, device=tokens.device).tril()
        return cls(tokens, positions.view_as(tokens), causal)


@dataclass(frozen=True)
class Penalties:
    """Penalties of bs requests; the flags are known on the host and speak for the whole batch.

    frequency   fp32  [bs, 1]
    presence    fp32  [bs, 1]
    repetition  fp32  [bs, 1]  1 where there is none
    stop_ids    int64 [bs, S]  0 is padding where `stop_bias` is 0
    stop_bias   fp32  [bs, S]  `_HELD_BACK` for a token that must not be drawn yet
    stops_from  int64 [bs, 1]  a row at this position or a later one may draw a stop
    """

    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor
    stop_ids: torch.Tensor
    stop_bias: torch.Tensor
    stops_from: torch.Tensor
    needs_counts: bool
    needs_repetition: bool

    @classmethod
    def of(cls, reqs: Sequence[Req], device: torch.device | str) -> Self:
        """Collect them from the requests, with two copies to the device and no wait for it."""
        numbers, stops = [], []
        for req in reqs:
            params = req.sampling_params
            numbers.append((params.frequency_penalty, params.presence_penalty, params.repetition_penalty))
            stops.append(stop_ids(req) if params.min_new_tokens > 0 else [])
        longest = max(map(len, stops))
        padded = [
            [len(req.origin_input_ids) + req.sampling_params.min_new_tokens - 1, len(ids)]
            + ids
            + [0] * (longest - len(ids))
            for req, ids in zip(reqs, stops, strict=True)
        ]
        factors = _to_device(numbers, torch.float32, device)
        integers = _to_device(padded, torch.int64, device)
        is_stop = torch.arange(longest, device=device) < integers[:, 1:2]
        return cls(
            frequency=factors[:, 0:1],
            presence=factors[:, 1:2],
            repetition=factors[:, 2:3],
            stop_ids=integers[:, 2:],
            stop_bias=torch.zeros(is_stop.shape, device=device).masked_fill_(is_stop, _HELD_BACK),
            stops_from=integers[:, 0:1],
            needs_counts=needs_counts(reqs),
            needs_repetition=any(repetition != 1.0 for *_, repetition in numbers),
        )


def needs_counts(reqs: Sequence[Req]) -> bool:
    """Whether any request is penalised by what it has generated."""
    return any(
        params.frequency_penalty != 0.0 or params.presence_penalty != 0.0 or params.repetition_penalty != 1.0
        for params in (req.sampling_params for req in reqs)
    )


def stop_ids(req: Req) -> list[int]:
    """The tokens that ``min_new_tokens`` holds back, as SGLang's own penalizer collects them."""
    tokenizer = req.tokenizer
    ids = set(req.sampling_params.stop_token_ids or ()) | set(tokenizer.additional_stop_token_ids or ())
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return sorted(ids)


class OutputCounts:
    """How often each request has generated each token, by the request's row in the slot table.

    The counts stay on the device, so that a step sees the run of the step before although the host does not yet.

    Args:
        num_requests: rows of the slot table.
        vocab_size: width of the logits.
    """

    def __init__(self, num_requests: int, vocab_size: int, device: torch.device | str) -> None:
        self._counts = torch.zeros((num_requests, vocab_size), dtype=torch.int32, device=device)

    def restart(self, slots: torch.Tensor, outputs: Sequence[Sequence[int]], drawn: torch.Tensor) -> None:
        """Begin after a prefill: with what each request had generated before a retraction, and the token just drawn.

        slots int64 [bs]; drawn int [bs].
        """
        self._counts.index_fill_(0, slots, 0)
        pairs = [(index, token) for index, ids in enumerate(outputs) for token in ids]
        if pairs:
            indices, tokens = _to_device(pairs, torch.int64, slots.device).unbind(1)
            self._add(slots[indices], tokens, torch.ones_like(tokens))
        self._add(slots, drawn, torch.ones_like(slots))

    def add(self, slots: torch.Tensor, runs: torch.Tensor, lens: torch.Tensor) -> None:
        """Count the first `lens` tokens of each run. slots int64 [bs]; runs int64 [bs, D]; lens int32 [bs]."""
        kept = torch.arange(runs.shape[1], device=runs.device) < lens[:, None]
        self._add(slots[:, None].expand_as(runs).flatten(), runs.flatten(), kept.flatten())

    def take(self, slots: torch.Tensor) -> torch.Tensor:
        """Counts of these requests, int32 [bs, vocab]."""
        return self._counts.index_select(0, slots)

    def _add(self, slots: torch.Tensor, tokens: torch.Tensor, times: torch.Tensor) -> None:
        cells = slots * self._counts.shape[1] + tokens
        self._counts.view(-1).scatter_add_(0, cells, times.to(torch.int32))


def penalize(logits: torch.Tensor, rows: VerifyRows, penalties: Penalties, counts: torch.Tensor | None) -> None:
    """Apply the penalties in place, each row by its own path.

    Args:
        logits: floating point [bs * T, vocab].
        counts: int32 [bs, vocab], committed output of each request, the root included; None when no request needs it.
    """
    batch_size, width = rows.tokens.shape
    table = logits.view(batch_size, width, -1)
    if counts is not None:
        drafted = rows.tokens[:, None, :].expand(-1, width, -1)
        on_path = _penalize_drafted(table.gather(2, drafted), rows, penalties, counts)
        additive, factor = _effect(counts, penalties)
        table.sub_(additive[:, None, :])
        if penalties.needs_repetition:
            _scale(table, factor[:, None, :])
        table.scatter_(2, drafted, on_path.to(table.dtype))
    if penalties.stop_ids.shape[1]:
        early = rows.positions < penalties.stops_from
        bias = torch.where(early[:, :, None], penalties.stop_bias[:, None, :], 0.0)
        table.scatter_add_(2, penalties.stop_ids[:, None, :].expand(-1, width, -1), bias.to(table.dtype))


def _penalize_drafted(
    values: torch.Tensor, rows: VerifyRows, penalties: Penalties, counts: torch.Tensor
) -> torch.Tensor:
    """Penalised logits of the drafted tokens: `values` and result [bs, T, T], the last dimension over the tokens.

    A token that was drafted twice has the same count, and so the same value, in both of its columns.
    """
    path = rows.visible.to(torch.float32)
    path[:, :, 0] = 0  # the root is among the committed tokens
    same = (rows.tokens[:, :, None] == rows.tokens[:, None, :]).to(torch.float32)
    additive, factor = _effect(
        counts.gather(1, rows.tokens)[:, None, :] + torch.matmul(path, same),
        penalties,
    )
    values = values - additive
    _scale(values, factor)
    return values


def _effect(counts: torch.Tensor, penalties: Penalties) -> tuple[torch.Tensor, torch.Tensor]:
    """What these counts, [bs, ...], subtract from a logit, and by how much they scale it."""
    shape = (-1,) + (1,) * (counts.ndim - 1)
    frequency, presence = penalties.frequency.view(shape), penalties.presence.view(shape)
    seen = counts > 0
    return frequency * counts + presence * seen, torch.where(seen, penalties.repetition.view(shape), 1.0)


def _scale(values: torch.Tensor, factor: torch.Tensor) -> None:
    """Move logits away from the top in place, whatever their sign, with one temporary of their size."""
    negative = values.clamp(max=0).mul_(factor)
    values.clamp_(min=0).div_(factor).add_(negative)


def _to_device(data: Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    pinned = torch.device(device).type == "cuda"
    return torch.tensor(data, dtype=dtype, pin_memory=pinned).to(device, non_blocking=True)
