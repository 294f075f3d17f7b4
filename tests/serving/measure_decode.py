# SPDX-License-Identifier: Apache-2.0
"""Decode speed and accept length of the demo pair on this machine: plain, the DFLASH chain, and trees by budget.

Usage: build/env/bin/python tests/serving/measure_decode.py [--json FILE]

Single stream: the demo prompts one after another, greedy, after two to warm up. Batched: all of them at once, at most
16 in flight. On the reference platform every verified row costs arithmetic, so speed says little about a GPU; accept
lengths are the same everywhere.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests

REPO_ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO_ROOT / "tests"))

from serving.server import ModelPair, Server

NUM_PROMPTS = 24
NEW_TOKENS = 96
CONCURRENCY = 16
CONFIGURATIONS: tuple[tuple[str, str | None, tuple[str, ...]], ...] = (
    ("plain", None, ()),
    ("chain", "DFLASH", ()),
    *((f"tree-{budget}", "DDTREE", ("--speculative-ddtree-budget", str(budget))) for budget in (7, 16, 32, 64)),
)


def generate(server: Server, prompt: str) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    response = requests.post(f"{server.url}/generate", json={"text": prompt, "sampling_params": sampling}, timeout=600)
    response.raise_for_status()
    return response.json()["meta_info"]


def measure(server: Server, prompts: list[str]) -> dict[str, float]:
    """Tokens per second alone and batched, and the mean accept length, bonus token included."""
    for prompt in prompts[:2]:
        generate(server, prompt)
    start = time.perf_counter()
    single = [generate(server, prompt) for prompt in prompts]
    middle = time.perf_counter()
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        batched = list(pool.map(lambda prompt: generate(server, prompt), prompts))
    end = time.perf_counter()
    tokens = sum(meta["completion_tokens"] for meta in single)
    steps = sum(meta.get("spec_verify_ct", meta["completion_tokens"]) for meta in single)
    return {
        "single_tok_s": round(tokens / (middle - start), 1),
        "batched_tok_s": round(sum(meta["completion_tokens"] for meta in batched) / (end - middle), 1),
        "accept_length": round(tokens / steps, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    output: Path | None = parser.parse_args().json
    demo = REPO_ROOT / "tests" / "models" / "demo"
    pair = ModelPair(target=demo / "target", draft=demo / "draft")
    prompts = [prompt["text"] for prompt in json.loads((demo / "prompts.json").read_text())[:NUM_PROMPTS]]
    rows = []
    with tempfile.TemporaryDirectory() as logs:
        for label, algorithm, options in CONFIGURATIONS:
            with Server(Path(logs) / f"{label}.log", *pair.arguments(algorithm), *options) as server:
                row = {"label": label} | measure(server, prompts)
            rows.append(row)
            print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    if output:
        env = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "card": "none"}
        output.write_text(json.dumps({"env": env, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
