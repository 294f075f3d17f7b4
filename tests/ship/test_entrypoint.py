# SPDX-License-Identifier: Apache-2.0
"""The image's entry point: the arguments it adds, and what it refuses in one line before the server is imported."""

from __future__ import annotations

import argparse
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_share import copy_programs

REPO_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO_ROOT / "docker"), str(REPO_ROOT / "scripts")]

import entrypoint
from entrypoint import Option, UsageError

TEXT, SWITCH = Option("1", ""), Option("0", "")
TEXTS = ("--attention-backend", "--api-key", "--config", "--device", "--host", "--model", "--model-path")
KNOWN = {
    **dict.fromkeys((*TEXTS, "--speculative-algorithm", "--speculative-draft-model-path"), TEXT),
    **dict.fromkeys(("--nnodes", "--port", "--tensor-parallel-size", "--tp-size"), Option("1", "int")),
    **dict.fromkeys(("-h", "--help", "--trust-remote-code"), SWITCH),
    "--mem-fraction-static": Option("1", "float"),
    "--cuda-graph-bs": Option("+", "int"),
    "--lora-paths": Option("*", ""),
    "--model-checksum": Option("?", ""),
}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def completed(*arguments: str) -> list[str]:
    return entrypoint.complete(arguments, entrypoint.read_options(arguments, KNOWN))


def questions(*arguments: str, **environment: str) -> entrypoint.Questions:
    return entrypoint.questions(entrypoint.read_options(arguments, KNOWN), environment)


def test_without_arguments_it_serves_the_demo_pair() -> None:
    added = completed()
    assert added[added.index("--model-path") + 1] == str(REPO_ROOT / "docker" / "demo" / "target")
    assert added[added.index("--speculative-draft-model-path") + 1] == str(REPO_ROOT / "docker" / "demo" / "draft")
    assert added[added.index("--speculative-algorithm") + 1] == "DDTREE"
    assert added[added.index("--host") + 1] == "0.0.0.0"
    assert added[added.index("--port") + 1] == "30000"
    assert added[added.index("--attention-backend") + 1] == "triton"


def test_a_model_gets_no_drafter() -> None:
    given = ["--model-path=/models/a", "--port", "8000", "--host", "127.0.0.1"]
    assert completed(*given) == given


def test_a_drafter_brings_ddtree_unless_another_algorithm_is_named() -> None:
    given = ["--model", "/models/a", "--speculative-draft-model-path", "/models/b", "--port", "1", "--host", "h"]
    assert completed(*given) == ["--speculative-algorithm", "DDTREE", *given]
    given += ["--speculative-algorithm", "DFLASH"]
    assert completed(*given) == given


def test_a_configuration_file_names_the_model() -> None:
    assert "--model-path" not in completed("--config", "/models/serve.yaml")


def test_a_configuration_file_s_options_count(tmp_path: Path) -> None:
    """Defaults of the image give way to the file, the file to the command line; a drafter in it brings DDTREE."""
    path = tmp_path / "serve.yaml"
    path.write_text("model-path: /models/a\nspeculative-draft-model-path: /models/b\nport: 30001\nhost: 10.0.0.1\n")
    given = ["--config", str(path), "--host", "::"]
    options = entrypoint.with_configuration(entrypoint.read_options(given, KNOWN), KNOWN)
    assert entrypoint.complete(given, options) == ["--speculative-algorithm", "DDTREE", *given]
    asked = entrypoint.questions(options, {})
    assert (asked.model, asked.draft, asked.host, asked.port) == ("/models/a", "/models/b", "::", 30001)
    assert entrypoint.health_address(asked) == "http://[::1]:30001/health"


def test_options_are_read_as_argparse_reads_them() -> None:
    options = entrypoint.read_options(["--tp", "8", "--trust", "--port=1", "--port", "2"], KNOWN)
    assert options == {"--tp-size": "8", "--trust-remote-code": "", "--port": "2"}


