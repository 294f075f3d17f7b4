# SPDX-License-Identifier: Apache-2.0
"""The series with full context, and the series on another release, on a toy checkout."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from toy import ENGINE, PRISTINE, ToyCheckout, digest, marked

from fork_tools import patch
from fork_tools.errors import ForkError
from fork_tools.refresh import require_merge_tree

ROUTER = "python/sglang/router.py"
LICENCE = "# SPDX-License-Identifier: Apache-2.0\n"


def fill(toy: ToyCheckout) -> None:
    """Two series and one of files alone: a patch that calls an overlay module, one that touches two files."""
    toy.overlay("sglang/reference.py", f"{LICENCE}from sglang.extra.early import activate\n")
    toy.overlay("sglang/extra/__init__.py", LICENCE)
    toy.overlay("sglang/extra/late.py", f"{LICENCE}def late():\n    from sglang.extra import deep\n")
    toy.overlay("sglang/extra/deep.py", f"{LICENCE}import math\n")
    toy.overlay("sglang/extra/early.py", LICENCE)
    call = marked("core/late", "from sglang.extra.late import late", "late()")
    toy.patch("core/late", {ENGINE: [(15, call)]})
    toy.heading("second")
    early = marked("core/early", "import sglang.extra.deep, sglang.extra.early")
    toy.patch("core/early", {ENGINE: [(5, early)], ROUTER: [(3, marked("core/early", "r = 1"))]})
    toy.heading("rest")


def mails(toy: ToyCheckout) -> list[Path]:
    """The mails of all series in order, without the cover letters."""
    return sorted(path for path in (toy.layout.build / "review").glob("*/*") if path.name != "0000-cover-letter.patch")


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def pristine_repository(folder: Path) -> None:
    """The toy release as upstream's own repository would hold it."""
    for name, text in PRISTINE.items():
        (folder / "python" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "python" / name).write_text(text)
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "release")


