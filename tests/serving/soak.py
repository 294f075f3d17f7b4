# SPDX-License-Identifier: Apache-2.0
"""A long mixed load on a server whose pool is too small for it: aborts, disconnects, retractions, and equal texts.

    build/env/bin/python tests/serving/soak.py OUT.json --seconds 1200

Greedy texts must equal those of the same server without pressure; SGLang's strict memory check runs all the time; the
memory of every process must stay flat after the first quarter.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import requests

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from serving.server import ModelPair, Server

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
CONCURRENCY = 12
POOL_TOKENS = 640
NUM_TEXTS = 60
SAMPLE_SECONDS = 2.0
# A process may keep what its allocator has not given back; a leak of one slot's worth a step would be far more.
MAX_GROWTH_MIB = 48.0
ARGUMENTS = ("--page-size", "1", "--max-total-tokens", str(POOL_TOKENS), "--enable-metrics")
ENVIRONMENT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_TEST_RETRACT": "1"}


def make_server(log: Path, pair: ModelPair) -> Server:
    """The server under test, not started yet."""
    return Server(log, *pair.arguments("DDTREE"), *ARGUMENTS, environment=ENVIRONMENT)


def make_bodies(prompts: list[str], seed: int = 0) -> list[dict[str, Any]]:
    """Greedy requests of different lengths, whose texts are known once each has been sent alone."""
    chance = random.Random(seed)
    lengths = [(chance.randint(1, 100), chance.random() < 0.5) for _ in prompts]
    return [
        {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": length, "ignore_eos": whole}}
        for prompt, (length, whole) in zip(prompts, lengths, strict=True)
    ]


class Soak:
    """Mixed load on one server.

    Args:
        server: running, under `ENVIRONMENT`.
        bodies: greedy requests, with `expected` their token ids.
        seconds: how long to keep `CONCURRENCY` requests in flight.
    """

    def __init__(self, server: Server, bodies: list[dict[str, Any]], expected: list[list[int]], seconds: float) -> None:
        self.server, self.bodies, self.expected = server, bodies, expected
        self.deadline = time.monotonic() + seconds
        self.counts: Counter[str] = Counter()
        self.wrong: list[dict[str, Any]] = []
        self.memory: list[tuple[float, dict[str, float]]] = []
        self._lock = threading.Lock()

    def run(self) -> None:
        """Returns when the time is over and the last request has ended."""
        with ThreadPoolExecutor(CONCURRENCY + 1) as pool:
            jobs = [pool.submit(self._client, seed) for seed in range(CONCURRENCY)]
            jobs.append(pool.submit(self._watch))
            for job in jobs:
                job.result()

    def _client(self, seed: int) -> None:
        chance = random.Random(seed)
        number = 0
        while time.monotonic() < self.deadline:
            number += 1
            kind = chance.choices(("greedy", "stream", "sampled", "abort", "leave"), (4, 2, 2, 1, 1))[0]
            index = chance.randrange(len(self.bodies))
            getattr(self, f"_{kind}")(chance, index, f"{seed}-{number}")
            self._count(kind)

    def _greedy(self, chance: random.Random, index: int, rid: str) -> None:
        self._compare(index, self._post(self.bodies[index])["output_ids"])

    def _sampled(self, chance: random.Random, index: int, rid: str) -> None:
        body = json.loads(json.dumps(self.bodies[index]))
        body["sampling_params"] |= {"temperature": 0.9, "top_p": 0.9, "min_p": 0.01, "frequency_penalty": 0.5}
        meta = self._post(body)["meta_info"]
        assert meta["completion_tokens"] <= body["sampling_params"]["max_new_tokens"]

    def _stream(self, chance: random.Random, index: int, rid: str) -> None:
        last: list[int] = []
        with self._open(self.bodies[index] | {"stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith(b"data: {"):
                    last = json.loads(line.removeprefix(b"data: "))["output_ids"]
        self._compare(index, last)

    def _leave(self, chance: random.Random, index: int, rid: str) -> None:
        with self._open(self.bodies[index] | {"stream": True}) as response:
            lines = response.iter_lines()
            for _ in range(chance.randint(0, 6)):
                next(lines, None)

    def _abort(self, chance: random.Random, index: int, rid: str) -> None:
        with ThreadPoolExecutor(1) as pool:
            url, body = f"{self.server.url}/generate", self.bodies[index] | {"rid": rid}
            answer = pool.submit(requests.post, url, json=body, timeout=300)
            time.sleep(chance.uniform(0, 0.5))
            requests.post(f"{self.server.url}/abort_request", json={"rid": rid}, timeout=60)
            assert answer.result().status_code in (200, 499, 503), answer.result().text

    def _open(self, body: dict[str, Any]) -> requests.Response:
        return requests.post(f"{self.server.url}/generate", json=body, stream=True, timeout=300)

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        response = requests.post(f"{self.server.url}/generate", json=body, timeout=300)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        self._count("tokens", answer["meta_info"]["completion_tokens"])
        self._count("steps", answer["meta_info"]["spec_verify_ct"])
        return answer

    def _compare(self, index: int, found: list[int]) -> None:
        if found != self.expected[index]:
            with self._lock:
                self.wrong.append({"body": self.bodies[index], "expected": self.expected[index], "found": found})

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self.counts[name] += number

    def _watch(self) -> None:
        start = time.monotonic()
        while time.monotonic() < self.deadline:
            self.memory.append((round(time.monotonic() - start, 1), resident_mib(self.server)))
            time.sleep(SAMPLE_SECONDS)


def resident_mib(server: Server) -> dict[str, float]:
    """Resident memory of the server's processes, in MiB, by name."""
    assert server._process is not None
    main = psutil.Process(server._process.pid)
    found: dict[str, float] = {}
    for process in (main, *main.children(recursive=True)):
        try:
            title = Path(process.cmdline()[0]).name if process.pid != main.pid else "server"
            found[title] = round(found.get(title, 0.0) + process.memory_info().rss / 2**20, 1)
        except (psutil.NoSuchProcess, IndexError):
            continue
    return found


