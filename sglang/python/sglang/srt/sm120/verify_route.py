# SPDX-License-Identifier: Apache-2.0
"""Where target-verify attention of an MLA model goes: to `mla_tree_verify`, or to SGLang's Triton kernel.

The Triton backend calls two functions of this module, each at the place where the data passes (patches ``verify/*``):
`graph_rows` when it sizes its CUDA graph state, and `serve_verify` per layer. The decision is made once, at start-up;
nothing is chosen in the hot path.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang.srt.sm120.metrics import series
from sglang.srt.sm120.startup import StartupError
from sglang.srt.sm120.verify_compare import VerifyComparison, shared_comparison
from sglang.srt.speculative.ddtree_algorithm import is_ddtree

if TYPE_CHECKING:
    from sgl_kernel_sm120 import Plan
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

logger = logging.getLogger(__name__)

MODE_VARIABLE = "SGLANG_SM120_VERIFY"
LATENT_DIM, ROPE_DIM = 512, 64


class VerifyMode(Enum):
    """Values of ``SGLANG_SM120_VERIFY``."""

    AUTO = "auto"  # the kernel on compute capability 12.x, Triton elsewhere
    ON = "on"  # the kernel, or no start
    OFF = "off"  # Triton
    VALIDATE = "validate"  # both; Triton's output is used, the kernel's is compared with it


def verify_mode() -> VerifyMode:
    """The mode that the environment asks for. Errors: StartupError for another value."""
    value = os.environ.get(MODE_VARIABLE, VerifyMode.AUTO.value)
    try:
        return VerifyMode(value)
    except ValueError:
        expected = ", ".join(mode.value for mode in VerifyMode)
        raise StartupError(f"{MODE_VARIABLE}: expected one of {expected}, got {value!r}; unset it") from None


def refuse_without_card() -> None:
    """Stop a start that insists on the kernel on a machine that cannot run it.

    Errors: StartupError in the modes ``on`` and ``validate`` without an NVIDIA device.
    """
    mode = verify_mode()
    if mode in (VerifyMode.ON, VerifyMode.VALIDATE) and not torch.cuda.is_available():
        raise StartupError(f"{MODE_VARIABLE}={mode.value}: expected an NVIDIA device, got none; set it to auto")


class Fallback(NamedTuple):
    """Why the kernel does not serve.

    code  one of `REMEDIES`; the label of the metric
    text  the whole reason, for the log
    """

    code: str
    text: str


# What an operator can do about each fallback; docker/OPERATING.md has this table.
REMEDIES = {
    "off": f"somebody set `{MODE_VARIABLE}=off`; unset it to use the kernel",
    "other_card": f"expected on such a card; `{MODE_VARIABLE}=on` tries the kernel where it has code for the card (9.0)",
    "not_mla": "expected: the kernel computes MLA attention alone",
    "latent_size": "expected: the kernel is made for a latent of 512 + 64, that of DeepSeek V3, Kimi K2 and GLM-4.7-Flash",
    "context_parallel": "drop `--dcp-size` to use the kernel",
    "unified_pool": "drop `--enable-unified-memory` to use the kernel",
    "no_library": "run `scripts/setup --kernel`, which builds and installs the kernel; the image has it",
    "unsupported": "the log names the limit: lower `--max-running-requests` or the budget, or use `--kv-cache-dtype auto`",
    "other_backend": "the kernel serves behind `--attention-backend triton` alone, which is the default on sm_120",
    "no_card": "expected without a card: the reference platform computes attention in plain torch",
}


@dataclass
class Kernel:
    """What a call of `mla_tree_verify` needs beside the batch; T is the verify width.

    workspace       uint8, large enough for every batch of the server
    compact_indptr  int64 [max_bs + 1], first byte of each request in masks of T x T bytes
    """

    workspace: torch.Tensor
    compact_indptr: torch.Tensor
    max_bs: int
    width: int

    def run(
        self,
        backend: Any,
        layer: RadixAttention,
        q: torch.Tensor,
        out: torch.Tensor,
        slots: torch.Tensor,
        mask: torch.Tensor | None,
        mask_indptr: torch.Tensor | None,
        mask_is_full: bool,
    ) -> None:
        """Write the attention of one layer to `out` [bs * T, heads * 512]; q [bs * T, heads * 576]."""
        from sgl_kernel_sm120 import mla_tree_verify

        metadata = backend.forward_metadata
        mla_tree_verify(
            q.view(-1, layer.tp_q_head_num, LATENT_DIM + ROPE_DIM),
            backend.token_to_kv_pool.get_key_buffer(layer.layer_id),
            metadata.kv_indptr,
            metadata.kv_indices,
            metadata.qo_indptr,
            slots,
            mask,
            mask_indptr,
            out.view(-1, layer.tp_q_head_num, LATENT_DIM),
            self.workspace,
            scale=layer.scaling,
            mask_is_full=mask_is_full,
        )


@dataclass
class VerifyRoute:
    """The route of one target backend, as `route_of` gives it.

    kernel      what serves, or None when Triton does
    fallback    why Triton serves; None when the kernel does
    comparison  set in validate mode
    tree_mask   bool [max_bs, T, T], static: DDTREE's trees; None for algorithms that carry their mask in the batch
    """

    kernel: Kernel | None
    fallback: Fallback | None
    comparison: VerifyComparison | None = None
    tree_mask: torch.Tensor | None = None

    @property
    def reason(self) -> str | None:
        """Why Triton serves, as one line; None when the kernel does."""
        return None if self.fallback is None else self.fallback.text

    @property
    def reads_compact_mask(self) -> bool:
        """Whether masks have T columns, so that no buffer of the context's length is needed."""
        return self.kernel is not None and self.comparison is None