def test_review_applies_with_git_am_and_gives_the_tree(toy: ToyCheckout, tmp_path: Path) -> None:
    fill(toy)
    assert toy.run("tree") == toy.run("review") == 0
    assert [str(path.relative_to(toy.layout.build / "review")) for path in mails(toy)] == [
        "01-toy/0001-core-insert-a-few-lines.patch",
        "02-second/0001-core-insert-a-few-lines.patch",
        "03-rest/0001-rest-make-it-better.patch",
    ]
    pristine_repository(tmp_path / "upstream")
    git(tmp_path / "upstream", "am", *map(str, mails(toy)))
    applied = {
        str(path.relative_to(tmp_path / "upstream/python")): path.read_bytes()
        for path in (tmp_path / "upstream/python").rglob("*")
        if path.is_file()
    }
    tree = toy.layout.build / "tree"
    built = {str(path.relative_to(tree)): path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    assert applied == {name: data for name, data in built.items() if ".dist-info/" not in name}
    subjects = git(tmp_path / "upstream", "log", "--format=%s", "-3").splitlines()
    assert subjects == ["rest: make it better", "core: insert a few lines", "core: insert a few lines"]
    body = git(tmp_path / "upstream", "log", "-1", "--skip=1", "--format=%an <%ae>%n%b")
    assert body.startswith("A Maintainer <maintainer@example.org>\nWhy: The toy needs them,")
    assert "\nRemove-when: the toy is grown up\n" in body and "Base:" not in body


def test_each_series_brings_the_files_that_it_calls_first(toy: ToyCheckout) -> None:
    fill(toy)
    assert toy.run("review") == 0
    brought = [re.findall(r"^ create mode \d+ python/(.*)$", path.read_text(), re.MULTILINE) for path in mails(toy)]
    assert brought == [
        ["sglang/extra/__init__.py", "sglang/extra/deep.py", "sglang/extra/late.py"],
        ["sglang/extra/early.py"],
        ["sglang/reference.py"],
    ]


def test_a_series_has_a_letter_that_names_what_it_needs(toy: ToyCheckout) -> None:
    fill(toy)
    assert toy.run("review") == 0
    first, second, last = sorted((toy.layout.build / "review").glob("*/0000-cover-letter.patch"))
    assert "\nSubject: [PATCH 0/1] toy: make it better\n\n## What is wrong\nIt is small.\n" in first.read_text()
    assert "Applies to v1.0.\n\n" in first.read_text() and "***" not in first.read_text()
    assert (
        "Applies to v1.0.\nIt calls files that come with the series 'toy':\n"
        "  python/sglang/extra/__init__.py\n  python/sglang/extra/deep.py\n\n"
    ) in second.read_text()
    assert "series 'second':\n  python/sglang/extra/early.py\n" in last.read_text()


def test_a_file_that_nothing_calls_needs_a_series(toy: ToyCheckout, capsys: pytest.CaptureFixture[str]) -> None:
    toy.overlay("sglang/reference.py", LICENCE)
    toy.patch("core/late", {ENGINE: [(15, marked("core/late", "late = 1"))]})
    assert toy.run("review") == 1
    assert capsys.readouterr().err.startswith(
        "fork: sglang/python/sglang/reference.py: expected a patch that calls it, got none; end patches/series with "
    )


def test_review_shows_context_and_is_the_same_every_time(toy: ToyCheckout) -> None:
    fill(toy)
    assert toy.run("review") == 0
    first = {path: path.read_bytes() for path in (toy.layout.build / "review").glob("*/*")}
    late = mails(toy)[0].read_text()
    added = "+from sglang.extra.late import late  # sm120: core/late\n+late()\n"
    assert f"\n step_15 = 15 * scale\n{added} step_16 = 16 * scale\n" in late
    assert toy.run("review") == 0
    assert first == {path: path.read_bytes() for path in (toy.layout.build / "review").glob("*/*")}


def test_review_needs_a_series_that_is_right(toy: ToyCheckout, capsys: pytest.CaptureFixture[str]) -> None:
    fill(toy)
    toy.write("patches/series", "# toy\ncore/late.patch\n")
    assert toy.run("review") == 1
    assert capsys.readouterr().err.startswith("fork: patches/series: expected each patch once")
    assert {path.name for path in toy.layout.build.iterdir()} == {"upstream", ".fork.lock"}


def next_release(**changes: str) -> dict[str, str]:
    """The next toy release: two lines more at the top of the engine, and the given files instead of others."""
    files = {**PRISTINE, "sglang/engine.py": "scale = 2\nlimit = 9\n" + PRISTINE["sglang/engine.py"]}
    return files | {name.replace("__", "/") + ".py": text for name, text in changes.items()}


def test_refresh_moves_hunks_to_where_their_neighbours_went(
    toy: ToyCheckout, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(toy)
    before = {path: path.read_bytes() for path in toy.layout.patches.rglob("*") if path.is_file()}
    files = next_release()
    wheel = toy.release(files, version="1.1", pin=False)
    assert toy.run("refresh", "1.1") == 0
    output = capsys.readouterr().out
    assert f"{wheel.name} sha256:{digest(wheel.read_bytes())}\n" in output
    assert "hunks: 3 of 3 merged, 0 by hand\npatches: 2 of 2 written\n" in output
    assert before == {path: path.read_bytes() for path in toy.layout.patches.rglob("*") if path.is_file()}
    text = (toy.layout.build / "refresh/patches/core/late.patch").read_text()
    moved = patch.parse("core/late", text)
    assert moved.insertions[0].after == 17 and "@@ -17,0 +18,2 @@\n" in text
    assert moved.base == {ENGINE: digest(files["sglang/engine.py"])}
    assert patch.problems(moved) == []


def test_refreshed_patches_build_a_tree_of_the_other_release(toy: ToyCheckout) -> None:
    fill(toy)
    files = next_release()
    toy.release(files, version="1.1", pin=False)
    assert toy.run("refresh", "1.1") == 0
    for path in (toy.layout.build / "refresh/patches").rglob("*.patch"):
        (toy.layout.patches / path.relative_to(toy.layout.build / "refresh/patches")).write_text(path.read_text())
    files["sglang/_version.py"] = files["sglang/_version.py"].replace("1.0", "1.1").replace("1, 0", "1, 1")
    toy.release(files, version="1.1")
    assert toy.run("tree") == 0
    lines = toy.tree("sglang/engine.py").splitlines()
    assert lines[6:8] == ["step_5 = 5 * scale", "import sglang.extra.deep, sglang.extra.early  # sm120: core/early"]
    assert lines[17:20] == ["step_15 = 15 * scale", "from sglang.extra.late import late  # sm120: core/late", "late()"]


def test_refresh_follows_a_file_that_was_renamed(toy: ToyCheckout) -> None:
    fill(toy)
    files = next_release(sglang__core__routing=PRISTINE["sglang/router.py"])
    del files["sglang/router.py"]
    toy.release(files, version="1.1", pin=False)
    assert toy.run("refresh", "1.1") == 0
    moved = patch.parse("core/early", (toy.layout.build / "refresh/patches/core/early.patch").read_text())
    assert [(insertion.path, insertion.after) for insertion in moved.insertions] == [
        ("python/sglang/core/routing.py", 3),
        (ENGINE, 7),
    ]


def test_refresh_lists_what_needs_a_hand_and_writes_no_half_patch(
    toy: ToyCheckout, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(toy)
    rewritten = PRISTINE["sglang/router.py"].replace("route_3 = table[3]", "route_3 = lookup(3)")
    toy.release(next_release(sglang__router=rewritten, sglang__reference="x = 1\n"), version="1.1", pin=False)
    assert toy.run("refresh", "1.1") == 0
    output = capsys.readouterr().out
    assert "hunks: 2 of 3 merged, 1 by hand\npatches: 1 of 2 written\n" in output
    assert f"by hand: {ROUTER}:3 (core/early): content conflict\n" in output
    assert "overlay: sglang/python/sglang/reference.py: expected a new path" in output
    written = [path.name for path in (toy.layout.build / "refresh").rglob("*.patch")]
    assert written == ["late.patch"]


def test_refresh_names_a_file_that_is_gone(toy: ToyCheckout, capsys: pytest.CaptureFixture[str]) -> None:
    fill(toy)
    files = next_release()
    del files["sglang/router.py"]
    toy.release(files, version="1.1", pin=False)
    assert toy.run("refresh", "1.1") == 0
    assert f"by hand: {ROUTER}:3 (core/early): modify/delete conflict\n" in capsys.readouterr().out


def test_refresh_to_a_release_that_does_not_exist_is_one_line(
    toy: ToyCheckout, capsys: pytest.CaptureFixture[str]
) -> None:
    assert toy.run("refresh", "9.9") == 1
    message = capsys.readouterr().err
    assert message.startswith("fork: sglang==9.9: expected one wheel from pip, got ")
    assert message.count("\n") == 1


def test_refresh_needs_a_git_that_merges_without_a_work_tree() -> None:
    require_merge_tree("git version 2.38.0")
    with pytest.raises(ForkError, match="expected 2.38 or newer for refresh, got 2.34.1"):
        require_merge_tree("git version 2.34.1")
