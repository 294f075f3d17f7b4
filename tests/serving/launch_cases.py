# SPDX-License-Identifier: Apache-2.0
"""Runs `sglang.launch_server` once for each argument list on standard input; prints exit statuses and outputs as JSON.

The imports, which take most of a start, are made once; each case then runs in a forked process of its own session.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import tempfile
import time
from typing import IO, NoReturn

CASE_SECONDS = 120.0


def launch(arguments: list[str], output: IO[bytes]) -> NoReturn:
    """Becomes the server: its output goes to `output`, its exit status is the process's."""
    os.setsid()
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.argv = ["launch_server.py", *arguments]
    status = 0
    try:
        runpy.run_module("sglang.launch_server", run_name="__main__")
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # noqa: BLE001  (whatever it is, it is the result of this case)
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run(arguments: list[str]) -> dict[str, object]:
    """Exit status of the server with `arguments` (negative: a signal; None: it was still running) and its output."""
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            launch(arguments, output)
        deadline = time.monotonic() + CASE_SECONDS
        ended = status = 0
        while not ended and time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.05)
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            pass
        if not ended:
            os.waitpid(child, 0)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return {"status": os.waitstatus_to_exitcode(status) if ended else None, "output": text}


if __name__ == "__main__":
    cases = json.load(sys.stdin)
    results_file = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the imports print must not mix with the results
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server  # noqa: F401

    results = [run(arguments) for arguments in cases]
    json.dump(results, results_file)
    results_file.close()