def route_of(backend: Any) -> VerifyRoute | None:
    """The route of a Triton backend, decided and logged when it is first asked for; None for other backends.

    A backend that verifies nothing has none either: a drafter's, or one without speculation. The first to ask is DDTREE's
    worker, else the capture of CUDA graphs, else the first verify pass.

    Errors: StartupError in the modes ``on`` and ``validate`` when the kernel cannot serve.
    """
    if not hasattr(backend, "sm120_route"):
        backend.sm120_route = _decide(backend) if type(backend).__name__ == "TritonAttnBackend" else None
    route: VerifyRoute | None = backend.sm120_route
    return route


def _decide(backend: Any) -> VerifyRoute | None:
    algorithm = _algorithm_name()
    if algorithm is None or backend.is_draft_runner or backend.skip_prefill:
        return None
    mode = verify_mode()
    width, max_bs = int(backend.num_draft_tokens or 0), int(backend.req_to_token_pool.size)
    fallback = _unserved(mode, backend, width, max_bs)
    if fallback is not None:
        if mode in (VerifyMode.ON, VerifyMode.VALIDATE):
            raise StartupError(
                f"{MODE_VARIABLE}={mode.value}: {fallback.text}; set it to auto to use SGLang's Triton kernel"
            )
        if is_ddtree(algorithm) or _is_sm120():
            logger.info("Verify attention: SGLang's Triton kernel, because %s.", fallback.text)
        return VerifyRoute(kernel=None, fallback=fallback)
    kernel = _allocate_kernel(backend, width, max_bs)
    _log_choice(backend, mode, kernel)
    return VerifyRoute(kernel, None, shared_comparison(backend.device) if mode is VerifyMode.VALIDATE else None)


def _unserved(mode: VerifyMode, backend: Any, width: int, max_bs: int) -> Fallback | None:
    """Why the kernel does not serve this backend, or None."""
    if mode is VerifyMode.OFF:
        return Fallback("off", f"{MODE_VARIABLE} is off")
    if mode is VerifyMode.AUTO and not _is_sm120():
        return Fallback("other_card", f"{MODE_VARIABLE} is auto and the card is not of compute capability 12.x")
    pool = backend.token_to_kv_pool
    if not backend.use_mla:
        return Fallback("not_mla", "the target is not an MLA model")
    if (pool.kv_lora_rank, pool.qk_rope_head_dim) != (LATENT_DIM, ROPE_DIM):
        return Fallback(
            "latent_size",
            f"the kernel expects a latent of {LATENT_DIM} + {ROPE_DIM}, "
            f"the target has {pool.kv_lora_rank} + {pool.qk_rope_head_dim}",
        )
    if backend.dcp_size > 1:
        return Fallback("context_parallel", "decode context parallelism is on")
    if backend._translate_kv_loc is not None:
        return Fallback("unified_pool", "the unified memory pool is on")
    try:
        from sgl_kernel_sm120 import is_supported

        # The package loads its library when it is first asked for a plan.
        workspace_bytes(1, 1, 1)
    except ImportError as error:
        # What is wrong with a library says its remedy itself.
        remedy = "; run scripts/setup --kernel" if isinstance(error, ModuleNotFoundError) else ""
        return Fallback("no_library", f"sgl_kernel_sm120 cannot be used: {error}{remedy}")
    limit = is_supported(
        batch_size=max_bs,
        num_tokens=width,
        num_heads=backend.num_head,
        kv_dtype=pool.dtype,
        capability=torch.cuda.get_device_capability(backend.device),
    )
    return None if limit is None else Fallback("unsupported", limit)


