# SPDX-License-Identifier: Apache-2.0
"""scripts/serve: the arguments it adds, what it refuses at once, how it reports readiness and how it stops."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serving.server import ModelPair, free_port

# Stands in for `python -m sglang.launch_server`: records its arguments, has a child that ignores requests to stop, and
# answers /health as its first argument after the script's own tells it to.
SERVER = f"""#!{sys.executable}
import http.server, json, os, pathlib, subprocess, sys
if "-m" not in sys.argv:  # a script of the repository
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
folder = pathlib.Path(__file__).parent
arguments = sys.argv[3:]
(folder / "arguments.json").write_text(json.dumps(arguments))
(folder / "environment.json").write_text(json.dumps(dict(os.environ)))
if "--fail" in arguments:
    sys.exit(7)
child = subprocess.Popen(["sh", "-c", "trap '' TERM INT; while :; do sleep 1; done"])
(folder / "pids.json").write_text(json.dumps([os.getpid(), child.pid]))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *arguments):
        pass
port = int(arguments[len(arguments) - 1 - arguments[::-1].index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Checkout:
    """A repository with scripts/serve, a set-up that succeeds, and a stand-in for the server."""

    def __init__(self, folder: Path, repo_root: Path) -> None:
        self.root = folder
        self.programs = folder / "build" / "env" / "bin"
        self.programs.mkdir(parents=True)
        (folder / "scripts").mkdir()
        for name in ("serve", "serve_checks.py", "doctor_checks.py"):
            shutil.copy(repo_root / "scripts" / name, folder / "scripts" / name)
        self.write(folder / "scripts" / "setup", "#!/bin/sh\necho called >>setup-calls\n")
        self.write(self.programs / "python", SERVER)
        self.port = free_port()

    @staticmethod
    def write(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        return self.start_bare("--port", str(self.port), *arguments, **environment)

    def start_bare(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start without a port of its own."""
        command = [self.root / "scripts" / "serve", *arguments]
        return popen(command, cwd=self.root, env={**os.environ, **environment})

    def model(self, name: str, *architectures: str) -> Path:
        """A folder of this name, relative to where the script is started, with a model in it."""
        folder = self.root / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"architectures": architectures}))
        (folder / "model.safetensors").write_bytes(b"weights")
        return folder

    def configuration(self, text: str) -> str:
        """A file for --config."""
        path = self.root / "serve.yaml"
        path.write_text(text)
        return str(path)

    def environment(self, *arguments: str, **environment: str) -> dict[str, str]:
        """Variables of a server that has ended."""
        self.start("--fail", *arguments, **environment).communicate(timeout=30)
        found: dict[str, str] = json.loads((self.programs / "environment.json").read_text())
        return found

    def server_arguments(self) -> list[str]:
        arguments: list[str] = json.loads((self.programs / "arguments.json").read_text())
        return arguments

    def alive(self) -> list[int]:
        """Processes of the server that still run."""
        pids: list[int] = json.loads((self.programs / "pids.json").read_text())
        return [pid for pid in pids if is_running(pid)]


def popen(command: list[Any], **options: Any) -> subprocess.Popen[str]:
    """Start `command` as a terminal would, with its output in pipes.

    A shell cannot trap a signal that was ignored when it started, as under nohup or in a background job.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(["env", "--default-signal=INT,HUP,TERM", *command], **pipes, **options)


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.fixture
def checkout(tmp_path: Path, repo_root: Path) -> Iterator[Checkout]:
    made = Checkout(tmp_path, repo_root)
    yield made
    if (made.programs / "pids.json").exists():
        for pid in made.alive():
            os.kill(pid, signal.SIGKILL)


def read_until(stream: Iterator[str], word: str) -> str:
    for line in stream:
        if word in line:
            return line
    raise AssertionError(f"the script ended without a line that contains {word!r}")


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_stops_every_process(checkout: Checkout, sent: signal.Signals, status: int) -> None:
    script = checkout.start()
    assert script.stdout is not None and script.stderr is not None
    assert f"http://127.0.0.1:{checkout.port}" in read_until(script.stderr, "ready on")
    assert len(checkout.alive()) == 2
    script.send_signal(sent)
    assert script.wait(30) == status
    assert checkout.alive() == []
    assert script.stderr.read() == "serve: stopping\n"


def test_the_server_ends_with_a_killed_script(checkout: Checkout) -> None:
    script = checkout.start()
    assert script.stderr is not None
    read_until(script.stderr, "ready on")
    server = json.loads((checkout.programs / "pids.json").read_text())[0]
    script.kill()
    assert script.wait(30) == -signal.SIGKILL
    assert wait_until(lambda: not is_running(server))


def test_the_status_is_the_server_s(checkout: Checkout) -> None:
    script = checkout.start("--fail")
    output, errors = script.communicate(timeout=30)
    assert (script.returncode, output, errors) == (7, "", "")


def test_the_printed_command_is_a_request(checkout: Checkout) -> None:
    script = checkout.start()
    assert script.stdout is not None and script.stderr is not None
    read_until(script.stderr, "ready on")
    command = script.stdout.readline() + script.stdout.readline()
    script.terminate()
    script.communicate(timeout=30)
    assert command.startswith(f"curl http://127.0.0.1:{checkout.port}/v1/completions ")
    body = json.loads(re.search(r"-d '(.*)'", command).group(1))  # type: ignore[union-attr]
    assert {"model", "prompt", "max_tokens"} <= set(body)


def test_the_printed_command_asks_for_the_key(checkout: Checkout) -> None:
    script = checkout.start("--api-key", "secret")
    assert script.stdout is not None and script.stderr is not None
    read_until(script.stderr, "ready on")
    command = script.stdout.readline()
    script.terminate()
    assert "secret" not in command + script.communicate(timeout=30)[1]
    assert '-H "Authorization: Bearer $API_KEY"' in command


@pytest.mark.parametrize(
    ("arguments", "added"),
    [
        ([], ["--model-path", "{demo}/target", "--speculative-draft-model-path", "{demo}/draft", "{ddtree}"]),
        (["--speculative-algorithm", "DFLASH"], ["--model-path", "{demo}/target", "--speculative-draft-model-path", "{demo}/draft"]),
        (["--speculative-algorithm=DFLASH"], ["--model-path", "{demo}/target", "--speculative-draft-model-path", "{demo}/draft"]),
        (["--model-path", "m"], []),
        (["--model-path=m"], []),
        (["--model-path", "m", "--speculative-draft-model-path", "d"], ["{ddtree}"]),
        (["--model-path", "m", "--speculative-draft-model-path", "d", "--speculative-algorithm", "DFLASH"], []),
        (["--host", "127.0.0.1"], ["--model-path", "{demo}/target", "--speculative-draft-model-path", "{demo}/draft", "{ddtree}"]),
    ],
)  # fmt: skip
def test_arguments_are_added_only_where_needed(checkout: Checkout, arguments: list[str], added: list[str]) -> None:
    script = checkout.start(*arguments, "--fail")
    script.communicate(timeout=30)
    demo = str(checkout.root / "tests" / "models" / "demo")
    expected = [
        word for text in added for word in text.format(demo=demo, ddtree="--speculative-algorithm DDTREE").split()
    ]
    own = ["--host", "127.0.0.1", "--port", str(checkout.port)]
    assert checkout.server_arguments() == [*own, *expected, "--port", str(checkout.port), *arguments, "--fail"]


@pytest.mark.parametrize(
    ("text", "arguments", "added"),
    [
        ("model-path: m\nspeculative-draft-model-path: org/d\n", [], "{ddtree}"),
        ("model-path: m\nspeculative-draft-model-path: d\nspeculative-algorithm: DFLASH\n", [], ""),
        ("model: m  # a comment\n", [], ""),
        ("speculative-draft-model: 'd'\n", ["--model-path", "m"], "{ddtree}"),
        ("tp-size: 2\ntrust-remote-code: true\n", ["--model-path", "m"], ""),
        ("", [], "--model-path {demo}/target --speculative-draft-model-path {demo}/draft {ddtree}"),
    ],
)
def test_the_configuration_counts_as_arguments(checkout: Checkout, text: str, arguments: list[str], added: str) -> None:
    """SGLang puts the file's options in front of the command's, so that what the script adds would override them."""
    words = ["--config", checkout.configuration(f"{text}port: {checkout.port}\nhost: localhost\n"), *arguments]
    script = checkout.start_bare(*words, "--fail")
    assert script.communicate(timeout=30) == ("", "")
    own = ["--host", "localhost", "--port", str(checkout.port)]
    expected = added.format(demo=checkout.root / "tests/models/demo", ddtree="--speculative-algorithm DDTREE").split()
    assert checkout.server_arguments() == [*own, *expected, *words, "--fail"]


def test_arguments_take_precedence_over_the_configuration(checkout: Checkout) -> None:
    file = checkout.configuration("model-path: /absent\nport: 1\nhost: 192.0.2.1\nspeculative-algorithm: DDTREE\n")
    words = ["--config", file, "--model", "m", "--host", "127.0.0.1", "--port", str(checkout.port)]
    checkout.start_bare(*words, "--fail").communicate(timeout=30)
    assert checkout.server_arguments() == ["--host", "127.0.0.1", "--port", str(checkout.port), *words, "--fail"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: many\n", "--port: expected 1 to 65535, got many; pass another one"),
        ("model-path: a/b/c\n", "--model-path: expected a directory, got a/b/c; pass the directory of a model"),
        ("- port\n", "--config: expected 'option: value' in {file}, got a list; correct it"),
        ("port: [1\n", "--config: expected YAML in {file}, got 'while parsing "),
    ],
)
def test_a_bad_configuration_is_refused_in_one_line(checkout: Checkout, text: str, message: str) -> None:
    file = checkout.configuration(text)
    script = checkout.start_bare("--config", file)
    output, errors = script.communicate(timeout=30)
    (line,) = errors.splitlines()
    assert (script.returncode, output) == (1, "")
    assert line.startswith("serve: " + message.format(file=file))


def test_models_are_looked_into(checkout: Checkout) -> None:
    """The faults of a folder that exists, which SGLang would tell in a traceback."""
    (checkout.root / "docker").mkdir()
    target = checkout.model("models/target", "DeepseekV3ForCausalLM")
    checkout.model("draft", "DFlashDraftModel")
    mistaken = "--model-path: expected a target, got a drafter (DFlashDraftModel) in draft; "
    no_drafter = "--speculative-draft-model-path: expected a DFlash drafter (DFlashDraftModel), "
    no_drafter += f"got DeepseekV3ForCausalLM in {target}; pass a drafter's folder"
    for arguments, fault in (
        (["docker"], "--model-path: expected docker/config.json, got no such file; pass a model's directory"),
        (["draft"], f"{mistaken}pass it as --speculative-draft-model-path"),
        ([str(target), "--speculative-draft-model-path", str(target)], no_drafter),
    ):
        script = checkout.start("--model-path", *arguments)
        assert script.communicate(timeout=30) == ("", f"serve: {fault}\n")
        assert script.returncode == 1
    for arguments in (
        ["models/target", "--speculative-draft-model-path", "draft"],
        ["models/target", "--speculative-draft-model-path", "models/target", "--speculative-algorithm", "EAGLE"],
        ["s3://bucket/folder/name"],
        ["docker", "--load-format", "remote"],
    ):
        script = checkout.start("--model-path", *arguments, "--fail")
        assert script.communicate(timeout=30) == ("", "")
        assert script.returncode == 7  # the server's


def test_the_compiler_of_the_requirements_is_named(checkout: Checkout) -> None:
    """SGLang compiles kernels at run time and asks CUDA_HOME for nvcc."""
    toolkit = checkout.root / "build" / "env" / "lib" / "python3.11" / "site-packages" / "nvidia" / "cu13"
    assert checkout.environment(CUDA_HOME="").get("CUDA_HOME") == ""
    (toolkit / "bin").mkdir(parents=True)
    checkout.write(toolkit / "bin" / "nvcc", "#!/bin/sh\n")
    found = checkout.environment(CUDA_HOME="")
    assert found["CUDA_HOME"] == str(toolkit)
    assert found["PATH"].split(":")[0] == str(checkout.programs)  # where ninja is
    assert checkout.environment(CUDA_HOME="/opt/cuda")["CUDA_HOME"] == "/opt/cuda"


def test_ranks_of_one_machine_meet_on_it(checkout: Checkout) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE")
    found = checkout.environment(NCCL_SOCKET_IFNAME="eth7")
    assert [found[name] for name in names[:2]] == ["lo", "eth7"]
    store = Path(found[names[2]].removeprefix("file://"))
    assert found[names[2]].startswith("file:///") and not store.parent.exists()  # removed with the server
    for option in ("--nnodes", "--dp-size"):
        spread = checkout.environment(option, "2")
        assert not set(names) & set(spread) - set(os.environ)


def test_a_port_in_use_is_refused_before_the_set_up(checkout: Checkout) -> None:
    with socket.create_server(("127.0.0.1", checkout.port)):
        script = checkout.start()
        output, errors = script.communicate(timeout=30)
    assert (script.returncode, output) == (1, "")
    assert errors == (
        f"serve: port {checkout.port}: expected it to be free, got an answer; stop what listens there or pass --port\n"
    )
    assert not (checkout.root / "setup-calls").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "many"], ("--port: expected 1 to 65535, got many",)),
        (["--port", "65536"], ("--port: expected 1 to 65535, got 65536",)),
        (["--port=0"], ("--port: expected 1 to 65535, got 0",)),
        (["--speculative-draft-model-path", "/absent"], ("expected a directory, got /absent", "DFlash drafter")),
        (["--model-path", "/absent"], ("--model-path: expected a directory, got /absent",)),
        (["--model-path", "tests/models/absent"], ("--model-path: expected a directory, got tests/models/absent",)),
        (["--config", "/absent.yaml"], ("--config: expected a file that can be read, got /absent.yaml; correct",)),
        (["--config=a.yaml"], ("expected its file as a word of its own, got --config=a.yaml; write --config a.yaml",)),
        (["--port"], ("--port: expected a value, got nothing; write it behind the option",)),
        (["--port", "--host", "127.0.0.1"], ("--port: expected a value, got nothing",)),
        (["--model-path="], ("--model-path: expected a value, got nothing",)),
    ],
)
def test_bad_arguments_are_refused_before_the_set_up(
    checkout: Checkout, arguments: list[str], words: tuple[str, ...]
) -> None:
    script = checkout.start(*arguments)
    output, errors = script.communicate(timeout=30)
    assert (script.returncode, output) == (1, "")
    assert len(errors.splitlines()) == 1
    for word in words:
        assert word in errors
    assert not (checkout.root / "setup-calls").exists()


