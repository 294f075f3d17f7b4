# SPDX-License-Identifier: Apache-2.0
"""Where the packages come from and what the image carries: locks for both Pythons, bill of materials, licences."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPO_ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO_ROOT / "docker"))

import inventory

REQUIREMENTS = REPO_ROOT / "scripts" / "requirements"
LOCKS = sorted(path.name for path in REQUIREMENTS.glob("*.txt"))
PYTHONS = ("3.11", "3.12")
OURS = {"sglang", "sgl-kernel-sm120"}


def entries(lock: str) -> list[tuple[Requirement, int]]:
    """Requirements of a lock with the number of their hashes."""
    text = (REQUIREMENTS / lock).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return [
        (Requirement(line.split("--hash")[0].strip()), len(re.findall("--hash=sha256:[0-9a-f]{64}", line)))
        for line in lines
    ]


def pins(lock: str, python: str) -> Counter[tuple[str, str]]:
    """Name and version of what a lock installs on Linux with this Python."""
    machine = {"python_version": python, "python_full_version": f"{python}.1", "implementation_name": "cpython"}
    machine |= {"platform_machine": "x86_64", "sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
    machine |= {"platform_python_implementation": "CPython"}
    found: Counter[tuple[str, str]] = Counter()
    for requirement, _ in entries(lock):
        if requirement.marker is None or requirement.marker.evaluate(machine):
            (pin,) = requirement.specifier
            assert pin.operator == "==", requirement
            found[canonicalize_name(requirement.name), pin.version] += 1
    return found


def test_all_locks_are_looked_at() -> None:
    assert LOCKS == ["audit.txt", "cpu.txt", "cuda.txt", "installer.txt", "test.txt"]


@pytest.mark.parametrize("lock", LOCKS)
def test_every_requirement_has_hashes(lock: str) -> None:
    assert entries(lock)
    assert [str(requirement) for requirement, hashes in entries(lock) if hashes == 0] == []
    assert not re.search(
        r"^\s*(-e|--index-url|--extra-index-url|--find-links)|://(?!\S*# via)",
        (REQUIREMENTS / lock).read_text(),
        re.MULTILINE,
    )


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("lock", LOCKS)
def test_each_python_gets_one_version_of_each_package(lock: str, python: str) -> None:
    names = Counter(name for name, _ in pins(lock, python))
    assert [name for name, count in names.items() if count > 1] == []
    other = {name for name, _ in pins(lock, PYTHONS[1 - PYTHONS.index(python)])}
    # What one Python needs, the other does too; what is in one alone stands for a module of the other's library.
    assert set(names) ^ other == set()


def bill() -> list[dict[str, str]]:
    components: list[dict[str, str]] = json.loads((REPO_ROOT / "docker" / "sbom.json").read_text())["components"]
    return components


def test_the_bill_is_what_the_lock_installs() -> None:
    listed = {
        (canonicalize_name(one["name"]), one["version"])
        for one in bill()
        if "purl" not in one or one["purl"].startswith("pkg:pypi/")
    }
    assert {one for one in listed if one[0] not in OURS} == set(pins("cuda.txt", "3.11"))
    assert OURS <= {name for name, _ in listed}


def test_the_bill_has_debian_s_packages() -> None:
    names = {one["name"] for one in bill() if one.get("purl", "").startswith("pkg:deb/debian/")}
    assert {"g++", "python3", "libc6", "tini", "ca-certificates"} <= names


def test_every_package_has_a_row_of_licences() -> None:
    page = (REPO_ROOT / "docker" / "LICENSES.md").read_text()
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (.+) \|$", page, flags=re.MULTILINE)
    assert {row[:2] for row in rows} - {("package", "version")} == {(one["name"], one["version"]) for one in bill()}
    unnamed = {name for name, _, licence in rows if licence == inventory.UNNAMED}
    # Wheels that hold neither a licence's name nor its text.
    told = re.search(r"^These neither name a licence nor hold the text of one: (.+)\.$", page, flags=re.MULTILINE)
    assert unnamed == set(re.findall(r"`([^`]+)`", told[1] if told else ""))


def test_licences_of_a_python_package() -> None:
    def component(*licences: dict[str, object]) -> dict[str, object]:
        return {"licenses": list(licences)}

    assert inventory.declared(component({"license": {"id": "MIT"}})) == ["MIT"]
    assert inventory.declared(component({"expression": "MIT OR Apache-2.0"})) == ["MIT OR Apache-2.0"]
    classifier = {"license": {"name": "License :: OSI Approved :: BSD License"}}
    assert inventory.declared(component(classifier, {"license": {"id": "BSD-3-Clause"}})) == [
        "BSD License",
        "BSD-3-Clause",
    ]
    text = "Copyright\nApache License\nVersion 2.0\n" + "x" * 200
    assert inventory.declared(component({"license": {"name": text}})) == ["Apache License"]
    assert inventory.declared(component({"license": {"name": "UNKNOWN"}})) == []


def test_licence_from_a_package_s_files(tmp_path: Path) -> None:
    info = tmp_path / "some_name-1.0.dist-info" / "licenses"
    info.mkdir(parents=True)
    metadata = info.parent / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: some_name\nLicense: Copyright (c) Somebody\n")
    assert inventory.from_files(tmp_path, "some.name") == ""
    (info / "LICENSE").write_text("MIT License\n\nCopyright")
    assert inventory.from_files(tmp_path, "Some-Name") == "MIT License"
    (info / "LICENSE").write_text("Copyright\n\nRedistribution and use in source\nand binary forms, with or without")
    assert inventory.from_files(tmp_path, "some_name") == "BSD License"
    metadata.write_text("Metadata-Version: 2.1\nName: some_name\nLicense: Public Domain\n")
    assert inventory.from_files(tmp_path, "some_name") == "Public Domain"
    assert inventory.from_files(tmp_path, "name") == ""


def test_licences_of_a_debian_package() -> None:
    assert inventory.of_debian("Files: *\nLicense: GPL-2+\n\nFiles: a\nLicense: Expat\n") == ["Expat", "GPL-2+"]
    assert inventory.of_debian("On Debian see /usr/share/common-licenses/LGPL-2.1.") == ["LGPL-2.1"]
    assert inventory.of_debian("in the public domain") == []
