# SPDX-License-Identifier: Apache-2.0
"""Who serves verify attention, decided at start-up, and what a call passes on. The backend here is a stand-in."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from sglang.srt import runtime_context
from sglang.srt.sm120 import verify_route
from sglang.srt.sm120.startup import StartupError
from sglang.srt.sm120.verify_compare import VerifyComparison
from sglang.srt.sm120.verify_route import (
    MODE_VARIABLE,
    Fallback,
    Kernel,
    VerifyMode,
    VerifyRoute,
    publish_routes,
    route_of,
    serve_verify,
    verify_mode,
)

HEADS, WIDTH, MAX_BS = 8, 9, 4


class TritonAttnBackend(SimpleNamespace):
    """A stand-in by that name, by which SGLang too tells its backends apart."""


def pool(**changes: Any) -> SimpleNamespace:
    fields = {
        "dtype": torch.bfloat16,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "get_key_buffer": lambda layer: torch.zeros(64, 1, 576),
    }
    return SimpleNamespace(**fields | changes)


def backend(**changes: Any) -> TritonAttnBackend:
    fields = {
        "skip_prefill": False,
        "is_draft_runner": False,
        "num_draft_tokens": WIDTH,
        "req_to_token_pool": SimpleNamespace(size=MAX_BS),
        "use_mla": True,
        "dcp_size": 1,
        "_translate_kv_loc": None,
        "num_head": HEADS,
        "device": "cpu",
        "token_to_kv_pool": pool(),
        "use_sliding_window_kv_pool": False,
        "verify_mask": None,
    }
    return TritonAttnBackend(**fields | changes)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends that the machine has a card of the given compute capability, with the kernel's plan in place."""

    def pretend(major: int, minor: int = 0) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a card")
        monkeypatch.setattr(verify_route, "_plan", planned)
        monkeypatch.setattr(verify_route, "_algorithm_name", lambda: "DDTREE")
        graph = SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(bs=[1, 2, 4])))
        monkeypatch.setattr(runtime_context, "get_exec", lambda: SimpleNamespace(graph=graph))
        kernels = SimpleNamespace(is_supported=is_supported)
        monkeypatch.setitem(sys.modules, "sgl_kernel_sm120", kernels)

    return pretend


def planned(bs: int, width: int, heads: int) -> SimpleNamespace:
    return SimpleNamespace(num_splits=16 // bs, workspace_bytes=bs * 1024, block_rows=32 if bs < 4 else 64)


def is_supported(*, batch_size: int, kv_dtype: torch.dtype, **_: Any) -> str | None:
    if kv_dtype != torch.bfloat16:
        return f"kv_pool dtype: expected torch.bfloat16, got {kv_dtype}"
    return None if batch_size <= 128 else f"batch size: expected 1 to 128, got {batch_size}"


def test_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MODE_VARIABLE, raising=False)
    assert verify_mode() is VerifyMode.AUTO
    for mode in VerifyMode:
        monkeypatch.setenv(MODE_VARIABLE, mode.value)
        assert verify_mode() is mode
    monkeypatch.setenv(MODE_VARIABLE, "yes")
    with pytest.raises(StartupError, match="SGLANG_SM120_VERIFY: expected one of auto, on, off, validate, got 'yes'"):
        verify_mode()


def test_auto_takes_the_kernel_on_sm120(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MODE_VARIABLE, raising=False)
    card(12)
    route = route_of(backend())
    assert route is not None and route.kernel is not None and route.reason is None and route.reads_compact_mask
    assert route.kernel.workspace.numel() == MAX_BS * 1024
    assert route.kernel.compact_indptr.tolist() == [b * WIDTH * WIDTH for b in range(MAX_BS + 1)]


def test_the_log_says_what_was_chosen(
    card: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(MODE_VARIABLE, "validate")
    card(12, 1)
    caplog.set_level("INFO")
    target = backend()
    assert route_of(target) is route_of(target)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        "Verify attention: mla_tree_verify beside Triton (validate) on a card (compute capability 12.1), 8 heads, 9 rows "
        "per request; splits by batch size 1: 16, 2: 8, 4: 4; blocks of 32 and 64 rows; workspace 4096 bytes, "
        "compact mask 324 bytes."
    )


def test_auto_leaves_other_cards_alone(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MODE_VARIABLE, raising=False)
    card(9)
    route = route_of(backend())
    assert route is not None and route.kernel is None and "not of compute capability 12.x" in str(route.reason)


