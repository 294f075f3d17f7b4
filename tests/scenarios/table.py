# SPDX-License-Identifier: Apache-2.0
"""The scenarios of the bug log and what covers each of them, read from `scenarios.toml` and the tests' own markers.

    build/env/bin/python tests/scenarios/table.py

writes `README.md` beside this file. A test names its scenarios by `@pytest.mark.scenario("BUG-017")`; an older one is
listed in `scenarios.toml`.
"""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCES = ("tests", "sgl-kernel-sm120/tests")
NUM_SCENARIOS = 92
KINDS = ("test", "gpu", "cannot", "open")


@dataclass(frozen=True)
class Scenario:
    """One scenario; `kind` is test, gpu, cannot or open, and `why` speaks for all but the first."""

    title: str
    kind: str
    why: str
    tests: tuple[str, ...]


@functools.cache
def test_functions() -> dict[str, tuple[Path, ast.AST]]:
    """Every test of the repository, by `path::name`."""
    found: dict[str, tuple[Path, ast.AST]] = {}
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("test_*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
                    found[f"{path.relative_to(ROOT)}::{node.name}"] = (path, node)
    return found


def _marked_ids(node: ast.AST) -> Iterator[str]:
    for decorator in getattr(node, "decorator_list", []):
        for call in ast.walk(decorator):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "scenario":
                yield from (argument.value for argument in call.args if isinstance(argument, ast.Constant))


@functools.cache
def marked_tests() -> dict[str, list[str]]:
    """Tests by the scenario that their markers name."""
    marked: dict[str, list[str]] = {}
    for name, (_, node) in test_functions().items():
        for scenario in _marked_ids(node):
            marked.setdefault(scenario, []).append(name)
    return marked


def scenarios() -> dict[str, Scenario]:
    """All scenarios in order, listed and marked tests together."""
    entries = tomllib.loads((HERE / "scenarios.toml").read_text())
    marked = marked_tests()
    found = {}
    for name, entry in entries.items():
        tests = dict.fromkeys([*entry.get("tests", ()), *marked.get(name, ())])
        kind = next((kind for kind in ("gpu", "cannot") if kind in entry), "test" if tests else "open")
        found[name] = Scenario(entry["title"], kind, entry.get(kind, ""), tuple(tests))
    return found


def render() -> str:
    """The table as markdown."""
    found = scenarios()
    counts = {kind: sum(entry.kind == kind for entry in found.values()) for kind in KINDS}
    lines = [
        "# Scenarios",
        "",
        "Faults that users of this and other servers reported, and what shows that they do not happen here. Made by",
        "`build/env/bin/python tests/scenarios/table.py` from `scenarios.toml` and the markers of the tests.",
        "",
        f"{counts['test']} have tests that run without a GPU, {counts['gpu']} need a GPU, {counts['cannot']} cannot happen",
        f"here, {counts['open']} are open.",
        "",
        "| scenario | what happened | covered by |",
        "|---|---|---|",
    ]
    for name, entry in found.items():
        tests = ", ".join(f"`{test.split('::')[1]}`" for test in entry.tests)
        said = {"test": "", "gpu": f"needs a GPU ({entry.why}) ", "cannot": "cannot happen: ", "open": "open: "}[
            entry.kind
        ]
        reason = entry.why if entry.kind in ("cannot", "open") else ""
        lines.append(f"| {name} | {entry.title} | {(said + reason + tests).strip()} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    (HERE / "README.md").write_text(render())


if __name__ == "__main__":
    main()
