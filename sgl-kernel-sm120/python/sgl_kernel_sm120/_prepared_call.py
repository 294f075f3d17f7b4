# SPDX-License-Identifier: Apache-2.0
"""mla_tree_verify for the layers of a model: what they share is checked once."""

from __future__ import annotations

import torch

from sgl_kernel_sm120._mla_tree_verify import (
    _ADDRESSES,
    _check_alignment,
    _check_arguments,
    _check_options,
    _check_tensor,
    _plan_launch,
)
from sgl_kernel_sm120._mla_tree_verify_torch import mla_tree_verify_torch


class PreparedCall:
    """mla_tree_verify with every argument settled but q, kv_pool and out: `call(q, kv_pool, out)`.

    Takes the arguments of mla_tree_verify, checks them and raises as it does, but launches nothing. The tensors are kept
    and may change in content, not in place, size or type. A call costs the host less than mla_tree_verify, which reads
    the properties of ten tensors every time. It can be captured in a CUDA graph and shared by threads, and does not
    go through torch.ops: use mla_tree_verify under torch.compile.
    """

    def __init__(
        self,
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
        settled = (kv_indptr, kv_indices, qo_indptr, out_cache_loc, custom_mask, mask_indptr)
        _check_options(scale, mask_is_full, num_splits)
        shape = _check_arguments(q, kv_pool, *settled, out, workspace)
        self._layer = {"q": _properties(q), "kv_pool": _properties(kv_pool), "out": _properties(out)}
        self._expected = tuple(value for properties in self._layer.values() for value in properties)
        self._settled, self._workspace = settled, workspace  # kept alive
        self._scale, self._mask_is_full = scale, mask_is_full
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in settled]
        self._addresses, self._workspace_address = tuple(addresses), workspace.data_ptr()
        self._launch = None
        if q.is_cuda:
            self._launch = _plan_launch(shape, q, kv_pool, qo_indptr, out, workspace, scale, mask_is_full, num_splits)

    def __call__(self, q: torch.Tensor, kv_pool: torch.Tensor, out: torch.Tensor) -> None:
        """Compute one layer. The tensors have shapes, strides, types and device of those that were prepared.

        Errors: TypeError or ValueError naming the argument, before any launch; KernelError if CUDA fails.
        """
        try:
            q_address, pool_address, out_address = q.data_ptr(), kv_pool.data_ptr(), out.data_ptr()
            properties = (
                q.shape, q.stride(), q.dtype, q.device, kv_pool.shape, kv_pool.stride(), kv_pool.dtype, kv_pool.device,
                out.shape, out.stride(), out.dtype, out.device,
            )  # fmt: skip
        except (AttributeError, RuntimeError):  # something that is no dense tensor
            self._refuse(q=q, kv_pool=kv_pool, out=out)
            raise
        if properties != self._expected or (q_address | pool_address | out_address) % 16:
            self._refuse(q=q, kv_pool=kv_pool, out=out)
        if self._launch is None:
            mla_tree_verify_torch(
                q, kv_pool, *self._settled, out, scale=self._scale, mask_is_full=self._mask_is_full
            )  # fmt: skip
            return
        self._launch(_ADDRESSES.pack(q_address, pool_address, *self._addresses, out_address, self._workspace_address))

    def _refuse(self, **tensors: torch.Tensor) -> None:
        """Raise for the first tensor that differs from the prepared one."""
        for name, tensor in tensors.items():
            _check_tensor(name, tensor)
            got, expected = _properties(tensor), self._layer[name]
            if got != expected:
                raise ValueError(
                    f"{name}: expected {_text(expected)} as prepared, got {_text(got)}; prepare another call"
                )
            _check_alignment(name, tensor)


_Properties = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


def _properties(tensor: torch.Tensor) -> _Properties:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _text(properties: _Properties) -> str:
    shape, stride, dtype, device = properties
    return f"{dtype} {tuple(shape)} with strides {stride} on {device}"
