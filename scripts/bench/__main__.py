# SPDX-License-Identifier: Apache-2.0
"""Decode speed of two servers in one run: SGLang's release with DFLASH, and the fork with DDTREE.

    build/env/bin/python scripts/bench OUT.json --stock DIR [--fork DIR] [--models DIR] [--gpus 0,1] [-- SERVER FLAGS]

Both serve the model pair of tests/models/rank_shape.py on dummy weights, with CUDA graphs and the same simulated accept
length, at each context alone and four at a time. DIR goes to the front of PYTHONPATH: for --stock a folder into which the
pinned release is unpacked (without --stock only the fork runs), for --fork build/tree when it is not installed. With two
GPUs the servers run side by side, each on its own. Text means nothing; times do.

--steps also traces some decode steps of both servers and writes what they cost the host and the device.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
import step_trace
from checks import UNPACK, Refused, check_device, check_stock
from memory_log import memory_by_owner

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))

from serving.server import Server, ServerFailed
from serving.streams import decode, follow_together, while_all_decode

CONTEXTS = (1024, 4096, 16384, 65536)
CONCURRENCY = (1, 4)
ACCEPT_LENGTH = 3
WARM_TOKENS, NEW_TOKENS = 48, 144
# Contexts and concurrency of the traces; at 64k eight streams share one prefix, since stock reads a prompt in 40 seconds.
TRACED = ((1024, 1), (1024, 8), (65536, 1), (65536, 8))
TRACED_STEPS, HELD_TOKENS = 12, 8192
GRAPHS_PER_STEP = 2  # drafter and target
TRACE_TIMEOUT_SECONDS = 300.0
# Eight nodes under the root: rows for rows what the chain of a block of eight verifies, and one more.
DDTREE_BUDGET = 8
COMMON_FLAGS = (
    *("--load-format", "dummy", "--speculative-draft-load-format", "dummy"),
    *("--attention-backend", "triton", "--speculative-draft-attention-backend", "triton"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--speculative-draft-window-size", "4096"),
    *("--cuda-graph-max-bs-decode", "8", "--max-running-requests", "8", "--max-total-tokens", "400000"),
    *("--context-length", "140000", "--mem-fraction-static", "0.8", "--skip-server-warmup"),
)


class ComparedServer(Server):
    """One of the servers that are compared.

    Args:
        label: name of its rows and of its log.
        models: folder with target/ and draft/.
        flags: beside those that both servers share.
        environment: variables beside those that both servers share.
        path: folder for the front of PYTHONPATH, or None.
        gpu: index of its card.
        logs: folder of its log.
    """

    def __init__(
        self,
        label: str,
        models: Path,
        flags: tuple[str, ...],
        environment: dict[str, str],
        path: Path | None,
        gpu: str,
        logs: Path,
    ) -> None:
        self.label = label
        pair = ("--model-path", str(models / "target"), "--speculative-draft-model-path", str(models / "draft"))
        variables = {
            **environment,
            "CUDA_VISIBLE_DEVICES": gpu,
            "PYTHONPATH": os.pathsep.join([str(path)] * bool(path) + [os.environ.get("PYTHONPATH", "")]),
            "SGLANG_SIMULATE_ACC_LEN": str(ACCEPT_LENGTH),
        }
        super().__init__(logs / f"{label}.log", *pair, *COMMON_FLAGS, *flags, environment=variables)

    def captures(self) -> list[str]:
        """What its log says of captured graphs and of the attention that verifies."""
        return [
            re.sub(r"^\[[^]]*\] ", "", line)
            for line in self.output().splitlines()
            if re.search(r"CUDA graph end|Verify attention", line)
        ]

    def memory(self) -> dict[str, int]:
        """Bytes by owner from the table at its start, which only the fork has."""
        return memory_by_owner(self.output())


def measure(
    server: ComparedServer, contexts: tuple[int, ...], concurrencies: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    """Rows of one server. A longer prompt begins with the shorter one, so that prefixes come from the cache."""
    generator = random.Random(7)
    prompts = [[generator.randint(4, 1000) for _ in range(max(contexts))] for _ in range(max(concurrencies))]
    for concurrency in concurrencies:  # compiles what the measured streams need
        follow_together(server, [ids[-64:] for ids in prompts[:concurrency]], NEW_TOKENS)
    for context in contexts:
        for concurrency in concurrencies:
            answers = follow_together(server, [ids[:context] for ids in prompts[:concurrency]], NEW_TOKENS)
            spans = while_all_decode(answers, WARM_TOKENS)
            if not spans:
                raise SystemExit(
                    f"bench: {server.label}: expected {concurrency} streams of {NEW_TOKENS} tokens to decode together, "
                    "some ended before others began; see --max-running-requests and --max-total-tokens"
                )
            lengths = [answer.parts[-1][1] / answer.steps for answer in answers]
            per_step = [length * span.seconds / span.tokens for span, length in zip(spans, lengths, strict=True)]
            yield {
                "label": server.label,
                "context": context,
                "concurrency": concurrency,
                "ms_per_step": round(1e3 * sum(per_step) / concurrency, 2),
                "tok_s": round(sum(span.tokens / span.seconds for span in spans), 1),
                "ttft_s": round(max(answer.parts[0][0] - answer.asked for answer in answers), 2),
            }


def hold(server: Server, ids: list[int], running: threading.Barrier, done: threading.Event) -> None:
    """Keep one stream decoding until `done`."""
    with contextlib.closing(decode(server, ids, HELD_TOKENS)) as parts:
        for index, _ in enumerate(parts):
            if index == 0:
                running.wait()
            if done.is_set():
                return
    raise SystemExit(f"{server.url}: a stream of {HELD_TOKENS} tokens ended before the trace was there")


def trace(server: ComparedServer, ids: list[int], concurrency: int) -> dict[str, Any]:
    """What steps cost while `concurrency` streams decode behind the same prompt."""
    running, done = threading.Barrier(concurrency + 1, timeout=TRACE_TIMEOUT_SECONDS), threading.Event()
    folder = Path(tempfile.mkdtemp(dir=server.log.parent))
    body = {"output_dir": str(folder), "num_steps": TRACED_STEPS, "activities": ["CPU", "GPU"]}
    with ThreadPoolExecutor(concurrency) as pool:
        streams = [pool.submit(hold, server, ids, running, done) for _ in range(concurrency)]
        try:
            running.wait()
            requests.post(f"{server.url}/start_profile", json=body, timeout=TRACE_TIMEOUT_SECONDS).raise_for_status()
            events = read_when_written(folder)
        finally:
            done.set()
    for finished in streams:
        finished.result()
    return step_trace.summarise(events, GRAPHS_PER_STEP)


def read_when_written(folder: Path) -> list[dict[str, Any]]:
    """The events of the trace that a server writes below `folder`."""
    deadline = time.monotonic() + TRACE_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        for path in folder.rglob("*.trace.json.gz"):
            try:
                return step_trace.read(path)
            except (EOFError, ValueError, OSError):
                pass  # still being written
        time.sleep(1)
    raise SystemExit(f"{folder}: expected a trace within {TRACE_TIMEOUT_SECONDS:.0f} s, got none")


def trace_all(server: ComparedServer, contexts: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Rows of one server at the points of `TRACED` that have one of these contexts."""
    generator = random.Random(7)  # the first prompt of `measure`, whose prefix is cached
    prompt = [generator.randint(4, 1000) for _ in range(max(context for context, _ in TRACED))]
    for context, concurrency in TRACED:
        if context not in contexts:
            continue
        row = {"label": server.label, "context": context, "concurrency": concurrency}
        yield row | trace(server, prompt[:context], concurrency)


