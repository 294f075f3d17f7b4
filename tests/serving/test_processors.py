# SPDX-License-Identifier: Apache-2.0
"""Custom logit processors on chains and trees give the tokens of plain decoding.

Plain decoding without overlap is the reference: with overlap a processor's view of the output is a token short there.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from serving.processors import ForceAtLength, NoRecentToken
from serving.server import Server
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

NEW_TOKENS = 32
FLAG = "--enable-custom-logit-processor"
# The servers import the processors by the name that the tests know them by.
ENVIRONMENT = {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
Serve = Callable[..., Server]


CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "no recent token": {"processor": NoRecentToken, "params": {"window": 3}},
    "force at 13": {"processor": ForceAtLength, "params": {"length": 13, "token": 77}},
    "disallow": {"processor": DisallowedTokensLogitsProcessor, "params": {"token_ids": list(range(20, 120))}},
    "force at 6, penalised": {
        "processor": ForceAtLength,
        "params": {"length": 6, "token": 78},
        "options": {"frequency_penalty": 2.0},
    },
    "no recent token, in a grammar, penalised": {
        "processor": NoRecentToken,
        "params": {"window": 1},
        "options": {"regex": "[a-z_]{20,60}", "repetition_penalty": 1.3, "ignore_eos": False},
    },
}


def generate(server: Server, prompt: str, case: dict[str, Any]) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True} | case.get("options", {})
    body: dict[str, Any] = {"text": prompt, "sampling_params": sampling}
    if case:
        sampling["custom_params"] = case["params"]
        body["custom_logit_processor"] = case["processor"].to_str()
    response = requests.post(f"{server.url}/generate", json=body, timeout=300)
    assert response.status_code == 200, response.text
    return response.json()["output_ids"]


@pytest.fixture(scope="module")
def prompts(repo_root: Path) -> list[str]:
    texts = json.loads((repo_root / "tests" / "models" / "demo" / "prompts.json").read_text())
    return [prompt["text"] for prompt in texts][:4]


def answers(server: Server, prompts: list[str]) -> dict[str, list[list[int]]]:
    """All cases at once, so that a batch mixes processors and requests without one."""
    with ThreadPoolExecutor(len(CASES) * len(prompts)) as pool:
        asked = {name: [pool.submit(generate, server, text, case) for text in prompts] for name, case in CASES.items()}
        return {name: [answer.result() for answer in each] for name, each in asked.items()}


@pytest.fixture(scope="module")
def reference(serve: Serve, prompts: list[str]) -> dict[str, list[list[int]]]:
    return answers(serve(None, FLAG, "--disable-overlap-schedule", environment=ENVIRONMENT), prompts)


@pytest.mark.parametrize("algorithm", ["DFLASH", "DDTREE"])
def test_processors_equal_plain_decoding(
    serve: Serve, prompts: list[str], reference: dict[str, list[list[int]]], algorithm: str
) -> None:
    """BUG-036: a processor acts on every token of a run, with the history of that token."""
    found = answers(serve(algorithm, FLAG, environment=ENVIRONMENT), prompts)
    assert found == reference
    for ids in found["no recent token"]:
        assert all(token not in ids[max(0, index - 3) : index] for index, token in enumerate(ids))
    assert all(ids[13] == 77 for ids in found["force at 13"])
    assert all(ids[6] == 78 for ids in found["force at 6, penalised"])
    assert not any(set(ids) & set(range(20, 120)) for ids in found["disallow"])
    for ids in found["no recent token, in a grammar, penalised"]:
        assert all(token != before for before, token in itertools.pairwise(ids))


@pytest.mark.parametrize("text", ["x", '{"callable": "00"}', "{}"])
def test_text_that_is_no_processor_is_refused(serve: Serve, text: str) -> None:
    server = serve("DDTREE", FLAG, environment=ENVIRONMENT)
    body: dict[str, Any] = {"text": "import", "sampling_params": {"max_new_tokens": 2}}
    refused = requests.post(f"{server.url}/generate", json=body | {"custom_logit_processor": text}, timeout=60)
    assert refused.status_code == 400 and "custom_logit_processor" in refused.text
    assert requests.post(f"{server.url}/generate", json=body, timeout=60).status_code == 200


def test_processor_is_refused_by_name_without_the_flag(serve: Serve) -> None:
    body = {"text": "import", "custom_logit_processor": DisallowedTokensLogitsProcessor.to_str()}
    response = requests.post(f"{serve('DDTREE').url}/generate", json=body, timeout=60)
    assert response.status_code == 400 and FLAG in response.text
