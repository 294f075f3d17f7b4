# SPDX-License-Identifier: Apache-2.0
"""Folders that are either complete or absent, and the lock that keeps two runs apart."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """An empty folder at `path`, gone afterwards; a leftover of a killed run is removed first."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def sibling(path: Path, suffix: str) -> Path:
    """A hidden name beside `path`, on the same file system, for work in progress."""
    return path.with_name(f".{path.name}.{suffix}")


def replace_folder(new: Path, target: Path) -> None:
    """Put the complete folder `new` in the place of `target`."""
    old = sibling(target, "old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`, waiting for another run to end."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".fork.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
