# SPDX-License-Identifier: Apache-2.0
"""MLA tree-verify attention: the public functions and their checks."""

from __future__ import annotations

import functools
import numbers
import struct
from dataclasses import dataclass

import torch

from sgl_kernel_sm120 import _library
from sgl_kernel_sm120._library import MAX_BATCH, MAX_HEADS, MAX_SMS, MAX_TREE
from sgl_kernel_sm120._mla_tree_verify_torch import mla_tree_verify_torch

DIM_QK = 576
DIM_V = 512
MAX_SPLITS = 65535  # of a grid dimension


class UnsupportedError(ValueError):
    """The arguments are valid, but no kernel of this package computes them."""


@dataclass(frozen=True)
class Plan:
    """What the shapes of a call decide.

    num_splits: parts into which the keys of a request are cut; workspace_bytes: bytes of workspace that the call needs;
    block_rows: rows (tokens x heads) of a request that one block computes.
    """

    num_splits: int
    workspace_bytes: int
    block_rows: int


def plan(batch_size: int, num_tokens: int, num_heads: int, num_sms: int, num_splits: int | None = None) -> Plan:
    """Plan a call for a GPU of `num_sms` multiprocessors; `num_splits` replaces the chosen number of splits.

    Errors: TypeError for what is no integer, UnsupportedError for a shape outside the limits, ValueError for num_sms
    outside 1 to 16,383 or num_splits outside 1 to 65,535.
    """
    reason = _unsupported_shape(batch_size, num_tokens, num_heads)
    if reason is not None:
        raise UnsupportedError(reason)
    _check_integer("num_sms", num_sms)
    if not 1 <= num_sms <= MAX_SMS:
        raise ValueError(f"num_sms: expected 1 to {MAX_SMS}, got {num_sms}; pass the card's multi_processor_count")
    _check_num_splits(num_splits)
    return _plan(batch_size, num_tokens, num_heads, num_sms, num_splits)


@functools.lru_cache(maxsize=4096)
def _plan(batch_size: int, num_tokens: int, num_heads: int, num_sms: int, num_splits: int | None) -> Plan:
    library = _library.library()
    if num_splits is None:
        num_splits = int(library.sgl_sm120_mla_tree_verify_splits(batch_size, num_tokens, num_heads, num_sms))
    size = library.sgl_sm120_mla_tree_verify_workspace_bytes(batch_size, num_tokens, num_heads, num_splits)
    block_rows = library.sgl_sm120_mla_tree_verify_block_rows(batch_size, num_tokens, num_heads, num_sms)
    return Plan(num_splits, int(size), int(block_rows))


def workspace_bytes(
    batch_size: int, num_tokens: int, num_heads: int, num_sms: int, num_splits: int | None = None
) -> int:
    """Bytes of workspace for these shapes; allocate them once, before a CUDA graph is captured. Errors: as of plan()."""
    return plan(batch_size, num_tokens, num_heads, num_sms, num_splits).workspace_bytes


def _check_integer(name: str, value: object) -> None:
    if not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: expected an integer, got {_described(value)}; convert it")


def _check_num_splits(num_splits: int | None) -> None:
    if num_splits is None:
        return
    _check_integer("num_splits", num_splits)
    if not 1 <= num_splits <= MAX_SPLITS:
        remedy = "leave it out to use the planned number"
        raise ValueError(f"num_splits: expected 1 to {MAX_SPLITS}, got {num_splits}; {remedy}")


def _described(value: object) -> str:
    """A short name of a value of a wrong type."""
    is_short = value is None or isinstance(value, (str, numbers.Number))
    return f"{value!r:.40}" if is_short else f"a {type(value).__name__}"


def _unsupported_shape(batch_size: int, num_tokens: int, num_heads: int) -> str | None:
    _check_integer("batch_size", batch_size)
    _check_integer("num_tokens", num_tokens)
    _check_integer("num_heads", num_heads)
    for name, value, limit in (
        ("batch size", batch_size, MAX_BATCH),
        ("tree tokens per request", num_tokens, MAX_TREE),
        ("heads", num_heads, MAX_HEADS),
    ):
        if not 1 <= value <= limit:
            return f"{name}: expected 1 to {limit}, got {value}; use the stock backend for this shape"
    return None


