# SPDX-License-Identifier: Apache-2.0
"""Texts are equal while KV rows move before every step and while nothing runs, with aborts, disconnects and retractions.

`SGLANG_SM120_DEFRAG_CHECK` compares the moved rows in every layer of both pools; a difference ends the server.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from serving import soak
from serving.server import Server

LOAD_SECONDS = 8.0
# Prompts are read in several pieces: a request between two of them holds slots and is in no batch.
ARGUMENTS = (*soak.ARGUMENTS, "--chunked-prefill-size", "32")
ENVIRONMENT = {**soak.ENVIRONMENT, "SGLANG_SM120_DEFRAG": "auto", "SGLANG_SM120_DEFRAG_CHECK": "1"}


def series(server: Server) -> dict[str, float]:
    """The defragmenter's series without their common prefix."""
    families = text_string_to_metric_families(requests.get(f"{server.url}/metrics", timeout=60).text)
    samples = [sample for family in families for sample in family.samples]
    prefix = "sglang:sm120_"
    return {sample.name.removeprefix(prefix): sample.value for sample in samples if sample.name.startswith(prefix)}


@pytest.mark.scenario("BUG-051")
def test_texts_are_equal_while_every_step_moves_rows(serve: Callable[..., Server]) -> None:
    server = serve("DDTREE", *ARGUMENTS, environment=ENVIRONMENT)
    # Half of the prompts begin alike, so that running requests share nodes of the tree.
    prompts = soak.demo_prompts(8)
    prompts = [prompts[0][:120] + text[:80] if index % 2 else text for index, text in enumerate(prompts)]
    figures = soak.soak(server, prompts, LOAD_SECONDS)
    assert figures["texts_compared"] > 0
    found = series(server)
    assert found["defrag_rows_moved_total"] > 0 and found["defrag_seconds_total"] > 0
    assert found["kv_run_length"] >= 1
    assert "kv run length: " in server.output()


def test_cached_texts_move_while_nothing_runs(serve: Callable[..., Server]) -> None:
    server = serve("DDTREE", *ARGUMENTS, environment=ENVIRONMENT)
    bodies = soak.make_bodies(soak.demo_prompts(4))

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = requests.post(f"{server.url}/generate", json=body, timeout=300).json()
        return result

    fresh = [answer(body) for body in bodies]
    time.sleep(1.0)  # so that moves of the steps are all counted
    soak.settle(server)
    before = series(server)["defrag_rows_moved_total"]
    for body in bodies:
        # A single token comes from the prefill: no step runs that could move anything.
        answer({"text": body["text"], "sampling_params": {"temperature": 0, "max_new_tokens": 1}})
    deadline = time.monotonic() + 30
    while series(server)["defrag_rows_moved_total"] == before:
        assert time.monotonic() < deadline, "expected rows to move while nothing runs"
        time.sleep(0.2)
    cached = [answer(body) for body in bodies]
    assert [text["output_ids"] for text in cached] == [text["output_ids"] for text in fresh]
    assert all(text["meta_info"]["cached_tokens"] > 0 for text in cached)
    assert server.running, server.tail()
