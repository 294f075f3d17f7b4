# SPDX-License-Identifier: Apache-2.0
"""The scan for upstream text: three consecutive lines of ours that also stand in the pinned wheel.

Lines are compared without indentation. Imports and lines without a word, such as blanks and brackets, are stepped over.
"""

import hashlib
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from fork_tools import archive
from fork_tools.files import sibling

LICENCE_TEXT = "LICENSE"
_LINES = 3
_HASH_BYTES = 8
_WORD = re.compile(r"[^\W_]{2}")
_IMPORT = re.compile(r"import [\w.]+( as \w+)?(,.*)?|from [\w.]+ import\b.*|#include\b.*")

Line = tuple[int, str]
Shingle = tuple[int, bytes]


def shingles(lines: Iterable[Line]) -> Iterator[Shingle]:
    """Yield (line number, digest) for every run of three among the numbered lines that count."""
    kept = list(_that_count(lines))
    for (number, first), (_, second), (_, third) in zip(kept, kept[1:], kept[2:], strict=False):
        content = f"{first}\n{second}\n{third}"
        yield number, hashlib.blake2b(content.encode(), digest_size=_HASH_BYTES).digest()


def _that_count(lines: Iterable[Line]) -> Iterator[Line]:
    inside_import = False
    for number, raw in lines:
        line = raw.strip()
        if inside_import:
            inside_import = ")" not in line
        elif line.startswith(("import ", "from ", "#include")) and _IMPORT.fullmatch(line):
            inside_import = "(" in line and ")" not in line
        elif _WORD.search(line):
            yield number, line


def lines_of(name: str, text: str) -> Iterator[Line]:
    """The numbered lines of a file; of a patch, the header and the added lines, without their +."""
    for number, line in enumerate(text.split("\n"), 1):
        if not name.endswith(".patch"):
            yield number, line
        elif not line.startswith(("---", "+++", "@@")):
            yield number, line.removeprefix("+")


def decode(data: bytes) -> str | None:
    """The text of a file, or None when it is binary."""
    if b"\0" in data:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def upstream_texts(files: archive.Files) -> Iterator[tuple[str, str]]:
    """Path and text of every text file of the wheel."""
    for name, entry in files.items():
        if (text := decode(entry.data)) is not None:
            yield name, text


class UpstreamIndex:
    """The shingles of the pinned wheel, as a sorted array kept below build/."""

    def __init__(self, wheel: Path, sha256: str) -> None:
        self._wheel = wheel
        form = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
        cache = wheel.with_name(f"shingles-{sha256[:8]}-{form[:8]}.bin")
        if not cache.is_file():
            self._write(cache)
        self._hashes = array("Q")
        self._hashes.frombytes(cache.read_bytes())

    def _write(self, cache: Path) -> None:
        found = {
            shingle
            for name, text in upstream_texts(archive.read(self._wheel))
            for _, shingle in shingles(lines_of(name, text))
        }
        partial = sibling(cache, "partial")
        partial.write_bytes(array("Q", sorted(map(_number, found))).tobytes())
        partial.replace(cache)

    def __contains__(self, shingle: bytes) -> bool:
        number = _number(shingle)
        index = bisect_left(self._hashes, number)
        return index < len(self._hashes) and self._hashes[index] == number

    def sources(self, wanted: set[bytes]) -> dict[bytes, str]:
        """Where each of `wanted` stands upstream, as path:line. Reads the whole wheel: for reports only."""
        return {
            shingle: f"{name}:{number}"
            for name, text in upstream_texts(archive.read(self._wheel))
            for number, shingle in shingles(lines_of(name, text))
            if shingle in wanted
        }


def _number(shingle: bytes) -> int:
    return int.from_bytes(shingle, "big")


def scan(index: UpstreamIndex, files: Mapping[str, bytes]) -> list[str]:
    """Report every passage of `files` (content by path) that stands upstream too, the licence's own text aside."""
    hits = []
    for name, data in files.items():
        text = None if name == LICENCE_TEXT else decode(data)
        found = shingles(lines_of(name, text)) if text is not None else ()
        hits += [(name, number, shingle) for number, shingle in found if shingle in index]
    sources = index.sources({shingle for *_, shingle in hits}) if hits else {}
    reports: list[str] = []
    previous = ("", 0)
    for name, number, shingle in hits:
        if previous[0] != name or number > previous[1] + _LINES:
            reports.append(f"{name}:{number}: expected text of our own, got that of {sources[shingle]}; write it anew")
        previous = (name, number)
    return reports
