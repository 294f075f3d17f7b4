# SPDX-License-Identifier: Apache-2.0
"""Every kind of bad input raises before any launch and names the argument, what was expected and what came."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases.mla_tree_verify import Case
from problem import SCALE, make_problem

import sgl_kernel_sm120 as kernels
from sgl_kernel_sm120 import _mla_tree_verify

BATCH, TOKENS, HEADS = 2, 9, 8
ROWS = BATCH * TOKENS


def good_arguments(device: str = "cpu") -> dict[str, Any]:
    problem = make_problem(Case("good", (40, 3), HEADS, TOKENS), device)
    names = (
        "q",
        "kv_pool",
        "kv_indptr",
        "kv_indices",
        "qo_indptr",
        "out_cache_loc",
        "custom_mask",
        "mask_indptr",
        "out",
    )
    arguments: dict[str, Any] = dict(zip(names, problem.arguments(), strict=True))
    arguments["workspace"] = torch.empty(1 << 22, dtype=torch.uint8, device=device)
    arguments |= {"scale": SCALE, "mask_is_full": problem.mask_is_full, "num_splits": None}
    return arguments


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, 2 bytes into a buffer."""
    buffer = torch.empty(tensor.numel() + 8, dtype=tensor.dtype)
    return buffer[1 : 1 + tensor.numel()].view(tensor.shape)


Change = Callable[[dict[str, Any]], None]


def replaced(name: str, value: Callable[[Any], Any]) -> Change:
    def change(arguments: dict[str, Any]) -> None:
        arguments[name] = value(arguments[name])

    return change


def without_requests(arguments: dict[str, Any]) -> None:
    arguments["kv_indptr"] = arguments["kv_indptr"][:1]


def with_tokens(tokens: int) -> Change:
    def change(arguments: dict[str, Any]) -> None:
        arguments["q"] = torch.zeros(BATCH * tokens, HEADS, 576, dtype=torch.bfloat16)

    return change


def with_batch(batch: int) -> Change:
    def change(arguments: dict[str, Any]) -> None:
        arguments["q"] = torch.zeros(batch, HEADS, 576, dtype=torch.bfloat16)
        arguments["kv_indptr"] = torch.zeros(batch + 1, dtype=torch.int32)

    return change


def overlapping(out: torch.Tensor) -> torch.Tensor:
    """Rows that start 8 elements apart."""
    return torch.zeros(out.numel(), dtype=out.dtype).as_strided(out.shape, (8, 18 * 512, 1))


def with_heads(heads: int) -> Change:
    return replaced("q", lambda q: torch.zeros(ROWS, heads, 576, dtype=torch.bfloat16))