@pytest.mark.parametrize("change", [{"is_draft_runner": True}, {"skip_prefill": True}])
def test_a_drafter_has_no_route(card: Any, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    monkeypatch.setenv(MODE_VARIABLE, "on")
    card(12)
    assert route_of(backend(**change)) is None


def test_nothing_is_routed_without_speculation_or_on_other_backends(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE_VARIABLE, "on")
    card(12)
    assert route_of(SimpleNamespace()) is None
    monkeypatch.setattr(verify_route, "_algorithm_name", lambda: None)
    assert route_of(backend()) is None


def test_a_route_is_decided_once(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE_VARIABLE, "on")
    card(12)
    target = backend()
    route = route_of(target)
    monkeypatch.setenv(MODE_VARIABLE, "off")
    assert route is not None and route_of(target) is route


UNSERVED = [
    ({"use_mla": False}, "not an MLA model"),
    ({"token_to_kv_pool": pool(kv_lora_rank=256)}, "expects a latent of 512 . 64, the target has 256 . 64"),
    ({"dcp_size": 2}, "decode context parallelism"),
    ({"_translate_kv_loc": abs}, "unified memory pool"),
    ({"token_to_kv_pool": pool(dtype=torch.float8_e4m3fn)}, "kv_pool dtype: expected torch.bfloat16"),
    ({"req_to_token_pool": SimpleNamespace(size=129)}, "batch size: expected 1 to 128, got 129"),
]


@pytest.mark.parametrize("changes, reason", UNSERVED)
def test_auto_falls_back_with_the_reason(
    card: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    reason: str,
) -> None:
    monkeypatch.setenv(MODE_VARIABLE, "auto")
    card(12)
    caplog.set_level("INFO")
    route = route_of(backend(**changes))
    assert route is not None and route.kernel is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("Verify attention: SGLang's Triton kernel, because")
    assert re.search(reason, line)


def test_each_fallback_has_a_remedy() -> None:
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(verify_route))) if isinstance(node, ast.Call)]
    codes = {ast.literal_eval(call.args[0]) for call in calls if getattr(call.func, "id", "") == "Fallback"}
    assert codes | {"other_backend", "no_card"} == set(verify_route.REMEDIES)


def test_the_gauge_says_who_serves(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE_VARIABLE, "auto")
    card(12)
    backends = {9: backend(), 17: backend(use_mla=False), 33: SimpleNamespace()}
    publish_routes(backends, {"model_name": "routes"})

    def value(**labels: Any) -> float | None:
        named = {"model_name": "routes"} | {name: str(label) for name, label in labels.items()}
        return REGISTRY.get_sample_value("sglang:sm120_verify_route", named)

    assert value(width=9, kernel="mla_tree_verify", reason="") == 1
    assert value(width=17, kernel="triton", reason="not_mla") == 1
    assert value(width=33, kernel="other", reason="other_backend") == 1


@pytest.mark.parametrize("mode", ["on", "validate"])
@pytest.mark.parametrize("changes, reason", UNSERVED)
def test_on_and_validate_refuse_to_start(
    card: Any,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    changes: dict[str, Any],
    reason: str,
) -> None:
    monkeypatch.setenv(MODE_VARIABLE, mode)
    card(9)
    with pytest.raises(StartupError, match=f"SGLANG_SM120_VERIFY={mode}: .*{reason}"):
        route_of(backend(**changes))