class Results:
    """A file of rows that is complete after each of them."""

    def __init__(self, path: Path, servers: list[ComparedServer]) -> None:
        self._path, self._servers = path, servers
        self._rows: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def take(self, rows: Iterable[dict[str, Any]]) -> None:
        for row in rows:
            print(json.dumps(row), flush=True)
            with self._lock:
                self._rows.append(row)
                order = [server.label for server in self._servers]
                result = {
                    "env": environment(self._servers),
                    "rows": sorted(self._rows, key=lambda row: order.index(row["label"])),
                }
                self._path.parent.mkdir(parents=True, exist_ok=True)
                partial = self._path.with_name(self._path.name + ".partial")
                partial.write_text(json.dumps(result, indent=1) + "\n")
                partial.replace(self._path)


def environment(servers: list[ComparedServer]) -> dict[str, Any]:
    """Where, when and how."""
    import torch

    return {
        "date": datetime.date.today().isoformat(),
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": "tests/models/rank_shape.py, 61 layers, dummy weights",
        "accept_length": f"{ACCEPT_LENGTH} (SGLANG_SIMULATE_ACC_LEN)",
        "ddtree_budget": DDTREE_BUDGET,
        "ttft": "prefixes of shorter contexts cached; at concurrency 4 the last of four prompts",
        "command": "scripts/bench " + " ".join(re.sub(r".*/", "", word) for word in sys.argv[1:]),
        "start_up": {server.label: server.captures() for server in servers},
        "memory_bytes": {server.label: memory for server in servers if (memory := server.memory())},
    }


