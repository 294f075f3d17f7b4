# SPDX-License-Identifier: Apache-2.0
"""The table of memory at start-up: each storage once, for its first owner, and rows that add up to the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.sm120 import memory_table
from sglang.srt.sm120.verify_route import Fallback, Kernel, VerifyRoute
from sglang.srt.utils import common

CPU = torch.device("cpu")


def test_what_two_hold_counts_for_the_first() -> None:
    shared = torch.zeros(10, 10)
    table = memory_table.count_once({"a": [shared[2:4]], "b": [shared, torch.zeros(5)]}, CPU)
    assert table == {"a": 400, "b": 20}


def test_other_devices_and_empty_tensors_count_nothing() -> None:
    table = memory_table.count_once({"a": [torch.zeros(8, device="meta"), torch.zeros(0), torch.zeros(1)]}, CPU)
    assert table == {"a": 4}


class Layer(torch.nn.Module):
    """A parameter, a buffer, and absorbed weights as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.register_buffer("table", torch.zeros(5))
        self.w_kc = torch.zeros(7)
        self.parts = [torch.zeros(11), None]


def test_all_tensors_of_a_model_are_found() -> None:
    model = torch.nn.Sequential(Layer(), torch.nn.Sequential(Layer()))
    assert memory_table.count_once({"a": memory_table.module_tensors(model)}, CPU) == {"a": 2 * 4 * (3 + 5 + 7 + 11)}


def runner(model: torch.nn.Module, pool_elements: int, **graphs: float) -> Any:
    pool = SimpleNamespace(k_buffer=[torch.zeros(pool_elements), torch.zeros(pool_elements)], size=pool_elements)
    return SimpleNamespace(model=model, token_to_kv_pool=pool, graph_memory_usage=graphs, device="cpu", gpu_id=0)


def rung(width: int, mask_bytes: int, capture_bytes: int, kernel: Kernel | None) -> Any:
    fallback = None if kernel is not None else Fallback("off", "off")
    full = SimpleNamespace(buffer=torch.zeros(mask_bytes, dtype=torch.uint8)) if mask_bytes else None
    backend = SimpleNamespace(sm120_route=VerifyRoute(kernel, fallback), verify_mask=full)
    tree = SimpleNamespace(mask=torch.zeros(4, width, width, dtype=torch.bool))
    return SimpleNamespace(tree=tree, attn_backend=backend, capture_bytes=capture_bytes, dropped_bytes=500)


def test_rows_add_up_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    monkeypatch.setattr(common, "get_available_gpu_memory", lambda *_: 0.5)
    monkeypatch.setattr(memory_table, "device_bytes", lambda *_: gib)
    target, drafter = Layer(), Layer()
    drafter.w_kc = target.w_kc  # what the drafter shares is the target's
    kernel = Kernel(torch.empty(5000, dtype=torch.uint8), torch.zeros(5, dtype=torch.int64), 4, 9)
    rungs = [rung(9, 0, 1 << 20, kernel), rung(17, 30_000, 0, None)]
    target_runner = runner(target, 1000, target_verify=0.125, prefill=0.0625)
    table = memory_table.measure(target_runner, runner(drafter, 10, draft_decode=0.0625), rungs)
    assert list(table) == list(memory_table.OWNERS)
    assert table["weights"] == 104 and table["draft_weights"] == 104 - 28
    assert table["kv"] == 8000 and table["draft_kv"] == 80
    assert table["workspace"] == 5000
    assert table["mask"] == 4 * 81 + 4 * 289 + 5 * 8 + 30_000
    assert table["graphs"] == gib // 4 + (1 << 20) - 30_000 - 2 * 500
    assert table["free"] == gib // 2
    assert sum(table.values()) == gib


def test_the_log_has_a_line_for_each_owner(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    memory_table.log(dict.fromkeys(memory_table.OWNERS, 3 * 2**29))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.splitlines()[0] == "Memory of rank 0:"
    assert message.splitlines()[2].split() == ["weights", "1610612736", "1.500"]
    assert len(message.splitlines()) == 2 + len(memory_table.OWNERS)
