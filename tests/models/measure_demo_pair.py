# SPDX-License-Identifier: Apache-2.0
"""Measures a trained demo pair: accept lengths of chain and trees, written beside the weights with the prompts.

    python tests/models/measure_demo_pair.py --out tests/models/demo

Needs no server; a few minutes on two cores.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import tokenizers
import torch
from demo_eval import Rounds, generate, mean_accept_length, measure
from demo_models import Drafter, Target, load_pair, write_json
from demo_prompts import draw_prompts
from tokenizers import Tokenizer
from torch import Tensor

PROMPT_LENGTHS = (24, 40, 56, 80, 112)
NUM_PROMPTS = 200
NUM_EVAL_PROMPTS = 50
NUM_SAMPLES = 5
EVAL_TOKENS = 128
BUDGETS = (1, 7, 16, 32, 64)
SMALLEST_GAP = 1e-3


def environment() -> dict[str, Any]:
    """Where and when figures were taken."""
    return {
        "date": datetime.date.today().isoformat(),
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tokenizers": tokenizers.__version__,
    }


def choose_prompts(target: Target, tokenizer: Tokenizer, seed: int) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """Prompts, their lengths in turn, and each with its greedy continuation as a sequence.

    A prompt on whose continuation the best two logits come closer than `SMALLEST_GAP` is left out: there the rounding
    of one summation order or another decides, and decoders that are both right may differ.
    """
    share = NUM_PROMPTS // len(PROMPT_LENGTHS)
    groups = []
    for length in PROMPT_LENGTHS:
        drawn = draw_prompts(tokenizer, length, share * 3 // 2, seed)
        ids = torch.tensor(list(drawn.values()), device=target.embed_tokens.weight.device)
        sequences, gaps = generate(target, ids, EVAL_TOKENS + target.config.block_size - 1)
        group = [
            ({"text": text, "tokens": length, "smallest_gap": round(gap, 5)}, sequence)
            for text, gap, sequence in zip(drawn, gaps.tolist(), sequences, strict=True)
            if gap >= SMALLEST_GAP
        ]
        if len(group) < share:
            raise SystemExit(f"prompts of {length} tokens: expected {share} without near ties, got {len(group)}")
        groups.append(group[:share])
    pairs = [pair for turn in zip(*groups, strict=True) for pair in turn]
    return [prompt for prompt, _ in pairs], [sequence for _, sequence in pairs]


def evaluate(target: Target, drafter: Drafter, tokenizer: Tokenizer, sequences: list[Tensor]) -> dict[str, Any]:
    """Accept lengths of chain and trees on the first `NUM_EVAL_PROMPTS` prompts, greedy, float32."""
    results: list[dict[int, Rounds]] = []
    samples: list[dict[str, str]] = []
    for sequence in sequences[:NUM_EVAL_PROMPTS]:
        length = PROMPT_LENGTHS[len(results) % len(PROMPT_LENGTHS)]
        results += measure(target, drafter, sequence.unsqueeze(0), length, BUDGETS)
        if len(samples) < NUM_SAMPLES:
            prompt, text = (tokenizer.decode(part.tolist()) for part in (sequence[:length], sequence[length:]))
            samples.append({"prompt": prompt, "greedy": text})
    return {
        "prompts": len(results),
        "new_tokens": EVAL_TOKENS,
        "chain_accept_length": round(mean_accept_length([result[0] for result in results]), 4),
        "tree_accept_length": {
            str(budget): round(mean_accept_length([result[budget] for result in results]), 4) for budget in BUDGETS
        },
        "tokens_and_rounds": {
            name: [[result[budget].tokens, result[budget].rounds] for result in results]
            for name, budget in (("chain", 0), ("tree_16", 16))
        },
        "samples": samples,
    }


def file_facts(root: Path) -> dict[str, Any]:
    """Size in bytes and sha256 of every file of the pair."""
    paths = sorted(path for folder in ("target", "draft") for path in (root / folder).iterdir())
    return {
        path.relative_to(root).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in paths
    }


def measure_pair(root: Path, seed: int) -> dict[str, Any]:
    """Measures the pair in `root`, writes `prompts.json` there and returns what belongs into `figures.json`."""
    target, drafter = load_pair(root, "cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = Tokenizer.from_file(str(root / "target" / "tokenizer.json"))
    prompts, sequences = choose_prompts(target, tokenizer, seed)
    write_json(root / "prompts.json", prompts)
    evaluation = {**environment(), "seed": seed, **evaluate(target, drafter, tokenizer, sequences)}
    for name in ("chain_accept_length", "tree_accept_length"):
        print(f"{name}: {evaluation[name]}")
    return {"evaluation": evaluation, "files": file_facts(root)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the accept lengths of a trained demo pair.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "demo")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    figures = json.loads((args.out / "figures.json").read_text(encoding="utf-8"))
    write_json(args.out / "figures.json", figures | measure_pair(args.out, args.seed))


if __name__ == "__main__":
    main()