def _unsupported_device(capability: tuple[int, int]) -> str | None:
    is_pair = isinstance(capability, tuple) and len(capability) == 2
    if not is_pair or not all(isinstance(number, numbers.Integral) for number in capability):
        remedy = "pass that of torch.cuda.get_device_capability()"
        raise TypeError(f"capability: expected two integers, got {capability!r:.40}; {remedy}")
    if capability == (9, 0) or capability >= (12, 0):
        return None
    got = f"{capability[0]}.{capability[1]}"
    return f"device: expected compute capability 12.x or 9.0, got {got}; use the stock backend on this card"


def is_supported(
    *,
    batch_size: int,
    num_tokens: int,
    num_heads: int,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype = torch.bfloat16,
    capability: tuple[int, int] | None = None,
) -> str | None:
    """None if mla_tree_verify computes such a call, else the reason why not, as one line.

    `capability` is the compute capability of the GPU; None leaves the card out of the question. Errors: TypeError for a
    size that is no integer or a capability that is no pair of them.
    """
    reason = _unsupported_shape(batch_size, num_tokens, num_heads)
    if reason is not None:
        return reason
    for name, got in (("q dtype", dtype), ("kv_pool dtype", kv_dtype)):
        if got != torch.bfloat16:
            return f"{name}: expected torch.bfloat16, got {got}; serve the model with a bf16 KV cache"
    return None if capability is None else _unsupported_device(capability)


@functools.lru_cache(maxsize=64)
def _num_sms(device_index: int) -> int:
    """Multiprocessors of a CUDA device. Errors: UnsupportedError for a card without a kernel."""
    properties = torch.cuda.get_device_properties(device_index)
    reason = _unsupported_device((properties.major, properties.minor))
    if reason is not None:
        raise UnsupportedError(reason)
    return int(properties.multi_processor_count)


def mla_tree_verify(
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    qo_indptr: torch.Tensor,
    out_cache_loc: torch.Tensor,
    custom_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    out: torch.Tensor,
    workspace: torch.Tensor,
    *,
    scale: float,
    mask_is_full: bool = True,
    num_splits: int | None = None,
) -> None:
    """Softmax attention of tree tokens over their prefix and the tree, written to `out`.

    Row t of request b attends to the request's prefix and to the tree tokens that its mask row shows.

    q              [bs * T, H, 576] bf16
    kv_pool        [slots, 1, 576] or [slots, 576] bf16; V is the first 512 columns. Slots that nobody may see may
                   hold anything
    kv_indptr      [bs + 1] int32, offsets into kv_indices: the prefix only
    kv_indices     [total prefix] int64, slots
    qo_indptr      [bs + 1] int32 or int64, first row of each request in q, out_cache_loc and out
    out_cache_loc  [bs * T] int64, slots of the tree tokens, already written
    custom_mask    uint8 or bool, non-zero = visible; None = a chain, in which token t sees tokens 0 to t.
                   mask_is_full: T rows of prefix + T bytes per request, of which the last T are read, else T x T bytes
    mask_indptr    [bs + 1] int64, first byte of each request in custom_mask; None exactly if custom_mask is
    out            [bs * T, H, 512] bf16; a row that sees no key becomes zero
    workspace      uint8, 16-byte aligned, at least workspace_bytes(...) long; its content does not matter
    scale          factor of the scores before the softmax
    num_splits     None: plan(...).num_splits

    T and bs follow from the shapes (1 to 65 and 1 to 128; H is 1 to 128). Strides of q and out are free in multiples
    of 8 elements as long as rows are dense. On CUDA the call launches one or two kernels on the current stream; it does not
    allocate, synchronise or read device memory, so a CUDA graph can capture it. On a CPU it runs mla_tree_verify_torch.

    Errors: TypeError, ValueError or UnsupportedError naming the argument, before any launch; KernelError if CUDA fails.
    """
    if torch.compiler.is_compiling():
        torch.ops.sgl_kernel_sm120.mla_tree_verify(
            q, kv_pool, kv_indptr, kv_indices, qo_indptr, out_cache_loc, custom_mask, mask_indptr, out, workspace,
            scale, mask_is_full, num_splits,
        )  # fmt: skip
        return
    _run(
        q, kv_pool, kv_indptr, kv_indices, qo_indptr, out_cache_loc, custom_mask, mask_indptr, out, workspace,
        scale, mask_is_full, num_splits,
    )  # fmt: skip


