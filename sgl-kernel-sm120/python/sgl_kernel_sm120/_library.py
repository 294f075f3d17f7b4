# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled library and mirrors its C interface, `csrc/include/sgl_kernel_sm120.h`."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

ABI_VERSION = 2
LIBRARY_PATH = Path(__file__).with_name("libsgl_kernel_sm120.so")
MAX_BATCH = 128
MAX_TREE = 65
MAX_HEADS = 128
MAX_SMS = 16383
REMEDY = "run scripts/setup --kernel, or `pip install ./sgl-kernel-sm120` in an environment of your own"


class KernelError(RuntimeError):
    """A launch failed; the message holds the CUDA error."""


class MlaTreeVerifyArgs(ctypes.Structure):
    """SglSm120MlaTreeVerify; a test compiles the header and compares sizes and offsets."""

    _fields_ = [
        ("q", ctypes.c_void_p),
        ("kv_pool", ctypes.c_void_p),
        ("kv_indptr", ctypes.c_void_p),
        ("kv_indices", ctypes.c_void_p),
        ("qo_indptr", ctypes.c_void_p),
        ("out_cache_loc", ctypes.c_void_p),
        ("custom_mask", ctypes.c_void_p),
        ("mask_indptr", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("q_token_stride", ctypes.c_int64),
        ("q_head_stride", ctypes.c_int64),
        ("kv_slot_stride", ctypes.c_int64),
        ("out_token_stride", ctypes.c_int64),
        ("out_head_stride", ctypes.c_int64),
        ("workspace_bytes", ctypes.c_int64),
        ("batch_size", ctypes.c_int32),
        ("num_tokens", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_splits", ctypes.c_int32),
        ("num_sms", ctypes.c_int32),
        ("qo_indptr_is_int64", ctypes.c_int32),
        ("mask_is_full", ctypes.c_int32),
        ("scale", ctypes.c_float),
    ]


def load_library(path: Path) -> ctypes.CDLL:
    """Load the library at `path`, declare its functions, and refuse another version of its interface.

    Errors: ImportError with what was found, what this package expects, and the remedy.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"{path}: expected the compiled kernels, got '{error}'; {REMEDY}") from error
    try:
        version = int(library.sgl_sm120_abi_version())
    except AttributeError as error:
        raise ImportError(
            f"{path}: expected interface version {ABI_VERSION}, got a library without one; {REMEDY}"
        ) from error
    if version != ABI_VERSION:
        raise ImportError(f"{path}: expected interface version {ABI_VERSION}, got {version}; {REMEDY}")
    int32, int64 = ctypes.c_int32, ctypes.c_int64
    library.sgl_sm120_error_string.restype = ctypes.c_char_p
    library.sgl_sm120_error_string.argtypes = [int32]
    library.sgl_sm120_mla_tree_verify_splits.restype = int32
    library.sgl_sm120_mla_tree_verify_splits.argtypes = [int32] * 4
    library.sgl_sm120_mla_tree_verify_block_rows.restype = int32
    library.sgl_sm120_mla_tree_verify_block_rows.argtypes = [int32] * 4
    library.sgl_sm120_mla_tree_verify_workspace_bytes.restype = int64
    library.sgl_sm120_mla_tree_verify_workspace_bytes.argtypes = [int32] * 4
    library.sgl_sm120_mla_tree_verify.restype = int32
    # An MlaTreeVerifyArgs by reference, or its bytes.
    library.sgl_sm120_mla_tree_verify.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return library


@functools.cache
def library() -> ctypes.CDLL:
    """The library that is installed beside this file."""
    return load_library(LIBRARY_PATH)


def check(code: int, what: str) -> None:
    """Raise KernelError with the CUDA string if `code` is an error."""
    if code != 0:
        text = library().sgl_sm120_error_string(code).decode()
        raise KernelError(f"{what}: expected a launch, got error {code} ({text}); see the CUDA error")
