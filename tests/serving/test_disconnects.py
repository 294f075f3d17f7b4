# SPDX-License-Identifier: Apache-2.0
"""Clients that leave: soon nothing of their requests runs, no slot is held, and the next request is served.

They leave while queued, in prefill, in the first verify step, while writing and after a retraction; the pool is too small
for all of them, so that each of these happens.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from serving import soak
from serving.server import Server, generate

NUM_CLIENTS = 24
# Any of the requests would run for longer than the whole test.
NEW_TOKENS = 500
KNOWN: dict[str, Any] = {"prompt": "import os\n", "max_new_tokens": 32, "ignore_eos": True}
# A stream is ended two seconds after its client has left, other requests are looked at every second.
SECONDS_TO_END = 5.0
SOAK_SECONDS = 25.0


@pytest.fixture
def server(serve: Callable[..., Server]) -> Server:
    """The server with a small pool that the allocator's test shares."""
    return serve("DDTREE", *soak.ARGUMENTS, environment=soak.ENVIRONMENT)


def gauges(server: Server, *names: str) -> list[float]:
    """Current values of gauges in /metrics, summed over their labels."""
    values = dict.fromkeys(names, 0.0)
    for family in text_string_to_metric_families(requests.get(f"{server.url}/metrics", timeout=60).text):
        for sample in family.samples:
            if sample.name in values:
                values[sample.name] += sample.value
    return list(values.values())


def wait_until_free(server: Server, seconds: float = SECONDS_TO_END) -> None:
    """Return when nothing runs or waits and a flush finds every slot free; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    # A flush is refused while anything runs or waits.
    while requests.post(f"{server.url}/flush_cache", timeout=60).status_code != 200:
        assert time.monotonic() < deadline, server.tail(20)
        time.sleep(0.1)


def leave(server: Server, path: str, body: dict[str, Any], after_seconds: float, num_events: int) -> int:
    """Send a request on a socket of its own, close it after some events or seconds, return the events that came."""
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head.encode() + payload)
        connection.settimeout(after_seconds)
        received = b""
        deadline = time.monotonic() + after_seconds
        try:
            while received.count(b"data: ") < num_events and time.monotonic() < deadline:
                part = connection.recv(65536)
                if not part:
                    break
                received += part
        except TimeoutError:
            pass
    return received.count(b"data: ")


@pytest.mark.scenario("BUG-042")
@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("stream", [True, False])
def test_nothing_of_a_client_that_left_runs_on(server: Server, stream: bool, choices: int) -> None:
    soak.settle(server)
    alone = generate(server, **KNOWN)
    chance = random.Random(choices)
    jobs = []
    for number in range(NUM_CLIENTS):
        body = {
            "model": "default",
            "prompt": "import os\n" * chance.randint(1, 12) + "#" * number,
            "max_tokens": NEW_TOKENS,
            "n": choices,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        # Nothing read at all, the first token, the first verify step, and later.
        jobs.append((body, chance.choice((0.01, 0.2, 1.0, 3.0)), chance.choice((1, 2, 3, 20))))
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        events = list(pool.map(lambda job: leave(server, "/v1/completions", *job), jobs))
    assert not stream or 0 < sum(count > 0 for count in events)
    wait_until_free(server)
    assert generate(server, **KNOWN)["output_ids"] == alone["output_ids"]
    # An idle server publishes its queue every 30 seconds only, so the request above has brought it up to date.
    wait_until_free(server)
    assert gauges(server, "sglang:num_running_reqs", "sglang:num_queue_reqs") == [0, 0]
    assert server.running and "Traceback" not in server.output(), server.tail()


@pytest.mark.scenario("BUG-042")
def test_abort_ends_queued_and_running_requests(server: Server) -> None:
    wait_until_free(server)
    with ThreadPoolExecutor(8) as pool:
        bodies = [
            {
                "text": "class A:\n" * 4,
                "rid": f"abort-{number}",
                "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
            }
            for number in range(8)
        ]
        answers = [pool.submit(requests.post, f"{server.url}/generate", json=body, timeout=300) for body in bodies]
        time.sleep(1.0)
        for body in bodies:
            assert (
                requests.post(f"{server.url}/abort_request", json={"rid": body["rid"]}, timeout=60).status_code == 200
            )
        for answer in answers:
            response = answer.result()
            assert response.status_code in (200, 499, 503), response.text
            if response.status_code == 200:
                meta = response.json()["meta_info"]
                assert meta["finish_reason"]["type"] == "abort" and meta["completion_tokens"] < NEW_TOKENS
    wait_until_free(server)
    assert server.running, server.tail()


@pytest.mark.scenario("BUG-048")
@pytest.mark.scenario("BUG-049")
def test_retraction_and_eviction_do_not_change_a_text(server: Server) -> None:
    """The cache is full of texts that have ended; every request that grows needs their slots, and some are retracted."""
    wait_until_free(server)
    prompts = [f"def f{number}(x):\n    return " for number in range(50)]

    def ask(prompt: str) -> dict[str, Any]:
        return generate(server, prompt, max_new_tokens=80, ignore_eos=True)

    alone = [ask(prompt) for prompt in prompts[:10]]
    before = gauges(server, "sglang:num_retracted_reqs", "sglang:num_retracted_requests_total")
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, prompts))
    assert [answer["output_ids"] for answer in together[:10]] == [answer["output_ids"] for answer in alone]
    assert all(answer["meta_info"]["completion_tokens"] == 80 for answer in together)
    after = gauges(server, "sglang:num_retracted_reqs", "sglang:num_retracted_requests_total")
    assert sum(after) > sum(before), "the load was meant to force retractions"
    wait_until_free(server)


@pytest.mark.slow
@pytest.mark.scenario("BUG-026")
def test_a_short_soak(server: Server) -> None:
    """`soak.py` for a while; its run of 20 minutes is in `results/soak.json`."""
    wait_until_free(server)
    figures = soak.soak(server, soak.demo_prompts(12), SOAK_SECONDS)
    assert figures["texts_compared"] > 0 and figures["texts_different"] == 0
    assert min(figures["requests"].values()) > 0
