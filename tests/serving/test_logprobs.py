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

from serving.server import Server, generate, stream

FIXED = {"max_new_tokens": 24, "ignore_eos": True}
TOLERANCE = 1e-4  # fp32
EOS = 2  # of the demo pair
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


def answers(server: Server, prompts: list[str]) -> list[dict[str, Any]]:
    """Three prompts for each case, all at once."""
    asked = [(prompt, *CASES[name]) for name in CASES for prompt in prompts[:3]]
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda case: generate(server, case[0], fields=case[1], **FIXED | case[2]), asked))


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
        drawn = generate(server, prompt, fields=ALL, **FIXED | {"temperature": 1.0})
        ids = [entry[1] for entry in drawn["meta_info"]["input_token_logprobs"]] + drawn["output_ids"]
        scored = generate(server, ids, fields=ALL, max_new_tokens=1)["meta_info"]["input_token_logprobs"]
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


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("algorithm", ["DDTREE", None])
def test_a_stream_has_the_entries_of_the_whole_answer(
    serve: Serve, prompts: list[str], path: str, algorithm: str | None
) -> None:
    """BUG-033: the end token's entry too, which comes in a step without text."""
    asked: dict[str, Any] = {"model": "default", "temperature": 0, "max_tokens": 20, "logit_bias": {str(EOS): 100.0}}
    if "chat" in path:
        asked |= {"messages": [{"role": "user", "content": prompts[0]}], "logprobs": True, "top_logprobs": 2}
    else:
        asked |= {"prompt": prompts[0], "logprobs": 2}
    server = serve(algorithm)
    for least in range(1, 8):
        body = asked | {"min_tokens": least}
        whole = requests.post(f"{server.url}{path}", json=body, timeout=300).json()
        assert whole["usage"]["completion_tokens"] == least + 1 and whole["choices"][0]["finish_reason"] == "stop"
        choices = [choice for event in stream(server, path, body) for choice in event["choices"]]
        found = [entry for choice in choices for entry in entries_of(choice)]
        expected = entries_of(whole["choices"][0])
        assert [(token, list(tops)) for token, _, tops in found] == [(token, list(tops)) for token, _, tops in expected]
        for (_, value, tops), (_, wanted, wanted_tops) in zip(found, expected, strict=True):
            assert (value, tops) == (pytest.approx(wanted, abs=TOLERANCE), pytest.approx(wanted_tops, abs=TOLERANCE))
        assert len(found) == least + 1


def entries_of(choice: dict[str, Any]) -> list[tuple[str, float, dict[str, float]]]:
    """One entry a token: what both endpoints say of its text, its value and its alternatives."""
    logprobs = choice.get("logprobs") or {}
    if logprobs.get("content"):
        return [
            (entry["token"], entry["logprob"], {top["token"]: top["logprob"] for top in entry["top_logprobs"]})
            for entry in logprobs["content"]
        ]
    return list(zip(*(logprobs.get(name) or [] for name in ("tokens", "token_logprobs", "top_logprobs")), strict=True))


@pytest.mark.parametrize("algorithm", ["DDTREE", None])
def test_no_entry_where_no_token_is_asked_for(serve: Serve, prompts: list[str], algorithm: str | None) -> None:
    """A request for no tokens scores its prompt, and chosen tokens in the place of the next one; none of its own."""
    server = serve(algorithm)
    chosen = {"return_logprob": True, "token_ids_logprob": [5, 6]}
    for fields, num_chosen, num_top in (
        ({"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}, 0, 0),
        (chosen, 1, 0),
        (chosen | {"top_logprobs_num": 2}, 1, 1),
    ):
        answer = generate(server, prompts[0], fields=fields, max_new_tokens=0)
        meta = answer["meta_info"]
        assert answer["output_ids"] == [] and meta["completion_tokens"] == 0
        assert meta["output_token_logprobs"] == [] and meta["output_token_logprobs_length"] == 0
        assert len(meta.get("output_top_logprobs", [])) == num_top
        assert len(meta.get("output_token_ids_logprobs", [])) == num_chosen
