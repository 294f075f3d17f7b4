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

from serving.server import Server, generate, generate_body
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


def check_metrics(text: str, budget: int) -> None:
    """DDTREE's series are there after the load, and none is out of its range."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        values |= {sample.name: sample.value for sample in family.samples if "_bucket" not in sample.name}
    verified, accepted = (values[f"sglang:spec_tree_nodes_{kind}_total"] for kind in ("verified", "accepted"))
    assert 0 < accepted < verified
    assert values["sglang:spec_accepted_depth_sum"] == accepted
    assert values["sglang:spec_accepted_depth_count"] == verified / budget
    assert 0 <= values["sglang:spec_accept_rate"] <= 1
    assert values["sglang:spec_accept_length"] >= 1


def small_pool(
    serve: Callable[..., Server], algorithm: str | None, page_size: int, *flags: str, tokens: int = POOL_TOKENS
) -> Server:
    """A server whose pool is too small for the load, under the strict check."""
    return serve(
        algorithm,
        *("--page-size", str(page_size), "--max-total-tokens", str(tokens), "--enable-metrics", *flags),
        environment={"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_TEST_RETRACT": "1"},
    )


@pytest.mark.parametrize(("page_size", "num_requests"), [(1, 300), (16, 100)])
def test_pool_returns_to_its_start(serve: Callable[..., Server], page_size: int, num_requests: int) -> None:
    load_and_empty(small_pool(serve, "DDTREE", page_size), page_size, num_requests, DEFAULT_BUDGET, POOL_TOKENS - 160)


@pytest.mark.scenario("BUG-046")
def test_pool_of_large_pages_returns_to_its_start(serve: Callable[..., Server]) -> None:
    """With the largest tree a step reserves more than two pages of the largest size."""
    tokens = 2 * POOL_TOKENS
    server = small_pool(serve, "DDTREE", 64, "--speculative-ddtree-budget", "64", tokens=tokens)
    load_and_empty(server, page_size=64, num_requests=24, budget=64, longest=tokens - 320)


def load_and_empty(server: Server, page_size: int, num_requests: int, budget: int, longest: int) -> None:
    """Mixed load; afterwards an answer of `longest` tokens must find its slots."""
    rng = random.Random(page_size)
    jobs = [(make_request(rng, n), rng.uniform(0.0, 0.6) if rng.random() < 0.25 else None) for n in range(num_requests)]
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        lengths = list(pool.map(lambda job: send(server, *job), jobs))
    assert sum(lengths) > num_requests, "most requests must have run"
    assert server.running and "Traceback" not in server.output(), server.tail()
    assert "retract" in server.output().lower(), "the load was meant to force retractions"
    check_metrics(requests.get(f"{server.url}/metrics", timeout=60).text, budget)
    assert requests.post(f"{server.url}/flush_cache", timeout=60).status_code == 200, "nothing may still hold a slot"

    # After a flush a request that needs nearly the whole pool must fit, which a lost slot would prevent.
    answer = generate(server, "x", max_new_tokens=longest, ignore_eos=True)
    assert answer["meta_info"]["completion_tokens"] == longest
    assert server.running, server.tail()


# The longest prompt that a pool of 640 tokens serves: a page is left free, a token follows, and a verify step reserves two
# windows of 16 rows (a tree of 15 nodes) or 8 (a block).
LONGEST_PROMPTS = [("DDTREE", 1, 640 - 1 - 1 - 32), ("DDTREE", 16, 640 - 16 - 1 - 32), ("DFLASH", 1, 640 - 1 - 1 - 16)]
# 39 pages but one, and less than one page for what follows.
LONGEST_PROMPTS.append((None, 16, 608))


@pytest.mark.scenario("BUG-048")
@pytest.mark.parametrize(("algorithm", "page_size", "longest"), LONGEST_PROMPTS)
def test_a_text_ends_where_the_pool_does(
    serve: Callable[..., Server], algorithm: str | None, page_size: int, longest: int
) -> None:
    """What the pool can never hold is refused with both lengths; what outgrows it ends by its length, with its text."""
    server = small_pool(serve, algorithm, page_size)
    ids = [5 + number % 90 for number in range(POOL_TOKENS + 20)]
    for num_prompt, new_tokens in ((longest + 1, 1), (longest + 1, 500), (longest + 20, 5)):
        body = generate_body(ids[:num_prompt], max_new_tokens=new_tokens)
        response = requests.post(f"{server.url}/generate", json=body, timeout=60)
        assert response.status_code == 400, response.text
        assert f"at most {longest} tokens" in response.text and f"got {num_prompt}" in response.text
    prompts = [(longest, 1), (longest, 500), (longest - 20, 500), (longest - 20, 500)]
    with ThreadPoolExecutor(2) as pool:  # each pair is too much for the pool
        answers = list(
            pool.map(lambda job: generate(server, ids[: job[0]], max_new_tokens=job[1], ignore_eos=True), prompts)
        )
    for (num_prompt, new_tokens), answer in zip(prompts, answers, strict=True):
        count = answer["meta_info"]["completion_tokens"]
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": count}
        assert len(answer["output_ids"]) == count >= min(new_tokens, 1 + longest - num_prompt)
    assert answers[2]["output_ids"] == answers[3]["output_ids"]
    assert server.running and "Traceback" not in server.output(), server.tail()