def _run(
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    qo_indptr: torch.Tensor,
    out_cache_loc: torch.Tensor,
    custom_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    out: torch.Tensor,
    workspace: torch.Tensor,
    scale: float,
    mask_is_full: bool,
    num_splits: int | None,
) -> None:
    # One comparison decides for arguments whose properties have all passed before.
    tensors = (q, kv_pool, kv_indptr, kv_indices, qo_indptr, out_cache_loc, custom_mask, mask_indptr, out, workspace)
    try:
        signature = (
            q.shape, q.stride(), q.dtype, q.device, kv_pool.shape, kv_pool.stride(), kv_pool.dtype, kv_pool.device,
            kv_indptr.shape, kv_indptr.dtype, kv_indptr.device, kv_indptr.is_contiguous(),
            kv_indices.shape, kv_indices.dtype, kv_indices.device, kv_indices.is_contiguous(),
            qo_indptr.shape, qo_indptr.dtype, qo_indptr.device, qo_indptr.is_contiguous(),
            out_cache_loc.shape, out_cache_loc.dtype, out_cache_loc.device, out_cache_loc.is_contiguous(),
            _vector(custom_mask), _vector(mask_indptr),
            workspace.shape, workspace.dtype, workspace.device, workspace.is_contiguous(),
            out.shape, out.stride(), out.dtype, out.device, scale, mask_is_full, num_splits,
        )  # fmt: skip
        launch = _LAUNCHES.get(signature)
        q_address, pool_address, out_address = q.data_ptr(), kv_pool.data_ptr(), out.data_ptr()
        workspace_address = workspace.data_ptr()
    except (AttributeError, RuntimeError, TypeError):
        # Something that is no dense tensor, or a list where a number belongs: the checks know its name.
        _check_options(scale, mask_is_full, num_splits)
        _check_arguments(*tensors)
        raise
    if launch is None or (q_address | pool_address | out_address | workspace_address) % 16:
        _check_options(scale, mask_is_full, num_splits)
        shape = _check_arguments(*tensors)
        if not q.is_cuda:
            mla_tree_verify_torch(*tensors[:-1], scale=scale, mask_is_full=mask_is_full)
            return
        launch = _plan_launch(shape, q, kv_pool, qo_indptr, out, workspace, scale, mask_is_full, num_splits)
        if len(_LAUNCHES) >= _MAX_LAUNCHES:
            _LAUNCHES.clear()
        _LAUNCHES[signature] = launch
    launch(
        _ADDRESSES.pack(
            q_address, pool_address, kv_indptr.data_ptr(), kv_indices.data_ptr(), qo_indptr.data_ptr(),
            out_cache_loc.data_ptr(), 0 if custom_mask is None else custom_mask.data_ptr(),
            0 if mask_indptr is None else mask_indptr.data_ptr(), out_address, workspace_address,
        )
    )  # fmt: skip


# The addresses are the first fields of the C structure.
_ADDRESSES = struct.Struct("10Q")


class _Launch:
    """What a call needs beside addresses. Immutable, so that threads may share it."""

    def __init__(self, arguments: _library.MlaTreeVerifyArgs, device: int) -> None:
        self._function = _library.library().sgl_sm120_mla_tree_verify
        self._tail = bytes(arguments)[_ADDRESSES.size :]
        self._device = device

    def __call__(self, addresses: bytes) -> None:
        """Launch with the packed addresses. Errors: KernelError if CUDA fails."""
        # torch's raw getters save a microsecond over the Stream object; Triton's launcher takes them as well.
        device = self._device
        if device == torch._C._cuda_getDevice():
            code = self._function(addresses + self._tail, torch._C._cuda_getCurrentRawStream(device))
        else:
            with torch.cuda.device(device):
                code = self._function(addresses + self._tail, torch._C._cuda_getCurrentRawStream(device))
        if code != 0:
            _library.check(code, "mla_tree_verify")


_MAX_LAUNCHES = 4096
_LAUNCHES: dict[tuple[object, ...], _Launch] = {}


def _vector(tensor: torch.Tensor | None) -> tuple[object, ...] | None:
    """The properties of a vector that the checks look at."""
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device, tensor.is_contiguous())


