# SPDX-License-Identifier: Apache-2.0
"""Every scenario of the bug log is covered once, by something that exists."""

from __future__ import annotations

import ast

from scenarios import table


def is_gpu_test(name: str) -> bool:
    path, node = table.test_functions()[name]
    own = any("gpu" in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", []))
    module_marks = [
        ast.unparse(statement)
        for statement in ast.parse(path.read_text()).body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "pytestmark"
    ]
    return own or any("gpu" in marks for marks in module_marks)


def test_every_scenario_is_there_once() -> None:
    assert list(table.scenarios()) == [f"BUG-{number:03}" for number in range(1, table.NUM_SCENARIOS + 1)]


def test_each_is_covered_or_says_why_not() -> None:
    for name, entry in table.scenarios().items():
        if entry.kind == "test":
            assert any(not is_gpu_test(test) for test in entry.tests), f"{name} has no test that runs here"
        else:
            assert entry.why, name
            assert all(is_gpu_test(test) for test in entry.tests), f"{name} has a test that runs here"


def test_named_tests_exist() -> None:
    known = table.test_functions()
    missing = {test for entry in table.scenarios().values() for test in entry.tests if test not in known}
    assert missing == set()


def test_markers_name_known_scenarios() -> None:
    assert set(table.marked_tests()) <= set(table.scenarios())


def test_most_are_tests() -> None:
    kinds = [entry.kind for entry in table.scenarios().values()]
    assert kinds.count("test") >= 60


def test_the_page_is_current() -> None:
    assert (table.HERE / "README.md").read_text() == table.render(), "run tests/scenarios/table.py"
