# SPDX-License-Identifier: Apache-2.0
"""Servers for tests and measurements: an SGLang in a process group of its own, on a free loopback port."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import requests

from serving.launcher import Launched, Launcher

if TYPE_CHECKING:
    import openai

# A model of 61 layers takes four minutes on a card for which nothing is compiled yet.
START_TIMEOUT_SECONDS = 600.0
REFUSAL_TIMEOUT_SECONDS = 240.0
STOP_TIMEOUT_SECONDS = 30.0
LOG_TAIL_LINES = 60


@dataclass(frozen=True)
class ModelPair:
    """A target model and the DFlash drafter trained for it, as directories."""

    target: Path
    draft: Path

    def arguments(self, algorithm: str | None) -> tuple[str, ...]:
        """Server arguments for `algorithm` (DDTREE, DFLASH), or for plain decoding when it is None."""
        model = ("--model-path", str(self.target))
        if algorithm is None:
            return model
        return (*model, "--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(self.draft))


class ServerFailed(AssertionError):
    """The server ended, or was not ready in time; the message carries the end of its log."""


class Server:
    """One running server. Start it with `with Server(log, *arguments)` or through the `serve` fixture.

    It ends with the thread that has started it, or with the launcher that has forked it, however these end.

    Args:
        log: file that receives the output of all its processes; errors have its name.
        arguments: SGLang's own; host and port are added.
        environment: variables set on top of this process's own.
        launcher: forks the server, unless it has variables of its own; without one each start imports SGLang again.
    """

    def __init__(
        self,
        log: Path,
        *arguments: str,
        environment: dict[str, str] | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        self.log = log
        self.arguments = arguments
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._environment = environment or {}
        self._launcher = launcher
        self._process: subprocess.Popen[bytes] | Launched | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether the server's main process is alive."""
        return self._process is not None and self._process.poll() is None

    def start(self, timeout: float = START_TIMEOUT_SECONDS) -> None:
        """Starts the server and returns when it answers; raises `ServerFailed` if it ends or takes too long."""
        deadline = time.monotonic() + timeout
        self._spawn()
        try:
            while not self._healthy():
                if not self.running:
                    raise self._failed(f"to start, it ended with {self._exit_status()}")
                if time.monotonic() > deadline:
                    raise self._failed(f"to answer within {timeout:.0f} s, it has not")
                time.sleep(0.25)
        except BaseException:
            self.stop()
            raise

    def run_to_exit(self, timeout: float = REFUSAL_TIMEOUT_SECONDS) -> int:
        """Starts a server that is expected to refuse, and returns its exit status; the output is in `log`."""
        self._spawn()
        assert self._process is not None
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise self._failed("to refuse, it still runs") from None
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends the server's whole process group: politely, then by force."""
        if self._process is not None and self.running:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Ends the server's whole process group by force, without the seconds that SGLang waits for its requests.

        A signal handler may call it, whatever another thread does with the server.
        """
        if self._process is None:
            return
        process, self._process = self._process, None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def client(self, timeout: float = 120.0) -> openai.OpenAI:
        """An OpenAI client that never retries, so that a failed request fails the test."""
        import openai  # takes a second, and measurements do without

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", timeout=timeout, max_retries=0)

    def output(self) -> str:
        """Everything that the server has written so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of the server's output."""
        return "\n".join(self.output().splitlines()[-lines:])

    def _spawn(self) -> None:
        arguments = ["--host", "127.0.0.1", "--port", str(self.port), *self.arguments]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self._launcher is not None and not self._environment:
            self._process = self._launcher.start(arguments, self.log)
            return
        # The signal on the parent's death ends the server of a run that is itself killed. The parent is a thread.
        command = ["setpriv", "--pdeathsig", "TERM", sys.executable, "-m", "sglang.launch_server"]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )

    def _exit_status(self) -> int | None:
        return None if self._process is None else self._process.returncode

    def _failed(self, expected: str) -> ServerFailed:
        return ServerFailed(f"{self.log.stem}: expected the server {expected}\n{self.tail()}")

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=30) as response:
                return response.status == 200
        except (OSError, http.client.HTTPException):
            return False