def _plan_launch(
    shape: tuple[int, int, int],
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    qo_indptr: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor,
    scale: float,
    mask_is_full: bool,
    num_splits: int | None,
) -> _Launch:
    """Plan a call whose arguments have been checked. Errors: UnsupportedError for the card, ValueError for workspace."""
    device = q.get_device()
    num_sms = _num_sms(device)
    planned = plan(*shape, num_sms, num_splits)
    size = workspace.numel()
    if size < planned.workspace_bytes:
        raise ValueError(
            f"workspace: expected at least {planned.workspace_bytes} bytes, got {size}; size it with workspace_bytes()"
        )
    batch_size, num_tokens, num_heads = shape
    arguments = _library.MlaTreeVerifyArgs(
        q_token_stride=q.stride(0),
        q_head_stride=q.stride(1),
        kv_slot_stride=kv_pool.stride(0),
        out_token_stride=out.stride(0),
        out_head_stride=out.stride(1),
        workspace_bytes=size,
        batch_size=batch_size,
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_splits=planned.num_splits,
        num_sms=num_sms,
        qo_indptr_is_int64=qo_indptr.dtype is torch.int64,
        mask_is_full=mask_is_full,
        scale=scale,
    )
    return _Launch(arguments, device)


def _check_options(scale: float, mask_is_full: bool, num_splits: int | None) -> None:
    """Raise on the first option that breaks the contract."""
    if not isinstance(scale, numbers.Real):
        raise TypeError(f"scale: expected a number, got {_described(scale)}; convert it")
    # Hidden keys score minus infinity: a scale of zero or less would make that NaN, or show them.
    if not 1e-37 <= scale <= 1e37:
        raise ValueError(f"scale: expected a positive number within fp32, got {scale!r:.40}; scale q instead")
    if not isinstance(mask_is_full, bool):
        raise TypeError(f"mask_is_full: expected True or False, got {_described(mask_is_full)}; convert it")
    _check_num_splits(num_splits)


def _check_arguments(
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    qo_indptr: torch.Tensor,
    out_cache_loc: torch.Tensor,
    custom_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    out: torch.Tensor,
    workspace: torch.Tensor,
) -> tuple[int, int, int]:
    """Raise on the first argument that breaks the contract; return (bs, T, H)."""
    _check_device(
        q, kv_pool=kv_pool, kv_indptr=kv_indptr, kv_indices=kv_indices, qo_indptr=qo_indptr,
        out_cache_loc=out_cache_loc, custom_mask=custom_mask, mask_indptr=mask_indptr, out=out, workspace=workspace,
    )  # fmt: skip
    _check_vector("kv_indptr", kv_indptr, (torch.int32,))
    batch_size = kv_indptr.numel() - 1
    _check_rows("q", q, DIM_QK)
    num_rows, num_heads = q.shape[0], q.shape[1]
    if batch_size < 1 or num_rows % batch_size:
        raise ValueError(
            f"q: expected a multiple of {batch_size} rows for kv_indptr of {batch_size + 1} entries, got {num_rows}; "
            "pass the same number of tree tokens for every request"
        )
    num_tokens = num_rows // batch_size
    reason = _unsupported_shape(batch_size, num_tokens, num_heads)
    if reason is not None:
        raise UnsupportedError(reason)
    _check_pool(kv_pool)
    _check_vector("kv_indices", kv_indices, (torch.int64,))
    _check_vector("qo_indptr", qo_indptr, (torch.int32, torch.int64), batch_size + 1)
    _check_vector("out_cache_loc", out_cache_loc, (torch.int64,), num_rows)
    _check_mask(custom_mask, mask_indptr, batch_size, num_tokens)
    _check_rows("out", out, DIM_V)
    if out.shape[0] != num_rows or out.shape[1] != num_heads:
        expected = (num_rows, num_heads, DIM_V)
        raise ValueError(f"out: expected shape {expected}, got {tuple(out.shape)}; allocate it for the rows of q")
    _check_no_overlap("out", out)
    _check_vector("workspace", workspace, (torch.uint8,))
    _check_alignment("workspace", workspace)
    return batch_size, num_tokens, num_heads


def _check_device(q: torch.Tensor, **others: torch.Tensor | None) -> None:
    for name, tensor in {"q": q, **others}.items():
        if tensor is not None or name not in ("custom_mask", "mask_indptr"):
            _check_tensor(name, tensor)
    device = q.device
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"q: expected a cuda or cpu tensor, got {device}; move the arguments")
    for name, tensor in others.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name}: expected device {device} like q, got {tensor.device}; move it there")


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {_described(value)}; make it one")
    if value.layout is not torch.strided or value.is_nested:
        got = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise TypeError(f"{name}: expected a dense tensor, got {got}; convert it")


def _check_vector(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], length: int | None = None) -> None:
    if tensor.dtype not in dtypes:
        expected = " or ".join(map(str, dtypes))
        raise TypeError(f"{name}: expected dtype {expected}, got {tensor.dtype}; convert it once, outside the graph")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        got = f"shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        raise ValueError(f"{name}: expected a contiguous vector, got {got}; pass a contiguous one")
    if length is not None and tensor.numel() != length:
        raise ValueError(f"{name}: expected {length} entries, got {tensor.numel()}; slice it to the batch")


