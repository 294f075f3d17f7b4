# SPDX-License-Identifier: Apache-2.0
"""What operators see of DDTREE: acceptance by depth and node use, in ``/metrics``, the log and the response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.sm120.verify_route import report_comparison
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
    """For the scheduler's decode log: the accept rate's denominator, and what validate mode found since the last line."""
    return drafts_per_step(scheduler.server_args, drafts_per_round), report_comparison(scheduler)


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


class TreeMetrics:
    """Prometheus series of one scheduler, under SGLang's own prefix.

    Create it after SGLang has set the multiprocess folder, that is, in the scheduler process.
    """

    def __init__(self, model_name: str, depth: int) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        labels = {"model_name": model_name}
        self._accepted_depth = Histogram(
            "sglang:spec_accepted_depth",
            "Drafted tokens accepted by one verify pass of one request.",
            labelnames=labels,
            buckets=list(range(depth + 1)),
        ).labels(**labels)
        self._budget = Gauge(
            "sglang:spec_tree_budget", "Nodes of the last verified trees, the root not counted.", labelnames=labels
        ).labels(**labels)
        self._nodes_verified = Counter(
            "sglang:spec_tree_nodes_verified", "Tree nodes verified, the root not counted.", labelnames=labels
        ).labels(**labels)
        self._nodes_accepted = Counter(
            "sglang:spec_tree_nodes_accepted", "Tree nodes accepted, the root not counted.", labelnames=labels
        ).labels(**labels)

    def observe(self, accepted_per_request: Sequence[int], budget: int) -> None:
        """Record one verify pass: drafted tokens accepted by each request, and the nodes of each tree."""
        self._budget.set(budget)
        for accepted in accepted_per_request:
            self._accepted_depth.observe(accepted)
        self._nodes_verified.inc(budget * len(accepted_per_request))
        self._nodes_accepted.inc(sum(accepted_per_request))
