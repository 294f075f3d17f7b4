# SPDX-License-Identifier: Apache-2.0
"""The Prometheus series that the fork adds to SGLang's ``/metrics``, each declared once.

``docker/OPERATING.md`` has its table from here. Series carry the labels of SGLang's own scheduler series. They live in
scheduler processes and reach the server through the folder of ``prometheus_client``'s multiprocess mode, so `series` must
not be called before SGLang has set that folder, that is, not on import.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state_wrapper import ParallelState
    from sglang.srt.server_args import ServerArgs


@dataclass(frozen=True)
class Metric:
    """One series, as it is declared.

    name    as in a query, without the suffix that Prometheus adds to counters and histograms
    kind    counter, gauge or histogram
    text    what a value says, with its unit
    when    what makes it appear
    labels  beside those of SGLang's scheduler
    bounds  upper ends of a histogram's buckets; none where they depend on the server
    """

    name: str
    kind: str
    text: str
    when: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


_DDTREE = "DDTREE"
_SPECULATION = "DDTREE; other speculative algorithms from their first decode log on"
_VALIDATE = "`SGLANG_SM120_VERIFY=validate`"

METRICS = (
    Metric(
        "sglang:spec_accepted_depth",
        "histogram",
        "Drafted tokens accepted by one verify pass of one request, 0 to the depth of the tree.",
        _DDTREE,
    ),
    Metric("sglang:spec_tree_budget", "gauge", "Nodes of the last verified trees, the root not counted.", _DDTREE),
    Metric("sglang:spec_tree_nodes_verified", "counter", "Tree nodes verified, the root not counted.", _DDTREE),
    Metric("sglang:spec_tree_nodes_accepted", "counter", "Tree nodes accepted, the root not counted.", _DDTREE),
    Metric(
        "sglang:sm120_verify_seconds",
        "histogram",
        "Seconds that the device spends in the target's pass over the trees of a batch, all layers; no wait for it.",
        _DDTREE,
        bounds=(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0),
    ),
    Metric(
        "sglang:sm120_verify_route",
        "gauge",
        "1 for who computes verify attention at a verify width, and why it is not mla_tree_verify.",
        _SPECULATION,
        labels=("width", "kernel", "reason"),
    ),
    Metric(
        "sglang:sm120_memory_bytes",
        "gauge",
        "Bytes of a rank's device by owner, as the table at start-up has them.",
        _DDTREE,
        labels=("owner",),
    ),
    Metric(
        "sglang:sm120_kv_run_length",
        "gauge",
        "Mean number of neighbouring positions of running requests whose KV slots are neighbours too.",
        _DDTREE,
    ),
    Metric("sglang:sm120_defrag_rows_moved", "counter", "KV rows moved, each in all layers of both pools.", _DDTREE),
    Metric("sglang:sm120_defrag_seconds", "counter", "Seconds of the device spent on moving KV rows.", _DDTREE),
    Metric("sglang:verify_comparison_calls", "gauge", "Layers compared since the start.", _VALIDATE),
    Metric(
        "sglang:verify_comparison_bad_rows",
        "gauge",
        "Rows (token and head) in which the kernel and Triton disagree, since the start.",
        _VALIDATE,
    ),
    Metric(
        "sglang:verify_comparison_max_error",
        "gauge",
        "Largest error of the kernel against Triton, in units of the row's largest element.",
        _VALIDATE,
    ),
    Metric(
        "sglang:verify_comparison_min_cosine",
        "gauge",
        "Smallest cosine between a row of the kernel and Triton's.",
        _VALIDATE,
    ),
)


@dataclass(frozen=True)
class Series:
    """A collector of ``prometheus_client`` with the scheduler's labels filled in."""

    collector: Any
    base: Mapping[str, str]

    def labels(self, **own: Any) -> Any:
        """The child for the metric's own labels, which may be none."""
        return self.collector.labels(**self.base, **own)


def series(name: str, labels: Mapping[str, Any], bounds: tuple[float, ...] = ()) -> Series:
    """The declared series `name` of this process; made when it is first asked for.

    Args:
        labels: of the scheduler, the same for every call.
        bounds: of a histogram whose declaration has none.
    """
    base = {key: str(value) for key, value in labels.items()}
    return Series(_collector(name, tuple(base), bounds), base)


@functools.cache
def _collector(name: str, label_names: tuple[str, ...], bounds: tuple[float, ...]) -> Any:
    from prometheus_client import Counter, Gauge, Histogram

    metric = next(metric for metric in METRICS if metric.name == name)
    names = [*label_names, *metric.labels]
    if metric.kind == "gauge":
        # One value a series, whichever process set it last, as SGLang's own gauges.
        return Gauge(name, metric.text, names, multiprocess_mode="mostrecent")
    if metric.kind == "counter":
        return Counter(name, metric.text, names)
    return Histogram(name, metric.text, names, buckets=metric.bounds or bounds)


def scheduler_labels(server_args: ServerArgs, ps: ParallelState) -> dict[str, Any]:
    """The labels of SGLang's scheduler series, for code that runs before the scheduler has made its collector."""
    from sglang.srt.disaggregation.utils import DisaggregationMode

    labels = {
        "model_name": server_args.served_model_name,
        "engine_type": DisaggregationMode.to_engine_type(server_args.disaggregation_mode),
        "tp_rank": ps.tp_rank,
        "pp_rank": ps.pp_rank,
        "moe_ep_rank": ps.moe_ep_rank,
    }
    if server_args.enable_priority_scheduling:
        labels["priority"] = ""
    if ps.dp_rank is not None:
        labels["dp_rank"] = ps.dp_rank
    return labels | (server_args.extra_metric_labels or {})
