# SPDX-License-Identifier: Apache-2.0
"""A server whose drafter follows a script: every accept pattern leaves the text as it is, and a bad drafter shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from scenarios.patterns import ALL_PATTERNS, DEPTH, Pattern
from serving.server import ModelPair, Server

HERE = Path(__file__).resolve().parent
PROMPTS = ["def read_lines(path):\n", "import os\nimport sys\n", "class Stack:\n    def __init__(self):\n"]
NUM_STEPS = 3
NEW_TOKENS = 100


class ScriptedServer:
    """The server, and the file that its drafter reads in every step."""

    def __init__(self, server: Server, script: Path, vocab: int) -> None:
        self.server, self._script, self._vocab = server, script, vocab

    def play(self, texts: Sequence[Sequence[int]], patterns: Sequence[Pattern]) -> None:
        """From the next step on draft from `texts` by `patterns`; without texts draft what is never accepted."""
        script = json.dumps({"texts": texts, "patterns": patterns, "vocab": self._vocab})
        self._script.with_suffix(".new").write_text(script)
        self._script.with_suffix(".new").rename(self._script)

    def generate(self, ids: list[int], new_tokens: int, **options: Any) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True} | options
        body = {"input_ids": ids, "sampling_params": sampling}
        response = requests.post(f"{self.server.url}/generate", json=body, timeout=300)
        assert response.status_code == 200, response.text
        return response.json()


@pytest.fixture(scope="module")
def scripted(
    serve: Callable[..., Server], demo_pair: ModelPair, tmp_path_factory: pytest.TempPathFactory
) -> ScriptedServer:
    script = tmp_path_factory.mktemp("script") / "script.json"
    vocab = json.loads((demo_pair.target / "config.json").read_text())["vocab_size"]
    script.write_text(json.dumps({"texts": [], "patterns": [], "vocab": vocab}))
    environment = {"SCRIPT": str(script), "PYTHONPATH": f"{HERE / 'scripted'}:{HERE}"}
    return ScriptedServer(serve("DDTREE", "--enable-metrics", environment=environment), script, vocab)


@pytest.fixture(scope="module")
def prompts(demo_pair: ModelPair) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_pair.target)
    return [tokenizer(prompt).input_ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def texts(scripted: ScriptedServer, prompts: list[list[int]]) -> list[list[int]]:
    """Whole texts that the target writes when no draft is accepted, which is plain decoding."""
    scripted.play([], [])
    answers = [scripted.generate(ids, NEW_TOKENS) for ids in prompts]
    return [ids + answer["output_ids"] for ids, answer in zip(prompts, answers, strict=True)]


@pytest.mark.scenario("BUG-088")
def test_a_drafter_that_is_never_right_shows_in_the_figures(scripted: ScriptedServer, prompts: list[list[int]]) -> None:
    scripted.play([], [])
    meta = scripted.generate(prompts[0], 20)["meta_info"]
    # SGLang divides all tokens, that of the prefill too, by the steps.
    assert meta["spec_accept_length"] == pytest.approx(20 / 19) and meta["spec_accept_rate"] == 0.0
    assert meta["spec_accept_histogram"] == [19]
    text = requests.get(f"{scripted.server.url}/metrics", timeout=60).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    values = {sample.name: sample.value for sample in samples if "_bucket" not in sample.name}
    assert values["sglang:spec_accepted_depth_count"] >= 19
    assert values["sglang:spec_accepted_depth_sum"] == values["sglang:spec_tree_nodes_accepted_total"] == 0


def test_plain_text_is_the_server_s_without_a_drafter(
    serve: Callable[..., Server], texts: list[list[int]], prompts: list[list[int]]
) -> None:
    plain = ScriptedServer(serve(None), Path(), 0)
    assert [ids + plain.generate(ids, NEW_TOKENS)["output_ids"] for ids in prompts] == texts


@pytest.mark.scenario("BUG-021")
@pytest.mark.parametrize("pattern", ALL_PATTERNS, ids=lambda pattern: f"{pattern.accepted}-branch-{pattern.branch}")
def test_each_pattern_is_accepted_as_forced(
    pattern: Pattern, scripted: ScriptedServer, texts: list[list[int]], prompts: list[list[int]]
) -> None:
    new_tokens = 1 + NUM_STEPS * (pattern.accepted + 1)
    for ids, text in zip(prompts, texts, strict=True):
        scripted.play([text], [pattern])
        answer = scripted.generate(ids, new_tokens)
        assert ids + answer["output_ids"] == text[: len(ids) + new_tokens]
        meta = answer["meta_info"]
        assert meta["spec_verify_ct"] == NUM_STEPS
        assert meta["spec_accept_histogram"] == [0] * pattern.accepted + [NUM_STEPS]
        assert meta["spec_accept_rate"] == pytest.approx(pattern.accepted / DEPTH)


def test_mixed_batches_of_patterns_write_the_same_texts(
    scripted: ScriptedServer, texts: list[list[int]], prompts: list[list[int]]
) -> None:
    """Requests of one batch accept different lengths in every step, on and off the spine."""
    for offset in (0, 7, 19):
        scripted.play(texts, ALL_PATTERNS[offset:] + ALL_PATTERNS[:offset])
        with ThreadPoolExecutor(9) as pool:
            answers = list(pool.map(lambda ids: scripted.generate(ids, NEW_TOKENS - DEPTH - 1), prompts * 3))
        for ids, text, answer in zip(prompts * 3, texts * 3, answers, strict=True):
            assert ids + answer["output_ids"] == text[: len(ids) + NEW_TOKENS - DEPTH - 1]
        assert len([count for count in answers[0]["meta_info"]["spec_accept_histogram"] if count]) > 3


@pytest.mark.parametrize("accepted", range(DEPTH + 1))
def test_the_limit_cuts_every_run(
    accepted: int, scripted: ScriptedServer, texts: list[list[int]], prompts: list[list[int]]
) -> None:
    """max_new_tokens falls on each token of an accepted run; nothing beyond it is reported."""
    scripted.play([texts[0]], [Pattern(accepted, 0)])
    for new_tokens in range(1, accepted + 4):
        answer = scripted.generate(prompts[0], new_tokens)
        assert prompts[0] + answer["output_ids"] == texts[0][: len(prompts[0]) + new_tokens]
        assert answer["meta_info"]["completion_tokens"] == new_tokens
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": new_tokens}
