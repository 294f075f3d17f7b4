# SPDX-License-Identifier: Apache-2.0
"""Validate mode: the kernel's output compared with Triton's on the device, inside captured graphs as well.

Every figure is accumulated in device memory without a host read. `VerifyComparison.poll`, called between steps,
starts a copy and reports what the previous copy brought.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang.srt.sm120.metrics import series

logger = logging.getLogger(__name__)

# Both kernels round the weights and the output to bf16 (2^-9 relative each) and add in different orders. A weighted sum of
# values of both signs is smaller than its terms, so errors weigh more: 1.4e-2 of a row's largest element was the most in
# 515 compared layers of the demo pair on an H200. A row (token and head) beyond twice that is bad.
ROW_TOLERANCE = 2.0**-5
# Tests set this variable to 1: one element of each compared output is then falsified, which must be reported.
FAULT_VARIABLE = "SGLANG_SM120_VERIFY_FAULT"


@dataclass(frozen=True)
class ComparisonReport:
    """Figures since the start.

    calls       compared layers
    bad_rows    rows (token and head) beyond the tolerance
    max_error   largest error, in units of the largest element of its row
    min_cosine  smallest cosine between a row and its reference
    first_bad   (layer, row, head, column); None while all agree
    """

    calls: int
    bad_rows: int
    max_error: float
    min_cosine: float
    first_bad: tuple[int, int, int, int] | None


@dataclass
class VerifyComparison:
    """Accumulators on the device.

    counts     int64 [2]  calls, bad rows
    extremes   fp32 [2]   largest error in units of the row's largest element, smallest cosine of a row
    first_bad  int64 [4]  layer, row, head, column; -1 while all agree
    """

    counts: torch.Tensor
    extremes: torch.Tensor
    first_bad: torch.Tensor
    falsify: bool
    in_stock_half: bool = False  # while Triton computes its half, the route lets it pass
    _host: list[torch.Tensor] = field(default_factory=list)
    _copied: torch.cuda.Event | None = None
    _reported_bad: int = 0

    @classmethod
    def allocate(cls, device: torch.device | str) -> VerifyComparison:
        return cls(
            counts=torch.zeros(2, dtype=torch.int64, device=device),
            extremes=torch.tensor([0.0, 1.0], device=device),
            first_bad=torch.full((4,), -1, dtype=torch.int64, device=device),
            falsify=os.environ.get(FAULT_VARIABLE) == "1",
        )

    def add(self, layer: int, got: torch.Tensor, expected: torch.Tensor, slots: torch.Tensor) -> None:
        """Compare one layer: got and expected bf16 [rows, heads, 512]; slots int64 [rows], 0 for rows of padding.

        Padded rows all write slot 0, so that the two kernels may read different keys there.
        """
        got, expected = got.float(), expected.float()
        if self.falsify:
            got[0, 0, 0] += 1.0 + expected[0, 0].abs().amax()
        live = (slots != 0)[:, None]
        scale = expected.abs().amax(-1).clamp_(min=torch.finfo(torch.bfloat16).tiny)
        error = ((got - expected).abs() / scale[..., None]).nan_to_num(nan=torch.inf)
        row_error = error.amax(-1).masked_fill(~live, 0.0)
        cosine = (
            torch.nn.functional.cosine_similarity(got, expected, dim=-1).nan_to_num(nan=-1.0).masked_fill(~live, 1.0)
        )
        # Rows of zeros have no direction.
        cosine = torch.where((expected == 0).all(-1) & (got == 0).all(-1), 1.0, cosine)
        bad = row_error > ROW_TOLERANCE
        self.counts[0] += 1
        self.counts[1] += bad.sum()
        torch.maximum(self.extremes[0], row_error.amax(), out=self.extremes[0])
        torch.minimum(self.extremes[1], cosine.amin(), out=self.extremes[1])
        row = bad.flatten().to(torch.int64).argmax()
        heads = bad.shape[1]
        column = error.flatten(0, 1).index_select(0, row[None]).argmax()
        where = torch.stack([torch.full_like(row, layer), row // heads, row % heads, column])
        is_first = bad.any() & (self.first_bad[0] < 0)
        self.first_bad.copy_(torch.where(is_first, where, self.first_bad))

    def read(self) -> ComparisonReport:
        """The figures now; waits for the device."""
        return _report([tensor.cpu() for tensor in (self.counts, self.extremes, self.first_bad)])

    def poll(self, labels: Mapping[str, Any] | None = None) -> str:
        """Start a copy of the figures and describe what the one before brought, with a comma behind; "" without one.

        With `labels` what it brought is also set in ``/metrics``.
        """
        if self._copied is not None and not self._copied.query():
            return ""
        report = _report(self._host) if self._copied is not None else None
        self._host = [tensor.to("cpu", non_blocking=True) for tensor in (self.counts, self.extremes, self.first_bad)]
        self._copied = torch.cuda.Event()
        self._copied.record()
        if report is None:
            return ""
        if report.bad_rows > self._reported_bad:
            self._reported_bad = report.bad_rows
            logger.error("Verify comparison: the kernel and Triton disagree: %s.", report)
        if labels is not None:
            publish_report(report, labels)
        return f"verify error: {report.max_error:.1e} in {report.calls} calls, "


def _report(tensors: list[torch.Tensor]) -> ComparisonReport:
    counts, extremes, first_bad = (tensor.tolist() for tensor in tensors)
    layer, row, head, column = first_bad
    return ComparisonReport(
        calls=counts[0],
        bad_rows=counts[1],
        max_error=extremes[0],
        min_cosine=extremes[1],
        first_bad=None if layer < 0 else (layer, row, head, column),
    )


@functools.cache
def shared_comparison(device: torch.device | str) -> VerifyComparison:
    """The comparison of all backends of this process on one device."""
    return VerifyComparison.allocate(device)


def publish_report(report: ComparisonReport, labels: Mapping[str, Any]) -> None:
    """Set the gauges of validate mode."""
    for name in ("calls", "bad_rows", "max_error", "min_cosine"):
        series(f"sglang:verify_comparison_{name}", labels).labels().set(getattr(report, name))
