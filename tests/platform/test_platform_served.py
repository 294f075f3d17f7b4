# SPDX-License-Identifier: Apache-2.0
"""The reference platform at work: a served model gives the tokens that the model itself gives."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
import torch

from serving import soak
from serving.server import ModelPair, Server

MAX_NEW_TOKENS = 24
PROMPTS = (
    "def add(a, b):\n    return",
    "import os\n\n\ndef main(args):\n    for name in args:\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "for i in range(10):\n",
    "x",
    "try:\n    value = int(text)\nexcept ValueError:\n",
    "# A function that counts words.\ndef count_words(text):\n    words = {}\n",
    "".join(f"def function_{i}(a, b):\n    return a + {i}\n\n\n" for i in range(12)),
)
LONG_PROMPT = "".join(f"class Case{i}(unittest.TestCase):\n    number = {i}\n\n" for i in range(24))
# Small chunks, whole pages, a drafter window shorter than the prompts, and fewer slots than requests.
NARROW = ("--page-size", "16", "--chunked-prefill-size", "64", "--speculative-draft-window-size", "32")
NARROW += ("--max-running-requests", "4")
Serve = Callable[..., Server]


def generate(server: Server, prompt: str, **options: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS, "ignore_eos": True, **options}
    body = {"text": prompt, "sampling_params": sampling}
    response = requests.post(f"{server.url}/generate", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def generate_all(server: Server, prompts: tuple[str, ...]) -> list[list[int]]:
    """Answers of concurrent requests."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: generate(server, prompt)["output_ids"], prompts))


@pytest.fixture(scope="module", params=[(None,), ("DFLASH",), ("DFLASH", *NARROW)], ids=["plain", "chain", "narrow"])
def server(request: pytest.FixtureRequest, serve: Serve) -> Server:
    """One server per configuration; pytest runs the tests of one before it starts the next."""
    return serve(*request.param)


@pytest.fixture(scope="module")
def reference(demo_pair: ModelPair) -> list[list[int]]:
    """Greedy tokens of transformers' own implementation of the target, one prompt at a time in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_pair.target)
    model = AutoModelForCausalLM.from_pretrained(demo_pair.target, dtype=torch.float32).eval()
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, do_sample=False, max_new_tokens=MAX_NEW_TOKENS, eos_token_id=[], pad_token_id=0)
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers


def test_greedy_tokens_are_those_of_transformers(server: Server, reference: list[list[int]]) -> None:
    assert [generate(server, prompt)["output_ids"] for prompt in PROMPTS] == reference
    assert generate_all(server, PROMPTS) == reference


def test_cached_prefix_gives_the_same_tokens(server: Server) -> None:
    soak.settle(server)
    cold, warm = (generate(server, LONG_PROMPT) for _ in range(2))
    num_tokens = cold["meta_info"]["prompt_tokens"]
    assert cold["meta_info"]["cached_tokens"] == 0
    assert warm["meta_info"]["cached_tokens"] >= num_tokens - 16
    assert warm["output_ids"] == cold["output_ids"]


@pytest.mark.parametrize("temperature", [0, 1])
def test_grammar_holds(server: Server, temperature: int) -> None:
    options = {"temperature": temperature, "ignore_eos": False}
    text = generate(server, "x = ", regex=r"[0-9]{3}-[a-f]{4}", **options)["text"]
    assert re.fullmatch(r"[0-9]{3}-[a-f]{4}", text), text
    text = generate(server, "kind = ", json_schema=json.dumps({"enum": ["leaf", "node"]}), **options)["text"]
    assert json.loads(text) in ("leaf", "node")


def test_sampled_requests_are_sampled(server: Server) -> None:
    """Neither greedy nor the same each time; the narrowest top-k and top-p are greedy again."""
    prompt = PROMPTS[0]
    greedy = generate(server, prompt)["output_ids"]
    hot = [generate(server, prompt, temperature=2.0)["output_ids"] for _ in range(3)]
    assert hot[0] != greedy and hot[0] != hot[1] and hot[1] != hot[2]
    assert generate(server, prompt, temperature=1.0, top_k=1)["output_ids"] == greedy
    assert generate(server, prompt, temperature=1.0, top_p=1e-6)["output_ids"] == greedy
    assert "falling back to greedy" not in server.output()


ENGINE_SCRIPT = """
import json, sys
import sglang

if __name__ == "__main__":
    engine = sglang.Engine(model_path=sys.argv[1])
    sampling = {"temperature": 0, "max_new_tokens": int(sys.argv[2]), "ignore_eos": True}
    print("ANSWERS", json.dumps([answer["output_ids"] for answer in engine.generate(json.loads(sys.argv[3]), sampling)]))
    engine.shutdown()
"""


def test_engine_in_process(
    demo_pair: ModelPair, reference: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    script = tmp_path_factory.mktemp("engine") / "engine.py"
    script.write_text(ENGINE_SCRIPT)
    command = [sys.executable, script, demo_pair.target, str(MAX_NEW_TOKENS), json.dumps(PROMPTS)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    answers = [line.removeprefix("ANSWERS ") for line in result.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert result.returncode == 0 and answers, result.stderr[-3000:]
    assert json.loads(answers[0]) == reference


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("tp_size", 2, "--tp-size expected 1, got 2: one process computes everything"),
        ("quantization", "fp8", "--quantization expected to be left out, got fp8"),
        ("device", "cuda", "--device expected cpu, got cuda: no accelerator is visible"),
        ("attention_backend", "flashinfer", "--attention-backend expected triton .* got flashinfer"),
        ("kv_cache_dtype", "fp8_e4m3", "--kv-cache-dtype expected auto .* got fp8_e4m3"),
        ("speculative_algorithm", "NGRAM", "--speculative-algorithm expected DFLASH or DDTREE, got NGRAM"),
        ("cuda_graph_backend_decode", "full", "--cuda-graph-backend-decode expected disabled, got full"),
        ("enable_lora", True, "--enable-lora expected to be left out, got True"),
    ],
)
def test_what_cannot_be_honoured_is_refused(demo_pair: ModelPair, option: str, value: object, message: str) -> None:
    from sglang.srt.server_args import ServerArgs

    with pytest.raises(ValueError, match=f"reference platform: {message}") as error:
        ServerArgs(model_path=str(demo_pair.target), **{option: value})
    assert "\n" not in str(error.value)


def test_defaults_leave_explicit_values(demo_pair: ModelPair) -> None:
    from sglang.srt.server_args import ServerArgs

    default = ServerArgs(model_path=str(demo_pair.target))
    assert (default.device, default.dtype, default.attention_backend) == ("cpu", "float32", "triton")
    assert default.sampling_backend == "pytorch" and default.skip_server_warmup
    assert default.max_total_tokens == 65536
    chosen = ServerArgs(model_path=str(demo_pair.target), dtype="bfloat16", max_total_tokens=4096)
    assert (chosen.dtype, chosen.max_total_tokens) == ("bfloat16", 4096)
