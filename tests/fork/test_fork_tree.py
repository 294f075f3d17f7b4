# SPDX-License-Identifier: Apache-2.0
"""The materialised tree on a toy checkout: its bytes, its refusals, and what a broken run leaves behind."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from toy import ENGINE, PRISTINE, ToyCheckout, digest, marked

from fork_tools import archive, tree

ROUTER = "python/sglang/router.py"


def fill(toy: ToyCheckout) -> None:
    """Three patches that share files, and an overlay file."""
    toy.overlay("sglang/reference.py", "# SPDX-License-Identifier: Apache-2.0\nactivate = None\n")
    toy.patch("core/first", {ENGINE: [(20, marked("core/first", "end = 1"))]})
    toy.patch("core/second", {ENGINE: [(0, marked("core/second", "top = 1", "top += 1"))]})
    toy.patch(
        "core/third", {ENGINE: [(5, marked("core/third", "five = 1"))], ROUTER: [(3, marked("core/third", "r = 1"))]}
    )


def content(folder: Path) -> dict[str, bytes]:
    """All files below a folder, except the tool's stamp."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != tree.STAMP
    }


def test_is_pristine_plus_overlay_plus_insertions(toy: ToyCheckout) -> None:
    fill(toy)
    assert toy.run("tree") == 0
    pristine = PRISTINE["sglang/engine.py"].splitlines()
    expected = ["top = 1  # sm120: core/second", "top += 1", *pristine[:5], "five = 1  # sm120: core/third"]
    assert toy.tree("sglang/engine.py").splitlines() == [*expected, *pristine[5:], "end = 1  # sm120: core/first"]
    assert toy.tree("sglang/router.py").splitlines()[3] == "r = 1  # sm120: core/third"
    assert toy.tree("sglang/reference.py").endswith("activate = None\n")
    assert toy.tree("sglang/__init__.py") == PRISTINE["sglang/__init__.py"]


def test_delta_is_what_the_tree_has_beyond_the_release(toy: ToyCheckout) -> None:
    fill(toy)
    toy.write("build/delta/sglang/stale.py", "")
    assert toy.run("tree") == 0 and toy.run("delta") == 0
    delta = content(toy.layout.build / "delta")
    assert sorted(delta) == ["sglang/engine.py", "sglang/reference.py", "sglang/router.py"]
    assert {name: toy.tree(name).encode() for name in delta} == delta


def test_carries_the_metadata_of_the_fork(toy: ToyCheckout) -> None:
    assert toy.run("tree") == 0
    info = "sglang-1.0+sm120.3.dist-info"
    assert "\nVersion: 1.0+sm120.3\n" in toy.tree(f"{info}/METADATA")
    assert "[sglang.platforms]\nreference = sglang.reference:activate\n" in toy.tree(f"{info}/entry_points.txt")
    assert "sglang = sglang.main:Main\n" in toy.tree(f"{info}/entry_points.txt")


def test_has_the_same_bytes_for_any_order_of_patches(toy: ToyCheckout) -> None:
    fill(toy)
    pristine = archive.read(toy.index / next(toy.index.iterdir()).name)
    patches = tree.read_patches(toy.layout)
    results = [tree.apply(pristine, order) for order in itertools.permutations(patches)]
    assert len(results) == 6
    assert all(result == results[0] for result in results)


def test_has_the_same_bytes_in_another_folder(toy: ToyCheckout) -> None:
    fill(toy)
    assert toy.run("tree") == toy.run("tree", "--out", str(toy.layout.build / "other")) == 0
    assert content(toy.layout.build / "tree") == content(toy.layout.build / "other")


def test_refuses_a_shifted_base(toy: ToyCheckout, capsys: pytest.CaptureFixture[str]) -> None:
    fill(toy)
    shifted = "import os\nimport sys\n" + PRISTINE["sglang/engine.py"]
    toy.release({**PRISTINE, "sglang/engine.py": shifted})
    assert toy.run("tree") == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    for part in (ENGINE, digest(PRISTINE["sglang/engine.py"]), digest(shifted)):
        assert part in message
    assert not (toy.layout.build / "tree").exists()


def test_refuses_a_file_that_is_not_the_recorded_one(toy: ToyCheckout, capsys: pytest.CaptureFixture[str]) -> None:
    fill(toy)
    toy.release(PRISTINE, wrong_record="sglang/engine.py")
    assert toy.run("tree") == 1
    assert f"{ENGINE}: expected sha256=" in capsys.readouterr().err


