# SPDX-License-Identifier: Apache-2.0
"""The pinned wheel, by name from the package index that pip is configured for."""

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fork_tools.errors import ForkError
from fork_tools.files import scratch_folder
from fork_tools.layout import Layout
from fork_tools.pin import Pin, PinnedWheel


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_valid(path: Path, wheel: PinnedWheel) -> bool:
    """True when `path` holds exactly the pinned bytes."""
    return path.is_file() and sha256_of(path) == wheel.sha256


def fetch(layout: Layout, pin: Pin, wheel: PinnedWheel) -> Path:
    """Return the pinned wheel in build/upstream, downloading it unless a valid copy is there.

    Raises ForkError when the download fails or has another sha256; then nothing is kept.
    """
    target = layout.upstream / wheel.filename
    if is_valid(target, wheel):
        return target
    _, abi, system = wheel.tags
    options = ["--implementation", "cp", "--python-version", wheel.python, "--abi", abi, "--platform", system]
    with scratch_folder(layout.upstream / ".download") as scratch:
        download = pip_download(f"{pin.name}=={pin.version}", options, scratch)
        found = sha256_of(download)
        if download.name != wheel.filename or found != wheel.sha256:
            raise ForkError(
                f"{wheel.filename}: expected sha256 {wheel.sha256}, got {found} ({download.name}); "
                "use another index, or correct the pin in sglang/UPSTREAM.toml"
            )
        download.replace(target)
    return target


def pip_download(requirement: str, options: Sequence[str], folder: Path) -> Path:
    """Download the one wheel that `requirement` names into an empty `folder`; returns its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", *options, "--dest", str(folder), requirement]
    result = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    found = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(found) != 1:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or ["no message from pip"]
        remedy = "give this Python pip" if "No module named pip" in lines[-1] else "check the network and pip's index"
        raise ForkError(f"{requirement}: expected one wheel from pip, got '{lines[-1]}'; {remedy}")
    return found[0]
