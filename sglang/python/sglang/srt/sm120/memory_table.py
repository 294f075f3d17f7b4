# SPDX-License-Identifier: Apache-2.0
"""Where a rank's device memory is once DDTREE has started: one table, one owner for each byte.

Tensors are counted by their storage, each once and for the first owner that holds it, so that what the drafter shares
with the target (embedding, head) is the target's. Graphs are what captures took from the free memory, without masks and
workspaces that were allocated meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.sm120.metrics import series
from sglang.srt.sm120.verify_route import route_of

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.ddtree_ladder import Rung

logger = logging.getLogger(__name__)

OWNERS = {
    "weights": "the target's parameters, buffers and absorbed weights",
    "draft_weights": "the drafter's, without what it shares with the target",
    "kv": "the target's KV pool",
    "draft_kv": "the drafter's KV pool, which has a slot for each of the target's",
    "workspace": "`mla_tree_verify`; 0 where Triton serves",
    "mask": "tree masks of all verify widths, and masks of the whole context where Triton reads them",
    "graphs": "what capturing CUDA graphs took, slot lists, attention scratch and logits included",
    "other": "everything else in use: CUDA, NCCL, cached blocks, request tables, other processes",
    "free": "what nothing holds",
}
GIB = 2**30


def measure(target: ModelRunner, drafter: ModelRunner, rungs: Sequence[Rung]) -> dict[str, int]:
    """Bytes by owner, in the order of `OWNERS`; they add up to the device's memory.

    Args:
        target, drafter: their runners, with everything captured.
        rungs: the verify widths.
    """
    from sglang.srt.utils.common import get_available_gpu_memory

    routes = [route for rung in rungs if (route := route_of(rung.attn_backend)) is not None]
    kernels = [route.kernel for route in routes if route.kernel is not None]
    compact = [rung.tree.mask for rung in rungs] + [kernel.compact_indptr for kernel in kernels]
    full = [rung.attn_backend.verify_mask.buffer for rung in rungs if rung.attn_backend.verify_mask is not None]
    holders: dict[str, Iterable[torch.Tensor]] = {
        "weights": module_tensors(target.model),
        "draft_weights": module_tensors(drafter.model),
        "kv": attribute_tensors(target.token_to_kv_pool),
        "draft_kv": attribute_tensors(drafter.token_to_kv_pool),
        "workspace": [kernel.workspace for kernel in kernels],
        "mask": compact + full,
    }
    table = count_once(holders, torch.device(target.device))
    captured = sum(GIB * sum(runner.graph_memory_usage.values()) for runner in (target, drafter))
    captured += sum(rung.capture_bytes - rung.dropped_bytes for rung in rungs) - sum(map(num_bytes, full))
    table["graphs"] = max(0, int(captured))
    table["free"] = int(get_available_gpu_memory(target.device, target.gpu_id) * GIB)
    total = device_bytes(target.device, target.gpu_id)
    table["other"] = max(0, total - sum(table.values()))
    return {owner: table[owner] for owner in OWNERS}


def device_bytes(device: str, gpu_id: int) -> int:
    """The memory of the device; of the machine where there is none."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info(gpu_id)[1])
    import psutil

    return int(psutil.virtual_memory().total)


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's storage."""
    return int(tensor.untyped_storage().nbytes())


def count_once(holders: Mapping[str, Iterable[torch.Tensor]], device: torch.device) -> dict[str, int]:
    """Bytes of the storages on `device` by holder; one that several hold counts for the first."""
    seen: set[int] = set()
    table = dict.fromkeys(holders, 0)
    for owner, tensors in holders.items():
        for tensor in tensors:
            if tensor.device.type == device.type and tensor.data_ptr() and _storage_key(tensor) not in seen:
                seen.add(_storage_key(tensor))
                table[owner] += num_bytes(tensor)
    return table


def _storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def module_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers and plain attributes of all modules: absorbed MLA weights are such attributes."""
    for part in module.modules():
        yield from attribute_tensors(part)  # torch keeps parameters and buffers in dicts of the module


def attribute_tensors(owner: Any) -> Iterator[torch.Tensor]:
    """Tensors that are attributes of `owner`, alone or in a list, a tuple or a dict."""
    for value in vars(owner).values():
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        yield from (part for part in parts if isinstance(part, torch.Tensor))


def log(table: Mapping[str, int]) -> None:
    """One line a row, as operators read it: bytes and GiB."""
    rows = [f"  {owner:14s} {size:>16d} {size / GIB:>9.3f}" for owner, size in table.items()]
    logger.info("\n".join(["Memory of rank 0:", f"  {'owner':14s} {'bytes':>16s} {'GiB':>9s}", *rows]))


def publish(table: Mapping[str, int], labels: Mapping[str, Any]) -> None:
    """Set a gauge for each owner; `labels` are those of the scheduler's series."""
    gauge = series("sglang:sm120_memory_bytes", labels)
    for owner, size in table.items():
        gauge.labels(owner=owner).set(size)
