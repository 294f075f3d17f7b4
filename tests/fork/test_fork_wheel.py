# SPDX-License-Identifier: Apache-2.0
"""The fork's wheel on a toy checkout: judged by the `wheel` tool, by pip and by importlib.metadata."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from toy import CPYTHON, PRISTINE, ToyCheckout, digest

TAGS = f"{CPYTHON}-{CPYTHON}-manylinux_2_17_x86_64"


def build(toy: ToyCheckout) -> Path:
    assert toy.run("wheel") == 0
    (path,) = (toy.layout.build / "dist").glob("*.whl")
    return path


def unpack(wheel: Path, folder: Path) -> Path:
    """Unpack with the `wheel` tool, which checks every line of RECORD."""
    subprocess.run([sys.executable, "-m", "wheel", "unpack", "--dest", str(folder), str(wheel)], check=True)
    (unpacked,) = folder.iterdir()
    return unpacked


def test_is_valid_and_names_the_fork(toy: ToyCheckout, tmp_path: Path) -> None:
    wheel = build(toy)
    assert wheel.name == f"sglang-1.0+sm120.3-{TAGS}.whl"
    unpacked = unpack(wheel, tmp_path / "unpacked")
    (info,) = unpacked.glob("*.dist-info")
    assert info.name == "sglang-1.0+sm120.3.dist-info"
    distribution = PathDistribution(info)
    assert distribution.version == "1.0+sm120.3"
    assert distribution.requires == ["a", "dill"]
    assert distribution.metadata["Name"] == "sglang"
    assert (info / "METADATA").read_text().endswith("\nRequires-Dist: dill\n\nText.\n")
    points = {(point.group, point.name, point.value) for point in distribution.entry_points}
    assert points == {
        ("console_scripts", "sglang", "sglang.main:Main"),
        ("sglang.platforms", "reference", "sglang.reference:activate"),
    }
    stamped = (unpacked / "sglang/_version.py").read_text()
    assert stamped == "version = '1.0+sm120.3'\nversion_tuple = (1, 0, 'sm120.3')\n"


def test_differs_from_the_tree_in_version_and_record_alone(toy: ToyCheckout, tmp_path: Path) -> None:
    toy.overlay("sglang/reference.py")
    assert toy.run("tree") == 0
    unpacked, tree = unpack(build(toy), tmp_path / "unpacked"), toy.layout.build / "tree"
    ours = {str(path.relative_to(unpacked)): path.read_bytes() for path in unpacked.rglob("*") if path.is_file()}
    theirs = {str(path.relative_to(tree)): path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    different = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    info = "sglang-1.0+sm120.3.dist-info"
    assert different == {"sglang/_version.py", f"{info}/RECORD", f"{info}/fork-stamp.json"}


def test_can_be_installed(toy: ToyCheckout, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(tmp_path / "site"), str(build(toy))], check=True)
    code = "import importlib.metadata, sglang; print(importlib.metadata.version('sglang'), sglang.answer)"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, check=True, cwd=tmp_path / "site", capture_output=True, text=True)
    assert result.stdout == "1.0+sm120.3 42\n"


def test_has_the_same_bytes_twice(toy: ToyCheckout, tmp_path: Path) -> None:
    toy.overlay("sglang/reference.py")
    first = build(toy)
    before = digest(first.read_bytes())
    first.unlink()
    assert digest(build(toy).read_bytes()) == before
    with zipfile.ZipFile(first) as archive:
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert archive.namelist() == sorted(archive.namelist())


def test_is_built_again_only_after_a_change(toy: ToyCheckout, capsys: pytest.CaptureFixture[str]) -> None:
    def outcome() -> str:
        build(toy)
        return capsys.readouterr().out.rsplit(" ", 1)[1].strip("()\n")

    assert [outcome(), outcome()] == ["written", "unchanged"]
    toy.overlay("sglang/reference.py")
    assert [outcome(), outcome()] == ["written", "unchanged"]
    build(toy).write_bytes(b"damaged")
    assert [outcome(), outcome()] == ["written", "unchanged"]


def test_keeps_the_permission_to_execute(toy: ToyCheckout) -> None:
    toy.overlay("sglang/tool.sh", "#!/bin/sh\n")
    (toy.layout.overlay / "sglang/tool.sh").chmod(0o755)
    with zipfile.ZipFile(build(toy)) as archive:
        assert archive.getinfo("sglang/tool.sh").external_attr >> 16 == 0o100755
        assert archive.getinfo("sglang/__init__.py").external_attr >> 16 == 0o100644


def test_refuses_an_entry_point_that_upstream_has(toy: ToyCheckout, capsys: pytest.CaptureFixture[str]) -> None:
    pinned = toy.layout.pin.read_text()
    toy.write("sglang/UPSTREAM.toml", pinned + '[entry-points.console_scripts]\nsglang = "sglang.ours:main"\n')
    assert toy.run("wheel") == 1
    assert "expected a new entry point in console_scripts, got sglang" in capsys.readouterr().err


def test_refuses_a_release_whose_version_file_it_does_not_know(
    toy: ToyCheckout, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.release({**PRISTINE, "sglang/_version.py": "version = read_tag()\n"})
    assert toy.run("wheel") == 1
    assert "sglang/_version.py: expected \"'1.0'\" once, got it 0 times" in capsys.readouterr().err
    assert list((toy.layout.build).glob("dist/*")) == []
