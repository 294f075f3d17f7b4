# SPDX-License-Identifier: Apache-2.0
"""The programs of the image, laid out as its Dockerfile does."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[2]


def copy_programs(folder: Path) -> None:
    """Copy what the Dockerfile copies from the repository into the share folder: the entry point and what it imports."""
    dockerfile = (REPO_ROOT / "docker" / "Dockerfile").read_text()
    (line,) = re.findall(r"^COPY ((?:(?:scripts|docker)/\S+ )+)/opt/sglang/share/$", dockerfile, re.MULTILINE)
    for source in line.split():
        shutil.copy(REPO_ROOT / source, folder)
