# SPDX-License-Identifier: Apache-2.0
"""patches/series: the patches in the order of their review, in groups that go upstream one after another."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fork_tools.errors import ForkError
from fork_tools.layout import Layout
from fork_tools.patch import Patch

_HEADING = re.compile(r"# ([a-z][a-z0-9-]*)")


@dataclass(frozen=True)
class Series:
    """Patches that are reviewed together, by their names relative to patches/; `name` is their heading."""

    name: str
    patches: tuple[str, ...]


def read_groups(layout: Layout) -> list[Series]:
    """The groups of patches/series. A heading is `# name`; other lines that start with # are comments.

    Raises ForkError when a patch stands above the first heading, or a heading comes twice.
    """
    path = layout.patches / "series"
    if not path.is_file():
        raise ForkError("patches/series: expected the list of patches, got no such file")
    groups: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in (line.strip() for line in path.read_text(encoding="utf-8").splitlines()):
        if match := _HEADING.fullmatch(line):
            if match[1] in groups:
                raise ForkError(f"patches/series: expected the heading '{match[1]}' once, got it again; join the two")
            current = groups.setdefault(match[1], [])
        elif line and not line.startswith("#"):
            if current is None:
                raise ForkError(f"patches/series: expected a heading such as '# fixes' first, got {line}")
            current.append(line)
    return [Series(name, tuple(patches)) for name, patches in groups.items()]


def read_series(layout: Layout) -> list[str]:
    """The names that patches/series lists, in order, relative to patches/."""
    return [name for group in read_groups(layout) for name in group.patches]


def in_series_order(layout: Layout, patches: Sequence[Patch]) -> list[Patch]:
    """`patches` in the order of patches/series; raises ForkError when the two do not agree."""
    by_name = {f"{one.name}.patch": one for one in patches}
    listed = read_series(layout)
    if sorted(listed) != sorted(by_name):
        raise ForkError("patches/series: expected each patch once, got another list; see scripts/fork lint")
    return [by_name[name] for name in listed]
