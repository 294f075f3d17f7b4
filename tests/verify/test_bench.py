# SPDX-License-Identifier: Apache-2.0
"""What scripts/bench refuses before it loads anything, and that no server outlives it, on a server made by hand."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import checks
import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "scripts" / "bench"
RELEASE = tomllib.loads((ROOT / "sglang" / "UPSTREAM.toml").read_text())["version"]
DEADLINE_SECONDS = 60.0
# Starts a process that heeds no signal, writes down the ids of both, and never answers.
SILENT_SERVER = """
import os, subprocess, sys, time
child = subprocess.Popen(["sh", "-c", "trap '' TERM INT HUP; while :; do sleep 1; done"])
with open(os.environ["PIDS"] + ".partial", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(os.environ["PIDS"] + ".partial", os.environ["PIDS"])
if os.environ.get("ENDS"):
    sys.exit(3)
while True:
    time.sleep(1)
"""
DRIVER = """
import runpy, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
bench = runpy.run_path(sys.argv[1] + "/__main__.py", run_name="bench")
here = Path(sys.argv[2])
server = bench["ComparedServer"]("fork", here, (), {}, here, "0", here)
def run(server):
    with server:
        pass
bench["run_all"]([server], 1, run)
"""


def unpacked(folder: Path, version: str | None, *, beside: str | None = None) -> Path:
    """What pip makes of a wheel, as far as it tells the version."""
    (folder / "sglang" / "srt").mkdir(parents=True)
    (folder / "sglang" / "__init__.py").touch()
    if version is not None:
        (folder / "sglang" / "_version.py").write_text(f"__version__: str\n\n__version__ = version = '{version}'\n")
    if beside is not None:
        (folder / f"sglang-{beside}.dist-info").mkdir()
    return folder


def test_the_pinned_wheel_is_taken(tmp_path: Path) -> None:
    (wheel,) = (ROOT / "build" / "upstream").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        kept = [name for name in names if name.count("/") == 1 and name.startswith("sglang")]
        archive.extractall(tmp_path, kept)
    checks.check_stock(tmp_path)
    assert checks.versions(tmp_path) == {RELEASE}


@pytest.mark.parametrize("version, beside", [(RELEASE, None), (None, RELEASE), (RELEASE, RELEASE)])
def test_either_statement_of_the_release_is_enough(tmp_path: Path, version: str | None, beside: str | None) -> None:
    checks.check_stock(unpacked(tmp_path, version, beside=beside))


def absent(folder: Path) -> None:
    (folder / "sglang.txt").touch()


def fork(folder: Path) -> None:
    (unpacked(folder, RELEASE) / "sglang" / "srt" / "sm120").mkdir()


@pytest.mark.parametrize(
    "make, got",
    [
        (absent, "without sglang/__init__.py"),
        (fork, "got the fork in"),
        (lambda folder: unpacked(folder, RELEASE, beside=f"{RELEASE}+sm120.1"), f"{RELEASE} and {RELEASE}+sm120.1"),
        (lambda folder: unpacked(folder, "0.5.16"), "got 0.5.16 in"),
        (lambda folder: unpacked(folder, None), "got one of no version in"),
    ],
)
def test_another_folder_is_refused(tmp_path: Path, make: Callable[[Path], object], got: str) -> None:
    make(tmp_path)
    result = subprocess.run(
        [sys.executable, BENCH, tmp_path / "out.json", "--stock", tmp_path], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1
    expected = f"bench: --stock: expected a folder with sglang/ of {RELEASE}, got "
    assert result.stderr.startswith(expected) and got in result.stderr
    assert result.stderr.endswith(f"unpack it with pip install --no-deps --target DIR sglang=={RELEASE}\n")


def test_the_built_tree_is_no_release() -> None:
    with pytest.raises(checks.Refused, match="got the fork"):
        checks.check_stock(ROOT / "build" / "tree")


def test_without_a_device_nothing_is_loaded(tmp_path: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, BENCH, tmp_path / "out.json", "--models", tmp_path / "models"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("bench: expected an NVIDIA device, got none")
    assert list(tmp_path.iterdir()) == []


def test_help_says_what_each_option_is() -> None:
    text = subprocess.run([sys.executable, BENCH, "--help"], capture_output=True, text=True, check=True).stdout
    helps = {
        part.split()[0]: " ".join(part.split()) for part in re.split(r"\n  (?=--)", text.partition("options:")[2])[1:]
    }
    assert set(helps) == {
        f"--{name}" for name in ("stock", "fork", "models", "gpus", "steps", "contexts", "concurrency")
    }
    for option, said in helps.items():
        assert re.fullmatch(rf"{option} [\w.]+ \w.+ \(default: (?!None).+\)", said)
    assert f"pip install --no-deps --target DIR sglang=={RELEASE}" in helps["--stock"]


def test_the_kernel_s_benchmark_needs_the_kernel() -> None:
    """One line, also where the package is installed: it is hidden here."""
    benchmark = ROOT / "sgl-kernel-sm120" / "benchmarks" / "bench_mla_tree_verify.py"
    hidden = (
        "import runpy, sys; sys.modules['sgl_kernel_sm120'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", hidden, benchmark], capture_output=True, text=True, check=False)
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(
        "sgl_kernel_sm120: expected the package, got none; scripts/setup --kernel installs it"
    )


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., tuple[subprocess.Popen[str], list[int]]]:
    """Starts the benchmark's part that runs servers; with the ids of the server's two processes."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(SILENT_SERVER)
    pids = tmp_path / "pids"

    def started(**environment: str) -> tuple[subprocess.Popen[str], list[int]]:
        reset = ["env", "--default-signal=INT,HUP,TERM", sys.executable, "-c", DRIVER, BENCH, tmp_path]
        variables = {**os.environ, "PIDS": str(pids), **environment}
        process = subprocess.Popen(reset, env=variables, stderr=subprocess.PIPE, text=True)
        wait_for(lambda: pids.exists() or process.poll() is not None)
        return process, [int(pid) for pid in pids.read_text().split()]

    return started


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_server_with_all_its_processes(
    start: Callable[..., tuple[subprocess.Popen[str], list[int]]], number: signal.Signals
) -> None:
    process, pids = start()
    assert all(map(alive, pids))
    process.send_signal(number)
    assert process.wait(DEADLINE_SECONDS) == 128 + number
    wait_for(lambda: not any(map(alive, pids)))


def test_an_abort_ends_the_server(start: Callable[..., tuple[subprocess.Popen[str], list[int]]]) -> None:
    """Nobody is left to end its children, which SGLang's own watch their parent."""
    process, (server, child) = start()
    process.kill()
    process.wait(DEADLINE_SECONDS)
    try:
        wait_for(lambda: not alive(server))
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_server_that_ends_leaves_nothing(start: Callable[..., tuple[subprocess.Popen[str], list[int]]]) -> None:
    process, pids = start(ENDS="1")
    _, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 1
    assert errors.startswith("bench: fork: expected the server to start, it ended with 3\n")
    wait_for(lambda: not any(map(alive, pids)))
