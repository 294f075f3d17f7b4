# SPDX-License-Identifier: Apache-2.0
"""docker/prune.py: what it takes out of an environment, and that it refuses when something asks for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO_ROOT / "docker"))

import prune


def compile_library(path: Path, *link: Path) -> None:
    """A library whose name is its file's, linked with others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["g++", "-shared", "-x", "c", "/dev/null", "-o", str(path), f"-Wl,-soname,{path.name},--no-as-needed"]
    subprocess.run([*command, "-x", "none", *map(str, link)], check=True)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with one library that nothing links and one folder."""
    monkeypatch.setattr(
        prune,
        "ENTRIES",
        (
            prune.Entry("lib/libspare.so.*", "never loaded", "libspare", ("catalogue.py",)),
            prune.Entry("other/folder", "for other cards", "other/folder"),
        ),
    )
    compile_library(tmp_path / "lib" / "libspare.so.1")
    compile_library(tmp_path / "lib" / "libused.so.1")
    compile_library(tmp_path / "lib" / "libuser.so.1", tmp_path / "lib" / "libused.so.1")
    (tmp_path / "other" / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "other" / "folder" / "deep" / "file").write_text("12345")
    (tmp_path / "catalogue.py").write_text("ALL = ['libspare']")
    return tmp_path


def run(site: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["prune.py", str(site)])
    return prune.main()


def files(site: Path) -> set[str]:
    return {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}


def test_links_are_read_as_the_linker_wrote_them(site: Path) -> None:
    assert "libused.so.1" in prune.needed(site / "lib" / "libuser.so.1")
    assert "libused.so.1" not in prune.needed(site / "lib" / "libspare.so.1")
    assert prune.needed(site / "catalogue.py") == set()


def test_what_nothing_asks_for_goes(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(site, monkeypatch) == 0
    assert files(site) == {"lib/libused.so.1", "lib/libuser.so.1", "catalogue.py"}


def check_refusal(site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str) -> None:
    before = files(site)
    assert run(site, monkeypatch) == 1
    assert capsys.readouterr().err == f"prune: {line}\n"
    assert files(site) == before


def test_a_link_forbids_it(site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    compile_library(site / "lib" / "liblate.so", site / "lib" / "libspare.so.1")
    check_refusal(site, monkeypatch, capsys, "lib/liblate.so: expected not to link libspare.so.1, got a link; keep it")


def test_a_second_copy_of_the_library_serves_the_link(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_library(site / "second" / "libspare.so.1")
    compile_library(site / "lib" / "liblate.so", site / "second" / "libspare.so.1")
    assert run(site, monkeypatch) == 0


def test_a_mention_forbids_it(site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "loader.py").write_text("ctypes.CDLL('libspare.so.1')")
    line = "loader.py: expected no mention of libspare, got one; find out whether it loads lib/libspare.so.*"
    check_refusal(site, monkeypatch, capsys, line)


def test_an_entry_without_files_is_refused(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / "other" / "folder" / "deep" / "file").unlink()
    check_refusal(site, monkeypatch, capsys, "other/folder: expected files, got none; correct or drop it")
