# SPDX-License-Identifier: Apache-2.0
"""A server as the image starts it, with keys: who may ask what, how much, and on which addresses it listens."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from image_share import copy_programs

from serving.server import ServerFailed, exchange, free_port

REPO_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO_ROOT / "docker"), str(REPO_ROOT / "scripts")]

import entrypoint

KEY, ADMIN = "key-of-a-client", "key-of-the-operator"
LIMIT_MIB = 1
# They tell that the server lives and what it does, never what it was asked; probes and Prometheus have no key.
OPEN = ("/health", "/health_generate", "/metrics")


class Guarded:
    """A running server of the demo pair with both keys, started through the image's entry point."""

    def __init__(self, folder: Path) -> None:
        share = folder / "share"
        share.mkdir()
        copy_programs(share)
        (share / "demo").symlink_to(REPO_ROOT / "tests" / "models" / "demo")
        subprocess.run([sys.executable, REPO_ROOT / "docker" / "list_flags.py", share / "flags.json"], check=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "log"
        command = ["setpriv", "--pdeathsig", "TERM", sys.executable, str(share / "entrypoint.py")]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--enable-metrics"]
        command += ["--api-key", KEY, "--admin-api-key", ADMIN]
        variables = {**os.environ, "SGLANG_SM120_MAX_BODY_MIB": str(LIMIT_MIB)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True
            )

    def wait(self, timeout: float = 300) -> None:
        """Return when it answers. Errors: ServerFailed."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                if exchange(f"{self.url}/health")[0] == 200:
                    return
            except OSError:
                time.sleep(0.25)
        raise ServerFailed(f"expected a server, got {self.log.read_text()[-3000:]}")

    def stop(self) -> None:
        """End it and its processes."""
        self.process.terminate()
        try:
            self.process.wait(30)
        finally:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def ask(self, method: str, path: str, key: str | None, **options: Any) -> requests.Response:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        return requests.request(method, self.url + path, headers=headers, timeout=60, **options)

    def processes(self) -> list[psutil.Process]:
        """The server and all that it started."""
        server = psutil.Process(self.process.pid)
        return [server, *server.children(recursive=True)]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    server = Guarded(tmp_path_factory.mktemp("guarded"))
    try:
        server.wait()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def routes() -> list[tuple[str, str]]:
    """Method and path of all that the server answers to, of SGLang's own application."""
    from sglang.srt.entrypoints.http_server import app

    found = []

    def walk(some: Any) -> None:
        for route in some:
            inner = getattr(route, "original_router", None) or getattr(route, "router", None)
            if getattr(route, "path", None) is None:
                walk(inner.routes if inner is not None else ())
            else:
                found.extend((method, route.path) for method in getattr(route, "methods", None) or ())

    walk(app.routes)
    return sorted(set(found))


def test_every_route_asks_for_a_key(guarded: Guarded, routes: list[tuple[str, str]]) -> None:
    assert len(routes) > 80
    for method, pattern in routes:
        path = re.sub(r"\{[^}]*\}", "x", pattern)
        for key in (None, "wrong", KEY.upper()):
            answer = guarded.ask(method, path, key)
            if path in OPEN:
                assert answer.status_code in (200, 405), (method, path)
            else:
                # Not even whether there is such a route is told.
                assert answer.status_code == 401, (method, path, key)
                assert answer.content in (b"", b'{"error":"Unauthorized"}'), (method, path)


def test_paths_that_only_look_open_are_not(guarded: Guarded) -> None:
    for path in ("//health", "/v1/../health", "/HEALTH", "/%2e/metrics", "/server_info/../metrics"):
        connection = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=60)
        connection.request("GET", path)
        assert connection.getresponse().status in (401, 404), path
        connection.close()
    # The prefix is open, and leads nowhere.
    assert guarded.ask("GET", "/healthy", None).status_code == 404


def test_the_key_opens(guarded: Guarded) -> None:
    body = {"model": "default", "prompt": "import os\n", "max_tokens": 2}
    assert guarded.ask("POST", "/v1/completions", KEY, json=body).status_code == 200
    assert guarded.ask("GET", "/v1/models", KEY).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/update_weights_from_disk"),
        ("POST", "/update_weights_from_tensor"),
        ("POST", "/load_lora_adapter"),
        ("POST", "/load_lora_adapter_from_tensors"),
        ("POST", "/flush_cache"),
        ("GET", "/server_info"),
        ("GET", "/get_server_info"),
    ],
)
def test_what_changes_the_server_or_shows_its_keys_asks_for_the_operator_s(
    guarded: Guarded, method: str, path: str
) -> None:
    assert guarded.ask(method, path, KEY).status_code == 401
    assert guarded.ask(method, path, ADMIN).status_code != 401


