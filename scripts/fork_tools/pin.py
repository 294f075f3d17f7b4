# SPDX-License-Identifier: Apache-2.0
"""The pinned release: `sglang/UPSTREAM.toml` as types, and the choice of a wheel for a host."""

import platform
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fork_tools.errors import ForkError


@dataclass(frozen=True)
class Host:
    """What decides whether a wheel runs here. `glibc` is (0, 0) where there is none."""

    python: str
    system: str
    machine: str
    glibc: tuple[int, int]

    @classmethod
    def current(cls) -> "Host":
        """The running interpreter's host."""
        library, version = platform.libc_ver()
        major, minor = (int(part) for part in version.split(".")[:2]) if library == "glibc" else (0, 0)
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        return cls(python, platform.system().lower(), platform.machine(), (major, minor))


@dataclass(frozen=True)
class PinnedWheel:
    """One wheel file of the release."""

    python: str
    filename: str
    sha256: str

    @property
    def tags(self) -> tuple[str, str, str]:
        """Python, ABI and platform tag, from the file name."""
        python, abi, system = self.filename.removesuffix(".whl").split("-")[-3:]
        return python, abi, system

    @property
    def glibc(self) -> tuple[int, int]:
        """The oldest glibc that the wheel accepts."""
        major, minor = re.findall(r"manylinux_(\d+)_(\d+)_", self.filename)[0]
        return int(major), int(minor)


@dataclass(frozen=True)
class Pin:
    """The contents of UPSTREAM.toml."""

    name: str
    version: str
    tag: str
    revision: int
    licence: str
    requires: tuple[str, ...]
    wheels: tuple[PinnedWheel, ...]
    entry_points: Mapping[str, Mapping[str, str]]

    @property
    def fork_version(self) -> str:
        """The fork's version, with its local part: 0.5.17+sm120.1."""
        return f"{self.version}+sm120.{self.revision}"

    def wheel_for(self, host: Host) -> PinnedWheel:
        """The wheel that runs on `host`; raises ForkError when there is none."""
        pythons = " or ".join(wheel.python for wheel in self.wheels)
        if (host.system, host.machine) != ("linux", "x86_64"):
            raise ForkError(
                f"machine: expected linux x86_64, got {host.system} {host.machine}; "
                f"{self.name} {self.version} is pinned for that alone"
            )
        wheel = next((wheel for wheel in self.wheels if wheel.python == host.python), None)
        if wheel is None:
            remedy = f"run it with python{self.wheels[-1].python}"
            raise ForkError(f"python: expected {pythons}, got {host.python}; {remedy}")
        if host.glibc < wheel.glibc:
            expected = "{}.{}".format(*wheel.glibc)
            found = "{}.{}".format(*host.glibc) if any(host.glibc) else "another C library"
            raise ForkError(f"glibc: expected {expected} or newer, got {found}; use Debian 12, Ubuntu 22.04 or newer")
        return wheel


def load(path: Path) -> Pin:
    """Read UPSTREAM.toml; raises ForkError naming the field that is missing or malformed."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        wheels = tuple(PinnedWheel(**entry) for entry in table["wheel"])
        pin = Pin(
            name=table["name"],
            version=table["version"],
            tag=table["tag"],
            revision=table["revision"],
            licence=table["licence"],
            requires=tuple(table.get("requires", ())),
            wheels=wheels,
            entry_points=table.get("entry-points", {}),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ForkError(f"{path.name}: expected a complete pin, got {error!r}; see sglang/README.md") from error
    for wheel in wheels:
        if not re.fullmatch(r"[0-9a-f]{64}", wheel.sha256):
            raise ForkError(f"{path.name}: expected 64 hex digits for {wheel.filename}, got {wheel.sha256!r}")
    return pin