def test_a_missing_library_is_named(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    card(12)
    monkeypatch.setitem(sys.modules, "sgl_kernel_sm120", None)
    monkeypatch.setenv(MODE_VARIABLE, "auto")
    route = route_of(backend())
    assert route is not None and str(route.reason).endswith("; run scripts/setup --kernel")
    monkeypatch.setenv(MODE_VARIABLE, "on")
    with pytest.raises(StartupError, match="sgl_kernel_sm120 cannot be used"):
        route_of(backend())


def test_a_library_that_cannot_be_loaded_is_named(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package can be imported without its library, or with one of another version."""
    ask_the_package = verify_route._plan
    card(12)

    def plan(*shape: int) -> Any:
        raise ImportError("lib.so: expected interface version 2, got 1; run it")

    monkeypatch.setattr(verify_route, "_plan", ask_the_package)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=188))
    monkeypatch.setitem(sys.modules, "sgl_kernel_sm120", SimpleNamespace(is_supported=is_supported, plan=plan))
    reason = "sgl_kernel_sm120 cannot be used: lib.so: expected interface version 2, got 1; run it"
    monkeypatch.setenv(MODE_VARIABLE, "auto")
    route = route_of(backend())
    assert route is not None and route.fallback == Fallback("no_library", reason)
    monkeypatch.setenv(MODE_VARIABLE, "on")
    with pytest.raises(StartupError, match=re.escape(f"SGLANG_SM120_VERIFY=on: {reason}; set it to auto")):
        route_of(backend())


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_workspace_that_does_not_fit_names_bytes_and_flag(
    card: Any, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    card(12)

    def empty(*size: int, **options: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (4095, 2**30))
    monkeypatch.setenv(MODE_VARIABLE, mode)
    expected = f"expected {MAX_BS * 1024} free bytes .* at {MAX_BS} requests, got 4095; lower --max-running-requests"
    with pytest.raises(StartupError, match=expected):
        route_of(backend())


def test_off_never_looks_at_the_kernel(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    card(12)
    monkeypatch.setitem(sys.modules, "sgl_kernel_sm120", None)
    monkeypatch.setenv(MODE_VARIABLE, "off")
    route = route_of(backend())
    assert route is not None and route.kernel is None and route.reason == "SGLANG_SM120_VERIFY is off"


class Calls:
    """Stands for mla_tree_verify: keeps what it was given and writes ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[tuple[Any, ...]] = []
        kernels = SimpleNamespace(mla_tree_verify=self)
        monkeypatch.setitem(sys.modules, "sgl_kernel_sm120", kernels)

    def __call__(self, *arguments: Any, scale: float, mask_is_full: bool) -> None:
        self.given.append((*arguments, scale, mask_is_full))
        arguments[8].fill_(1.0)


def verify_batch(batch_size: int, mask: torch.Tensor | None) -> tuple[SimpleNamespace, SimpleNamespace]:
    metadata = SimpleNamespace(
        kv_indptr=torch.zeros(batch_size + 1, dtype=torch.int32),
        kv_indices=torch.zeros(10, dtype=torch.int64),
        qo_indptr=torch.arange(batch_size + 1) * WIDTH,
        custom_mask=mask,
        mask_indptr=torch.arange(batch_size + 1),
        max_extend_len=WIDTH,
    )
    mode = SimpleNamespace(is_target_verify=lambda: True)
    return metadata, SimpleNamespace(forward_mode=mode, out_cache_loc=torch.ones(batch_size * WIDTH, dtype=torch.int64))


def layer(**changes: Any) -> SimpleNamespace:
    fields = {
        "layer_id": 3,
        "tp_q_head_num": HEADS,
        "qk_head_dim": 576,
        "v_head_dim": 512,
        "tp_k_head_num": 1,
        "logit_cap": 0,
        "k_scale": None,
        "scaling": 0.1,
    }
    return SimpleNamespace(**fields | changes)


def kernel_backend(mask: torch.Tensor | None, batch_size: int = 2, **changes: Any) -> Any:
    kernel = Kernel(torch.empty(16, dtype=torch.uint8), torch.arange(MAX_BS + 1) * WIDTH**2, MAX_BS, WIDTH)
    metadata, batch = verify_batch(batch_size, mask)
    return backend(sm120_route=VerifyRoute(kernel, None), forward_metadata=metadata, **changes), batch


def call(target: Any, batch: Any, **changes: Any) -> tuple[bool, torch.Tensor]:
    rows = batch.out_cache_loc.shape[0]
    out = torch.zeros(rows, HEADS * 512)
    qkv = torch.zeros(rows, HEADS, 576), torch.zeros(rows, 1, 576), torch.zeros(rows, 1, 512)
    extras = {"sinks": changes.pop("sinks", None)}
    return serve_verify(target, layer(**changes), batch, out, qkv, extras), out


def test_prefill_is_none_of_its_business(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    target, batch = kernel_backend(None)
    batch.forward_mode = SimpleNamespace(is_target_verify=lambda: False)
    assert call(target, batch)[0] is False and not calls.given


def test_a_chain_has_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    served, out = call(*kernel_backend(None))
    assert served and (out == 1).all()
    ((*_, mask, mask_indptr, _, _, scale, full),) = calls.given
    assert mask is None and mask_indptr is None and scale == 0.1 and full is False


def test_trees_of_ddtree_are_compact(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    target, batch = kernel_backend(None)
    target.sm120_route.tree_mask = torch.ones(MAX_BS, WIDTH, WIDTH, dtype=torch.bool)
    assert call(target, batch)[0]
    ((*_, mask, mask_indptr, _, _, _, full),) = calls.given
    assert mask.numel() == MAX_BS * WIDTH**2 and mask_indptr.tolist() == [0, 81, 162] and full is False


@pytest.mark.parametrize("validates", [False, True])
def test_an_error_of_the_kernel_is_not_hidden(monkeypatch: pytest.MonkeyPatch, validates: bool) -> None:
    """It ends the capture, hence the start, or an eager pass; Triton does not take over in silence."""

    def failing(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("mla_tree_verify: expected a launch, got error 209 (no kernel image); see the CUDA error")

    monkeypatch.setitem(sys.modules, "sgl_kernel_sm120", SimpleNamespace(mla_tree_verify=failing))
    target, batch = kernel_backend(None)
    if validates:
        target.sm120_route.comparison = VerifyComparison.allocate("cpu")
        target.forward_extend = lambda *_, **__: torch.zeros(2 * WIDTH, HEADS * 512)
    with pytest.raises(RuntimeError, match=r"got error 209 \(no kernel image\)"):
        call(target, batch)
    if validates:
        assert target.sm120_route.comparison.read().calls == 0


def test_a_mask_in_the_batch_spans_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """EAGLE writes its mask into the backend's buffer, in the layout that SGLang's kernel reads."""
    calls = Calls(monkeypatch)
    buffer = torch.zeros(400, dtype=torch.uint8)
    assert call(*kernel_backend(buffer))[0]
    ((*_, mask, mask_indptr, _, _, _, full),) = calls.given
    assert mask is buffer and full is True and mask_indptr.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"qk_head_dim": 192}, "qk_head_dim"),
        ({"v_head_dim": 128}, "v_head_dim"),
        ({"tp_k_head_num": 8}, "tp_k_head_num"),
        ({"logit_cap": 30.0}, "logit_cap"),
        ({"k_scale": torch.ones(1), "k_scale_float": 0.5}, "k_scale"),
        ({"sinks": torch.zeros(8)}, "sinks"),
    ],
)
def test_a_layer_of_another_kind_is_named(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], name: str) -> None:
    calls = Calls(monkeypatch)
    with pytest.raises(StartupError, match=f"layer 3: .*{name}.*SGLANG_SM120_VERIFY=off"):
        call(*kernel_backend(None), **changes)
    assert not calls.given