def run_all(servers: list[ComparedServer], side_by_side: int, run: Callable[[ComparedServer], None]) -> None:
    """Run each server, in threads that live as long as their servers do.

    A signal that ends the benchmark ends the servers first, which are in sessions of their own and would not get it.
    """

    def end(number: int, frame: object) -> None:
        for server in servers:
            server.kill()
        os._exit(128 + number)  # the threads wait for answers that will not come

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, end)
    try:
        with ThreadPoolExecutor(side_by_side) as pool:
            list(pool.map(run, servers))
    except ServerFailed as failed:
        raise SystemExit(f"bench: {failed}") from None


def parse_args() -> argparse.Namespace:
    """The options, whose help says what each is for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("out", type=Path, help="file for the results, JSON")
    add(
        "--stock",
        type=Path,
        metavar="DIR",
        help=f"folder into which the release is unpacked: {UNPACK} (default: none, only the fork runs)",
    )
    add("--fork", type=Path, metavar="DIR", help="folder that holds the fork's sglang/ (default: the installed one)")
    add("--models", type=Path, metavar="DIR", help="folder of the model pair, written when absent (default: a new one)")
    add("--gpus", default="0", help="one index, or two for servers side by side: 0,1 (default: %(default)s)")
    add("--steps", type=Path, metavar="STEPS.json", help="also trace decode steps into this file (default: no traces)")
    add("--contexts", default=",".join(map(str, CONTEXTS)), help="tokens of the prompts (default: %(default)s)")
    add(
        "--concurrency",
        default=",".join(map(str, CONCURRENCY)),
        help="numbers of streams at the same time (default: %(default)s)",
    )
    add("flags", nargs="*", help="flags for both servers, behind --")
    return parser.parse_intermixed_args()


def main() -> None:
    args = parse_args()
    try:
        if args.stock:
            check_stock(args.stock)
        check_device()
    except Refused as error:
        raise SystemExit(f"bench: {error}") from None
    contexts = tuple(int(context) for context in args.contexts.split(","))
    concurrencies = tuple(int(streams) for streams in args.concurrency.split(","))
    gpus = args.gpus.split(",")
    logs = Path(tempfile.mkdtemp(prefix="bench-"))
    models = args.models or logs / "models"
    if not (models / "target").is_dir():
        subprocess.run([sys.executable, str(ROOT / "tests" / "models" / "rank_shape.py"), str(models)], check=True)
    tree = ("--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", str(DDTREE_BUDGET), *args.flags)
    chain = ("--speculative-algorithm", "DFLASH", "--speculative-num-draft-tokens", "8", *args.flags)
    # Where it is no sm_120 card, the kernel must be asked for.
    kernel = {"SGLANG_SM120_VERIFY": "on"}
    servers = [ComparedServer("sm120-ddtree", models, tree, kernel, args.fork, gpus[-1], logs)]
    if args.stock:
        servers.insert(0, ComparedServer("stock-dflash", models, chain, {}, args.stock, gpus[0], logs))

    decoding = Results(args.out, servers)
    tracing = Results(args.steps, servers) if args.steps else None

    def run(server: ComparedServer) -> None:
        with server:
            decoding.take(measure(server, contexts, concurrencies))
            if tracing is not None:
                tracing.take(trace_all(server, contexts))

    run_all(servers, len(set(gpus)), run)


if __name__ == "__main__":
    main()
