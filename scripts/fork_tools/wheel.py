# SPDX-License-Identifier: Apache-2.0
"""The fork's wheel: the tree with its version stamped in and a RECORD, as reproducible bytes."""

import json
from pathlib import Path

from fork_tools import archive
from fork_tools.archive import Entry
from fork_tools.fetch import sha256_of
from fork_tools.files import sibling
from fork_tools.layout import Layout
from fork_tools.metadata import VERSION_FILE, stamp_version
from fork_tools.pin import Pin, PinnedWheel
from fork_tools.tree import inputs_digest, materialise


def wheel_name(pin: Pin, wheel: PinnedWheel) -> str:
    """File name of the fork's wheel: sglang-0.5.17+sm120.1-<tags>.whl."""
    return f"{pin.name}-{pin.fork_version}-{'-'.join(wheel.tags)}.whl"


def build_wheel(layout: Layout, pin: Pin, wheel: PinnedWheel, upstream: Path) -> tuple[Path, bool]:
    """Write the fork's wheel to build/dist; returns its path, and False when it was there already, unchanged."""
    target = layout.build / "dist" / wheel_name(pin, wheel)
    stamp = target.with_suffix(".json")
    inputs = inputs_digest(layout, wheel.sha256)
    if target.is_file() and stamp.is_file() and stamp.read_text() == _stamp(inputs, target):
        return target, False
    files = materialise(layout, pin, upstream)
    files[VERSION_FILE] = Entry(stamp_version(pin, files[VERSION_FILE].data.decode()).encode())
    record = f"{archive.dist_info(files)}/RECORD"
    files[record] = Entry(archive.write_record(files, record))
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = sibling(target, "partial")
    try:
        archive.write(partial, files)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    stamp.write_text(_stamp(inputs, target))
    return target, True


def _stamp(inputs: str, target: Path) -> str:
    return json.dumps({"inputs": inputs, "sha256": sha256_of(target)}) + "\n"
