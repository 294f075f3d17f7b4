# SPDX-License-Identifier: Apache-2.0
"""What DDTREE allocates after the KV pools were sized, counted before they are.

SGLang leaves a share of the card, 1 - ``--mem-fraction-static``, to activations and captured graphs, and its default
knows nothing of trees: masks, slot lists and attention scratch of the verify passes, their logits, the kernel's
workspace. `lower_default_fraction` takes them off a default, `check_room` refuses a value of the user that leaves too
little, before anything is captured.
"""

from __future__ import annotations

import copy
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.sm120.startup import StartupError

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

FLAG = "--mem-fraction-static"
MIB = 2**20
FP32, INT64 = 4, 8
# Target and drafter at four batch sizes took 0.25 GiB on an H200 (tests/verify/results/h200.json).
GRAPH_BYTES_PER_SIZE = 64 * MIB
# What SGLang's default leaves for decode graphs, by the largest captured batch (ServerArgs.reserve_for_graph_mb).
STOCK_GRAPH_BYTES_PER_REQUEST = 2 * MIB


@dataclass(frozen=True)
class AttentionScratch:
    """Sizes of one backend's split-KV results, fp32: a row has heads * splits partial outputs of `value_dim`."""

    heads: int
    splits: int
    value_dim: int

    @classmethod
    def of(cls, backend: Any) -> AttentionScratch:
        """What a backend will allocate when it is captured: nothing, unless it is Triton's."""
        from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

        if not isinstance(backend, TritonAttnBackend):
            return cls(0, 0, 0)
        return cls(int(backend.num_head), int(backend.max_kv_splits), int(backend.v_head_dim))

    def bytes_per_row(self) -> int:
        """The partial outputs and one log-sum-exp each."""
        return self.heads * self.splits * (self.value_dim + 1) * FP32


