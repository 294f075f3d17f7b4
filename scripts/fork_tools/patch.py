# SPDX-License-Identifier: Apache-2.0
"""The patch form of this fork: parse, check, merge. Pure functions on text and bytes; no files, no git.

A patch only inserts lines. Its hunks have no context and count lines in the pristine file, so patches never depend
on each other: all insertions into one file are merged and written together, in any order. A hunk without context
lands silently in the wrong place when the file has changed; the `Base:` field, a sha256 of each file, prevents that.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fork_tools.errors import ForkError

MAX_ADDED_LINES = 3
FIELDS = ("From", "Subject", "Why", "Kind", "Upstream", "Remove-when", "Test", "Base")
KINDS = ("feature", "fix", "backport")
MAX_SUBJECT = 72

_FIELD = re.compile(rf"({'|'.join(FIELDS)}):\s*(.*)")
_BASE = re.compile(r"(\S+) sha256:([0-9a-f]{64})")
_SENDER = re.compile(r"[^<>]+ <[^<>@ ]+@[^<>@ ]+>")
_UPSTREAM = re.compile(r"https://\S+|not-sent, .+|rejected https://\S+, kept because .+")
_HUNK = re.compile(r"@@ -(\d+),0 \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True)
class Insertion:
    """Lines to add after line `after` (0 for the top) of the pristine file `path`."""

    patch: str
    path: str
    after: int
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path}:{self.after} ({self.patch})"


@dataclass(frozen=True)
class Patch:
    """One patch file. `name` is its path under patches/ without the suffix: <area>/<verb>-<object>.

    `header` is the text above '---', `fields` the same by field; `base` maps each patched path to its sha256.
    """

    name: str
    header: str
    fields: Mapping[str, str]
    base: Mapping[str, str]
    insertions: tuple[Insertion, ...]

    @property
    def marker(self) -> str:
        """The comment that ends the first line of every hunk."""
        return f"# sm120: {self.name}"


def sha256(data: bytes) -> str:
    """Hex digest of a file's content."""
    return hashlib.sha256(data).hexdigest()


def parse(name: str, text: str) -> Patch:
    """Read one patch; raises ForkError with the line at fault when the text is not in this fork's form."""
    lines = text.removesuffix("\n").split("\n")
    end = lines.index("---") if "---" in lines else len(lines)
    fields, base = _parse_header(name, lines[:end])
    insertions = _parse_hunks(name, lines, end + 1)
    return Patch(name, "\n".join(lines[:end]), fields, base, tuple(insertions))