class ServerPool:
    """Keeps servers alive between tests, so that those with equal arguments share one.

    Args:
        logs: directory for the servers' logs.
        launcher: see `Server`.
        limit: most servers alive at once (a forked one holds 1 GB, another 3 GB); the one asked for least recently ends.
    """

    def __init__(self, logs: Path, launcher: Launcher | None = None, limit: int = 2) -> None:
        self._logs = logs
        self._launcher = launcher
        self._limit = limit
        self._servers: OrderedDict[tuple[Any, ...], Server] = OrderedDict()
        self._started = 0

    def get(self, *arguments: str, environment: dict[str, str] | None = None) -> Server:
        """A running server with these arguments: one that is alive already, or a new one."""
        key = (arguments, tuple(sorted((environment or {}).items())))
        server = self._servers.pop(key, None)
        if server is None or not server.running:
            while len(self._servers) >= self._limit:
                self._servers.popitem(last=False)[1].kill()
            self._started += 1
            log = self._logs / f"server-{self._started}.log"
            server = Server(log, *arguments, environment=environment, launcher=self._launcher)
            server.start()
        self._servers[key] = server
        return server

    def close(self) -> None:
        """Ends every server."""
        while self._servers:
            self._servers.popitem()[1].kill()


def free_port() -> int:
    """A loopback TCP port that is free, below those that the system gives to whoever asks for any.

    One of these might be given away before the server listens.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.SystemRandom().sample(range(first // 2, first), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"free port: expected one from {first // 2} to {first - 1}, got none of 100; end what listens there")


def exchange(url: str, body: bytes | None = None, timeout: float = 60.0) -> tuple[int, bytes]:
    """Status and body of a GET, or of a POST of `body` as JSON; error statuses are returned, not raised."""
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def generate(server: Server, prompt: Any, *, fields: dict[str, Any] | None = None, **sampling: Any) -> Any:
    """The answer of `/generate` to a text, to token ids, or to a list of either; greedy unless `sampling` says otherwise.

    Args:
        fields: what goes beside the sampling parameters, such as `return_logprob`.
    """
    response = requests.post(f"{server.url}/generate", json=generate_body(prompt, fields, **sampling), timeout=300)
    assert response.status_code == 200, response.text
    return response.json()


def generate_body(prompt: Any, fields: dict[str, Any] | None = None, **sampling: Any) -> dict[str, Any]:
    """What `generate` sends."""
    first = prompt[0] if isinstance(prompt, list) else prompt
    name = "text" if isinstance(first, str) else "input_ids"
    return {name: prompt, "sampling_params": {"temperature": 0, **sampling}, **(fields or {})}


def result(answer: Any) -> tuple[str, list[int], Any, int]:
    """What must not depend on how an answer was drafted: text, token ids, finish reason and number of tokens."""
    meta = answer["meta_info"]
    return answer["text"], answer["output_ids"], meta["finish_reason"], meta["completion_tokens"]


def stream(
    server: Server, path: str, body: dict[str, Any], timeout: float = 300.0
) -> Generator[dict[str, Any], None, None]:
    """The events that an endpoint streams, without the word that ends them; closing the generator ends the request."""
    with requests.post(f"{server.url}{path}", json=body | {"stream": True}, stream=True, timeout=timeout) as response:
        assert response.status_code == 200, response.text
        for line in response.iter_lines():
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


def stream_generate(server: Server, prompt: Any, *, fields: dict[str, Any] | None = None, **sampling: Any) -> Any:
    """The last event of a streamed `/generate`, after checking that each event continues the one before."""
    last: Any = {"text": "", "output_ids": []}
    for event in stream(server, "/generate", generate_body(prompt, fields, **sampling)):
        # Half of a character is sent as U+FFFD and replaced when the rest has come.
        assert event["text"].startswith(last["text"].rstrip("\ufffd"))
        assert event["output_ids"][: len(last["output_ids"])] == last["output_ids"]
        last = event
    return last
