# SPDX-License-Identifier: Apache-2.0
"""Attention kernels for NVIDIA sm_120 cards: MLA tree-verify attention for speculative decoding."""

from sgl_kernel_sm120._library import MAX_BATCH, MAX_HEADS, MAX_TREE, KernelError
from sgl_kernel_sm120._mla_tree_verify import (
    DIM_QK,
    DIM_V,
    Plan,
    UnsupportedError,
    is_supported,
    mla_tree_verify,
    plan,
    workspace_bytes,
)
from sgl_kernel_sm120._mla_tree_verify_torch import mla_tree_verify_torch
from sgl_kernel_sm120._prepared_call import PreparedCall

__version__ = "0.1.0"
__all__ = [
    "DIM_QK",
    "DIM_V",
    "MAX_BATCH",
    "MAX_HEADS",
    "MAX_TREE",
    "KernelError",
    "Plan",
    "PreparedCall",
    "UnsupportedError",
    "is_supported",
    "mla_tree_verify",
    "mla_tree_verify_torch",
    "plan",
    "workspace_bytes",
]