def growth_mib(memory: list[tuple[float, dict[str, float]]]) -> dict[str, float]:
    """By process: median of the last quarter minus median of the second, since the first one fills caches."""
    quarter = max(1, len(memory) // 4)

    def median(part: list[tuple[float, dict[str, float]]], name: str) -> float:
        values = sorted(sample[name] for _, sample in part if name in sample)
        return values[len(values) // 2] if values else 0.0

    names = memory[-1][1]
    return {
        name: round(median(memory[-quarter:], name) - median(memory[quarter : 2 * quarter], name), 1) for name in names
    }


def soak(server: Server, prompts: list[str], seconds: float) -> dict[str, Any]:
    """Run the load and return its figures.

    Raises:
        AssertionError: if a text differs, a slot is lost, the load forced no retraction or the memory grows.
    """
    bodies = make_bodies(prompts)
    earlier = num_retractions(server)
    alone = [requests.post(f"{server.url}/generate", json=body, timeout=300).json()["output_ids"] for body in bodies]
    load = Soak(server, bodies, alone, seconds)
    load.run()
    assert load.wrong == [], load.wrong[:1]
    assert server.running and "Traceback" not in server.output(), server.tail()
    retractions = num_retractions(server) - earlier
    growth = growth_mib(load.memory)
    settle(server)
    after = requests.post(f"{server.url}/generate", json=bodies[0], timeout=300).json()["output_ids"]
    assert after == alone[0]
    assert retractions > 0, "the load was meant to force retractions"
    assert all(mib <= MAX_GROWTH_MIB for mib in growth.values()), growth
    return {
        "seconds": seconds,
        "requests": {name: load.counts[name] for name in ("greedy", "stream", "sampled", "abort", "leave")},
        "texts_compared": load.counts["greedy"] + load.counts["stream"],
        "texts_different": len(load.wrong),
        "tokens": load.counts["tokens"],
        "verify_steps_of_requests": load.counts["steps"],
        "retractions": retractions,
        "memory_growth_mib": growth,
        "memory_end_mib": load.memory[-1][1],
    }


def num_retractions(server: Server) -> int:
    """Retractions that the server's log has, forced ones (`SGLANG_TEST_RETRACT`) and those of a full pool."""
    return server.output().count("Testing retraction.") + server.output().count("KV cache pool is full.")


def settle(server: Server, timeout: float = 30.0) -> None:
    """Wait until nothing runs, then check that a flush finds every slot free."""
    deadline = time.monotonic() + timeout
    while requests.post(f"{server.url}/flush_cache", timeout=60).status_code != 200:
        assert time.monotonic() < deadline, "expected nothing to run after the load"
        time.sleep(0.5)


def demo_prompts(number: int = NUM_TEXTS) -> list[str]:
    """Texts of the demo pair's own prompts."""
    prompts = json.loads((DEMO / "prompts.json").read_text())
    return [prompt["text"][:200] for prompt in prompts][:number]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=1200.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with make_server(log, ModelPair(DEMO / "target", DEMO / "draft")) as server:
            figures = soak(server, demo_prompts(), arguments.seconds)
    arguments.out.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
