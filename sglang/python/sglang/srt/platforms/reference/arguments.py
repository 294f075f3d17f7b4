# SPDX-License-Identifier: Apache-2.0
"""Server arguments on the reference platform: defaults for a laptop, and what is refused."""

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.sm120.startup import StartupError

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# The size of everything that grows with requests: a default start of a small model stays within a few GB.
DEFAULT_MAX_TOTAL_TOKENS = 65536
DEFAULT_MAX_RUNNING_REQUESTS = 32
DEFAULT_CHUNKED_PREFILL_SIZE = 2048
# With --enable-deterministic-inference SGLang cuts chunks at multiples of this and waits for ever on smaller ones.
DETERMINISTIC_CHUNKED_PREFILL_SIZE = 4096
# Weights and KV together, as a share of the memory that is free at the start.
DEFAULT_MEM_FRACTION = 0.6

_NO_GRAPHS = "there are no device graphs without a device"
# field: (values that can be honoured, reason for refusing any other)
_SUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "device": ((None, "cpu"), "no accelerator is visible to torch"),
    "tp_size": ((1,), "one process computes everything"),
    "pp_size": ((1,), "one process computes everything"),
    "dp_size": ((1,), "one process computes everything"),
    "ep_size": ((1,), "one process computes everything"),
    "nnodes": ((1,), "one process computes everything"),
    # intel_amx is what SGLang fills in for device cpu before it asks the platform, so it reads as "left open".
    "attention_backend": ((None, "triton", "intel_amx"), "attention is plain torch under the name triton"),
    "prefill_attention_backend": ((None, "triton"), "attention is plain torch under the name triton"),
    "decode_attention_backend": ((None, "triton"), "attention is plain torch under the name triton"),
    "speculative_draft_attention_backend": ((None, "triton"), "attention is plain torch under the name triton"),
    "sampling_backend": ((None, "pytorch"), "sampling kernels need a GPU"),
    "grammar_backend": ((None, "xgrammar", "none"), "only xgrammar has a CPU path here"),
    "quantization": ((None,), "quantised kernels need a GPU"),
    "kv_cache_dtype": (("auto", "bfloat16", "bf16"), "the KV cache is read as floating point by plain torch"),
    "speculative_algorithm": ((None, "DFLASH", "DDTREE"), "no other algorithm runs without a GPU"),
    "cuda_graph_backend_decode": ((None, Backend.DISABLED), _NO_GRAPHS),
    "cuda_graph_backend_prefill": ((None, Backend.DISABLED), _NO_GRAPHS),
    "enable_torch_compile": ((False,), "no compiler is assumed to be installed"),
    "enable_hierarchical_cache": ((False,), "it copies between host and device"),
    "disaggregation_mode": (("null",), "it moves KV between GPUs"),
    "enable_lora": ((None, False), "its kernels need a GPU"),
}


def refuse_unsupported(server_args: "ServerArgs") -> None:
    """Raise StartupError naming the first option that this platform cannot honour, with the reason and a remedy."""
    for field, (allowed, reason) in _SUPPORTED.items():
        value = getattr(server_args, field)
        if value in allowed:
            continue
        option = "--" + field.replace("_", "-")
        expected = " or ".join(str(choice) for choice in allowed if choice is not None and choice is not False)
        raise StartupError(
            f"reference platform: {option} expected {expected or 'to be left out'}, got {value}: {reason}; "
            "drop the option or serve on a GPU"
        )


def set_defaults(server_args: "ServerArgs") -> None:
    """Fill in every field that the user left open; explicit values are kept."""
    server_args.device = "cpu"
    server_args.attention_backend = "triton"
    server_args.sampling_backend = "pytorch"
    if server_args.dtype == "auto":
        server_args.dtype = "float32"
    for phase in (server_args.cuda_graph_config.decode, server_args.cuda_graph_config.prefill):
        phase.backend = Backend.DISABLED
    server_args.disable_cuda_graph = True
    server_args.skip_server_warmup = True
    # An idle scheduler polls without a pause otherwise and takes a core from whoever works.
    server_args.sleep_on_idle = True
    _set_if_open(server_args, "max_total_tokens", DEFAULT_MAX_TOTAL_TOKENS)
    _set_if_open(server_args, "max_running_requests", DEFAULT_MAX_RUNNING_REQUESTS)
    deterministic = server_args.enable_deterministic_inference
    chunk = DETERMINISTIC_CHUNKED_PREFILL_SIZE if deterministic else DEFAULT_CHUNKED_PREFILL_SIZE
    _set_if_open(server_args, "chunked_prefill_size", chunk)
    _set_if_open(server_args, "mem_fraction_static", DEFAULT_MEM_FRACTION)
    logger.info(
        "No accelerator found: serving on the reference platform (CPU, plain torch attention, %s, at most %d tokens).",
        server_args.dtype,
        server_args.max_total_tokens,
    )


def _set_if_open(server_args: "ServerArgs", field: str, value: object) -> None:
    if getattr(server_args, field) is None:
        setattr(server_args, field, value)
