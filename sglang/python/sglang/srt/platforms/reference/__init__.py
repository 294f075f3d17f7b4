# SPDX-License-Identifier: Apache-2.0
"""Reference platform: serves on a machine without an accelerator, with plain torch in place of device kernels.

The scheduler, the KV pools, speculative workers and the HTTP API are the real ones; only device kernels differ. The
platform is an entry point of the group ``sglang.srt.platforms`` and needs no option: it is chosen when nothing else
can run.
"""

import os

import torch

PLATFORM_CLASS = "sglang.srt.platforms.reference.platform.ReferencePlatform"
ENTRY_POINT_NAME = "sm120_reference"

# Read by triton and torch when they are imported or first used; child processes inherit them.
_PROCESS_ENVIRONMENT = {
    "TRITON_INTERPRET": "1",  # a Triton kernel without a torch replacement still runs, slowly
    "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads sleep, so that processes share the cores
    "TORCHDYNAMO_DISABLE": "1",  # no compiler is needed, and none is assumed to be installed
}


def activate() -> str | None:
    """Return the platform's class name when this process must run without an accelerator, else None.

    Nothing is touched when it returns None. The platform stands back for any accelerator that torch can use (CUDA,
    ROCm, XPU, MPS), for another ``SGLANG_PLATFORM`` and for ``SGLANG_USE_CPU_ENGINE=1``.
    """
    asked = os.environ.get("SGLANG_PLATFORM")
    if asked and asked != ENTRY_POINT_NAME:
        return None
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    if torch.cuda.is_available() or torch.accelerator.is_available():
        return None
    for name, value in _PROCESS_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return PLATFORM_CLASS
