# SPDX-License-Identifier: Apache-2.0
"""Wheel files as mappings from path to content, read and written reproducibly."""

import base64
import csv
import hashlib
import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fork_tools.errors import ForkError

# Every file in a wheel of ours carries this date, the oldest that a zip archive can hold.
SOURCE_DATE = (1980, 1, 1, 0, 0, 0)
_REGULAR_FILE = 0o100000
_UNIX = 3


@dataclass(frozen=True)
class Entry:
    """Content of one file, and whether it may be executed."""

    data: bytes
    executable: bool = False

    @property
    def mode(self) -> int:
        return 0o755 if self.executable else 0o644


Files = dict[str, Entry]


def read(path: Path) -> Files:
    """All regular files of a wheel, by their path inside it."""
    try:
        with zipfile.ZipFile(path) as archive:
            return {
                info.filename: Entry(archive.read(info), bool(info.external_attr >> 16 & 0o100))
                for info in archive.infolist()
                if not info.is_dir()
            }
    except (OSError, zipfile.BadZipFile) as error:
        raise ForkError(f"{path.name}: expected a wheel, got '{error}'; run scripts/fork fetch") from error


def write(path: Path, files: Mapping[str, Entry]) -> None:
    """Write a wheel whose bytes depend on `files` alone: sorted, one date, two modes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            info = zipfile.ZipInfo(name, SOURCE_DATE)
            info.create_system = _UNIX
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (_REGULAR_FILE | files[name].mode) << 16
            archive.writestr(info, files[name].data)


def dist_info(files: Mapping[str, Entry]) -> str:
    """The name of the one metadata folder."""
    names = {name.partition("/")[0] for name in files if name.partition("/")[0].endswith(".dist-info")}
    if len(names) != 1:
        raise ForkError(f"wheel: expected one .dist-info folder, got {len(names)}; run scripts/fork fetch")
    return names.pop()


def record_digest(data: bytes) -> str:
    """A digest as RECORD writes it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def read_record(files: Mapping[str, Entry]) -> dict[str, str]:
    """Digest by path, from the RECORD of a wheel."""
    text = files[f"{dist_info(files)}/RECORD"].data.decode()
    return {row[0]: row[1] for row in csv.reader(io.StringIO(text)) if row}


def write_record(files: Mapping[str, Entry], path: str) -> bytes:
    """The RECORD of `files`, which will itself lie at `path`."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for name in sorted(files):
        writer.writerow([name, record_digest(files[name].data), len(files[name].data)])
    writer.writerow([path, "", ""])
    return out.getvalue().encode()