def kernel_is_asked_for() -> bool:
    """Whether the mode and the card let the kernel serve, as far as that is known before a model is loaded."""
    mode = verify_mode()
    return mode is not VerifyMode.OFF and (mode is not VerifyMode.AUTO or _is_sm120())


def workspace_bytes(width: int, max_bs: int, num_heads: int) -> int:
    """Bytes that the kernel needs for any batch of at most `max_bs` requests.

    Errors: ImportError without the library, ValueError for a shape beyond its limits.
    """
    return max(_plan(bs, width, num_heads).workspace_bytes for bs in range(1, max_bs + 1))


def workspace_of(backend: Any) -> int:
    """Bytes of the workspace that a backend's kernel holds, 0 where none serves."""
    route = route_of(backend)
    return 0 if route is None or route.kernel is None else int(route.kernel.workspace.nbytes)


def workspace_for(backend: Any, width: int) -> int:
    """Bytes of the workspace that a further backend for another verify width will hold, 0 where no kernel serves."""
    route = route_of(backend)
    if route is None or route.kernel is None:
        return 0
    return workspace_bytes(width, route.kernel.max_bs, int(backend.num_head))


def publish_routes(backends: Mapping[int, Any], labels: Mapping[str, Any]) -> None:
    """Set the gauge that says who serves verify attention; `backends` are the target's by verify width."""
    gauge = series("sglang:sm120_verify_route", labels)
    for width, backend in backends.items():
        route = route_of(backend)
        if route is None:
            kernel, code = "other", "other_backend" if torch.cuda.is_available() else "no_card"
        elif route.fallback is None:
            kernel, code = "mla_tree_verify", ""
        else:
            kernel, code = "triton", route.fallback.code
        gauge.labels(width=width, kernel=kernel, reason=code).set(1)


def _is_sm120() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 12


def _plan(bs: int, width: int, num_heads: int) -> Plan:
    from sgl_kernel_sm120 import plan

    num_sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    planned: Plan = plan(bs, width, num_heads, num_sms)
    return planned


def _allocate_kernel(backend: Any, width: int, max_bs: int) -> Kernel:
    needed = workspace_bytes(width, max_bs, backend.num_head)
    try:
        workspace = torch.empty(needed, dtype=torch.uint8, device=backend.device)
    except torch.cuda.OutOfMemoryError as error:
        raise StartupError(
            f"verify attention: expected {needed} free bytes for the kernel's workspace at {max_bs} requests, "
            f"got {torch.cuda.mem_get_info()[0]}; lower --max-running-requests or --mem-fraction-static"
        ) from error
    compact_indptr = torch.arange(max_bs + 1, dtype=torch.int64, device=backend.device) * (width * width)
    return Kernel(workspace, compact_indptr, max_bs, width)


def _log_choice(backend: Any, mode: VerifyMode, kernel: Kernel) -> None:
    from sglang.srt.runtime_context import get_exec

    sizes = sorted(bs for bs in get_exec().graph.cuda_graph_config.decode.bs or [1] if bs <= kernel.max_bs)
    plans = {bs: _plan(bs, kernel.width, backend.num_head) for bs in sizes}
    logger.info(
        "Verify attention: mla_tree_verify%s on %s (compute capability %d.%d), %d heads, %d rows per request; splits by "
        "batch size %s; blocks of %s rows; workspace %d bytes, compact mask %d bytes.",
        " beside Triton (validate)" if mode is VerifyMode.VALIDATE else "",
        torch.cuda.get_device_name(backend.device),
        *torch.cuda.get_device_capability(backend.device),
        backend.num_head,
        kernel.width,
        ", ".join(f"{bs}: {planned.num_splits}" for bs, planned in plans.items()),
        " and ".join(map(str, sorted({planned.block_rows for planned in plans.values()}))),
        kernel.workspace.numel(),
        kernel.max_bs * kernel.width**2,
    )


def graph_rows(backend: Any, max_bs: int, max_num_tokens: int) -> int:
    """Rows that a Triton backend's CUDA graph state needs, of the `max_num_tokens` that SGLang sizes it by.

    The state is decode scratch and slot lists. Verification reads the lists alone, one per request; one per tree row
    takes gigabytes. One request more keeps lengths that are slightly above the context length inside, as the slack
    of the larger buffer did. DDTREE's two models only ever verify; other algorithms keep their size unless the kernel
    serves, so that nothing changes for them elsewhere.
    """
    route = route_of(backend)
    verifies_only = is_ddtree(_algorithm_name()) or (route is not None and route.kernel is not None)
    if not verifies_only or backend.use_sliding_window_kv_pool or backend.skip_prefill:
        return max_num_tokens
    return min(max_bs + 1, max_num_tokens)


def _algorithm_name() -> str | None:
    from sglang.srt.runtime_context import get_spec

    return get_spec().speculative_algorithm