def test_no_web_socket_goes_past_the_key(guarded: Guarded) -> None:
    """SGLang asks for the key on HTTP alone; no library of web sockets is installed, so that none is opened."""
    for lock in ("cuda", "cpu"):
        text = (REPO_ROOT / "scripts" / "requirements" / f"{lock}.txt").read_text()
        assert not re.search(r"^(websockets|wsproto)==", text, flags=re.MULTILINE), lock
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=60) as connection:
        connection.sendall(
            b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 401 ")


def test_keys_are_not_in_the_log(guarded: Guarded) -> None:
    log = guarded.log.read_text()
    assert "api_key='***'" in log
    assert KEY not in log and ADMIN not in log


def test_nothing_listens_beyond_the_port(guarded: Guarded) -> None:
    sockets = [one for process in guarded.processes() for one in process.net_connections("inet")]
    addresses = {tuple(one.laddr) for one in sockets if one.status == psutil.CONN_LISTEN}
    assert ("127.0.0.1", guarded.port) in addresses
    assert {host for host, _ in addresses} <= {"127.0.0.1", "::1"}, addresses


def body_of(size: int) -> bytes:
    """A request of exactly `size` bytes."""
    frame = json.dumps({"text": "", "sampling_params": {"max_new_tokens": 1}}).encode()
    return frame.replace(b'"text": ""', b'"text": "' + b"a" * (size - len(frame)) + b'"', 1)


def test_a_body_up_to_the_limit_is_read_and_one_above_is_not(guarded: Guarded) -> None:
    limit = LIMIT_MIB << 20
    below = guarded.ask("POST", "/generate", KEY, data=body_of(limit))
    assert below.status_code == 400 and "context length" in below.text  # read, and too long a prompt
    above = guarded.ask("POST", "/generate", KEY, data=body_of(limit + 1))
    assert above.status_code == 413
    message = f"expected a body of at most {LIMIT_MIB} MiB, got more; shorten it or raise SGLANG_SM120_MAX_BODY_MIB"
    assert above.json()["message"] == message


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages"])
def test_a_body_of_unknown_length_is_cut_off(guarded: Guarded, path: str) -> None:
    chunks = (b" " * 65536 for _ in range((LIMIT_MIB << 20) // 65536 + 1))
    assert guarded.ask("POST", path, KEY, data=chunks).status_code == 413


def test_model_names_are_no_paths(guarded: Guarded) -> None:
    """A request names the served model; a path in its place is not opened."""
    for name in ("/etc/passwd", "../../etc/passwd", "default/../../etc"):
        answer = guarded.ask("GET", f"/v1/models/{name.replace('/', '%2F')}", KEY)
        assert answer.status_code == 404 and "root:" not in answer.text
        body = {"model": name, "prompt": "a", "max_tokens": 1}
        answer = guarded.ask("POST", "/v1/completions", KEY, json=body)
        assert "root:" not in answer.text


def test_the_server_still_answers(guarded: Guarded) -> None:
    """After all of the above."""
    body = {"model": "default", "messages": [{"role": "user", "content": "A function."}], "max_tokens": 4}
    answer = guarded.ask("POST", "/v1/chat/completions", KEY, json=body)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] >= 1
    assert "Traceback" not in guarded.log.read_text()


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
def test_a_limit_that_is_no_number_stops_the_start(value: str) -> None:
    from sglang.srt.sm120.guard import body_limit

    with pytest.raises(SystemExit) as caught:
        body_limit(value)
    assert str(caught.value).startswith(
        "error: SGLANG_SM120_MAX_BODY_MIB: expected a whole number of MiB from 1 on, got "
    )
    assert body_limit(None) == 32 << 20 and body_limit("5") == 5 << 20


def test_a_length_that_lies_is_cut_off_all_the_same() -> None:
    """Content-Length is the client's word; what is counted is what comes."""
    from fastapi import HTTPException

    from sglang.srt.sm120.guard import BodyLimit

    async def reads_all(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"12345", "more_body": True}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "headers": [(b"content-length", b"5")]}
    with pytest.raises(HTTPException) as caught:
        asyncio.run(BodyLimit(reads_all, limit_bytes=12)(scope, receive, send))
    assert caught.value.status_code == 413


@pytest.mark.parametrize(
    ("arguments", "kept"), [((), True), (("--nnodes", "2"), False), (("--dp-size", "2"), False)], ids=str
)
def test_ranks_of_one_machine_meet_on_it(arguments: tuple[str, ...], kept: bool) -> None:
    known = dict.fromkeys(("--nnodes", "--dp-size", "--data-parallel-size"), entrypoint.Option("1", "int"))
    environment: dict[str, str] = {"NCCL_SOCKET_IFNAME": "eth7"}
    entrypoint.keep_to_this_machine(entrypoint.read_options(arguments, known), environment)
    assert environment["NCCL_SOCKET_IFNAME"] == "eth7"  # the operator's word stays
    assert (environment.get("GLOO_SOCKET_IFNAME") == "lo") == kept
    store = environment.get(entrypoint.STORE, "")
    assert store.startswith("file:///") == kept
    if kept:
        folder = Path(store.removeprefix("file://")).parent
        assert folder.stat().st_mode & 0o077 == 0
        folder.rmdir()
