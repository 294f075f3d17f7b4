# SPDX-License-Identifier: Apache-2.0
"""What operators see of DDTREE: acceptance by depth, node use, verify time, in ``/metrics``, the log and the response."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.sm120.metrics import series
from sglang.srt.sm120.verify_route import publish_routes, report_comparison
from sglang.srt.speculative.ddtree_algorithm import is_ddtree
from sglang.srt.speculative.ddtree_args import budgets_of

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def max_depth(budget: int, block_size: int) -> int:
    """The most drafted tokens one verify pass can accept: the depth of the tree."""
    return min(budget, block_size - 1)


def drafts_per_step(server_args: ServerArgs, default: int) -> int:
    """The denominator of the accept rate: the tree's depth under DDTREE, `default` for other algorithms."""
    if not is_ddtree(server_args.speculative_algorithm):
        return default
    return max_depth(budgets_of(server_args)[-1], int(server_args.speculative_dflash_block_size))


def describe_steps(scheduler: Any, drafts_per_round: int) -> tuple[int, str]:
    """For the scheduler's decode log: the accept rate's denominator; what validate mode found, budgets, runs of slots.

    Where metrics are on, it also says in ``/metrics`` who verifies for algorithms whose worker is SGLang's own.
    """
    reporter, args = scheduler.metrics_reporter, scheduler.server_args
    labels = reporter.metrics_collector.labels if reporter.current_scheduler_metrics_enabled else None
    found = report_comparison(scheduler, labels)
    if is_ddtree(args.speculative_algorithm):
        worker = scheduler.draft_worker
        found += worker.describe_budgets() + worker.defragmenter.describe()
    elif labels is not None:
        backend = scheduler.tp_worker.model_runner.attn_backend
        publish_routes({int(args.speculative_num_draft_tokens or 0): backend}, labels)
    return drafts_per_step(args, drafts_per_round), found


def describe_request(meta_info: dict[str, Any], server_args: ServerArgs, verify_steps: int, accepted: int) -> int:
    """Add a request's node use to its meta info; return the drafted tokens that it could have accepted.

    Args:
        meta_info: the response's meta info; gains ``spec_node_use`` under DDTREE with a fixed budget, the accepted share
            of all nodes.
        verify_steps: verify passes of the request, at least 1.
        accepted: drafted tokens accepted in all of them, bonus tokens not counted.
    """
    if is_ddtree(server_args.speculative_algorithm) and len(budgets := budgets_of(server_args)) == 1:
        meta_info["spec_node_use"] = accepted / (verify_steps * budgets[0])
    return verify_steps * drafts_per_step(server_args, int(server_args.speculative_num_draft_tokens) - 1)


class VerifyTimer:
    """How long verify passes take on the device, without a wait for it.

    On CUDA a pass is enclosed by two events of its stream, which are read once both are over; elsewhere the host computes
    it and its clock tells. `MOST_IN_FLIGHT` passes can be open, more than overlap has; a further one is not timed.
    """

    MOST_IN_FLIGHT = 4

    def __init__(self, device: torch.device | str) -> None:
        self._on_cuda = torch.device(device).type == "cuda"
        self._free = deque(
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(self.MOST_IN_FLIGHT if self._on_cuda else 0)
        )
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds: list[float] = []
        self._started = 0.0

    def start(self) -> None:
        """Call before the first launch of a pass."""
        self._started = time.perf_counter()
        if self._free:
            self._free[0][0].record()

    def stop(self) -> None:
        """Call after its last launch."""
        if not self._on_cuda:
            self._seconds.append(time.perf_counter() - self._started)
        elif self._free:
            events = self._free.popleft()
            events[1].record()
            self._open.append(events)

    def finished(self) -> list[float]:
        """Seconds of the passes that have ended since the last call, oldest first."""
        while self._open and self._open[0][1].query():
            start, end = events = self._open.popleft()
            self._seconds.append(start.elapsed_time(end) / 1e3)
            self._free.append(events)
        seconds, self._seconds = self._seconds, []
        return seconds


class TreeMetrics:
    """Prometheus series of one scheduler, under SGLang's own prefix.

    Create it after SGLang has set the multiprocess folder, that is, in the scheduler process.

    Args:
        labels: of the scheduler's series.
        depth: the most drafted tokens that a pass can accept.
    """

    def __init__(self, labels: Mapping[str, Any], depth: int) -> None:
        bounds = tuple(float(accepted) for accepted in range(depth + 1))
        self._accepted_depth = series("sglang:spec_accepted_depth", labels, bounds).labels()
        self._budget = series("sglang:spec_tree_budget", labels).labels()
        self._nodes_verified = series("sglang:spec_tree_nodes_verified", labels).labels()
        self._nodes_accepted = series("sglang:spec_tree_nodes_accepted", labels).labels()
        self._verify_seconds = series("sglang:sm120_verify_seconds", labels).labels()

    def observe(self, accepted_per_request: Sequence[int], budget: int, verify_seconds: Sequence[float] = ()) -> None:
        """Record one verify pass: drafted tokens accepted by each request, and the nodes of each tree.

        `verify_seconds` are the durations of passes that have ended since the last call.
        """
        self._budget.set(budget)
        for accepted in accepted_per_request:
            self._accepted_depth.observe(accepted)
        self._nodes_verified.inc(budget * len(accepted_per_request))
        self._nodes_accepted.inc(sum(accepted_per_request))
        for seconds in verify_seconds:
            self._verify_seconds.observe(seconds)
