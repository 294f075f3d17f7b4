# SPDX-License-Identifier: Apache-2.0
"""The fork itself: the real patches and overlay on the pinned wheel, which is fetched when it is not at hand."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from fork_tools import cli, lint, patch, pin, tree
from fork_tools.fetch import fetch
from fork_tools.layout import Layout


def content(folder: Path) -> dict[str, str]:
    """Digest of every file below a folder, by path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and ".git" not in path.relative_to(folder).parts
    }


@pytest.fixture(scope="module")
def pristine(repo_root: Path) -> Path:
    """The pinned wheel for the running Python."""
    layout = Layout(repo_root)
    release = pin.load(layout.pin)
    return fetch(layout, release, release.wheel_for(pin.Host.current()))


@pytest.fixture(scope="module")
def checkout(repo_root: Path, pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository's inputs with build folders of its own, and a tree in them."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("sglang", "patches"):
        shutil.copytree(repo_root / name, root / name)
    (root / "build").mkdir()
    (root / "build/upstream").symlink_to(pristine.parent)
    assert cli.main(["--root", str(root), "tree"]) == 0
    return root


def test_every_insertion_stands_in_the_tree_once(checkout: Path) -> None:
    patches = tree.read_patches(Layout(checkout))
    assert patches
    for one in patches:
        for path in one.base:
            patched = (checkout / "build/tree" / path.removeprefix("python/")).read_bytes()
            hunks = [insertion for insertion in one.insertions if insertion.path == path]
            assert patched.count(one.marker.encode() + b"\n") == len(hunks)
            for insertion in hunks:
                assert patched.count("\n".join(["", *insertion.lines, ""]).encode()) == 1


def test_without_its_insertions_the_tree_is_pristine(checkout: Path, pristine: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(pristine), str(tmp_path)], check=True)
    overlay = content(checkout / "sglang/python")
    ours = content(checkout / "build/tree")
    theirs = content(tmp_path)
    patched = {path.removeprefix("python/") for one in tree.read_patches(Layout(checkout)) for path in one.base}
    changed = {name for name in theirs if ours.get(name) != theirs[name] and ".dist-info/" not in name}
    assert changed == patched
    added = {name for name in ours.keys() - theirs.keys() if ".dist-info/" not in name}
    assert added == {name for name in overlay if "__pycache__" not in name}
    for name in patched:
        lines = iter((checkout / "build/tree" / name).read_bytes().split(b"\n"))
        assert all(line in lines for line in (tmp_path / name).read_bytes().split(b"\n")), f"{name} lost a line"


def test_the_tree_has_the_same_bytes_twice(checkout: Path) -> None:
    again = checkout / "build/again"
    assert cli.main(["--root", str(checkout), "tree", "--out", str(again)]) == 0
    different = dict(content(again).items() ^ content(checkout / "build/tree").items())
    assert {Path(name).name for name in different} <= {tree.STAMP}


def test_patched_files_are_valid_python(checkout: Path) -> None:
    for one in tree.read_patches(Layout(checkout)):
        for path in one.base:
            source = checkout / "build/tree" / path.removeprefix("python/")
            compile(source.read_bytes(), str(source), "exec", dont_inherit=True)


def test_there_are_few_hunks(checkout: Path) -> None:
    hunks = [insertion for one in tree.read_patches(Layout(checkout)) for insertion in one.insertions]
    assert len(hunks) <= lint.MAX_HUNKS
    assert max(len(insertion.lines) for insertion in hunks) <= patch.MAX_ADDED_LINES


def test_lint_is_clean(repo_root: Path, pristine: Path) -> None:
    assert lint.lint(Layout(repo_root), pristine, hashlib.sha256(pristine.read_bytes()).hexdigest()) == []


def test_the_wheel_is_valid_and_has_the_same_bytes_twice(checkout: Path, tmp_path: Path) -> None:
    digests = set()
    for _ in range(2):
        assert cli.main(["--root", str(checkout), "wheel"]) == 0
        (wheel,) = (checkout / "build/dist").glob("*.whl")
        digests.add(hashlib.sha256(wheel.read_bytes()).hexdigest())
        wheel = wheel.rename(tmp_path / wheel.name)
    assert len(digests) == 1
    subprocess.run([sys.executable, "-m", "wheel", "unpack", "--dest", str(tmp_path / "all"), str(wheel)], check=True)
    (info,) = (tmp_path / "all").glob("*/*.dist-info")
    release = pin.load(checkout / "sglang/UPSTREAM.toml")
    distribution = PathDistribution(info)
    assert distribution.version == release.fork_version
    assert set(release.requires) <= set(distribution.requires or ())
    points = {(point.group, point.name, point.value) for point in distribution.entry_points}
    for group, added in release.entry_points.items():
        assert {(group, name, target) for name, target in added.items()} <= points


@pytest.fixture(scope="module")
def upstream(checkout: Path, pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A repository with the pinned release, and the review series beside it; the result runs git there."""
    assert cli.main(["--root", str(checkout), "review"]) == 0
    root = tmp_path_factory.mktemp("upstream")
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(pristine), str(root / "python")], check=True)

    def git(*arguments: str) -> Path:
        identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
        subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True)
        return root / "python"

    git("init", "--quiet", "--initial-branch=release")
    git("add", "--force", ".")
    git("commit", "--quiet", "-m", "release")
    return git


def mails(folder: Path) -> list[str]:
    """The mails below a folder in order, without the cover letters."""
    return sorted(str(path) for path in folder.rglob("*.patch") if path.name != "0000-cover-letter.patch")


def test_all_series_in_order_give_the_tree_by_git_am(checkout: Path, upstream: Callable[..., Path]) -> None:
    upstream("checkout", "--quiet", "-b", "all", "release")
    python = upstream("am", "--quiet", *mails(checkout / "build/review"))
    applied, built = content(python), content(checkout / "build/tree")
    assert {name: code for name, code in applied.items() if ".dist-info/" not in name} == {
        name: code for name, code in built.items() if ".dist-info/" not in name
    }


def test_each_series_applies_to_the_release_alone(checkout: Path, upstream: Callable[..., Path]) -> None:
    for series in sorted((checkout / "build/review").iterdir()):
        upstream("checkout", "--quiet", "--detach", "release")
        upstream("am", "--quiet", *mails(series))
