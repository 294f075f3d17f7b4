# SPDX-License-Identifier: Apache-2.0
"""What the documents name exists: paths, links, verbs of scripts/fork and environment variables."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parent.parent
PATH = re.compile(r"(?<![\w./-])((?:scripts|tests|patches|sglang|sgl-kernel-sm120|docker|\.ci|\.github)/[\w./*<>{}-]*)")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
ROOT_FILE = re.compile(r"`([A-Z]+(?:\.md)?|pyproject\.toml)`")
VERB = re.compile(r"scripts/fork ([a-z]+)")
VARIABLE = re.compile(r"SGLANG_SM120_[A-Z_]*[A-Z]")


@functools.cache
def tracked() -> tuple[str, ...]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=REPO_ROOT, capture_output=True, text=True, check=True)
    return tuple(name for name in listing.stdout.split("\0") if name)


def documents() -> list[str]:
    return [name for name in tracked() if name.endswith(".md")]


def named_paths(text: str) -> set[str]:
    """Paths that `text` names; patterns such as `patches/<area>/` and stand-ins such as `x.py` are left out."""
    found = {path.rstrip(".") for path in PATH.findall(text)}
    found |= {link for link in LINK.findall(text) if "://" not in link}
    found |= set(ROOT_FILE.findall(text))
    return {path for path in found if not set(path) & set("*<>{}") and "..." not in path and Path(path).stem != "x"}


def missing(document: str, text: str) -> list[str]:
    places = (REPO_ROOT, (REPO_ROOT / document).parent)
    return sorted(path for path in named_paths(text) if not any((place / path).exists() for place in places))


@pytest.mark.parametrize("document", documents())
def test_named_paths_exist(document: str) -> None:
    assert missing(document, (REPO_ROOT / document).read_text()) == []


def test_a_missing_path_is_found() -> None:
    text = (
        "See `scripts/absent`, [notes](sub/absent.md) and `ABSENT.md`, not `patches/<area>/x.patch` or `scripts/fork`."
    )
    assert missing("README.md", text) == ["ABSENT.md", "scripts/absent", "sub/absent.md"]


def test_named_verbs_exist() -> None:
    named = {verb for document in documents() for verb in VERB.findall((REPO_ROOT / document).read_text())}
    assert {"tree", "wheel", "lint", "review", "refresh"} <= named
    for verb in sorted(named):
        help_text = subprocess.run(
            [sys.executable, REPO_ROOT / "scripts" / "fork", verb, "--help"],
            check=False,
            capture_output=True,
            text=True,
        )
        assert help_text.returncode == 0, f"scripts/fork {verb}: {help_text.stderr}"


def test_named_variables_are_read() -> None:
    sources = "\n".join(
        (REPO_ROOT / name).read_text() for name in tracked() if name.endswith(".py") and "test" not in name
    )
    named = {name for document in documents() for name in VARIABLE.findall((REPO_ROOT / document).read_text())}
    assert sorted(name for name in named if name not in sources) == []


def test_readme_fits_its_size() -> None:
    lines = (REPO_ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 200
    assert next(number for number, line in enumerate(lines, 1) if line.startswith("```")) <= 40
