# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of OPERATING.md from what the code declares.

    build/env/bin/python docker/operating.py

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; everything else on the page is written by hand.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from sglang.srt.server_args import ServerArgs
from sglang.srt.sm120.memory_table import OWNERS
from sglang.srt.sm120.metrics import METRICS
from sglang.srt.sm120.variables import VARIABLES
from sglang.srt.sm120.verify_route import REMEDIES

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docker" / "OPERATING.md"
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->\n)", re.DOTALL)
ADDED_FIELD = re.compile(r"^\+    (\w+): A\[", re.MULTILINE)
SUFFIXES = {"counter": "_total", "histogram": "_bucket"}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def flags() -> str:
    """The options that the fork's patches add to SGLang's, with their help."""
    patches = sorted((ROOT / "patches").rglob("*.patch"))
    fields = [field for patch in patches for field in ADDED_FIELD.findall(patch.read_text())]
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    actions = {action.dest: action for action in parser._actions}
    return table(
        ["flag", "meaning"], [[f"`{actions[field].option_strings[0]}`", str(actions[field].help)] for field in fields]
    )


def variables() -> str:
    """The environment variables."""
    rows = [[f"`{one.name}`", one.values, one.default, one.text] for one in VARIABLES]
    return table(["variable", "values", "default", "meaning"], rows)


def metrics() -> str:
    """The series that the fork adds, by the names that a query uses."""
    rows = [
        [
            f"`{metric.name}{SUFFIXES.get(metric.kind, '')}`",
            metric.kind + (f" by {', '.join(metric.labels)}" if metric.labels else ""),
            metric.text,
            metric.when,
        ]
        for metric in METRICS
    ]
    return table(["series", "kind", "value", "there with"], rows)


def fallbacks() -> str:
    """Reasons for which the kernel does not serve, and what to do."""
    return table(["reason", "what to do"], [[f"`{code}`", remedy] for code, remedy in REMEDIES.items()])


def owners() -> str:
    """Rows of the table of memory."""
    return table(["owner", "bytes of"], [[f"`{owner}`", text] for owner, text in OWNERS.items()])


TABLES = {"flags": flags, "variables": variables, "metrics": metrics, "fallbacks": fallbacks, "owners": owners}


def render(page: str) -> str:
    """The page with its tables as the code has them now."""
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], page)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text()))