def test_triton_gets_the_tree_from_its_own_buffer() -> None:
    """SGLang captures the DFLASH family without a mask, which would drop the tree without a word."""
    buffer = SimpleNamespace(buffer=torch.zeros(4))
    target, batch = kernel_backend(None, verify_mask=buffer)
    target.sm120_route = VerifyRoute(None, Fallback("off", "a reason"), tree_mask=torch.ones(1))
    assert call(target, batch)[0] is False
    assert target.forward_metadata.custom_mask is buffer.buffer
    given = torch.ones(3)
    target.forward_metadata.custom_mask = given
    assert call(target, batch)[0] is False and target.forward_metadata.custom_mask is given


def test_triton_without_trees_is_left_alone() -> None:
    target, batch = kernel_backend(None, verify_mask=SimpleNamespace(buffer=torch.zeros(4)))
    target.sm120_route = VerifyRoute(None, Fallback("off", "a reason"))
    assert call(target, batch)[0] is False and target.forward_metadata.custom_mask is None


@pytest.mark.parametrize(
    "algorithm, served, rows",
    [("DDTREE", True, 5), ("DDTREE", False, 5), ("DFLASH", True, 5), ("DFLASH", False, 36), ("EAGLE", False, 36)],
)
def test_graph_state_is_sized_by_requests_where_only_verify_runs(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, served: bool, rows: int
) -> None:
    monkeypatch.setattr(verify_route, "_algorithm_name", lambda: algorithm)
    target, _ = kernel_backend(None)
    if not served:
        target.sm120_route = VerifyRoute(None, Fallback("off", "a reason"))
    assert verify_route.graph_rows(target, 4, 36) == rows
    assert verify_route.graph_rows(target, 4, 3) == 3
    target.use_sliding_window_kv_pool = True
    assert verify_route.graph_rows(target, 4, 36) == 36


@pytest.mark.parametrize("tree, served, kept", [(True, True, False), (False, True, True), (True, False, True)])
def test_a_mask_that_nobody_reads_is_freed(tree: bool, served: bool, kept: bool) -> None:
    """EAGLE's trees and Triton need the buffer; DDTREE on the kernel has its own."""
    buffer = SimpleNamespace(buffer=torch.zeros(4))
    target, _ = kernel_backend(None, _verify_mask=buffer)
    if not served:
        target.sm120_route = VerifyRoute(None, Fallback("off", "a reason"))
    target.sm120_route.tree_mask = torch.ones(1) if tree else None
    assert verify_route.drop_unread_mask(target) == (0 if kept else 16)
    assert (target._verify_mask is buffer) is kept
    assert verify_route.drop_unread_mask(target) == 0