BAD: list[tuple[str, Change, type[Exception], str]] = [
    ("q-dtype", replaced("q", lambda t: t.half()), TypeError, "q: expected dtype torch.bfloat16, got torch.float16"),
    ("q-dim", replaced("q", lambda t: t.flatten(1)), ValueError, "q: expected shape [rows, heads, 576], got (18, 4608)"),
    ("q-width", replaced("q", lambda t: t[..., :512]), ValueError, "q: expected shape [rows, heads, 576], got (18, 8, 512)"),
    ("q-rows", replaced("q", lambda t: t[:17]), ValueError, "q: expected a multiple of 2 rows"),
    ("q-stride", replaced("q", lambda t: t.repeat_interleave(2, -1)[..., ::2]), ValueError, "q: expected strides in multiples of 8"),
    ("q-odd-stride", replaced("q", lambda t: torch.zeros(18, 8, 577, dtype=t.dtype)[..., :576]), ValueError, "q: expected strides"),
    ("q-alignment", replaced("q", misaligned), ValueError, "q: expected 16-byte alignment"),
    ("q-device", replaced("q", lambda t: t.to("meta")), ValueError, "q: expected a cuda or cpu tensor, got meta"),
    ("no-heads", with_heads(0), kernels.UnsupportedError, "heads: expected 1 to 128, got 0"),
    ("129-heads", with_heads(129), kernels.UnsupportedError, "heads: expected 1 to 128, got 129"),
    ("no-tokens", with_tokens(0), kernels.UnsupportedError, "tree tokens per request: expected 1 to 65, got 0"),
    ("66-tokens", with_tokens(66), kernels.UnsupportedError, "tree tokens per request: expected 1 to 65, got 66"),
    ("129-requests", with_batch(129), kernels.UnsupportedError, "batch size: expected 1 to 128, got 129"),
    ("no-requests", without_requests, ValueError, "q: expected a multiple of 0 rows"),
    ("pool-dtype", replaced("kv_pool", lambda t: t.to(torch.float8_e4m3fn)), TypeError, "kv_pool: expected dtype torch.bfloat16"),
    ("pool-shape", replaced("kv_pool", lambda t: t.expand(-1, 2, -1)), ValueError, "kv_pool: expected shape [slots, 1, 576]"),
    ("pool-width", replaced("kv_pool", lambda t: t[..., :512]), ValueError, "kv_pool: expected shape [slots, 1, 576]"),
    ("pool-empty", replaced("kv_pool", lambda t: t[:0]), ValueError, "kv_pool: expected 1 to 2^31 - 1 slots, got 0"),
    ("pool-stride", replaced("kv_pool", lambda t: torch.zeros(99, 1, 577, dtype=t.dtype)[..., :576]), ValueError, "kv_pool: expected dense slots"),
    ("pool-alignment", replaced("kv_pool", misaligned), ValueError, "kv_pool: expected 16-byte alignment"),
    ("indptr-dtype", replaced("kv_indptr", torch.Tensor.long), TypeError, "kv_indptr: expected dtype torch.int32, got torch.int64"),
    ("indptr-dim", replaced("kv_indptr", lambda t: t[None]), ValueError, "kv_indptr: expected a contiguous vector"),
    ("indices-dtype", replaced("kv_indices", torch.Tensor.int), TypeError, "kv_indices: expected dtype torch.int64, got torch.int32"),
    ("indices-stride", replaced("kv_indices", lambda t: t[::2]), ValueError, "kv_indices: expected a contiguous vector"),
    ("qo-dtype", replaced("qo_indptr", torch.Tensor.float), TypeError, "qo_indptr: expected dtype torch.int32 or torch.int64"),
    ("qo-length", replaced("qo_indptr", lambda t: t[:2]), ValueError, "qo_indptr: expected 3 entries, got 2"),
    ("loc-dtype", replaced("out_cache_loc", torch.Tensor.int), TypeError, "out_cache_loc: expected dtype torch.int64"),
    ("loc-length", replaced("out_cache_loc", lambda t: t[:17]), ValueError, "out_cache_loc: expected 18 entries, got 17"),
    ("mask-dtype", replaced("custom_mask", torch.Tensor.int), TypeError, "custom_mask: expected dtype torch.uint8 or torch.bool"),
    ("mask-length", replaced("custom_mask", lambda t: t[:161]), ValueError, "custom_mask: expected at least 162 bytes, got 161"),
    ("mask-alone", replaced("mask_indptr", lambda t: None), ValueError, "mask_indptr: expected a tensor beside custom_mask, got None"),
    ("starts-alone", replaced("custom_mask", lambda t: None), ValueError, "custom_mask: expected a tensor beside mask_indptr"),
    ("starts-dtype", replaced("mask_indptr", torch.Tensor.int), TypeError, "mask_indptr: expected dtype torch.int64"),
    ("starts-length", replaced("mask_indptr", lambda t: t[:1]), ValueError, "mask_indptr: expected 3 entries, got 1"),
    ("out-dtype", replaced("out", torch.Tensor.float), TypeError, "out: expected dtype torch.bfloat16, got torch.float32"),
    ("out-shape", replaced("out", lambda t: t[:, :4]), ValueError, "out: expected shape (18, 8, 512), got (18, 4, 512)"),
    ("out-width", replaced("out", lambda t: t[..., :256]), ValueError, "out: expected shape [rows, heads, 512], got (18, 8, 256)"),
    ("out-alignment", replaced("out", misaligned), ValueError, "out: expected 16-byte alignment"),
    ("out-overlap", replaced("out", overlapping), ValueError, "out: expected rows that do not overlap, got strides (8, 9216, 1)"),
    ("q-none", replaced("q", lambda t: None), TypeError, "q: expected a tensor, got None"),
    ("q-numpy", replaced("q", lambda t: t.float().numpy()), TypeError, "q: expected a tensor, got a ndarray"),
    ("q-sparse", replaced("q", lambda t: t.to_sparse()), TypeError, "q: expected a dense tensor, got layout torch.sparse_coo"),
    ("pool-text", replaced("kv_pool", lambda t: "pool"), TypeError, "kv_pool: expected a tensor, got 'pool'"),
    ("indices-list", replaced("kv_indices", torch.Tensor.tolist), TypeError, "kv_indices: expected a tensor, got a list"),
    ("mask-number", replaced("custom_mask", lambda t: 1), TypeError, "custom_mask: expected a tensor, got 1"),
    ("out-none", replaced("out", lambda t: None), TypeError, "out: expected a tensor, got None"),
    ("workspace-none", replaced("workspace", lambda t: None), TypeError, "workspace: expected a tensor, got None"),
    ("scale-none", replaced("scale", lambda s: None), TypeError, "scale: expected a number, got None"),
    ("scale-list", replaced("scale", lambda s: [s]), TypeError, "scale: expected a number, got a list"),
    ("scale-tensor", replaced("scale", torch.tensor), TypeError, "scale: expected a number, got a Tensor"),
    ("scale-zero", replaced("scale", lambda s: 0.0), ValueError, "scale: expected a positive number within fp32, got 0.0"),
    ("scale-negative", replaced("scale", lambda s: -s), ValueError, "scale: expected a positive number within fp32, got -0.07"),
    ("scale-nan", replaced("scale", lambda s: float("nan")), ValueError, "scale: expected a positive number within fp32, got nan"),
    ("scale-infinite", replaced("scale", lambda s: float("inf")), ValueError, "scale: expected a positive number within fp32, got inf"),
    ("full-text", replaced("mask_is_full", lambda f: "no"), TypeError, "mask_is_full: expected True or False, got 'no'"),
    ("full-number", replaced("mask_is_full", lambda f: 2), TypeError, "mask_is_full: expected True or False, got 2"),
    ("splits-fraction", replaced("num_splits", lambda n: 1.5), TypeError, "num_splits: expected an integer, got 1.5"),
    ("splits-zero", replaced("num_splits", lambda n: 0), ValueError, "num_splits: expected 1 to 65535, got 0"),
    ("workspace-dtype", replaced("workspace", torch.Tensor.int), TypeError, "workspace: expected dtype torch.uint8"),
    ("workspace-alignment", replaced("workspace", misaligned), ValueError, "workspace: expected 16-byte alignment"),
    ("two-devices", replaced("kv_pool", lambda t: t.to("meta")), ValueError, "kv_pool: expected device cpu like q, got meta"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_argument(change: Change, error: type[Exception], message: str) -> None:
    arguments = good_arguments()
    change(arguments)
    with pytest.raises(error, match=re.escape(message)) as caught:
        kernels.mla_tree_verify(**arguments)
    assert re.fullmatch(r"[^\n]+: expected [^\n]+, got [^\n]+; [^\n]+", str(caught.value)), "expected, got, remedy"


@pytest.mark.parametrize(("change", "error", "message"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_argument_is_not_prepared(change: Change, error: type[Exception], message: str) -> None:
    arguments = good_arguments()
    change(arguments)
    with pytest.raises(error, match=re.escape(message)):
        kernels.PreparedCall(**arguments)


CONTENT_BAD: list[tuple[str, Change, str]] = [
    ("prefix-too-long", replaced("kv_indices", lambda t: t[:42]), "kv_indptr: expected offsets that do not fall, within the 42 entries of kv_indices, got [0, 40, 43]"),
    ("prefix-falls", replaced("kv_indptr", lambda t: t[[0, 2, 1]]), "within the 43 entries of kv_indices, got [0, 43, 40]"),
    ("prefix-negative", replaced("kv_indptr", lambda t: t - 3), "within the 43 entries of kv_indices, got [-3, 37, 40]"),
    ("slot-negative", replaced("kv_indices", lambda t: t.index_fill(0, torch.tensor([5]), -1)), "kv_indices: expected slots from 0 to 160, got [-1]"),
    ("slot-beyond", replaced("kv_indices", lambda t: t.index_fill(0, torch.tensor([5]), 161)), "kv_indices: expected slots from 0 to 160, got [161]"),
    ("loc-beyond", replaced("out_cache_loc", lambda t: t.fill_(1 << 40)), "out_cache_loc: expected slots from 0 to 160, got [1099511627776,"),
    ("row-beyond", replaced("qo_indptr", lambda t: t + 1), "qo_indptr: expected rows from 0 to 9, got [1, 10]"),
    ("row-negative", replaced("qo_indptr", lambda t: t - 1), "qo_indptr: expected rows from 0 to 9, got [-1, 8]"),
    ("mask-beyond", replaced("mask_indptr", lambda t: t + 1), "mask_indptr: expected 108 bytes of custom_mask from each offset, got 107 bytes from 442"),
    ("mask-not-full", replaced("custom_mask", lambda t: t[:162]), "mask_indptr: expected 441 bytes of custom_mask from each offset, got 162 bytes from 0"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), [b[1:] for b in CONTENT_BAD], ids=[b[0] for b in CONTENT_BAD])
def test_bad_content_on_a_cpu(change: Change, message: str) -> None:
    arguments = good_arguments()
    change(arguments)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        kernels.mla_tree_verify(**arguments)
    assert re.fullmatch(r"[^\n]+: expected [^\n]+, got [^\n]+; [^\n]+", str(caught.value)), "expected, got, remedy"
    assert bool(arguments["out"].isnan().all()), "nothing may have been written"


LAYER_BAD: list[tuple[str, str, Callable[[torch.Tensor], Any], str]] = [
    ("q-dtype", "q", lambda t: t.half(), "q: expected torch.bfloat16 (18, 8, 576) with strides (4608, 576, 1) on cpu as prepared, got torch.float16"),
    ("q-shape", "q", lambda t: t[:17], "q: expected torch.bfloat16 (18, 8, 576) with strides (4608, 576, 1) on cpu as prepared, got torch.bfloat16 (17,"),
    ("q-stride", "q", lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), "got torch.bfloat16 (18, 8, 576) with strides (576, 10368, 1)"),
    ("q-alignment", "q", misaligned, "q: expected 16-byte alignment, got address"),
    ("q-device", "q", lambda t: t.to("meta"), "with strides (4608, 576, 1) on meta"),
    ("q-none", "q", lambda t: None, "q: expected a tensor, got None"),
    ("pool-sparse", "kv_pool", lambda t: t.to_sparse(), "kv_pool: expected a dense tensor, got layout torch.sparse_coo"),
    ("out-numpy", "out", lambda t: t.float().numpy(), "out: expected a tensor, got a ndarray"),
    ("pool-shape", "kv_pool", lambda t: t[1:], "kv_pool: expected torch.bfloat16 (161, 1, 576)"),
    ("pool-alignment", "kv_pool", misaligned, "kv_pool: expected 16-byte alignment, got address"),
    ("out-width", "out", lambda t: t[..., :256], "out: expected torch.bfloat16 (18, 8, 512)"),
    ("out-alignment", "out", misaligned, "out: expected 16-byte alignment, got address"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "message"), [b[1:] for b in LAYER_BAD], ids=[b[0] for b in LAYER_BAD])
def test_prepared_call_refuses_another_layout(name: str, change: Callable[[torch.Tensor], Any], message: str) -> None:
    arguments = good_arguments()
    call = kernels.PreparedCall(**arguments)
    layer = {key: arguments[key] for key in ("q", "kv_pool", "out")}
    layer[name] = change(layer[name])
    with pytest.raises((TypeError, ValueError), match=re.escape(message)) as caught:
        call(**layer)
    assert re.fullmatch(r"[^\n]+: expected [^\n]+, got [^\n]+; [^\n]+", str(caught.value)), "expected, got, remedy"


def test_good_arguments_pass() -> None:
    arguments = good_arguments()
    kernels.mla_tree_verify(**arguments)
    assert bool(arguments["out"].isfinite().all())


@pytest.mark.parametrize(
    ("name", "value"), [("num_tokens", 0), ("num_tokens", 66), ("num_heads", 0), ("num_heads", 129), ("batch_size", 0), ("batch_size", 129)]
)  # fmt: skip
def test_shape_outside_the_limits(name: str, value: int) -> None:
    shape = {"batch_size": 1, "num_tokens": 9, "num_heads": 8, name: value}
    reason = kernels.is_supported(**shape)  # type: ignore[arg-type]
    assert reason is not None and f"got {value};" in reason
    with pytest.raises(kernels.UnsupportedError, match=re.escape(reason)):
        kernels.plan(**shape, num_sms=188)


@pytest.mark.parametrize("name", ["batch_size", "num_tokens", "num_heads", "num_sms"])
@pytest.mark.parametrize(("value", "got"), [(None, "None"), (1.0, "1.0"), ("1", "'1'"), ([1], "a list")])
def test_size_that_is_no_integer(name: str, value: Any, got: str) -> None:
    sizes = {"batch_size": 1, "num_tokens": 9, "num_heads": 8, "num_sms": 188, name: value}
    with pytest.raises(TypeError, match=re.escape(f"{name}: expected an integer, got {got}; convert it")):
        kernels.workspace_bytes(**sizes)
    if sizes.pop("num_sms") == 188:
        with pytest.raises(TypeError, match=re.escape(f"{name}: expected an integer, got {got}; convert it")):
            kernels.is_supported(**sizes)


@pytest.mark.parametrize("num_sms", [0, -1, 16384, 2**31, 2**40])
def test_bad_number_of_multiprocessors(num_sms: int) -> None:
    with pytest.raises(ValueError, match=f"num_sms: expected 1 to 16383, got {num_sms};"):
        kernels.plan(1, 9, 8, num_sms)


@pytest.mark.parametrize("num_sms", [1, 16383])
def test_extreme_numbers_of_multiprocessors_are_planned(num_sms: int) -> None:
    for batch, tokens, heads in ((1, 1, 1), (128, 65, 128)):
        assert 1 <= kernels.plan(batch, tokens, heads, num_sms).num_splits <= 65535


@pytest.mark.parametrize("capability", [12, "12", (12,), (12, 0, 0), ("12", "0"), (12.0, 0.0)])
def test_capability_that_is_no_pair(capability: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"capability: expected two integers, got {capability!r};")):
        kernels.is_supported(batch_size=1, num_tokens=9, num_heads=8, capability=capability)


@pytest.mark.parametrize("num_splits", [0, -1, 65536])
def test_bad_number_of_splits(num_splits: int) -> None:
    with pytest.raises(ValueError, match=f"num_splits: expected 1 to 65535, got {num_splits}"):
        kernels.plan(1, 9, 8, 188, num_splits)


@pytest.mark.parametrize(
    ("capability", "supported"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), False), ((12, 0), True), ((12, 1), True)]
)  # fmt: skip
def test_card_without_a_kernel(capability: tuple[int, int], supported: bool) -> None:
    reason = kernels.is_supported(batch_size=1, num_tokens=9, num_heads=8, capability=capability)
    assert (reason is None) == supported
    if reason is not None:
        assert f"got {capability[0]}.{capability[1]}" in reason