def drop_unread_mask(backend: Any) -> int:
    """Free a captured backend's mask buffer, of the context's length, where the kernel alone reads DDTREE's masks.

    Returns its bytes, 0 where it stays.
    """
    route = route_of(backend)
    if route is None or not route.reads_compact_mask or route.tree_mask is None or backend._verify_mask is None:
        return 0
    size = int(backend._verify_mask.buffer.nbytes)
    backend._verify_mask = None
    return size


def serve_verify(
    backend: Any,
    layer: RadixAttention,
    forward_batch: ForwardBatch,
    out: torch.Tensor,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    extras: dict[str, Any],
) -> bool:
    """Whether the attention of this layer has been written to `out`; otherwise the caller goes on with Triton.

    Args:
        out: [rows, heads * v_dim].
        qkv: what the caller was given; the pool holds k and v already.
        extras: what it was given beside (sinks, score_mod, aux_tensors); the kernel computes none of them.
    """
    if not forward_batch.forward_mode.is_target_verify() or (route := route_of(backend)) is None:
        return False
    if route.kernel is None:
        _use_tree_buffer(route, backend)
        return False
    _check_call(layer, backend.forward_metadata.max_extend_len, route.kernel.width, extras)
    slots = forward_batch.out_cache_loc
    if route.comparison is None:
        route.kernel.run(backend, layer, qkv[0], out, slots, *_mask_of(route, backend))
        return True
    if route.comparison.in_stock_half:
        _use_tree_buffer(route, backend)
        return False
    route.comparison.in_stock_half = True
    try:
        reference = backend.forward_extend(*qkv, layer, forward_batch, save_kv_cache=False, **extras)
    finally:
        route.comparison.in_stock_half = False
    kernel_out = torch.empty_like(reference)
    route.kernel.run(backend, layer, qkv[0], kernel_out, slots, *_mask_of(route, backend))
    rows = (slots.shape[0], layer.tp_q_head_num, LATENT_DIM)
    route.comparison.add(layer.layer_id, kernel_out.view(rows), reference.view(rows), slots)
    out.copy_(reference)
    return True


def _mask_of(route: VerifyRoute, backend: Any) -> tuple[torch.Tensor | None, torch.Tensor | None, bool]:
    """Mask, its offsets and whether its rows span the prefix, for the batch that the backend holds."""
    metadata, kernel = backend.forward_metadata, route.kernel
    assert kernel is not None
    batch_size = metadata.kv_indptr.shape[0] - 1
    if route.tree_mask is not None:
        return route.tree_mask.view(-1), kernel.compact_indptr[: batch_size + 1], False
    if metadata.custom_mask is None:
        return None, None, False
    return metadata.custom_mask, metadata.mask_indptr[: batch_size + 1], True


def _use_tree_buffer(route: VerifyRoute, backend: Any) -> None:
    """Let Triton read DDTREE's mask: SGLang captures the DFLASH family without one and would drop the tree.

    The worker fills the backend's buffer before each pass. Without captured graphs there is no such buffer, and the
    batch carries its mask.
    """
    metadata = backend.forward_metadata
    if route.tree_mask is not None and metadata.custom_mask is None and backend.verify_mask is not None:
        metadata.custom_mask = backend.verify_mask.buffer


def _check_call(layer: RadixAttention, width: int, kernel_width: int, extras: dict[str, Any]) -> None:
    """Raise for a layer that the kernel cannot compute, during the first pass or capture, that is, at start-up."""
    for name, got, expected in (
        ("qk_head_dim", layer.qk_head_dim, LATENT_DIM + ROPE_DIM),
        ("v_head_dim", layer.v_head_dim, LATENT_DIM),
        ("tp_k_head_num", layer.tp_k_head_num, 1),
        ("logit_cap", layer.logit_cap, 0),
        ("rows per request", width, kernel_width),
        ("k_scale", 1.0 if layer.k_scale is None else layer.k_scale_float, 1.0),
    ):
        if got != expected:
            raise StartupError(
                f"verify attention, layer {layer.layer_id}: expected {name} {expected}, got {got}; set {MODE_VARIABLE}=off"
            )
    for name, value in extras.items():
        if value is not None:
            raise StartupError(
                f"verify attention, layer {layer.layer_id}: {name} is not supported; set {MODE_VARIABLE}=off"
            )


def report_comparison(scheduler: Any, labels: Mapping[str, Any] | None) -> str:
    """Text for the scheduler's decode log in validate mode, else nothing.

    With `labels`, those of the scheduler's own series, it also sets the gauges of ``/metrics``.
    """
    route = route_of(scheduler.tp_worker.model_runner.attn_backend)
    if route is None or route.comparison is None:
        return ""
    return str(route.comparison.poll(labels))