def test_refuses_a_patch_of_a_file_that_is_not_there(toy: ToyCheckout, capsys: pytest.CaptureFixture[str]) -> None:
    toy.pristine["sglang/gone.py"] = "x\n"
    toy.patch("core/lost", {"python/sglang/gone.py": [(1, marked("core/lost", "y"))]})
    assert toy.run("tree") == 1
    assert "core/lost.patch: expected a file of the release, got python/sglang/gone.py" in capsys.readouterr().err


def test_refuses_two_hunks_at_one_anchor(toy: ToyCheckout, capsys: pytest.CaptureFixture[str]) -> None:
    fill(toy)
    toy.patch("core/twin", {ENGINE: [(5, marked("core/twin", "twin = 1"))]})
    assert toy.run("tree") == 1
    assert f"{ENGINE}: expected one hunk after line 5, got core/third and core/twin" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("sglang/engine.py", "sglang/engine.py"),
        ("sglang/engine/__init__.py", "sglang/engine.py"),
        ("sglang/layers.py", "sglang/layers/__init__.py"),
        ("sglang/engine.py/data.json", "sglang/engine.py"),
        ("sglang/layers", "sglang/layers"),
        ("sglang/engine.cpython-311-x86_64-linux-gnu.so", "sglang/engine.py"),
    ],
)
def test_refuses_an_overlay_file_that_hides_an_upstream_one(
    toy: ToyCheckout, capsys: pytest.CaptureFixture[str], name: str, hidden: str
) -> None:
    toy.overlay(name)
    assert toy.run("tree") == 1
    assert (
        f"sglang/python/{name}: expected a new path, got a clash with upstream's {hidden};" in capsys.readouterr().err
    )


def test_is_written_again_only_after_a_change(toy: ToyCheckout, capsys: pytest.CaptureFixture[str]) -> None:
    def outcome() -> str:
        assert toy.run("tree") == 0
        return capsys.readouterr().out.rsplit(" ", 1)[1].strip("()\n")

    fill(toy)
    assert [outcome(), outcome()] == ["written", "unchanged"]
    toy.overlay("sglang/reference.py", "# another text\n")
    assert [outcome(), outcome()] == ["written", "unchanged"]
    (toy.layout.patches / "core/first.patch").unlink()
    assert [outcome(), outcome()] == ["written", "unchanged"]
    (toy.layout.build / "tree/sglang/engine.py").write_text("edited by hand\n")
    assert [outcome(), outcome()] == ["written", "unchanged"]
    (toy.layout.build / "tree/sglang/router.py").unlink()
    assert [outcome(), outcome()] == ["written", "unchanged"]


def test_never_replaces_a_folder_of_somebody_else(
    toy: ToyCheckout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("years of work")
    assert toy.run("tree", "--out", str(tmp_path / "thesis")) == 1
    assert "move it away" in capsys.readouterr().err
    assert (tmp_path / "thesis" / "chapter").read_text() == "years of work"


@pytest.mark.parametrize("earlier", [False, True], ids=["first run", "tree is there"])
def test_an_interrupted_run_leaves_no_half_tree(
    toy: ToyCheckout, monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    fill(toy)
    build = toy.layout.build
    if earlier:
        assert toy.run("tree") == 0
        toy.overlay("sglang/reference.py", "changed = 1\n")
    before = content(build / "tree")
    write_bytes, written = Path.write_bytes, []

    def interrupted(path: Path, data: bytes) -> int:
        written.append(path)
        if len(written) == 4:
            raise KeyboardInterrupt
        return write_bytes(path, data)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", interrupted)
        assert toy.run("tree") == 130
    assert (build / "tree").exists() == earlier
    assert content(build / "tree") == before
    assert {path.name for path in build.iterdir()} <= {"tree", "upstream", ".fork.lock"}
    assert toy.run("tree") == 0


def test_the_leftovers_of_a_killed_run_do_no_harm(toy: ToyCheckout) -> None:
    fill(toy)
    for name in (".tree.partial/sglang", ".tree.old/sglang"):
        (toy.layout.build / name).mkdir(parents=True)
        (toy.layout.build / name / "half.py").write_text("half")
    assert toy.run("tree") == 0
    assert not (toy.layout.build / "tree/sglang/half.py").exists()
    assert {path.name for path in toy.layout.build.iterdir()} == {"tree", "upstream", ".fork.lock"}