def test_help_names_sglang_s_own(checkout: Checkout) -> None:
    script = checkout.start("--help")
    output, errors = script.communicate(timeout=30)
    assert (script.returncode, errors) == (0, "")
    assert output.startswith("Starts the patched SGLang")
    assert "sglang.launch_server --help" in output
    assert not (checkout.root / "setup-calls").exists()


def test_the_real_server_starts_and_stops(repo_root: Path, demo_pair: ModelPair) -> None:
    """The whole path of a user: the script, an answer, Ctrl-C."""
    if not (repo_root / "build" / "env" / "fork.stamp").exists():
        pytest.skip("needs the environment that scripts/setup makes")
    command = [repo_root / "scripts" / "serve", "--port", str(free_port()), *demo_pair.arguments("DDTREE")]
    script = popen(command)
    try:
        assert script.stdout is not None and script.stderr is not None
        address = read_until(script.stderr, "serve: ready on").split("ready on ")[1].split()[0]
        body = json.dumps({"model": "default", "prompt": "import os\n", "max_tokens": 8}).encode()
        request = urllib.request.Request(
            f"{address}/v1/completions", data=body, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            assert json.load(response)["choices"][0]["text"]
        script.send_signal(signal.SIGINT)
        script.communicate(timeout=60)
        assert script.returncode == 130
    finally:
        if script.poll() is None:
            script.kill()
