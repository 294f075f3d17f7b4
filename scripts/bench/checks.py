# SPDX-License-Identifier: Apache-2.0
"""What the benchmark asks of the machine and of the release it compares with, before it loads anything."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from doctor_checks import CudaDriver, DriverError

PINNED: str = tomllib.loads((ROOT / "sglang" / "UPSTREAM.toml").read_text(encoding="utf-8"))["version"]
UNPACK = f"pip install --no-deps --target DIR sglang=={PINNED}"


class Refused(ValueError):
    """The benchmark cannot run so; the message is one line."""


def check_stock(folder: Path) -> None:
    """Errors: Refused unless `folder` holds the pinned release of SGLang and no other, the fork least of all.

    A server that finds no sglang there would take the installed one, which is the fork, and be measured as the release.
    """
    expected = f"--stock: expected a folder with sglang/ of {PINNED}"
    remedy = f"unpack it with {UNPACK}"
    if not (folder / "sglang" / "__init__.py").is_file():
        raise Refused(f"{expected}, got {folder} without sglang/__init__.py; {remedy}")
    # The fork keeps the release's own _version.py: its folder, and the local part of its version, tell it.
    if (folder / "sglang" / "srt" / "sm120").exists():
        raise Refused(f"{expected}, got the fork in {folder}; {remedy}")
    found = versions(folder)
    if found != {PINNED}:
        raise Refused(f"{expected}, got {' and '.join(sorted(found)) or 'one of no version'} in {folder}; {remedy}")


def versions(folder: Path) -> set[str]:
    """What the unpacked wheel in `folder` says of its version, in its own module and beside it."""
    found = {path.name.removesuffix(".dist-info").split("-", 1)[1] for path in folder.glob("sglang-*.dist-info")}
    module = folder / "sglang" / "_version.py"
    if module.is_file():
        found |= set(re.findall(r"^__version__ =.* '([^']+)'$", module.read_text(encoding="utf-8"), re.MULTILINE))
    return found


def check_device() -> None:
    """Errors: Refused where the driver shows no NVIDIA device."""
    driver = CudaDriver.load()
    try:
        cards = driver.cards() if driver else []
    except DriverError as error:
        raise Refused(f"expected an NVIDIA device, got {error}; run scripts/doctor") from None
    if not cards:
        raise Refused(
            "expected an NVIDIA device, got none; run it on a machine with one, scripts/doctor tells what is there"
        )
