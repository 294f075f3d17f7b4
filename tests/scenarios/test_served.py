# SPDX-License-Identifier: Apache-2.0
"""Scenarios of the bug log that only a running server can show, on the CPU with the demo pair."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from serving.server import ModelPair, Server, generate_body, stream
from serving.server import generate as server_generate
from sglang.srt.speculative.ddtree_args import DEFAULT_BUDGET

BLOCK_SIZE = 8
PROMPT = "def read_lines(path):\n"
SHORT = ["import os\n", "class A:\n", "for x in ", "try:\n", "def main(", "    return ", "with open(", "print("]
Serve = Callable[..., Server]


@pytest.fixture
def server(serve: Serve) -> Server:
    """The default server with DDTREE, which other tests share, with its cache flushed."""
    found = serve("DDTREE")
    flush(found)
    return found


@pytest.fixture(scope="module")
def context(demo_pair: ModelPair) -> int:
    return int(json.loads((demo_pair.target / "config.json").read_text())["max_position_embeddings"])


def generate(server: Server, text: str | list[int], **options: Any) -> dict[str, Any]:
    """A short answer that no end of text cuts."""
    return server_generate(server, text, **{"max_new_tokens": 24, "ignore_eos": True} | options)


def flush(server: Server) -> None:
    """Empty the prefix cache; a request that has just ended may still hold it for a moment."""
    deadline = time.monotonic() + 30
    while requests.post(f"{server.url}/flush_cache", timeout=60).status_code != 200:
        assert time.monotonic() < deadline, "expected the server to become idle"
        time.sleep(0.2)


def chat(server: Server, messages: list[dict[str, str]], **options: Any) -> dict[str, Any]:
    body = {"model": "default", "messages": messages, "temperature": 0} | options
    response = requests.post(f"{server.url}/v1/chat/completions", json=body, timeout=300)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.scenario("BUG-008")
def test_a_burst_gives_what_each_request_gives_alone(server: Server) -> None:
    jobs = [(SHORT[number % 8], 8 + 5 * (number % 13)) for number in range(32)]
    alone = {job: generate(server, job[0], max_new_tokens=job[1])["output_ids"] for job in set(jobs)}
    for _ in range(2):
        with ThreadPoolExecutor(32) as pool:
            found = list(pool.map(lambda job: generate(server, job[0], max_new_tokens=job[1])["output_ids"], jobs))
        assert found == [alone[job] for job in jobs]


@pytest.mark.scenario("BUG-023")
@pytest.mark.scenario("BUG-024")
def test_a_cached_prefix_drafts_as_well_as_a_fresh_one(server: Server) -> None:
    """The drafter's cache belongs to the same slots, so that text and steps are the same."""
    prompt = PROMPT * 30
    first = generate(server, prompt, max_new_tokens=96)
    again = generate(server, prompt, max_new_tokens=96)
    assert first["meta_info"]["cached_tokens"] == 0
    assert again["meta_info"]["cached_tokens"] >= first["meta_info"]["prompt_tokens"] - 1
    assert again["output_ids"] == first["output_ids"]
    assert again["meta_info"]["spec_verify_ct"] == first["meta_info"]["spec_verify_ct"]
    with ThreadPoolExecutor(8) as pool:
        shared = list(pool.map(lambda text: generate(server, prompt + text, max_new_tokens=32), SHORT[:4]))
    flush(server)
    for text, answer in zip(SHORT[:4], shared, strict=True):
        alone = generate(server, prompt + text, max_new_tokens=32)
        assert answer["output_ids"] == alone["output_ids"]
        assert answer["meta_info"]["spec_verify_ct"] == alone["meta_info"]["spec_verify_ct"]
        flush(server)


@pytest.mark.scenario("BUG-025")
def test_nothing_of_a_request_stays_for_the_next_one(server: Server) -> None:
    long, short = PROMPT * 20, "x"
    expected = None
    for _ in range(4):
        flush(server)
        found = [
            (answer["output_ids"], answer["meta_info"]["spec_verify_ct"])
            for answer in (generate(server, text, max_new_tokens=40) for text in (long, short, long + "#"))
        ]
        expected = expected or found
        assert found == expected


@pytest.mark.scenario("BUG-047")
@pytest.mark.scenario("BUG-073")
def test_a_text_that_reaches_the_context_limit_leaves_its_neighbour_alone(serve: Serve, context: int) -> None:
    """Near the limit a step reserves more positions than there are left, with 64 nodes most of all."""
    server = serve("DDTREE", "--speculative-ddtree-budget", "64")
    quiet = generate(server, PROMPT, max_new_tokens=100)["output_ids"]
    for left in (7, 23):
        prompt = [5 + number % 90 for number in range(context - left)]
        with ThreadPoolExecutor(2) as pool:
            neighbour = pool.submit(generate, server, PROMPT, max_new_tokens=100)
            whole = pool.submit(generate, server, prompt, max_new_tokens=left).result()
            assert neighbour.result()["output_ids"] == quiet
        # SGLang keeps the last two positions free.
        assert whole["meta_info"]["completion_tokens"] == left - 2
        assert whole["meta_info"]["finish_reason"]["type"] == "length"
    flush(server)