def _parse_header(name: str, lines: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    fields: dict[str, str] = {}
    base: dict[str, str] = {}
    field = ""
    for number, line in enumerate(lines, 1):
        if match := _FIELD.fullmatch(line):
            field, value = match.groups()
            if field == "Base":
                base.update([_parse_base(name, number, value)])
            elif field in fields:
                raise ForkError(f"{name}:{number}: expected one {field} field, got a second one; merge them")
            fields[field] = value
        elif line.strip() and field:
            fields[field] += f" {line.strip()}"
        elif line.strip():
            raise ForkError(f"{name}:{number}: expected 'From: name <mail>' first, got '{line}'")
    return fields, base


def _parse_base(name: str, number: int, value: str) -> tuple[str, str]:
    match = _BASE.fullmatch(value)
    if not match:
        raise ForkError(f"{name}:{number}: expected 'Base: <path> sha256:<64 hex digits>', got '{value}'")
    return match[1], match[2]


def _parse_hunks(name: str, lines: list[str], start: int) -> list[Insertion]:
    for number, line in enumerate(lines[start:], start + 1):
        if not line.startswith(("--- a/", "+", "@@ ")):
            raise ForkError(f"{name}:{number}: expected a file header, a hunk or an added line, got '{line}'")
    insertions: list[Insertion] = []
    path, shift, index = "", 0, start
    while index < len(lines):
        line, where = lines[index], f"{name}:{index + 1}"
        if line.startswith("--- a/"):
            path, shift = line.removeprefix("--- a/"), 0
            following = lines[index + 1] if index + 1 < len(lines) else "the end of the file"
            if following != f"+++ b/{path}":
                raise ForkError(f"{where}: expected '+++ b/{path}' on the next line, got '{following}'")
            if any(other.path == path for other in insertions):
                raise ForkError(f"{where}: expected each file once, got {path} again; put its hunks together")
            index += 2
        elif path and line.startswith("@@"):
            count = _count_added(lines, index + 1)
            insertion = Insertion(name, path, _check_hunk(where, line, shift, count), _added(lines, index + 1, count))
            if insertions and insertions[-1].path == path and insertions[-1].after >= insertion.after:
                raise ForkError(f"{where}: expected an anchor after line {insertions[-1].after}, got {insertion.after}")
            insertions.append(insertion)
            shift += count
            index += 1 + count
        else:
            raise ForkError(f"{where}: expected '--- a/<path>' or '@@' first, got '{line}'")
    return insertions


def _count_added(lines: list[str], start: int) -> int:
    end = start
    while end < len(lines) and lines[end].startswith("+"):
        end += 1
    return end - start


def _added(lines: list[str], start: int, count: int) -> tuple[str, ...]:
    return tuple(line.removeprefix("+") for line in lines[start : start + count])


def _check_hunk(where: str, line: str, shift: int, count: int) -> int:
    """Return the anchor of a hunk header after checking it against the lines that follow it."""
    match = _HUNK.fullmatch(line)
    if not match:
        raise ForkError(f"{where}: expected '@@ -<line>,0 +<line>,<count> @@' and nothing more, got '{line}'")
    after, new = int(match[1]), int(match[2])
    stated = 1 if match[3] is None else int(match[3])
    if not 1 <= count <= MAX_ADDED_LINES:
        raise ForkError(f"{where}: expected 1 to {MAX_ADDED_LINES} added lines, got {count}; move code to the overlay")
    if stated != count:
        raise ForkError(f"{where}: expected {count} as the number of added lines, got {stated}")
    if new != after + 1 + shift:
        raise ForkError(f"{where}: expected +{after + 1 + shift} as the new line number, got +{new}")
    return after


def problems(patch: Patch) -> list[str]:
    """What a maintainer must still correct in a patch that parses: header fields, markers, bases."""
    found = [f"expected a {field} field, got none" for field in FIELDS if not patch.fields.get(field)]
    area = patch.name.partition("/")[0]
    sender, subject, kind, upstream = (patch.fields.get(field, "") for field in ("From", "Subject", "Kind", "Upstream"))
    if sender and not _SENDER.fullmatch(sender):
        found.append(f"expected 'From: name <mail>', got '{sender}'")
    if subject and not subject.startswith(f"{area}: "):
        found.append(f"expected a Subject that starts with '{area}: ', got '{subject}'")
    if len(subject) > MAX_SUBJECT:
        found.append(f"expected a Subject of at most {MAX_SUBJECT} characters, got {len(subject)}")
    if kind and kind not in KINDS:
        found.append(f"expected a Kind among {', '.join(KINDS)}, got '{kind}'")
    if upstream and not _UPSTREAM.fullmatch(upstream):
        found.append(f"expected Upstream as a URL, 'not-sent, why' or 'rejected URL, kept because', got '{upstream}'")
    if not patch.insertions:
        found.append("expected at least one hunk, got none")
    patched = {insertion.path for insertion in patch.insertions}
    found += [f"expected a Base for {path}, got none" for path in sorted(patched - patch.base.keys())]
    found += [f"expected a hunk for the Base {path}, got none" for path in sorted(patch.base.keys() - patched)]
    for insertion in patch.insertions:
        if not insertion.lines[0].endswith(f"  {patch.marker}"):
            found.append(f"expected the first line after {insertion.path}:{insertion.after} to end in '{patch.marker}'")
    return found


def check_anchors(patches: Iterable[Patch]) -> None:
    """Raise ForkError when two hunks insert after the same line of a file: their order would be a guess."""
    seen: dict[tuple[str, int], Insertion] = {}
    for patch in patches:
        for insertion in patch.insertions:
            other = seen.setdefault((insertion.path, insertion.after), insertion)
            if other is not insertion:
                raise ForkError(
                    f"{insertion.path}: expected one hunk after line {insertion.after}, "
                    f"got {other.patch} and {insertion.patch}; join them or move one"
                )


def merge(data: bytes, insertions: Iterable[Insertion]) -> bytes:
    """Return `data` with all insertions made; their order does not matter, since anchors are pristine and distinct."""
    lines = data.split(b"\n")
    for insertion in sorted(insertions, key=lambda insertion: insertion.after, reverse=True):
        if insertion.after >= len(lines):
            raise ForkError(f"{insertion}: expected an anchor up to line {len(lines) - 1}, got {insertion.after}")
        lines[insertion.after : insertion.after] = [line.encode() for line in insertion.lines]
    return b"\n".join(lines)


def render(patch: Patch, header: str) -> str:
    """The text of a patch: `header` up to and without the '---' line, then its hunks."""
    out = [header.rstrip("\n"), "---"]
    path, shift = "", 0
    for insertion in sorted(patch.insertions, key=lambda insertion: (insertion.path, insertion.after)):
        if insertion.path != path:
            path, shift = insertion.path, 0
            out += [f"--- a/{path}", f"+++ b/{path}"]
        count = len(insertion.lines)
        length = "" if count == 1 else f",{count}"
        out.append(f"@@ -{insertion.after},0 +{insertion.after + 1 + shift}{length} @@")
        out += [f"+{line}" for line in insertion.lines]
        shift += count
    return "\n".join(out) + "\n"
