# SPDX-License-Identifier: Apache-2.0
"""patches/covers: for each series, the letter that a maintainer of SGLang reads first."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fork_tools.errors import ForkError
from fork_tools.layout import Layout
from fork_tools.patch import MAX_SUBJECT
from fork_tools.series import read_groups

SECTIONS = ("What is wrong|What is missing", "How to see it", "What the change does", "Tests")

_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Cover:
    """A cover letter: one line that says what the series does, and Markdown with the sections of `SECTIONS`."""

    subject: str
    body: str


def read_cover(layout: Layout, name: str) -> Cover:
    """The letter of the series `name`; raises ForkError when it is not in the form that reviewers get."""
    path = layout.patches / "covers" / f"{name}.md"
    label = f"patches/covers/{name}.md"
    if not path.is_file():
        raise ForkError(f"{label}: expected the cover letter of the series, got no such file")
    title, _, body = path.read_text(encoding="utf-8").partition("\n")
    subject = title.removeprefix("# ")
    if title == subject or not subject.startswith(f"{name}: ") or len(subject) > MAX_SUBJECT:
        raise ForkError(f"{label}: expected '# {name}: what it does', at most {MAX_SUBJECT} characters, got '{title}'")
    _, *parts = _SECTION.split(body)
    found = dict(zip(parts[::2], parts[1::2], strict=True))
    _check_sections(label, found)
    return Cover(subject, body.strip() + "\n")


def _check_sections(label: str, found: Mapping[str, str]) -> None:
    if len(found) != len(SECTIONS) or not all(map(re.fullmatch, SECTIONS, found)):
        raise ForkError(f"{label}: expected the sections {', '.join(SECTIONS)}, got {', '.join(found) or 'none'}")
    empty = next((section for section, text in found.items() if not text.strip()), None)
    if empty is not None:
        raise ForkError(f"{label}: expected text under '{empty}', got none")


def lint_covers(layout: Layout) -> list[str]:
    """What is wrong with the letters, and letters without a series."""
    found = []
    names = [group.name for group in read_groups(layout)]
    for name in names:
        try:
            read_cover(layout, name)
        except ForkError as error:
            found.append(str(error))
    present = {path.stem for path in (layout.patches / "covers").glob("*.md")}
    found += [f"patches/covers/{name}.md: expected its series, got none" for name in sorted(present - set(names))]
    return found
