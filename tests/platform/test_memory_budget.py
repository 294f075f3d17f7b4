# SPDX-License-Identifier: Apache-2.0
"""Memory of verification counted before the KV pools are sized: what it is, the default that leaves it, the refusal."""

from __future__ import annotations

import dataclasses
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from serving.server import ModelPair
from sglang.srt import utils
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.attention.verify_mask import tree_mask_numel
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.runner import base_cuda_graph_runner
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.sm120 import memory_budget, verify_route
from sglang.srt.sm120.memory_budget import AttentionScratch, VerifyShape, capture_sizes, check_room
from sglang.srt.sm120.startup import StartupError
from sglang.srt.speculative import ddtree_ladder
from sglang.srt.speculative.ddtree_args import _load_drafter_config
from sglang.srt.speculative.ddtree_ladder import Ladder
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.utils import common

SHAPE = VerifyShape(
    captured=32,
    widths=(64,),
    block_size=8,
    context_len=131072,
    vocab_size=1000,
    tp_size=3,
    target=AttentionScratch(heads=8, splits=16, value_dim=512),
    drafter=AttentionScratch(heads=4, splits=8, value_dim=128),
)


@pytest.mark.scenario("BUG-056")
def test_masks_are_counted_as_sglang_allocates_them() -> None:
    expected = tree_mask_numel(TreeMaskMode.FULL_MASK, 32, 64, 131072)
    assert expected > 250_000_000
    assert SHAPE.capture_bytes()["masks"] == expected


def test_everything_else_that_a_capture_allocates() -> None:
    needed = SHAPE.capture_bytes()
    assert needed["slot lists"] == 2 * 33 * 131072 * 8
    assert needed["attention scratch"] == 33 * 4 * (8 * 16 * 513 + 4 * 8 * 129)
    assert needed["logits"] == 4 * (32 * 64 * 1000 + 32 * 7 * 334)
    several = dataclasses.replace(SHAPE, widths=(8, 64)).capture_bytes()
    assert several["masks"] == needed["masks"] + 32 * 8 * (131072 + 8)
    assert several["slot lists"] == 3 * 33 * 131072 * 8
    assert several["logits"] == needed["logits"]


def test_nothing_is_captured_without_graphs() -> None:
    assert dataclasses.replace(SHAPE, captured=0).capture_bytes() == {}


@pytest.mark.parametrize(
    "configured, max_requests, captured",
    [([1, 2, 4, 8], 8, [1, 2, 4, 8]), ([1, 2, 4, 8], 6, [1, 2, 4, 6]), ([1, 2], 48, [1, 2])],
)
def test_captured_sizes(configured: list[int], max_requests: int, captured: list[int]) -> None:
    assert capture_sizes(configured, max_requests) == captured


def test_room_to_the_byte() -> None:
    needed = {"masks": 600, "logits": 400}
    check_room(needed, 1000, 0.9, 10_000)
    with pytest.raises(StartupError, match=r"expected 1000 free bytes .*\(masks 1 MiB, logits 1 MiB\), got 999, 1 are"):
        check_room(needed, 999, 0.9, 10_000)


@pytest.mark.scenario("BUG-054")
def test_too_high_a_fraction_is_refused_with_one_that_fits() -> None:
    """The pools took 95 % of a card of 100 GiB; 7 GiB are needed beside them."""
    gib = 2**30
    needed = {"masks": 3 * gib, "logits": 4 * gib}
    with pytest.raises(StartupError) as refused:
        check_room(needed, 5 * gib, 0.95, 100 * gib)
    text = str(refused.value)
    assert text.startswith("--mem-fraction-static: expected 7516192768 free bytes")
    assert "got 5368709120, 2147483648 are missing" in text
    (fitting,) = re.findall(r"lower --mem-fraction-static from 0\.95 to at most ([\d.]+)", text)
    assert 0.9 < float(fitting) <= 0.93
    check_room(needed, int(100 * gib * (1 - float(fitting))), float(fitting), 100 * gib)