@dataclass(frozen=True)
class VerifyShape:
    """What decides the size of DDTREE's graph state on one rank.

    captured     requests in the largest captured batch; 0 without CUDA graphs
    widths       rows per request of each captured verify width
    block_size   rows per request of the drafter
    context_len  columns of a mask, entries of a slot list
    vocab_size   of the target
    tp_size      ranks that share the vocabulary in the drafter's logits
    target       scratch of the target's backend, one for each width
    drafter      scratch of the drafter's backend
    """

    captured: int
    widths: tuple[int, ...]
    block_size: int
    context_len: int
    vocab_size: int
    tp_size: int
    target: AttentionScratch
    drafter: AttentionScratch

    def capture_bytes(self) -> dict[str, int]:
        """Bytes by purpose that capturing allocates for certain, the graphs' own memory not counted."""
        if not self.captured:
            return {}
        rows = self.captured + 1  # verify_route.graph_rows
        lists = len(self.widths) + 1
        drafted = self.captured * (self.block_size - 1) * -(-self.vocab_size // self.tp_size)
        return {
            "masks": sum(self.captured * width * (self.context_len + width) for width in self.widths),
            "slot lists": lists * rows * self.context_len * INT64,
            "attention scratch": rows * (len(self.widths) * self.target.bytes_per_row() + self.drafter.bytes_per_row()),
            "logits": (self.captured * max(self.widths) * self.vocab_size + drafted) * FP32,
        }


def describe(sizes: dict[str, int]) -> str:
    """``masks 12 MiB, logits 300 MiB``, without what is empty."""
    return ", ".join(f"{name} {math.ceil(size / MIB)} MiB" for name, size in sizes.items() if size)


def floored(fraction: float) -> float:
    """Three digits, as SGLang's default has, and never more than asked."""
    return math.floor(fraction * 1000) / 1000


def check_room(needed: dict[str, int], free_bytes: int, fraction: float, fraction_of_bytes: int) -> None:
    """Refuse a start that would run out of memory in capture.

    Args:
        needed: what is still to be allocated, by purpose.
        free_bytes: of the device, with weights and KV pools in place.
        fraction: ``--mem-fraction-static``.
        fraction_of_bytes: the memory that it is a share of.

    Raises:
        StartupError: naming the missing bytes and the fraction that leaves them.
    """
    missing = sum(needed.values()) - free_bytes
    if missing <= 0:
        return
    fitting = floored(fraction - missing / fraction_of_bytes)
    raise StartupError(
        f"{FLAG}: expected {sum(needed.values())} free bytes beside weights and KV pools ({describe(needed)}), got "
        f"{free_bytes}, {missing} are missing; lower {FLAG} from {fraction} to at most {fitting}, or lower "
        "--max-running-requests"
    )


def capture_sizes(batch_sizes: Sequence[int], max_requests: int) -> list[int]:
    """The batch sizes that SGLang captures of the configured ones: those that can occur, and the largest of all."""
    sizes = {size for size in batch_sizes if size <= max_requests}
    return sorted(sizes | {max_requests} if max(batch_sizes) > max_requests else sizes)


def lower_default_fraction(server_args: ServerArgs, drafter: Any, widths: Sequence[int]) -> None:
    """Take DDTREE's memory off the default ``--mem-fraction-static``; a value of the user stays as it is.

    SGLang has filled in its default already. A value that differs from it was given, and so was one that equals it when
    the command line has the flag.

    Args:
        server_args: resolved but for the fraction.
        drafter: the drafter's Hugging Face config.
        widths: rows per request of each verify width.

    Raises:
        StartupError: when the card is too small for what verification allocates.
    """
    from sglang.srt.utils.common import get_device_memory_capacity

    capacity_mib = get_device_memory_capacity(server_args.device)
    if server_args.device != "cuda" or capacity_mib is None or not _captures_decode(server_args):
        return
    if server_args.post_capture_kv_sizing_planned():
        return  # SGLang sizes the pools of such a target by what capturing has left
    stock = server_args.mem_fraction_static
    if _is_on_command_line() or stock != _stock_default(server_args, capacity_mib):
        return
    extra = _unreserved_bytes(server_args, drafter, widths)
    if sum(extra.values()) <= 0:
        return
    lowered = floored(stock - sum(extra.values()) / MIB / capacity_mib)
    if lowered <= 0:
        raise StartupError(
            f"DDTREE: expected less than {int(stock * capacity_mib)} MiB for verification ({describe(extra)}), got "
            f"{math.ceil(sum(extra.values()) / MIB)}; "
            "lower --max-running-requests, --context-length or --speculative-ddtree-budget"
        )
    server_args.mem_fraction_static = lowered
    logger.info(
        "DDTREE: %s lowered from the default %s to %s for %s; give the flag to choose another value.",
        *(FLAG, stock, lowered, describe(extra)),
    )


def _is_on_command_line() -> bool:
    """Whether this process was started with the flag, which argparse also takes shortened."""
    names = (word.partition("=")[0] for word in sys.argv[1:])
    return any(name.startswith("--mem-") and FLAG.startswith(name) for name in names)


def _captures_decode(server_args: ServerArgs) -> bool:
    from sglang.srt.model_executor.cuda_graph_config import Backend

    return bool(server_args.cuda_graph_config.decode.backend != Backend.DISABLED)


def _stock_default(server_args: ServerArgs, capacity_mib: float) -> float | None:
    """SGLang's own default for these arguments."""
    probe = copy.copy(server_args)
    probe.cuda_graph_config = copy.deepcopy(server_args.cuda_graph_config)
    probe.mem_fraction_static = None
    probe._handle_gpu_memory_settings(capacity_mib)
    fraction: float | None = probe.mem_fraction_static
    return fraction


def _unreserved_bytes(server_args: ServerArgs, drafter: Any, widths: Sequence[int]) -> dict[str, int]:
    """Bytes by purpose beyond what SGLang's default leaves for decode graphs."""
    decode = server_args.cuda_graph_config.decode
    max_requests = int(server_args.max_running_requests)
    sizes = capture_sizes(decode.bs, max_requests)
    shape = configured_shape(server_args, drafter, widths, captured=max(sizes))
    needed = shape.capture_bytes()
    needed["workspace"] = _workspace_bytes(server_args, shape, max_requests)
    needed["graphs"] = max(
        0, GRAPH_BYTES_PER_SIZE * len(sizes) * len(widths) - STOCK_GRAPH_BYTES_PER_REQUEST * int(decode.max_bs)
    )
    return needed


def configured_shape(server_args: ServerArgs, drafter: Any, widths: Sequence[int], captured: int) -> VerifyShape:
    """The shape as far as arguments and configs tell it, before any model is loaded."""
    model = server_args.get_model_config()
    text, tp_size = model.hf_text_config, int(server_args.tp_size)
    latent = getattr(text, "kv_lora_rank", None)
    splits = int(server_args.triton_attention_num_kv_splits)
    heads = max(1, int(text.num_attention_heads) // tp_size)
    target = AttentionScratch(heads, splits, int(model.head_dim))
    if latent:
        target = AttentionScratch(heads, _mla_splits(splits, int(model.context_len)), int(latent))
    draft_heads = int(drafter.num_attention_heads)
    head_dim = getattr(drafter, "head_dim", None) or int(drafter.hidden_size) // draft_heads
    return VerifyShape(
        captured=captured,
        widths=tuple(widths),
        block_size=int(server_args.speculative_dflash_block_size),
        context_len=int(model.context_len),
        vocab_size=int(text.vocab_size),
        tp_size=tp_size,
        target=target,
        drafter=AttentionScratch(max(1, draft_heads // tp_size), splits, int(head_dim)),
    )


def _mla_splits(configured: int, context_len: int) -> int:
    import torch

    from sglang.srt.layers.attention.triton_backend import _mla_decode_kv_splits_cap

    processors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return int(_mla_decode_kv_splits_cap(configured, processors, context_len))


def _workspace_bytes(server_args: ServerArgs, shape: VerifyShape, max_requests: int) -> int:
    """Of `mla_tree_verify`, 0 where it will not serve."""
    from sglang.srt.sm120.verify_route import kernel_is_asked_for, workspace_bytes

    if not kernel_is_asked_for() or not server_args.use_mla_backend():
        return 0
    try:
        return sum(workspace_bytes(width, max_requests, shape.target.heads) for width in shape.widths)
    except (ImportError, ValueError):  # not installed, or a shape beyond its limits: Triton serves
        return 0
