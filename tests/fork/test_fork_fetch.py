# SPDX-License-Identifier: Apache-2.0
"""Fetching the pinned wheel, and the hosts for which there is none."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from toy import PRISTINE, ToyCheckout, digest, wheel_name

from fork_tools import pin
from fork_tools.errors import ForkError
from fork_tools.pin import Host

HERE = Host("3.12", "linux", "x86_64", (2, 36))


@pytest.fixture
def toy(toy: ToyCheckout) -> ToyCheckout:
    """The toy checkout before its wheel was fetched."""
    shutil.rmtree(toy.layout.upstream)
    return toy


def fetched(toy: ToyCheckout) -> Path:
    return toy.layout.upstream / wheel_name("1.0")


def test_downloads_once(toy: ToyCheckout) -> None:
    assert toy.run("fetch") == 0
    assert fetched(toy).read_bytes() == (toy.index / wheel_name("1.0")).read_bytes()
    (toy.index / wheel_name("1.0")).unlink()
    assert toy.run("fetch") == 0, "the valid copy is kept, so nothing is asked of the index"


def test_replaces_a_corrupt_download(toy: ToyCheckout) -> None:
    assert toy.run("fetch") == 0
    good = fetched(toy).read_bytes()
    fetched(toy).write_bytes(good[:-100])
    assert toy.run("fetch") == 0
    assert fetched(toy).read_bytes() == good


def test_refuses_a_wrong_hash_and_keeps_nothing(toy: ToyCheckout, capsys: pytest.CaptureFixture[str]) -> None:
    found = digest((toy.index / wheel_name("1.0")).read_bytes())
    toy.pin("0" * 64)
    assert toy.run("fetch") == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert f"expected sha256 {'0' * 64}, got {found}" in message
    assert list(toy.layout.upstream.iterdir()) == []


def test_says_in_one_line_that_the_index_has_no_such_wheel(
    toy: ToyCheckout, capsys: pytest.CaptureFixture[str]
) -> None:
    (toy.index / wheel_name("1.0")).unlink()
    assert toy.run("tree") == 1
    message = capsys.readouterr().err
    assert message.startswith("fork: sglang==1.0: expected one wheel from pip, got ")
    assert message.count("\n") == 1
    assert not (toy.layout.build / "tree").exists()


@pytest.mark.parametrize(
    ("host", "message"),
    [
        (Host("3.10", "linux", "x86_64", (2, 36)), "python: expected 3.11 or 3.12, got 3.10; run it with python3.12"),
        (Host("3.13", "linux", "x86_64", (2, 36)), "python: expected 3.11 or 3.12, got 3.13; run it with python3.12"),
        (Host("3.12", "linux", "aarch64", (2, 36)), "machine: expected linux x86_64, got linux aarch64; "),
        (Host("3.12", "darwin", "arm64", (0, 0)), "machine: expected linux x86_64, got darwin arm64; "),
        (Host("3.12", "linux", "x86_64", (2, 31)), "glibc: expected 2.34 or newer, got 2.31; "),
        (Host("3.12", "linux", "x86_64", (0, 0)), "glibc: expected 2.34 or newer, got another C library; "),
    ],
)
def test_names_a_host_without_a_wheel(repo_root: Path, host: Host, message: str) -> None:
    with pytest.raises(ForkError) as error:
        pin.load(repo_root / "sglang/UPSTREAM.toml").wheel_for(host)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_there_is_a_wheel_for_each_supported_python(repo_root: Path, python: str) -> None:
    wheel = pin.load(repo_root / "sglang/UPSTREAM.toml").wheel_for(Host(python, "linux", "x86_64", (2, 36)))
    assert wheel.tags[0] == f"cp{python.replace('.', '')}"


def test_an_old_python_gets_one_line_and_no_traceback(repo_root: Path) -> None:
    launcher = repo_root / "scripts/fork"
    code = f"import sys; sys.version_info = (3, 10, 4); exec(compile(open({str(launcher)!r}).read(), 'fork', 'exec'))"
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == "fork: python: expected 3.11 or 3.12, got 3.10; run it with python3.11 or python3.12\n"


def test_another_python_is_refused_in_one_line(toy: ToyCheckout, capsys: pytest.CaptureFixture[str]) -> None:
    assert toy.run("tree", "--python", "3.13") == 1
    assert capsys.readouterr().err.startswith("fork: python: expected ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "KeyError('wheel')"),
        ("version = ", "expected a complete pin"),
        ('[[wheel]]\npython = "3.11"\n', "sha256"),
    ],
)
def test_an_incomplete_pin_is_one_line(
    toy: ToyCheckout, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    toy.write("sglang/UPSTREAM.toml", text)
    assert toy.run("fetch") == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_damaged_zip_with_the_pinned_hash_is_one_line(toy: ToyCheckout, capsys: pytest.CaptureFixture[str]) -> None:
    (toy.index / wheel_name("1.0")).write_bytes(b"not a zip")
    toy.pin(digest(b"not a zip"))
    toy.layout.upstream.mkdir(parents=True)
    fetched(toy).write_bytes(b"not a zip")
    assert toy.run("tree") == 1
    assert "expected a wheel, got 'File is not a zip file'" in capsys.readouterr().err


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str], toy: ToyCheckout) -> None:
    with pytest.raises(SystemExit):
        toy.run("--help")
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 25
    for verb in ("fetch", "tree", "wheel", "lint", "table", "review", "refresh"):
        assert f"    {verb} " in text


def test_toy_files_are_what_the_wheel_holds(toy: ToyCheckout) -> None:
    assert toy.run("tree") == 0
    assert {name: toy.tree(name) for name in PRISTINE} == PRISTINE
