# SPDX-License-Identifier: Apache-2.0
"""Custom logit processors in a verify pass: each row is processed with the history of its own path.

SGLang calls a processor with one parameter dictionary a request, whose ``__req__`` tells what was generated so far. A
verify pass has several rows a request: here each gets a dictionary of its own, whose ``__req__`` ends at the row's token.
Processors are Python and wait for the device in plain decoding too, so this path may read values back.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.layers.sampler import apply_custom_logit_processor

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.verify_penalties import VerifyRows


class RecentRuns:
    """The last run of tokens of each request, by its row in the slot table; the host may not have seen it yet."""

    def __init__(self, num_requests: int, longest_run: int, device: torch.device | str) -> None:
        self._tokens = torch.zeros((num_requests, longest_run), dtype=torch.int64, device=device)
        self._lens = torch.zeros(num_requests, dtype=torch.int64, device=device)

    def record(self, slots: torch.Tensor, runs: torch.Tensor, lens: torch.Tensor) -> None:
        """slots int64 [bs]; runs int [bs, at most the longest run]; lens int [bs]."""
        self._tokens[slots, : runs.shape[1]] = runs.to(torch.int64)
        self._lens[slots] = lens.to(torch.int64)

    def outputs(self, reqs: Sequence[Req], slots: torch.Tensor, committed: torch.Tensor) -> list[array[int]]:
        """All that each request has generated. committed int [bs]: tokens in its cache, all but the last one."""
        runs, lens = self._tokens[slots].tolist(), self._lens[slots].tolist()
        outputs = []
        for req, run, length, cached in zip(reqs, runs, lens, committed.tolist(), strict=True):
            unseen = cached + 1 - len(req.origin_input_ids) - len(req.output_ids)
            outputs.append(array("q", [*req.output_ids, *run[max(0, length - unseen) : length]]))
        return outputs


class _RequestAtRow:
    """A request whose output ends at a verify row; all else is the request's own."""

    def __init__(self, req: Req, output_ids: array[int]) -> None:
        self._req = req
        self.output_ids = output_ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._req, name)


class _RowInfo:
    """The part of SGLang's SamplingBatchInfo that processors need, with a row for each verify row."""

    def __init__(self, info: SamplingBatchInfo, params: list[dict[str, Any] | None], width: int) -> None:
        self.custom_params = params
        self.custom_logit_processor = {
            key: (processor, mask.repeat_interleave(width))
            for key, (processor, mask) in (info.custom_logit_processor or {}).items()
        }

    def __len__(self) -> int:
        return len(self.custom_params)


def apply_processors(
    logits: torch.Tensor,
    rows: VerifyRows,
    info: SamplingBatchInfo,
    reqs: Sequence[Req],
    outputs: Sequence[array[int]],
) -> None:
    """Process the logits [bs * T, vocab] in place; `outputs` is what each request has generated, the root included."""
    batch_size, width = rows.tokens.shape
    tokens = rows.tokens.tolist()
    visible = rows.visible.expand(batch_size, -1, -1).tolist()
    params: list[dict[str, Any] | None] = []
    for index, (req, own) in enumerate(zip(reqs, info.custom_params or [], strict=True)):
        if req.custom_logit_processor is None or not isinstance(own, dict):
            params += [own] * width
            continue
        for row in range(width):
            path = [tokens[index][ancestor] for ancestor in range(1, width) if visible[index][row][ancestor]]
            at_row = _RequestAtRow(req, outputs[index] + array("q", path))
            params.append({**own, "__req__": at_row})
    row_info: Any = _RowInfo(info, params, width)
    apply_custom_logit_processor(logits, row_info)