@pytest.mark.scenario("BUG-043")
@pytest.mark.scenario("BUG-041")
def test_a_chunk_is_at_most_one_accepted_run(server: Server) -> None:
    whole = generate(server, PROMPT, max_new_tokens=100)
    lengths, last = [], {"output_ids": [], "text": ""}
    for event in stream(server, "/generate", generate_body(PROMPT, max_new_tokens=100, ignore_eos=True)):
        lengths.append(len(event["output_ids"]) - len(last["output_ids"]))
        assert event["text"].startswith(last["text"].rstrip("\ufffd"))
        last = event
    assert max(lengths) <= BLOCK_SIZE and max(lengths) > 1
    assert (last["output_ids"], last["text"]) == (whole["output_ids"], whole["text"])


@pytest.mark.scenario("BUG-053")
@pytest.mark.parametrize("max_tokens", [5, 6, 7, 8, 9, 30])
def test_the_second_turn_hits_the_cache_for_all_that_was_kept(server: Server, max_tokens: int) -> None:
    """The limit cuts inside an accepted run; what lies beyond it must not be part of the next turn's key."""
    prompt = PROMPT + "#" * max_tokens
    first = generate(server, prompt, max_new_tokens=max_tokens)
    assert first["meta_info"]["completion_tokens"] == max_tokens
    kept = first["meta_info"]["prompt_tokens"] + max_tokens
    ids = token_ids(server, prompt) + first["output_ids"]
    assert len(ids) == kept
    second = generate(server, ids + token_ids(server, "\nclass"), max_new_tokens=4)
    # The last token of a turn has no cache entry yet: the next step would have written it.
    assert second["meta_info"]["cached_tokens"] >= kept - 1


def token_ids(server: Server, text: str) -> list[int]:
    response = requests.post(f"{server.url}/tokenize", json={"model": "default", "prompt": text}, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()["tokens"]


def test_a_session_continues_its_text(server: Server) -> None:
    """Each turn of a session gives what the whole text gives without one, and reads the earlier turns from the cache."""
    opened = requests.post(f"{server.url}/open_session", json={"capacity_of_str_len": 2000}, timeout=60)
    assert opened.status_code == 200, opened.text
    session, text = {"id": opened.json(), "rid": None}, []
    for turn in range(3):
        # A session drops the BOS of its later turns.
        added = token_ids(server, SHORT[turn] * 8)[min(turn, 1) :]
        text += added
        body = {
            "input_ids": added,
            "session_params": dict(session),
            "sampling_params": {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True},
        }
        response = requests.post(f"{server.url}/generate", json=body, timeout=300)
        assert response.status_code == 200, response.text
        answer = response.json()
        alone = generate(server, text, max_new_tokens=20)
        assert answer["output_ids"] == alone["output_ids"]
        assert turn == 0 or answer["meta_info"]["cached_tokens"] >= len(text) - len(added) - 1
        text += answer["output_ids"]
        session["rid"] = answer["meta_info"]["id"]
    closed = requests.post(f"{server.url}/close_session", json={"session_id": session["id"]}, timeout=60)
    assert closed.status_code == 200
    flush(server)


def test_a_session_goes_on_from_the_turn_before_an_aborted_one(server: Server) -> None:
    opened = requests.post(f"{server.url}/open_session", json={"capacity_of_str_len": 2000}, timeout=60)
    session = {"id": opened.json()}
    texts = [token_ids(server, SHORT[0] * 8), *(token_ids(server, SHORT[turn])[1:] for turn in (1, 2))]

    def ask(text: list[int], new_tokens: int, rid: str) -> dict[str, Any]:
        fields = {"session_params": dict(session), "rid": rid}
        return server_generate(server, text, fields=fields, max_new_tokens=new_tokens, ignore_eos=True)

    first = ask(texts[0], 20, "first")
    session["rid"] = "first"
    with ThreadPoolExecutor(1) as pool:
        left = pool.submit(ask, texts[1], 2000, "left")
        time.sleep(1.0)
        requests.post(f"{server.url}/abort_request", json={"rid": "left"}, timeout=60).raise_for_status()
        assert left.result()["meta_info"]["finish_reason"]["type"] == "abort"
    whole = [*texts[0], *first["output_ids"], *texts[2]]
    assert ask(texts[2], 20, "third")["output_ids"] == generate(server, whole, max_new_tokens=20)["output_ids"]
    requests.post(f"{server.url}/close_session", json={"session_id": session["id"]}, timeout=60).raise_for_status()
    flush(server)


def test_a_profile_under_load_changes_no_text(server: Server, tmp_path: Path) -> None:
    def ask(text: str) -> list[int]:
        return generate(server, text, max_new_tokens=16)["output_ids"]

    alone = [ask(text) for text in SHORT[:4]]
    body = {"output_dir": str(tmp_path), "activities": ["CPU"]}
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, text) for text in SHORT[:4]]
        requests.post(f"{server.url}/start_profile", json=body, timeout=120).raise_for_status()
        answers += [pool.submit(ask, text) for text in SHORT[:4]]
        found = [answer.result() for answer in answers]
        requests.post(f"{server.url}/stop_profile", timeout=240).raise_for_status()
    assert found == alone * 2
    assert any(tmp_path.iterdir()), "the profile was meant to be written"
    assert [ask(text) for text in SHORT[:4]] == alone


