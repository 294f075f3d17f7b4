# SPDX-License-Identifier: Apache-2.0
"""scripts/setup on a stand-in for the machine: what it refuses, and that it makes each layer once and completely.

A copy of the script runs in an empty repository, with programs on PATH that record their calls instead of installing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

PYTHON = """#!/bin/bash
case "$*" in
*version_info*) echo "$FAKE_VERSION" ;;
*ensurepip*) exit "$FAKE_VENV_STATUS" ;;
*sys.executable*) echo "$0" ;;
*python_version*) echo "$FAKE_VERSION.0" ;;
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$FAKE_BIN/uv" "$3/bin/uv" && echo venv >>"$FAKE_LOG" ;;
"-m pip "*) echo installer >>"$FAKE_LOG" ;;
*/scripts/fork*)
    echo "fork ${!#}" >>"$FAKE_LOG"
    [[ ${!#} != "$FAKE_FAILURE" ]] || exit 1
    [[ ${!#} != wheel ]] || { touch "$FAKE_ROOT/fork.whl" && echo "$FAKE_ROOT/fork.whl sha256:0 (written)"; }
    ;;
*) exit 99 ;;
esac
"""
UV = """#!/bin/bash
name=$(basename "${!#}")
echo "uv $name" >>"$FAKE_LOG"
[[ $name != "$FAKE_FAILURE" ]] || exit 1
package=$FAKE_ROOT/build/env/lib/python3.11/site-packages/sgl_kernel_sm120
[[ $name != sgl-kernel-sm120 ]] || { mkdir -p "$package" && touch "$package/libsgl_kernel_sm120.so"; }
"""
# What the script looks for to choose between the two sets of requirements.
CHOSEN, OTHER = ("cuda", "cpu") if list(Path("/dev").glob("nvidia[0-9]*")) else ("cpu", "cuda")
BASE = ["venv", "installer", f"uv {CHOSEN}.txt"]
FORK = ["fork fetch", "fork tree", "fork wheel", "uv fork.whl"]
if CHOSEN == "cuda":
    FORK.append("uv sgl-kernel-sm120")


class Machine:
    """An empty repository and the programs that scripts/setup finds."""

    def __init__(self, folder: Path, repo_root: Path) -> None:
        self.root = folder / "repository"
        self.programs = folder / "programs"
        self.log = folder / "log"
        self.environment = {"FAKE_VERSION": "3.11", "FAKE_VENV_STATUS": "0", "FAKE_FAILURE": ""}
        kernel = ("csrc", "python", "build_tools")
        for name in ("sglang", "patches", "scripts/requirements", "scripts/fork_tools"):
            (self.root / name).mkdir(parents=True)
        for name in ("installer", "cpu", "cuda", "test"):
            (self.root / "scripts" / "requirements" / f"{name}.txt").write_text(f"# {name}")
        for name in kernel:
            (self.root / "sgl-kernel-sm120" / name).mkdir(parents=True)
        for name in ("pyproject.toml", "setup.py"):
            (self.root / "sgl-kernel-sm120" / name).touch()
        (self.root / "scripts" / "fork").touch()
        (self.root / "patches" / "series").touch()
        shutil.copy(repo_root / "scripts" / "setup", self.root / "scripts" / "setup")
        self.programs.mkdir()
        for name in ("python3", "python3.11", "python3.12"):
            self.program(name, PYTHON)
        self.program("uv", UV)
        self.program("df", "#!/bin/bash\necho Avail; echo 100\n")

    def program(self, name: str, text: str) -> None:
        path = self.programs / name
        path.write_text(text)
        path.chmod(0o755)

    def setup(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs scripts/setup; `calls` then has what this run called."""
        self.log.write_text("")
        return self.run(*arguments, **environment)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs scripts/setup and leaves the record of earlier calls."""
        return subprocess.run(
            [self.root / "scripts" / "setup", *arguments],
            env={
                **os.environ,
                "PATH": f"{self.programs}:/usr/bin:/bin",
                "FAKE_LOG": str(self.log),
                "FAKE_ROOT": str(self.root),
                "FAKE_BIN": str(self.programs),
                **self.environment,
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path, repo_root: Path) -> Machine:
    return Machine(tmp_path, repo_root)


def assert_refused(machine: Machine, result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for word in words:
        assert word in result.stderr
    assert machine.calls() == []
    assert not (machine.root / "build" / "env").exists()


@pytest.mark.parametrize("version", ["3.10", "3.13"])
def test_other_pythons_are_refused(machine: Machine, version: str) -> None:
    result = machine.setup(FAKE_VERSION=version)
    assert_refused(machine, result, "Python: expected 3.11 or 3.12", f"got {version}", "apt-get install")


def test_a_missing_python_is_refused(machine: Machine) -> None:
    for name in ("python3", "python3.11", "python3.12"):
        machine.program(name, "#!/bin/bash\nexit 127\n")
    assert_refused(machine, machine.setup(), "Python: expected 3.11 or 3.12", "got none", "apt-get install")


def test_a_python_without_venv_is_refused(machine: Machine) -> None:
    result = machine.setup(FAKE_VENV_STATUS="1")
    assert_refused(machine, result, "expected 3.11 or 3.12 with venv", "apt-get install python3.11-venv")


def test_another_python_on_path_is_found(machine: Machine) -> None:
    machine.program("python3", PYTHON.replace("$FAKE_VERSION", "3.10"))
    machine.program("python3.12", PYTHON.replace("$FAKE_VERSION", "3.12"))
    result = machine.setup()
    assert result.returncode == 0, result.stderr
    assert f"Python 3.12.0 ({machine.programs}/python3.12)" in result.stderr


@pytest.mark.parametrize(
    ("option", "answer", "words"),
    [
        ("-m", "aarch64", ("processor: expected x86_64, got aarch64", "x86_64 only")),
        ("-s", "Darwin", ("operating system: expected Linux, got Darwin", "use a Linux machine")),
    ],
)
def test_other_machines_are_refused(machine: Machine, option: str, answer: str, words: tuple[str, ...]) -> None:
    machine.program("uname", f'#!/bin/bash\n[[ $1 == {option} ]] && echo {answer} || /usr/bin/uname "$@"\n')
    assert_refused(machine, machine.setup(), *words)


def test_a_full_disk_is_refused(machine: Machine) -> None:
    machine.program("df", "#!/bin/bash\necho Avail; echo 3\n")
    result = machine.setup()
    assert result.returncode == 1
    assert "disk: expected" in result.stderr and "got 3 GiB" in result.stderr
    assert machine.calls() == []


def test_unknown_arguments_are_refused(machine: Machine) -> None:
    assert_refused(machine, machine.setup("--fast"), "arguments: expected --tests or --kernel, got --fast")


def test_a_second_run_does_nothing(machine: Machine) -> None:
    assert machine.setup().returncode == 0
    assert machine.calls() == BASE + FORK
    result = machine.setup()
    assert (result.returncode, machine.calls(), result.stderr) == (0, [], "")


def test_another_python_on_path_changes_nothing_once_it_is_made(machine: Machine) -> None:
    assert machine.setup().returncode == 0
    assert machine.setup(FAKE_VERSION="3.13").returncode == 0
    assert machine.calls() == []


def test_the_environment_s_own_python_is_not_what_it_is_made_with(machine: Machine) -> None:
    """An active environment is first on PATH, and it is removed before it is made again."""
    assert machine.setup().returncode == 0
    active = machine.root / "build" / "env" / "bin"
    (active / "python").unlink()
    (active / "python3").symlink_to(sys.executable)
    (machine.root / "scripts" / "requirements" / f"{CHOSEN}.txt").write_text("changed")
    result = machine.setup(PATH=f"{active}:{machine.programs}:/usr/bin:/bin")
    assert str(active) not in result.stderr.splitlines()[0]
    assert f"({Path(sys.executable).resolve()})" in result.stderr.splitlines()[0]


def test_tests_are_a_layer_of_their_own(machine: Machine) -> None:
    assert machine.setup().returncode == 0
    assert machine.setup("--tests").returncode == 0
    assert machine.calls() == ["uv test.txt"]
    assert machine.setup("--tests").returncode == 0
    assert machine.calls() == []


@pytest.mark.parametrize(
    ("failure", "repeated"),
    [(f"{CHOSEN}.txt", BASE + FORK), ("tree", FORK), ("wheel", FORK), ("fork.whl", FORK)],
)
def test_a_failed_layer_is_made_again(machine: Machine, failure: str, repeated: list[str]) -> None:
    failed = machine.setup(FAKE_FAILURE=failure)
    assert failed.returncode == 1
    assert "got the error above" in failed.stderr.splitlines()[-1]
    assert machine.setup().returncode == 0
    assert machine.calls() == repeated


@pytest.mark.parametrize(
    ("changed", "repeated"),
    [
        (f"scripts/requirements/{CHOSEN}.txt", BASE + FORK),
        ("scripts/requirements/installer.txt", BASE + FORK),
        (f"scripts/requirements/{OTHER}.txt", []),
        ("scripts/fork_tools/new.py", FORK),
        ("patches/series", FORK),
        ("sglang/new.py", FORK),
        ("README.md", []),
    ],
)
def test_a_change_repeats_what_depends_on_it(machine: Machine, changed: str, repeated: list[str]) -> None:
    assert machine.setup().returncode == 0
    (machine.root / changed).write_text("changed")
    assert machine.setup().returncode == 0
    assert machine.calls() == repeated


def test_a_moved_checkout_is_set_up_again(machine: Machine) -> None:
    """Scripts in a virtual environment name its path."""
    assert machine.setup().returncode == 0
    machine.root = machine.root.rename(machine.root.with_name("moved"))
    assert machine.setup().returncode == 0
    assert machine.calls() == BASE + FORK


def test_a_removed_interpreter_is_noticed(machine: Machine) -> None:
    assert machine.setup().returncode == 0
    (machine.root / "build" / "env" / "bin" / "python").unlink()
    assert machine.setup().returncode == 0
    assert machine.calls() == BASE + FORK


def test_concurrent_runs_make_one_environment(machine: Machine) -> None:
    machine.program("uv", UV.replace("[[", "sleep 0.3; [["))
    machine.log.write_text("")
    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(lambda _: machine.run().returncode, range(3)))
    assert results == [0, 0, 0]
    assert machine.calls() == BASE + FORK


def test_the_kernel_is_a_layer_of_its_own(machine: Machine) -> None:
    """Built on request where there is no card, again when its source changes, after a failure, and when it is gone."""
    assert machine.setup("--kernel").returncode == 0
    assert machine.calls() == list(dict.fromkeys([*BASE, *FORK, "uv sgl-kernel-sm120"]))
    assert machine.setup("--kernel").returncode == 0 and machine.calls() == []
    (machine.root / "sgl-kernel-sm120" / "csrc" / "new.cuh").write_text("// changed")
    failed = machine.setup("--kernel", FAKE_FAILURE="sgl-kernel-sm120")
    assert failed.returncode == 1 and "sgl-kernel-sm120: expected it to compile" in failed.stderr
    assert machine.setup("--kernel").returncode == 0 and machine.calls() == ["uv sgl-kernel-sm120"]
    (library,) = (machine.root / "build" / "env").rglob("libsgl_kernel_sm120.so")
    library.unlink()
    assert machine.setup("--kernel").returncode == 0 and machine.calls() == ["uv sgl-kernel-sm120"]


def test_help_is_the_usage(machine: Machine) -> None:
    for option in ("--help", "-h"):
        result = machine.setup(option)
        assert (result.returncode, result.stderr, machine.calls()) == (0, "", [])
        for word in ("scripts/setup [--tests] [--kernel]", "--tests ", "--kernel "):
            assert word in result.stdout


def test_the_compiler_of_the_requirements_becomes_a_toolkit(machine: Machine) -> None:
    """Its packages lack the names that linkers ask for."""
    toolkit = machine.root / "build" / "env" / "lib" / "python3.11" / "site-packages" / "nvidia" / "cu13"
    made = f"mkdir -p {toolkit}/bin {toolkit}/lib; touch {toolkit}/bin/nvcc {toolkit}/lib/lib{{cudart,nvrtc}}.so.13\n"
    machine.program("uv", UV.replace("name=", f"{made}chmod +x {toolkit}/bin/nvcc\nname=", 1))
    assert machine.setup().returncode == 0
    for name in ("libcudart.so", "libnvrtc.so"):
        assert (toolkit / "lib64" / name).resolve() == toolkit / "lib" / f"{name}.13"