@pytest.mark.scenario("BUG-059")
def test_two_shortages_have_opposite_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that leave no room ask for a higher fraction (SGLang says it), verification for a lower one (we do)."""
    monkeypatch.setattr(kv_cache_configurator, "get_available_gpu_memory", lambda *_, **__: 4.0)
    monkeypatch.setattr(kv_cache_configurator, "get_world_group", lambda: SimpleNamespace(world_size=1, cpu_group=None))
    monkeypatch.setattr(kv_cache_configurator, "get_schedule", lambda: SimpleNamespace(mem_fraction_static=0.9))
    configurator = SimpleNamespace(device="cuda", gpu_id=0, mambaish_config=None)
    with pytest.raises(ValueError, match=r"Raise --mem-fraction-static above 0\.960"):
        kv_cache_configurator.KVCacheConfigurator._profile_available_bytes(configurator, 100.0)
    with pytest.raises(StartupError, match=r"lower --mem-fraction-static from 0\.99 to at most 0\.98"):
        check_room({"masks": 100}, 90, 0.99, 1000)


def triton_backend(heads: int, splits: int, value_dim: int) -> TritonAttnBackend:
    backend: TritonAttnBackend = object.__new__(TritonAttnBackend)
    vars(backend).update(num_head=heads, max_kv_splits=splits, v_head_dim=value_dim)
    return backend


@pytest.mark.parametrize("drafts", ["triton", "flashinfer"])
def test_the_check_before_capture_takes_the_backends_as_they_are(monkeypatch: pytest.MonkeyPatch, drafts: str) -> None:
    """Three widths on a card whose pools have left 1 GiB of the 2.3 that capturing needs.

    A drafter's backend other than Triton's has its workspace before the check.
    """
    monkeypatch.setattr(base_cuda_graph_runner, "get_batch_sizes_to_capture", lambda runner, width: ([1, 8, 48], []))
    monkeypatch.setattr(utils, "get_available_gpu_memory", lambda device, gpu_id: 1.0)
    monkeypatch.setattr(ddtree_ladder, "workspace_for", lambda backend, width: width * 1_000_000)
    runner = SimpleNamespace(
        device="cuda",
        gpu_id=0,
        attn_backend=triton_backend(8, 256, 512),
        model_config=SimpleNamespace(context_len=131072, vocab_size=163840),
        server_args=SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(backend=Backend.FULL))),
        pre_model_load_memory=95.0,
        mem_fraction_static=0.98,
    )
    trees = [SimpleNamespace(width=width, tree=SimpleNamespace(max_depth=7)) for width in (8, 17, 33)]
    ladder: Any = SimpleNamespace(
        _runner=runner, _tp_group=SimpleNamespace(world_size=8), rungs=trees, largest=trees[-1]
    )
    drafting = triton_backend(8, 8, 128) if drafts == "triton" else SimpleNamespace()
    drafter = SimpleNamespace(attn_backend=drafting)
    needed = sum(48 * width * (131072 + width) for width in (8, 17, 33)) + 4 * 49 * 131072 * 8
    needed += 49 * 4 * (3 * 8 * 256 * 513 + 8 * 8 * 129 * (drafts == "triton")) + 4 * (
        48 * 33 * 163840 + 48 * 7 * 20480
    )
    needed += 8_000_000 + 17_000_000  # the workspaces of the widths that are captured later
    with pytest.raises(StartupError, match=f"expected {needed} free bytes .*, {needed - 2**30} are missing; lower"):
        Ladder.check_room(ladder, drafter)
    monkeypatch.setattr(utils, "get_available_gpu_memory", lambda device, gpu_id: needed / 2**30)
    Ladder.check_room(ladder, drafter)


CARD_MIB = 32_768


def on_a_card(pair: ModelPair, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> ServerArgs:
    """The demo pair's arguments as a card of 32 GiB would have resolved them, but for the fraction."""
    args = prepare_server_args(
        [
            *("--model-path", str(pair.target), "--speculative-algorithm", "DDTREE"),
            *("--speculative-draft-model-path", str(pair.draft), "--max-running-requests", "16", *arguments),
        ]
    )
    args._declarations_materialized = False  # as it is while arguments are resolved
    args.device = "cuda"
    args.cuda_graph_config.decode.backend = Backend.FULL
    args.cuda_graph_config.decode.bs = args.cuda_graph_config.decode.max_bs = None
    args.mem_fraction_static = None
    args._handle_gpu_memory_settings(CARD_MIB)
    card = SimpleNamespace(multi_processor_count=170)
    monkeypatch.setattr(common, "get_device_memory_capacity", lambda device: CARD_MIB)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    return args


