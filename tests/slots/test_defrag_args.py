# SPDX-License-Identifier: Apache-2.0
"""What `SGLANG_SM120_DEFRAG` takes, where it stops the start, and what it reports."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY

from serving.server import ModelPair
from sglang.srt.server_args import prepare_server_args
from sglang.srt.sm120 import defrag
from sglang.srt.sm120.defrag import Defragmenter, SlotMetrics
from sglang.srt.sm120.defrag_args import DefragMode, defrag_mode
from sglang.srt.sm120.startup import StartupError
from slots.toy import ToyServer


@pytest.mark.parametrize(("value", "mode"), [("", "off"), ("off", "off"), ("idle", "idle"), ("auto", "auto")])
def test_values(monkeypatch: pytest.MonkeyPatch, value: str, mode: str) -> None:
    monkeypatch.setenv("SGLANG_SM120_DEFRAG", value)
    assert defrag_mode() is DefragMode(mode)


def test_it_is_off_where_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_SM120_DEFRAG", raising=False)
    assert defrag_mode() is DefragMode.OFF


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"DEFRAG": "on"}, "SGLANG_SM120_DEFRAG: expected one of off, idle, auto, got 'on'; unset it"),
        ({"DEFRAG": "auto", "DEFRAG_CHECK": "yes"}, "SGLANG_SM120_DEFRAG_CHECK: expected 1 or nothing, got 'yes'"),
        ({"DEFRAG_CHECK": "1"}, "SGLANG_SM120_DEFRAG_CHECK: expected SGLANG_SM120_DEFRAG=idle or auto with it"),
        ({"DEFRAG": "auto"}, "SGLANG_SM120_DEFRAG=auto: expected --speculative-algorithm DDTREE, got None"),
    ],
)
def test_environment_is_checked_at_the_start(
    monkeypatch: pytest.MonkeyPatch, demo_pair: ModelPair, environment: dict[str, str], reason: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(f"SGLANG_SM120_{name}", value)
    with pytest.raises(StartupError, match=reason):
        prepare_server_args(list(demo_pair.arguments(None)))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--page-size", "16"), "expected --page-size 1, got 16; drop one of them"),
        (("--enable-streaming-session",), "expected no --enable-streaming-session, which holds slots of its own"),
        (("--enable-memory-saver",), "expected no --enable-memory-saver, which takes the pools away"),
        (("--disable-radix-cache",), "expected no --disable-radix-cache, whose requests nobody can count"),
    ],
)
def test_other_holders_of_slots_are_refused(
    monkeypatch: pytest.MonkeyPatch, demo_pair: ModelPair, arguments: tuple[str, ...], reason: str
) -> None:
    monkeypatch.setenv("SGLANG_SM120_DEFRAG", "idle")
    with pytest.raises(StartupError, match=f"SGLANG_SM120_DEFRAG=idle: {reason}"):
        prepare_server_args([*demo_pair.arguments("DDTREE"), *arguments])
    monkeypatch.setenv("SGLANG_SM120_DEFRAG", "off")
    prepare_server_args([*demo_pair.arguments("DDTREE"), *arguments])


def test_series_count_rows_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SM120_DEFRAG", "off")  # which measures and reports as well
    monkeypatch.setattr(defrag, "MEASURE_EVERY", 2)
    server = ToyServer()
    req = server.admit([1] * 30)
    assert req is not None
    runner = server.runner(server.pools[0])
    defragmenter = Defragmenter(runner, server.runner(server.pools[1]), SlotMetrics({"model_name": "a-model"}))

    def value(name: str) -> float | None:
        return REGISTRY.get_sample_value(f"sglang:sm120_{name}", {"model_name": "a-model"})

    # Every other slot: 30 runs of one.
    server.table[req.req_pool_idx, :30] = server.table[req.req_pool_idx, :30] * 2
    for _ in range(2):
        defragmenter.before_step(server.batch())
    assert value("kv_run_length") == 1.0
    assert value("defrag_rows_moved_total") == 0
    defragmenter._moved += 48
    defragmenter._pace(1500.0, 48)
    for _ in range(2):
        defragmenter.before_step(server.batch())
    assert value("defrag_rows_moved_total") == 48
    assert value("defrag_seconds_total") >= 0.0015
    defragmenter._measure(server.batch())
    defragmenter._report_rows(64)  # idle work, which the reading in flight knows nothing of
    defragmenter._collect()
    assert value("defrag_rows_moved_total") == 64
    defragmenter._report_rows(70)
    assert value("defrag_rows_moved_total") == 70


def test_a_name_that_a_client_chose_cannot_begin_a_line_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SM120_DEFRAG", "off")
    server = ToyServer()
    req = server.admit([1] * 30)
    assert req is not None
    req.rid = "request\n\x1b[31m\u2028"
    defragmenter = Defragmenter(server.runner(server.pools[0]), server.runner(server.pools[1]), None)
    monkeypatch.setattr(defrag, "MEASURE_EVERY", 2)
    for _ in range(2):
        defragmenter.before_step(server.batch())
    assert defragmenter.describe() == "kv run length: 30.0 (t\\n\\x1b[31m\\u2028=30.0), "


def test_without_requests_there_is_nothing_to_describe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SM120_DEFRAG", "off")
    server = ToyServer()
    defragmenter = Defragmenter(server.runner(server.pools[0]), server.runner(server.pools[1]), None)
    assert defragmenter.describe() == ""
    assert defragmenter.run_length() == 0.0
