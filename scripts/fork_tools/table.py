# SPDX-License-Identifier: Apache-2.0
"""The table of patches in patches/README.md, made from their headers."""

from collections.abc import Sequence

from fork_tools.errors import ForkError
from fork_tools.layout import Layout
from fork_tools.patch import Patch
from fork_tools.series import in_series_order

BEGIN = "<!-- table: scripts/fork table -->"
END = "<!-- end of table -->"


def render(patches: Sequence[Patch]) -> str:
    """A Markdown table, one row a patch, and a line with the totals."""
    rows = ["| patch | kind | hunks | what it does | goes when |", "|---|---|---|---|---|"]
    for one in patches:
        kind, subject, remove_when = (one.fields.get(field, "") for field in ("Kind", "Subject", "Remove-when"))
        cells = [f"`{one.name}`", kind, str(len(one.insertions)), subject.partition(": ")[2], remove_when]
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    hunks = sum(len(one.insertions) for one in patches)
    lines = sum(len(insertion.lines) for one in patches for insertion in one.insertions)
    return "\n".join([*rows, "", f"{len(patches)} patches, {hunks} hunks, {lines} added lines."])


def update(layout: Layout, patches: Sequence[Patch]) -> bool:
    """Write the table into patches/README.md; returns False when it was current."""
    path = layout.patches / "README.md"
    old = path.read_text(encoding="utf-8")
    new = _with_table(old, render(in_series_order(layout, patches)))
    if new != old:
        path.write_text(new, encoding="utf-8")
    return new != old


def problems(layout: Layout, patches: Sequence[Patch]) -> list[str]:
    """A line when patches/README.md does not show the patches that are there."""
    try:
        text = (layout.patches / "README.md").read_text(encoding="utf-8")
        current = _with_table(text, render(in_series_order(layout, patches))) == text
    except FileNotFoundError:
        return ["patches/README.md: expected the description of the patches, got no such file"]
    except ForkError:
        return []  # the list and the folder disagree, which is a problem of its own
    return [] if current else ["patches/README.md: expected the current table, got another; run scripts/fork table"]


def _with_table(text: str, table: str) -> str:
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ForkError(f"patches/README.md: expected '{BEGIN}' and '{END}', got no such pair")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"