@pytest.mark.parametrize(
    "words",
    [
        ["--cuda-graph-bs", "1", "2", "4", "--trust-remote-code", "--lora-paths", "--model-checksum", "--nnodes", "-1"],
        [
            "--model",
            "-",
            "--api-key",
            "- a text",
            "--mem-fraction-static",
            "-.5",
            "--lora-paths",
            "a=/models/a",
            "b",
            "-h",
        ],
        ["--model-checksum", "0123", "--api-key=--a", "--cuda-graph-bs=8"],
    ],
    ids=str,
)
def test_what_argparse_takes_is_taken(words: list[str]) -> None:
    parser = argparse.ArgumentParser(add_help=False)
    for name, option in KNOWN.items():
        if option.takes == "0":
            parser.add_argument(name, action="store_true")
        else:
            nargs = None if option.takes == "1" else option.takes
            parser.add_argument(name, nargs=nargs, type={"int": int, "float": float}.get(option.kind, str))
    parser.parse_args(words)
    entrypoint.read_options(words, KNOWN)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--modle-path 1",
            "--modle-path: expected an option of SGLang, got an unknown one; did you mean --model-path?",
        ),
        ("--zzzzzz", "--zzzzzz: expected an option of SGLang, got an unknown one; --help lists them"),
        ("-x", "-x: expected an option of SGLang, got an unknown one; --help lists them"),
        (
            "--t",
            "--t: expected one option, got 3, --tensor-parallel-size, --tp-size, --trust-remote-code; write it out",
        ),
        ("--model a b", "b: expected an option, got a value that none takes; put it behind its option"),
        ("--trust true", "true: expected an option, got a value that none takes; put it behind its option"),
        ("--trust=true", "--trust-remote-code: expected no value, got 'true'; leave it out"),
        ("--model", "--model: expected a value, got none; write it behind the option"),
        ("--cuda-graph-bs --help", "--cuda-graph-bs: expected a value, got none; write it behind the option"),
        ("--port http", "--port: expected a whole number, got 'http'; correct it"),
        ("--cuda-graph-bs 1 2 many", "--cuda-graph-bs: expected a whole number, got 'many'; correct it"),
        ("--mem-fraction-static 90%", "--mem-fraction-static: expected a number, got '90%'; correct it"),
    ],
)
def test_arguments_that_the_server_would_refuse(words: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        entrypoint.read_options(words.split(), KNOWN)
    assert str(caught.value) == message


def test_what_the_doctor_is_asked() -> None:
    asked = questions("--model-path", "/models/a", "--tp-size", "8", "--nnodes", "2", "--port", "81")
    assert (asked.model, asked.ranks, asked.port, asked.host) == ("/models/a", 4, 81, "0.0.0.0")
    assert asked.card_required
    assert (asked.algorithm, questions("--speculative-algorithm", "EAGLE").algorithm) == ("DDTREE", "EAGLE")
    assert not questions().card_required
    assert not questions("--model-path", "/models/a", "--device", "cpu").card_required
    assert not questions("--model-path", "/models/a", SGLANG_PLATFORM="sm120_reference").card_required


@pytest.mark.parametrize(
    ("host", "address"),
    [("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("::", "[::1]"), ("fd00::1", "[fd00::1]")],
)
def test_address_of_the_health_check(host: str, address: str) -> None:
    asked = entrypoint.Questions(host=host, port=5)
    assert entrypoint.health_address(asked) == f"http://{address}:5/health"


@pytest.fixture
def server_with_status(request: pytest.FixtureRequest) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(request.param)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/health"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(("server_with_status", "status"), [(200, 0), (503, 1)], indirect=["server_with_status"])
def test_health(server_with_status: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = tmp_path / "address"
    monkeypatch.setattr(entrypoint, "ADDRESS", address)
    assert entrypoint.main(["health"]) == 1  # nothing was started
    address.write_text(server_with_status)
    assert entrypoint.main(["health"]) == status


@pytest.fixture
def share(tmp_path: Path) -> Path:
    """The entry point as it lies in the image, beside the doctor and the list of options."""
    copy_programs(tmp_path)
    (tmp_path / "flags.json").write_text(json.dumps({name: option._asdict() for name, option in KNOWN.items()}))
    return tmp_path


@pytest.mark.parametrize("server_with_status", [200], indirect=True)
def test_the_address_is_kept_in_the_temporary_folder(server_with_status: str, share: Path, tmp_path: Path) -> None:
    """/tmp itself may be read-only where TMPDIR names another folder."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    (folder / "sglang-address").write_text(server_with_status)
    assert start(share, "health", TMPDIR=str(folder)) == (0, [])
    assert start(share, "health", TMPDIR=str(tmp_path))[0] == 1


def start(share: Path, *arguments: str, **environment: str) -> tuple[int, list[str]]:
    """Exit status and lines of a start that is refused."""
    command = [sys.executable, str(share / "entrypoint.py"), *arguments]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=variables, timeout=60)
    assert result.stdout == ""
    return result.returncode, result.stderr.splitlines()


def refused(share: Path, *arguments: str, **environment: str) -> str:
    status, lines = start(share, "--port", str(free_port()), *arguments, **environment)
    assert status == 78  # EX_CONFIG
    (line,) = lines
    return line


def test_refusals_are_one_line(share: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refused(share, "--unknown").startswith("error: --unknown: expected an option of SGLang")
    assert "expected a directory, got /absent" in refused(share, "--model-path", "/absent", "--device", "cpu")
    # Where there is a card, the driver is told to show none.
    assert refused(share, "--model-path", "organisation/name").startswith(
        "error: card: expected an NVIDIA device, got "
    )
    assert "error: cache: expected" in refused(share, XDG_CACHE_HOME=str(tmp_path / "file"))
    assert refused(share, "--model-path", "a", "b").startswith("error: b: expected an option")
    assert "error: --config: expected /absent.yaml to be" in refused(
        share, "--config", "/absent.yaml", "--device", "cpu"
    )
    (tmp_path / "broken.yaml").write_text("port: [")
    assert "error: --config: expected YAML in " in refused(share, "--config", str(tmp_path / "broken.yaml"))
    (tmp_path / "text.yaml").write_text("port: some")
    assert "error: --port: expected a whole number, got 'some'" in refused(
        share, "--config", str(tmp_path / "text.yaml")
    )
    (tmp_path / "other.yaml").write_text("prot: 30001")
    assert "error: --prot: expected an option of SGLang" in refused(share, "--config", str(tmp_path / "other.yaml"))
    assert "got 'fast'; unset it" in refused(share, SGLANG_SM120_VERIFY="fast")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        assert f"error: port {port}: expected it to be free" in refused(share, "--host", "127.0.0.1", "--port", port)


def test_a_word_that_is_no_command_is_refused(share: Path) -> None:
    status, lines = start(share, "bash")
    assert status == 78
    assert lines == ["error: bash: expected an option, doctor or health, got this; options begin with --"]