def test_a_default_leaves_what_verification_needs(demo_pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    args = on_a_card(demo_pair, monkeypatch)
    stock = args.mem_fraction_static
    monkeypatch.setattr(verify_route, "kernel_is_asked_for", lambda: True)
    monkeypatch.setattr(
        verify_route, "_plan", lambda bs, width, heads: SimpleNamespace(workspace_bytes=bs * width * 2**20)
    )
    monkeypatch.setattr(memory_budget.logger, "info", lambda text, *values: lines.append(text % values))
    memory_budget.lower_default_fraction(args, _load_drafter_config(args), [17])
    lowered = args.mem_fraction_static
    text = args.get_model_config().hf_text_config
    rows = 17
    least = 16 * 17 * 2**20  # workspace
    least += 16 * 17 * (4096 + 17) + 2 * rows * 4096 * 8 + 16 * 17 * text.vocab_size * 4
    least += rows * text.num_attention_heads * 128 * 513 * 4
    assert lowered <= stock - least / 2**20 / CARD_MIB
    assert lowered == math.floor(lowered * 1000) / 1000 > 0.5
    (line,) = lines
    assert line.startswith(f"DDTREE: --mem-fraction-static lowered from the default {stock} to {lowered} for masks ")
    assert "workspace 272 MiB" in line


def test_a_given_fraction_is_kept(demo_pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    args = on_a_card(demo_pair, monkeypatch)
    args.mem_fraction_static = given = args.mem_fraction_static + 0.02
    memory_budget.lower_default_fraction(args, _load_drafter_config(args), [17])
    assert args.mem_fraction_static == given


@pytest.mark.parametrize("words", [["--mem-fraction-static", "x"], ["--mem-fraction-static=x"], ["--mem-frac", "x"]])
def test_a_given_fraction_is_kept_also_when_it_is_the_default(
    demo_pair: ModelPair, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    args = on_a_card(demo_pair, monkeypatch)
    stock = args.mem_fraction_static
    command = ["sglang", "serve", *(word.replace("x", str(stock)) for word in words)]
    monkeypatch.setattr(memory_budget.sys, "argv", command)
    memory_budget.lower_default_fraction(args, _load_drafter_config(args), [17])
    assert args.mem_fraction_static == stock
    monkeypatch.setattr(memory_budget.sys, "argv", ["sglang", "serve", "--mem-fraction-staticky", "--max-running"])
    memory_budget.lower_default_fraction(args, _load_drafter_config(args), [17])
    assert args.mem_fraction_static < stock


def test_a_card_that_verification_fills_is_refused(demo_pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A default of nothing would end in the advice to raise it, which is the wrong direction."""
    args = on_a_card(demo_pair, monkeypatch)
    monkeypatch.setattr(memory_budget, "_unreserved_bytes", lambda *_: {"masks": 40 * 2**30})
    stock = args.mem_fraction_static
    with pytest.raises(StartupError) as refused:
        memory_budget.lower_default_fraction(args, _load_drafter_config(args), [17])
    assert str(refused.value) == (
        f"DDTREE: expected less than {int(stock * CARD_MIB)} MiB for verification (masks 40960 MiB), got 40960; "
        "lower --max-running-requests, --context-length or --speculative-ddtree-budget"
    )


def test_nothing_is_lowered_without_graphs_or_a_card(demo_pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    args = on_a_card(demo_pair, monkeypatch)
    stock = args.mem_fraction_static
    for field, value in (("device", "cpu"), ("backend", Backend.DISABLED)):
        changed: Any = args if field == "device" else args.cuda_graph_config.decode
        before = getattr(changed, field)
        setattr(changed, field, value)
        memory_budget.lower_default_fraction(args, _load_drafter_config(args), [17])
        assert args.mem_fraction_static == stock
        setattr(changed, field, before)


def test_a_shape_beyond_the_kernel_s_limits_needs_no_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> tuple[int, int]:
        raise ValueError("batch size: expected 1 to 128, got 129")

    monkeypatch.setattr(verify_route, "kernel_is_asked_for", lambda: True)
    monkeypatch.setattr(verify_route, "_plan", refuse)
    args = SimpleNamespace(use_mla_backend=lambda: True)
    assert memory_budget._workspace_bytes(args, SHAPE, 129) == 0
