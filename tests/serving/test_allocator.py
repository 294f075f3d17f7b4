# SPDX-License-Identifier: Apache-2.0
"""No KV slot is lost or owned twice: mixed load with aborts and forced retractions, under SGLang's strict check."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from serving.server import Server
from sglang.srt.speculative.ddtree_args import DEFAULT_BUDGET

CONCURRENCY = 12
POOL_TOKENS = 640
WORDS = ("def", "return", "import", "class", "self", "None", "x", "=", "(", ")", ":", "for", "in", "range")


def make_request(rng: random.Random, number: int) -> dict[str, Any]:
    """A prompt of random length, half of them with a common prefix, and a random answer length."""
    prefix = "import os\nimport sys\n" if rng.random() < 0.5 else ""
    return {
        "rid": f"request-{number}",
        "text": prefix + " ".join(rng.choices(WORDS, k=rng.randint(1, 60))),
        "sampling_params": {
            "temperature": rng.choice([0.0, 0.0, 0.8]),
            "max_new_tokens": rng.randint(1, 80),
            "ignore_eos": rng.random() < 0.5,
        },
    }


def send(server: Server, body: dict[str, Any], abort_after: float | None) -> int:
    """Send a request, abort it after a while if asked, and return the tokens that it gave."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(requests.post, f"{server.url}/generate", json=body, timeout=300)
        if abort_after is not None:
            time.sleep(abort_after)
            requests.post(f"{server.url}/abort_request", json={"rid": body["rid"]}, timeout=60)
        response = answer.result()
    assert response.status_code in (200, 499, 503), response.text
    return int(response.json()["meta_info"]["completion_tokens"]) if response.status_code == 200 else 0


def check_metrics(text: str) -> None:
    """DDTREE's series are there after the load, and none is out of its range."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        values |= {sample.name: sample.value for sample in family.samples if "_bucket" not in sample.name}
    verified, accepted = (values[f"sglang:spec_tree_nodes_{kind}_total"] for kind in ("verified", "accepted"))
    assert 0 < accepted < verified
    assert values["sglang:spec_accepted_depth_sum"] == accepted
    assert values["sglang:spec_accepted_depth_count"] == verified / DEFAULT_BUDGET
    assert 0 <= values["sglang:spec_accept_rate"] <= 1
    assert values["sglang:spec_accept_length"] >= 1


@pytest.mark.parametrize(("page_size", "num_requests"), [(1, 300), (16, 100)])
def test_pool_returns_to_its_start(serve: Callable[..., Server], page_size: int, num_requests: int) -> None:
    server = serve(
        "DDTREE",
        *("--page-size", str(page_size), "--max-total-tokens", str(POOL_TOKENS), "--enable-metrics"),
        environment={"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_TEST_RETRACT": "1"},
    )
    rng = random.Random(page_size)
    jobs = [(make_request(rng, n), rng.uniform(0.0, 0.6) if rng.random() < 0.25 else None) for n in range(num_requests)]
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        lengths = list(pool.map(lambda job: send(server, *job), jobs))
    assert sum(lengths) > num_requests, "most requests must have run"
    assert server.running and "Traceback" not in server.output(), server.tail()
    assert "retract" in server.output().lower(), "the load was meant to force retractions"
    check_metrics(requests.get(f"{server.url}/metrics", timeout=60).text)
    assert requests.post(f"{server.url}/flush_cache", timeout=60).status_code == 200, "nothing may still hold a slot"

    # After a flush a request that needs nearly the whole pool must fit, which a lost slot would prevent.
    body = {"text": "x", "sampling_params": {"temperature": 0, "max_new_tokens": POOL_TOKENS - 160, "ignore_eos": True}}
    answer = requests.post(f"{server.url}/generate", json=body, timeout=600).json()
    assert answer["meta_info"]["completion_tokens"] == POOL_TOKENS - 160
    assert server.running, server.tail()
