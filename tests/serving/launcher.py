# SPDX-License-Identifier: Apache-2.0
"""Starts servers as forks of one process that has SGLang imported: three imports are nine tenths of a start.

A server's processes are then forks too, where SGLang spawns them. So a launcher serves tests that ask what a server
answers; those of `scripts/serve` and of the image start as a user starts them. Modules read variables when they are
imported, so servers with variables of their own have a launcher of their own. With a CUDA device there is none, since its
state does not survive a fork.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import context
from pathlib import Path
from typing import Any, NoReturn

POLL_SECONDS = 0.05
AGAIN = "again"


class Launched:
    """A server that the launcher has forked, with what `Server` asks of a `subprocess.Popen`."""

    def __init__(self, launcher: Launcher, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._launcher = launcher

    def poll(self) -> int | None:
        """The exit status (negative: a signal), or None while it runs."""
        if self.returncode is None:
            self.returncode = self._launcher.ask("poll", self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; raises `subprocess.TimeoutExpired` when it still runs after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"server {self.pid}", timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return status

    def send_signal(self, sent: signal.Signals) -> None:
        """Sends a signal to the server's main process, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, sent)


class Launcher:
    """The process that forks servers. It starts with the first server, and ends with the tests that use it.

    Args:
        log: file that receives what the imports write.
        environment: variables of its servers, on top of the tests' own.
    """

    def __init__(self, log: Path, environment: dict[str, str] | None = None) -> None:
        self._log = log
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def start(self, arguments: list[str], log: Path) -> Launched:
        """Forks `python -m sglang.launch_server` with `arguments`, in a session of its own; it writes to `log`."""
        return Launched(self, self.ask("start", str(log), *arguments))

    def ask(self, *request: Any) -> Any:
        """The launcher's answer; raises `RuntimeError` when it gives none."""
        with self._lock:
            if self._process is None:
                self._process = self._spawn()
            assert self._process.stdin is not None and self._process.stdout is not None
            try:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
                answer = self._process.stdout.readline()
            except BrokenPipeError:
                answer = ""
        if not answer:
            raise RuntimeError(f"launcher: expected an answer, got none\n{self._log.read_text(errors='replace')}")
        return json.loads(answer)

    def close(self) -> None:
        """Ends the launcher, which ends its servers."""
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def _spawn(self) -> subprocess.Popen[str]:
        # The safe path keeps the modules beside this file from standing in for SGLang's.
        command = [sys.executable, "-P", __file__]
        with self._log.open("wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                text=True,
                start_new_session=True,
            )


def become_server(log: str, arguments: list[str]) -> NoReturn:
    """Turns a fork into the server: its output goes to `log`, its exit status is the process's."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["launch_server.py", *arguments]
    status = 0
    try:
        runpy.run_module("sglang.launch_server", run_name="__main__")
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # noqa: BLE001  (whatever it is, it is the result of this server)
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def poll(pid: int, running: set[int]) -> int | None:
    """The exit status of a fork, once, and None while it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        return None
    running.discard(pid)
    return os.waitstatus_to_exitcode(status)


def main() -> None:
    """Answers requests until standard input ends, which it does too when the tests are killed; then ends the servers."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the imports print must not mix with the answers
    variables = dict(os.environ)
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server  # noqa: F401

    if os.environ != variables and sys.argv[1:] != [AGAIN]:
        # The imports set variables for the processes that a server spawns, whose libraries read them when they are loaded.
        os.dup2(answers.fileno(), 1)
        os.execv(sys.executable, [sys.executable, "-P", __file__, AGAIN])
    # SGLang asks for spawned processes by name; spawned, each would import everything again.
    contexts = context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = contexts["fork"]
    gc.freeze()  # a collection in a fork would copy every page of the imports
    running: set[int] = set()
    for line in sys.stdin:
        verb, subject, *arguments = json.loads(line)
        if verb == "poll":
            answer = poll(subject, running)
        else:
            answer = os.fork()
            if answer == 0:
                answers.close()
                become_server(subject, arguments)
            running.add(answer)
        answers.write(f"{json.dumps(answer)}\n")
    for pid in running:
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
