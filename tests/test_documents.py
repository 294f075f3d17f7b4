# SPDX-License-Identifier: Apache-2.0
"""What the documents name exists: paths, links, verbs of scripts/fork and environment variables."""

from __future__ import annotations

import functools
import json
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
    # A package's documents may name paths from its own root.
    places = [REPO_ROOT / folder for folder in Path(document).parents]
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


def readme_rows(first_cell: str) -> list[list[str]]:
    """Cells of the README's table rows that begin with `first_cell`."""
    rows = [
        line.strip("|").split("|") for line in (REPO_ROOT / "README.md").read_text().splitlines() if line[:1] == "|"
    ]
    return [[cell.strip() for cell in row] for row in rows if row[0].strip() == first_cell]


def rounded(value: float) -> str:
    """Three digits at least, as the README prints microseconds."""
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


@pytest.mark.parametrize(
    ("label", "context"), [("1k", 1024), ("4k", 4096), ("16k", 16384), ("64k", 65536), ("200k", 200000)]
)
def test_readme_has_the_kernel_s_figures(label: str, context: int) -> None:
    results = REPO_ROOT / "sgl-kernel-sm120" / "benchmarks" / "results" / "h200" / "mla_tree_verify.json"
    shape = {"bs": 1, "heads": 8, "tree": 9, "context": context}
    rows = [row for row in json.loads(results.read_text())["rows"] if shape.items() <= row.items()]
    expected = [rounded(rows[0][name]) for name in ("triton_us", "fa2_us", "flashmla_us", "us")]
    assert readme_rows(label) == [[label, *expected]]
    if label == "64k":
        (claim,) = readme_rows("verify attention of one MLA layer, 64k context, 8 heads, 9 rows, H200")
        assert claim[1:] == [f"{expected[0]} us (Triton)", f"{expected[-1]} us (`mla_tree_verify`)"]


def test_readme_has_the_demo_pair_s_figures() -> None:
    figures = json.loads((REPO_ROOT / "tests" / "models" / "demo" / "figures.json").read_text())["evaluation"]
    chain, tree = figures["chain_accept_length"], figures["tree_accept_length"]
    (row,) = readme_rows("tokens per verify step, demo pair, greedy")
    assert row[1] == f"{chain:.2f} (DFLASH chain)"
    assert row[2] == f"{tree['16']:.2f} (DDTree, 16 nodes), {tree['64']:.2f} (64 nodes)"


def test_readme_has_the_cpu_s_figures() -> None:
    results = json.loads((REPO_ROOT / "tests" / "serving" / "results" / "cpu_decode.json").read_text())
    speed = {row["label"]: f"{row['single_tok_s']:.0f}" for row in results["rows"]}
    text = f"plain {speed['plain']}, chain {speed['chain']}, tree of 16 nodes {speed['tree-16']} tokens/s, one stream"
    assert text in (REPO_ROOT / "README.md").read_text()


@pytest.mark.parametrize("context", [1024, 4096, 16384, 65536])
def test_readme_has_the_server_s_figures(context: int) -> None:
    rows = json.loads((REPO_ROOT / "scripts" / "bench" / "results" / "h200" / "decode.json").read_text())["rows"]
    stock, fork = (
        next(row for row in rows if (row["label"], row["context"], row["concurrency"]) == (label, context, 1))
        for label in ("stock-dflash", "sm120-ddtree")
    )
    steps = [rounded(row["ms_per_step"]) for row in (stock, fork)]
    speeds = [f"{row['tok_s']:.1f}" for row in (stock, fork)]
    assert readme_rows(f"{context:,}") == [[f"{context:,}", *steps, *speeds]]
    if context == 65536:
        (claim,) = readme_rows("verify step at 64k context, rank shape of Kimi K2.6, H200")
        assert claim[1:] == [f"{steps[0]} ms (DFLASH, Triton)", f"{steps[1]} ms (DDTree, `mla_tree_verify`)"]