def _check_rows(name: str, tensor: torch.Tensor, width: int) -> None:
    if tensor.dtype is not torch.bfloat16:
        raise TypeError(f"{name}: expected dtype torch.bfloat16, got {tensor.dtype}; this kernel computes in bf16")
    shape = tensor.shape
    if len(shape) != 3 or shape[2] != width:
        raise ValueError(f"{name}: expected shape [rows, heads, {width}], got {tuple(shape)}; reshape it")
    token, head, element = tensor.stride()
    if element != 1 or token % 8 or head % 8:
        raise ValueError(
            f"{name}: expected strides in multiples of 8 elements with dense rows, got {(token, head, element)}; "
            "make it contiguous"
        )
    _check_alignment(name, tensor)


def _check_no_overlap(name: str, tensor: torch.Tensor) -> None:
    """Rows of a written tensor lie apart."""
    taken = tensor.shape[2]
    for stride, size in sorted(zip(tensor.stride()[:2], tensor.shape[:2], strict=True)):
        if size > 1 and stride < taken:
            raise ValueError(
                f"{name}: expected rows that do not overlap, got strides {tensor.stride()}; allocate it dense"
            )
        taken += stride * (size - 1)


def _check_alignment(name: str, tensor: torch.Tensor) -> None:
    address = tensor.data_ptr()
    if address % 16:
        raise ValueError(f"{name}: expected 16-byte alignment, got address {address:#x}; start the view at 16 bytes")


def _check_pool(kv_pool: torch.Tensor) -> None:
    if kv_pool.dtype is not torch.bfloat16:
        raise TypeError(f"kv_pool: expected dtype torch.bfloat16, got {kv_pool.dtype}; use a bf16 KV cache")
    shape = kv_pool.shape
    if not (len(shape) in (2, 3) and shape[-1] == DIM_QK and (len(shape) == 2 or shape[1] == 1)):
        raise ValueError(f"kv_pool: expected shape [slots, 1, {DIM_QK}], got {tuple(shape)}; pass the MLA buffer")
    if not 1 <= shape[0] < 2**31:
        raise ValueError(f"kv_pool: expected 1 to 2^31 - 1 slots, got {shape[0]}; pass the MLA buffer of one layer")
    if kv_pool.stride(-1) != 1 or kv_pool.stride(0) % 8:
        raise ValueError(
            f"kv_pool: expected dense slots with a stride in multiples of 8, got strides {kv_pool.stride()}; "
            "pass the MLA buffer as allocated"
        )
    _check_alignment("kv_pool", kv_pool)


def _check_mask(
    custom_mask: torch.Tensor | None, mask_indptr: torch.Tensor | None, batch_size: int, num_tokens: int
) -> None:
    if (custom_mask is None) != (mask_indptr is None):
        given, missing = ("custom_mask", "mask_indptr") if mask_indptr is None else ("mask_indptr", "custom_mask")
        raise ValueError(f"{missing}: expected a tensor beside {given}, got None; pass both or neither")
    if custom_mask is None or mask_indptr is None:
        return
    _check_vector("custom_mask", custom_mask, (torch.uint8, torch.bool))
    smallest = batch_size * num_tokens * num_tokens
    if custom_mask.numel() < smallest:
        raise ValueError(
            f"custom_mask: expected at least {smallest} bytes, got {custom_mask.numel()}; T x T bytes per request"
        )
    _check_vector("mask_indptr", mask_indptr, (torch.int64,), batch_size + 1)


def _fake(*arguments: object) -> None:
    """Nothing to compute for a meta tensor: the outputs are arguments."""


_OP = torch.library.Library("sgl_kernel_sm120", "DEF")
_OP.define(
    "mla_tree_verify(Tensor q, Tensor kv_pool, Tensor kv_indptr, Tensor kv_indices, Tensor qo_indptr, "
    "Tensor out_cache_loc, Tensor? custom_mask, Tensor? mask_indptr, Tensor(a!) out, Tensor(b!) workspace, "
    "float scale, bool mask_is_full, int? num_splits) -> ()",
)
_OP.impl("mla_tree_verify", _run, "CUDA")
_OP.impl("mla_tree_verify", _run, "CPU")
torch.library.register_fake("sgl_kernel_sm120::mla_tree_verify", _fake, lib=_OP)
