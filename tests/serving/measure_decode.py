# SPDX-License-Identifier: Apache-2.0
"""Decode speed and accept length of a model pair on this machine: plain, the DFLASH chain, and trees by budget.

    build/env/bin/python tests/serving/measure_decode.py --json OUT.json [--concurrency 1,16] [-- SERVER FLAGS]

Greedy answers to the demo prompts, after a few to warm up. Each row has

    concurrency    most answers in flight at the same time
    tok_s          tokens per second of whole answers, the reading of their prompts included
    decode_tok_s   tokens per second of so many streamed answers while all are written and no prompt is being read
    accept_length  tokens per step, the bonus included

decode_tok_s is null where they never all are: more of them than the server runs, or --new-tokens too few. On the
reference platform every verified row costs arithmetic, so speed says little about a GPU; accept lengths are the same
everywhere. Another --pair on dummy weights needs --accept-lengths: a file that this program has written for a real
pair, whose accept lengths are then forced.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import platform
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

REPO_ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO_ROOT / "tests"))

from serving.server import ModelPair, Server, generate
from serving.streams import follow_together, while_all_decode
from sglang.srt.speculative.ddtree_args import LENGTHS_VARIABLE
from sglang.srt.speculative.ddtree_budget import auto_budgets

NUM_PROMPTS = 24
MIN_ROUNDS, WARM_TOKENS = 3, 16
NEW_TOKENS = 96
DEMO = REPO_ROOT / "tests" / "models" / "demo"
AUTO_CHOICES = auto_budgets(json.loads((DEMO / "draft" / "config.json").read_text())["block_size"])
CONFIGURATIONS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "plain": (None, ()),
    "chain": ("DFLASH", ()),
    **{
        f"tree-{size}": ("DDTREE", ("--speculative-ddtree-budget", size))
        for size in ("7", "15", "16", "31", "32", "63", "64", "auto")
    },
}


def measure(server: Server, prompts: list[str], concurrency: int, new_tokens: int) -> dict[str, float | None]:
    """The figures of one row."""

    def answer(prompt: str) -> Any:
        return generate(server, prompt, max_new_tokens=new_tokens, ignore_eos=True)["meta_info"]

    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(answer, prompts[: 2 * concurrency]))
        start = time.perf_counter()
        answers = list(pool.map(answer, prompts))
        seconds = time.perf_counter() - start
    tokens = sum(meta["completion_tokens"] for meta in answers)
    steps = sum(meta.get("spec_verify_ct", meta["completion_tokens"]) for meta in answers)
    return {
        "concurrency": concurrency,
        "tok_s": round(tokens / seconds, 1),
        "decode_tok_s": decode_speed(server, prompts, concurrency, new_tokens),
        "accept_length": round(tokens / steps, 2),
    }


def decode_speed(server: Server, prompts: list[str], concurrency: int, new_tokens: int) -> float | None:
    """Tokens per second without prompts, in rounds of `concurrency` streams over all prompts in turn; None: no figure."""
    rounds = max(MIN_ROUNDS, math.ceil(len(prompts) / concurrency))
    in_turn = itertools.cycle(prompts)
    spans = []
    for _ in range(rounds):
        answers = follow_together(server, list(itertools.islice(in_turn, concurrency)), new_tokens)
        spans += while_all_decode(answers, WARM_TOKENS)
    if not spans:
        return None
    return round(concurrency * sum(span.tokens for span in spans) / sum(span.seconds for span in spans), 1)


def make_server(label: str, log: Path, pair: ModelPair, flags: list[str], forced: dict[str, str]) -> Server:
    """A server of one configuration that is yet to be started; `forced` has accept lengths by label, or nothing."""
    algorithm, own = CONFIGURATIONS[label]
    simulation = None
    if forced:
        variable = LENGTHS_VARIABLE if label == "tree-auto" else "SGLANG_SIMULATE_ACC_LEN"
        simulation = {variable: forced[label]}
    return Server(log, *pair.arguments(algorithm), *own, *flags, environment=simulation)


def forced_lengths(path: Path, labels: list[str]) -> dict[str, str]:
    """The accept lengths that a file has for these labels, as the servers' variables take them; auto's one a budget."""
    rows = json.loads(path.read_text())["rows"]
    found = {row["label"]: str(row["accept_length"]) for row in rows if row["concurrency"] == 1}
    parts = {label: [label] for label in labels} | {"tree-auto": [f"tree-{budget}" for budget in AUTO_CHOICES]}
    needed = [part for label in labels for part in parts[label]]
    missing = [part for part in dict.fromkeys(needed) if part not in found]
    if missing:
        raise SystemExit(
            f"measure_decode: {path}: expected rows of one stream for {','.join(needed)}, got none for "
            f"{','.join(missing)}; measure a real pair with --labels {','.join(missing)} and add its rows"
        )
    return {label: ",".join(found[part] for part in parts[label]) for label in labels}


def environment() -> dict[str, str]:
    """When, where and how."""
    import torch

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    command = " ".join(Path(word).name if "/" in word else word for word in sys.argv)
    return {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "card": card, "command": command}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--pair", type=Path, default=DEMO, help="folder with target/ and draft/")
    anywhere = ",".join(label for label in CONFIGURATIONS if label != "tree-auto")
    parser.add_argument("--labels", default=anywhere, help="which of %(default)s,tree-auto; auto needs a GPU")
    parser.add_argument("--concurrency", default="1,16")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS)
    parser.add_argument(
        "--new-tokens", type=int, default=NEW_TOKENS, help="few make tok_s tell more of prompts than of decoding"
    )
    parser.add_argument("--accept-lengths", type=Path)
    parser.add_argument("--logs", type=Path, help="folder in which the servers' logs stay")
    parser.add_argument("--together", action="store_true", help="start all servers first; give them --sleep-on-idle")
    parser.add_argument("flags", nargs="*", help="server flags, behind --")
    options = parser.parse_args()
    pair = ModelPair(target=options.pair / "target", draft=options.pair / "draft")
    prompts = [prompt["text"] for prompt in json.loads((DEMO / "prompts.json").read_text())[: options.prompts]]
    labels, concurrencies = options.labels.split(","), [int(number) for number in options.concurrency.split(",")]
    forced = forced_lengths(options.accept_lengths, labels) if options.accept_lengths else {}
    rows = []
    with contextlib.ExitStack() as stack:
        logs = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {label: make_server(label, logs / f"{label}.log", pair, options.flags, forced) for label in labels}
        if options.together:
            # The automatic budget times its steps when it starts, which wants the card for itself.
            last = [servers[label] for label in labels if label == "tree-auto"]
            # A server ends with the thread that has started it, so these stay.
            starters = stack.enter_context(ThreadPoolExecutor(len(servers)))
            list(starters.map(stack.enter_context, (each for each in servers.values() if each not in last)))
            for server in last:
                stack.enter_context(server)
        for label, server in servers.items():
            with contextlib.nullcontext() if options.together else server:
                for concurrency in concurrencies:
                    rows.append({"label": label} | measure(server, prompts, concurrency, options.new_tokens))
                    print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
                    if options.json:
                        options.json.write_text(json.dumps({"env": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
