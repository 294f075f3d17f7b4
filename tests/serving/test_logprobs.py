# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of chains and trees: one entry a token, with the values of plain decoding."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from serving.server import Server

NEW_TOKENS = 24
TOLERANCE = 1e-4  # fp32
Serve = Callable[..., Server]

ALL = {"return_logprob": True, "top_logprobs_num": 5, "token_ids_logprob": [3, 40, 511], "logprob_start_len": 0}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "token": ({"return_logprob": True}, {}),
    "top 5, token ids, prompt": (ALL, {}),
    "top 1, end of the prompt": ({"return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": 5}, {}),
    "token ids": ({"return_logprob": True, "token_ids_logprob": [7]}, {}),
    "penalties and bias": (ALL, {"frequency_penalty": 1.5, "repetition_penalty": 1.3, "logit_bias": {"20": 3.0}}),
    "held back": (ALL, {"min_new_tokens": 9, "logit_bias": {"2": 50.0}, "ignore_eos": False}),
    "none": ({}, {}),
    "stop in a run": (ALL, {"stop_token_ids": [267, 85, 263], "ignore_eos": False}),
    "cap in a run": (ALL, {"max_new_tokens": 5}),
}


@pytest.fixture(scope="module")
def prompts(repo_root: Path) -> list[str]:
    texts = json.loads((repo_root / "tests" / "models" / "demo" / "prompts.json").read_text())
    return [prompt["text"] for prompt in texts]


def generate(server: Server, prompt: Any, options: dict[str, Any], **sampling: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True} | sampling
    key = "text" if isinstance(prompt, str) else "input_ids"
    body = {key: prompt, "sampling_params": sampling, **options}
    response = requests.post(f"{server.url}/generate", json=body, timeout=300)
    assert response.status_code == 200, response.text
    return response.json()


def answers(server: Server, prompts: list[str]) -> list[dict[str, Any]]:
    """Three prompts for each case, all at once."""
    asked = [(prompt, *CASES[name]) for name in CASES for prompt in prompts[:3]]
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda case: generate(server, case[0], case[1], **case[2]), asked))


@pytest.fixture(scope="module")
def reference(serve: Serve, prompts: list[str]) -> list[dict[str, Any]]:
    return answers(serve(None, "--disable-overlap-schedule"), prompts)


def values(entries: Any) -> list[float]:
    """All numbers of a nested list of entries, a missing one as 0."""
    if isinstance(entries, list):
        return [value for entry in entries for value in values(entry)]
    return [float(entries or 0)] if not isinstance(entries, str) else []


@pytest.mark.parametrize(
    "arguments", [("DFLASH",), ("DDTREE", "--disable-overlap-schedule"), ("DDTREE",)], ids=" ".join
)
def test_logprobs_equal_plain_decoding(
    serve: Serve, prompts: list[str], reference: list[dict[str, Any]], arguments: tuple[str, ...]
) -> None:
    """BUG-033: never fewer entries than tokens; BUG-032: nothing after a stop."""
    for found, expected in zip(answers(serve(*arguments), prompts), reference, strict=True):
        assert found["output_ids"] == expected["output_ids"]
        meta, plain = found["meta_info"], expected["meta_info"]
        assert [key for key in meta if "logprobs" in key] == [key for key in plain if "logprobs" in key]
        for key in (key for key in plain if "logprobs" in key):
            assert values(meta[key]) == pytest.approx(values(plain[key]), abs=TOLERANCE), key
        if "output_token_logprobs" in plain:
            assert [entry[1] for entry in meta["output_token_logprobs"]] == found["output_ids"]
            assert len(found["output_ids"]) == meta["completion_tokens"]


def test_sampled_logprobs_are_those_of_the_prompt(serve: Serve, prompts: list[str]) -> None:
    """What was drawn scores as it does when the text is a prompt; other rows of the tree would score otherwise."""
    server = serve("DDTREE")
    for prompt in prompts[:4]:
        drawn = generate(server, prompt, ALL, temperature=1.0)
        ids = [entry[1] for entry in drawn["meta_info"]["input_token_logprobs"]] + drawn["output_ids"]
        scored = generate(server, ids, ALL, max_new_tokens=1)["meta_info"]["input_token_logprobs"]
        found = drawn["meta_info"]["output_token_logprobs"]
        assert [entry[1] for entry in found] == drawn["output_ids"]
        assert values([entry[0] for entry in found]) == pytest.approx(
            values([entry[0] for entry in scored[-len(found) :]]), abs=TOLERANCE
        )


@pytest.mark.parametrize("stream", [False, True])
def test_openai_endpoints_have_an_entry_for_each_token(serve: Serve, prompts: list[str], stream: bool) -> None:
    """BUG-033: chat `logprobs` with `top_logprobs`, and `logprobs` of completions."""
    client = serve("DDTREE").client()
    message: Any = [{"role": "user", "content": prompts[0]}]
    common: dict[str, Any] = {"model": "default", "max_tokens": 11, "temperature": 0, "stream": stream}
    common["extra_body"] = {"ignore_eos": True}
    chat = client.chat.completions.create(messages=message, logprobs=True, top_logprobs=3, **common)
    text = client.completions.create(prompt=prompts[0], logprobs=2, **common)
    parts = list(chat) if stream else [chat]
    entries = [e for part in parts for c in part.choices if c.logprobs for e in c.logprobs.content or []]
    assert len(entries) == 11
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        # A streamed chunk of the release repeats the alternatives of its first token.
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-6)
    parts = list(text) if stream else [text]
    logprobs = [c.logprobs for part in parts for c in part.choices if c.logprobs]
    tokens = [token for each in logprobs for token in each.tokens or []]
    assert len(tokens) == 11 and len([v for each in logprobs for v in each.token_logprobs or []]) == 11
    assert "".join(tokens) == "".join(choice.text for part in parts for choice in part.choices)
    assert all(len(top) == 2 for each in logprobs for top in each.top_logprobs or [])