@pytest.mark.parametrize("name", ["dtype", "kv_dtype"])
def test_unsupported_dtype(name: str) -> None:
    arguments: dict[str, Any] = {"batch_size": 1, "num_tokens": 9, "num_heads": 8, name: torch.float8_e4m3fn}
    reason = kernels.is_supported(**arguments)
    assert reason is not None and "expected torch.bfloat16, got torch.float8_e4m3fn" in reason


def test_card_is_refused_before_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        major, minor, multi_processor_count = 8, 9, 128

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    _mla_tree_verify._num_sms.cache_clear()
    with pytest.raises(kernels.UnsupportedError, match="got 8.9"):
        _mla_tree_verify._num_sms(0)


@pytest.mark.gpu
def test_small_workspace() -> None:
    arguments = good_arguments("cuda")
    arguments["workspace"] = arguments["workspace"][:1024]
    with pytest.raises(ValueError, match="workspace: expected at least [0-9]+ bytes, got 1024"):
        kernels.mla_tree_verify(**arguments)


@pytest.mark.gpu
def test_tensors_on_two_devices() -> None:
    arguments = good_arguments("cuda")
    arguments["kv_indices"] = arguments["kv_indices"].cpu()
    with pytest.raises(ValueError, match="kv_indices: expected device cuda:0 like q, got cpu"):
        kernels.mla_tree_verify(**arguments)
