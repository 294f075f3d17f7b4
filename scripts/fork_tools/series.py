# SPDX-License-Identifier: Apache-2.0
"""patches/series: the order in which patches are reviewed."""

from collections.abc import Sequence

from fork_tools.errors import ForkError
from fork_tools.layout import Layout
from fork_tools.patch import Patch


def read_series(layout: Layout) -> list[str]:
    """The names that patches/series lists, relative to patches/; lines that start with # are headings."""
    path = layout.patches / "series"
    if not path.is_file():
        raise ForkError("patches/series: expected the list of patches, got no such file")
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def in_series_order(layout: Layout, patches: Sequence[Patch]) -> list[Patch]:
    """`patches` in the order of patches/series; raises ForkError when the two do not agree."""
    by_name = {f"{one.name}.patch": one for one in patches}
    listed = read_series(layout)
    if sorted(listed) != sorted(by_name):
        raise ForkError("patches/series: expected each patch once, got another list; see scripts/fork lint")
    return [by_name[name] for name in listed]
