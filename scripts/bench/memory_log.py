# SPDX-License-Identifier: Apache-2.0
"""Reads the table of memory that the fork logs at the start of a server."""

from __future__ import annotations

import re

TABLE = re.compile(r"Memory of rank 0:\n.*\n((?:  \w+ +\d+ +[\d.]+\n)+)")


def memory_by_owner(log: str) -> dict[str, int]:
    """Bytes by owner of the last start in a log, in the order of its table; nothing where there is none."""
    return {row.split()[0]: int(row.split()[1]) for table in TABLE.findall(log)[-1:] for row in table.splitlines()}
