# SPDX-License-Identifier: Apache-2.0
"""Tables made from the patches' headers: each patch in patches/README.md, each series in README.md."""

from collections.abc import Sequence
from pathlib import Path

from fork_tools.covers import read_cover
from fork_tools.errors import ForkError
from fork_tools.layout import Layout
from fork_tools.patch import Patch
from fork_tools.series import in_series_order, read_groups

BEGIN = "<!-- table: scripts/fork table -->"
END = "<!-- end of table -->"


def render(patches: Sequence[Patch]) -> str:
    """A Markdown table, one row a patch, and a line with the totals."""
    rows = ["| patch | kind | hunks | what it does | goes when |", "|---|---|---|---|---|"]
    for one in patches:
        kind, remove_when = (one.fields.get(field, "") for field in ("Kind", "Remove-when"))
        rows.append(_row(f"`{one.name}`", kind, str(len(one.insertions)), _claim(one), remove_when))
    return "\n".join([*rows, "", _totals(patches)])


def render_series(layout: Layout, patches: Sequence[Patch]) -> str:
    """A Markdown table, one row a series: what its patches do, or its letter's subject when it has none."""
    by_name = {f"{one.name}.patch": one for one in patches}
    rows = ["| series | what differs |", "|---|---|"]
    for group in read_groups(layout):
        claims = [_claim(by_name[name]) for name in group.patches]
        claims = claims or [read_cover(layout, group.name).subject.partition(": ")[2]]
        rows.append(_row(f"[{group.name}](patches/covers/{group.name}.md)", "; ".join(claims)))
    return "\n".join([*rows, "", _totals(patches)])


def _claim(one: Patch) -> str:
    return one.fields.get("Subject", "").partition(": ")[2]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _totals(patches: Sequence[Patch]) -> str:
    hunks = sum(len(one.insertions) for one in patches)
    lines = sum(len(insertion.lines) for one in patches for insertion in one.insertions)
    return f"{len(patches)} patches, {hunks} hunks, {lines} added lines."


def update(layout: Layout, patches: Sequence[Patch]) -> list[Path]:
    """Write the tables into their pages; returns the pages that were not current."""
    written = []
    for page, table in _tables(layout, in_series_order(layout, patches)).items():
        old = page.read_text(encoding="utf-8")
        new = _with_table(layout, page, old, table)
        if new != old:
            page.write_text(new, encoding="utf-8")
            written.append(page)
    return written


def problems(layout: Layout, patches: Sequence[Patch]) -> list[str]:
    """A line for each page that does not show the patches that are there."""
    try:
        tables = _tables(layout, in_series_order(layout, patches))
    except ForkError:
        return []  # the list and the folder disagree, or a letter is missing, which is a problem of its own
    found = []
    for page, table in tables.items():
        label = page.relative_to(layout.root)
        try:
            text = page.read_text(encoding="utf-8")
            if _with_table(layout, page, text, table) != text:
                found.append(f"{label}: expected the current table, got another; run scripts/fork table")
        except FileNotFoundError:
            found.append(f"{label}: expected the description of the patches, got no such file")
        except ForkError as error:
            found.append(str(error))
    return found


def _tables(layout: Layout, patches: Sequence[Patch]) -> dict[Path, str]:
    return {
        layout.patches / "README.md": render(patches),
        layout.root / "README.md": render_series(layout, patches),
    }


def _with_table(layout: Layout, page: Path, text: str, table: str) -> str:
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ForkError(f"{page.relative_to(layout.root)}: expected '{BEGIN}' and '{END}', got no such pair")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"