def metric_values(server: Server) -> dict[str, float]:
    """All samples of /metrics, summed over labels but without buckets."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(requests.get(f"{server.url}/metrics", timeout=60).text):
        for sample in family.samples:
            if "_bucket" not in sample.name:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


@pytest.mark.scenario("BUG-087")
@pytest.mark.scenario("BUG-091")
def test_metrics_agree_with_usage_under_load(serve: Serve) -> None:
    server = serve("DDTREE", "--enable-metrics")
    before = metric_values(server)
    jobs = [(SHORT[number % 8], 1 + 7 * (number % 9), 0.8 * (number % 2)) for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda job: generate(server, job[0], max_new_tokens=job[1], temperature=job[2]), jobs))
    metas = [answer["meta_info"] for answer in answers]
    flush(server)
    after = metric_values(server)
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    # SGLang's word for a busy share that it has no device timer to measure.
    assert {name for name, value in after.items() if not math.isfinite(value)} <= {"sglang:fwd_occupancy"}
    assert [meta["completion_tokens"] for meta in metas] == [job[1] for job in jobs]
    assert grown["sglang:generation_tokens_total"] == sum(job[1] for job in jobs)
    assert grown["sglang:prompt_tokens_total"] == sum(meta["prompt_tokens"] for meta in metas)
    rates = {name: value for name, value in after.items() if name.endswith(("_rate", "_ratio", "_usage"))}
    assert rates and all(0 <= value <= 1 for value in rates.values()), rates
    steps = grown["sglang:spec_accepted_depth_count"]
    assert grown["sglang:spec_tree_nodes_verified_total"] == steps * DEFAULT_BUDGET
    assert 0 < grown["sglang:spec_tree_nodes_accepted_total"] <= steps * (BLOCK_SIZE - 1)
    # An overlapped step of a request that has ended is verified too, but it is no step of the request.
    assert steps >= sum(meta.get("spec_verify_ct", 0) for meta in metas) > 0


@pytest.mark.scenario("BUG-089")
def test_a_request_without_a_step_has_no_rate_to_divide_by(server: Server) -> None:
    meta = generate(server, PROMPT, max_new_tokens=1)["meta_info"]
    assert meta["completion_tokens"] == 1
    figures = {name: value for name, value in meta.items() if name.startswith("spec_") and not isinstance(value, list)}
    assert all(math.isfinite(value) and value >= 0 for value in figures.values()), figures
    assert meta.get("spec_accept_rate", 0) <= 1


@pytest.mark.scenario("BUG-092")
def test_the_server_says_what_it_resolved(server: Server) -> None:
    info = requests.get(f"{server.url}/server_info", timeout=60).json()
    assert info["speculative_algorithm"] == "DDTREE"
    assert info["speculative_ddtree_budget"] == str(DEFAULT_BUDGET)
    assert info["speculative_dflash_block_size"] == BLOCK_SIZE
    assert info["speculative_num_draft_tokens"] >= DEFAULT_BUDGET + 1
    assert info["attention_backend"]
    state = info["internal_states"][0]
    assert state["memory_usage"]["kvcache"] >= 0 and state["memory_usage"]["token_capacity"] > 0


def test_several_choices_and_prompts_come_in_order(server: Server) -> None:
    prompts = SHORT[:3]
    body = {"model": "default", "prompt": prompts, "n": 2, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    response = requests.post(f"{server.url}/v1/completions", json=body, timeout=300).json()
    alone = [generate(server, prompt, max_new_tokens=12)["text"] for prompt in prompts]
    assert [choice["index"] for choice in response["choices"]] == list(range(6))
    assert [choice["text"] for choice in response["choices"]] == [text for text in alone for _ in range(2)]
    assert response["usage"]["completion_tokens"] == 6 * 12
    events = list(stream(server, "/v1/completions", body | {"stream_options": {"include_usage": True}}))
    texts = [""] * 6
    for event in events[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == [text for text in alone for _ in range(2)]
    assert events[-1]["usage"]["completion_tokens"] == 72
