# SPDX-License-Identifier: Apache-2.0
"""The lint on a toy checkout: clean when all is well, one line for each thing that is not."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
from toy import ENGINE, PRISTINE, ToyCheckout, marked

LICENCE = "# SPDX-License-Identifier: Apache-2.0\n"
COPY = PRISTINE["sglang/engine.py"].splitlines()[3:6]
ORIGIN = "got that of sglang/engine.py:4;"


@pytest.fixture
def clean(toy: ToyCheckout) -> ToyCheckout:
    """A checkout with a patch and an overlay file that has nothing to complain about."""
    toy.overlay("sglang/reference.py", f"{LICENCE}activate = None\n")
    toy.patch("core/hook", {ENGINE: [(4, marked("core/hook", "import sglang.reference", "sglang.reference.start()"))]})
    assert toy.run("table") == 0
    return toy


@pytest.fixture
def problems(clean: ToyCheckout, capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """Runs the lint, which must fail; returns its lines without the last, which is their number."""

    def run() -> list[str]:
        capsys.readouterr()
        assert clean.run("lint") == 1
        *lines, total = capsys.readouterr().err.splitlines()
        assert total == f"fork: lint: expected no problems, got {len(lines)}; see above"
        return lines

    return run


def test_a_good_checkout_is_clean(clean: ToyCheckout, capsys: pytest.CaptureFixture[str]) -> None:
    assert clean.run("lint") == 0
    assert capsys.readouterr().out == "clean\n"


Change = Callable[[ToyCheckout], object]

CHANGES: dict[str, tuple[Change, str]] = {
    "patch that is not listed": (
        lambda toy: toy.patch("core/extra", {ENGINE: [(9, marked("core/extra", "x"))]}, listed=False),
        "patches/series: expected a line for core/extra.patch, got none",
    ),
    "listed patch that is gone": (
        lambda toy: (toy.layout.patches / "core/hook.patch").unlink(),
        "patches/series: expected a file for core/hook.patch, got none",
    ),
    "patch listed twice": (
        lambda toy: toy.write("patches/series", "# toy\ncore/hook.patch\ncore/hook.patch\n"),
        "patches/series: expected core/hook.patch once, got it again",
    ),
    "test that does not exist": (
        lambda toy: (toy.layout.root / "tests/test_toy.py").unlink(),
        "patches/core/hook.patch: expected the path of a test in this repository, got 'tests/test_toy.py'",
    ),
    "header without a reason": (
        lambda toy: toy.patch("core/hook", {ENGINE: [(4, marked("core/hook", "x"))]}, listed=False, Why=None),
        "patches/core/hook.patch: expected a Why field, got none",
    ),
    "context line": (
        lambda toy: (toy.layout.patches / "core/hook.patch").open("a").write(" step_5 = 5\n"),
        "patches/core/hook:16: expected a file header, a hunk or an added line, got ' step_5 = 5'",
    ),
    "binary patch": (
        lambda toy: (toy.layout.patches / "core/hook.patch").write_bytes(b"From: \xff"),
        "patches/core/hook: expected UTF-8 text, got invalid start byte at byte 6",
    ),
    "table that is old": (
        lambda toy: toy.patch("core/more", {ENGINE: [(9, marked("core/more", "x"))]}),
        "patches/README.md: expected the current table, got another; run scripts/fork table",
    ),
    "two hunks at one anchor": (
        lambda toy: toy.patch("core/twin", {ENGINE: [(4, marked("core/twin", "x"))]}),
        f"{ENGINE}: expected one hunk after line 4, got core/hook and core/twin; join them or move one",
    ),
    "source file without a licence": (
        lambda toy: toy.overlay("sglang/tool.py", "def tool():\n    return 1\n"),
        "sglang/python/sglang/tool.py: expected 'SPDX-License-Identifier: Apache-2.0' in the first two lines, got none",
    ),
    "script without a licence": (
        lambda toy: toy.write("scripts/serve", "#!/bin/sh\nexec true\n"),
        "scripts/serve: expected 'SPDX-License-Identifier: Apache-2.0' in the first two lines, got none",
    ),
    "overlay file that hides one": (
        lambda toy: toy.overlay("sglang/router.py"),
        "sglang/python/sglang/router.py: expected a new path, got a clash with upstream's sglang/router.py; rename it",
    ),
    "stale base": (
        lambda toy: toy.release({**PRISTINE, "sglang/engine.py": "changed = 1\n"}),
        f"{ENGINE}: expected sha256 ",
    ),
    "no README": (
        lambda toy: (toy.layout.patches / "README.md").unlink(),
        "patches/README.md: expected the description of the patches, got no such file",
    ),
    "page without a place for the table": (
        lambda toy: toy.write("README.md", "# Toy\n"),
        "README.md: expected '<!-- table: scripts/fork table -->' and '<!-- end of table -->', got no such pair",
    ),
    "series without a letter": (
        lambda toy: (toy.layout.patches / "covers/toy.md").unlink(),
        "patches/covers/toy.md: expected the cover letter of the series, got no such file",
    ),
    "letter without a series": (
        lambda toy: toy.cover("other"),
        "patches/covers/other.md: expected its series, got none",
    ),
    "letter of another title": (
        lambda toy: toy.write("patches/covers/toy.md", "# Toys\n"),
        "patches/covers/toy.md: expected '# toy: what it does', at most 72 characters, got '# Toys'",
    ),
    "letter that lacks a section": (
        lambda toy: toy.write("patches/covers/toy.md", "# toy: grow\n\n## What is wrong\nIt is small.\n"),
        "patches/covers/toy.md: expected the sections What is wrong|What is missing, How to see it, What the change does,",
    ),
    "letter with an empty section": (
        lambda toy: toy.cover("toy", How_to_see_it=" "),
        "patches/covers/toy.md: expected text under 'How to see it', got none",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_mistake_is_named(clean: ToyCheckout, problems: Callable[[], list[str]], name: str) -> None:
    change, message = CHANGES[name]
    change(clean)
    assert [line for line in problems() if line.startswith(f"fork: {message}")]


def test_more_hunks_than_thirty_are_too_many(clean: ToyCheckout, problems: Callable[[], list[str]]) -> None:
    clean.release({**PRISTINE, "sglang/long.py": "".join(f"row_{number}\n" for number in range(30))})
    hunks = [(number, marked("core/many", f"added_{number}")) for number in range(30)]
    clean.patch("core/many", {"python/sglang/long.py": hunks})
    assert clean.run("table") == 0
    assert problems() == ["fork: patches: expected at most 30 hunks in all, got 31; move code to the overlay"]


COPIES: dict[str, str] = {
    "notes.md": "\n".join(["# Notes", "", *COPY, ""]),
    "sglang/python/sglang/copy.py": LICENCE + "def f():\n" + "".join(f"        {line}\n" for line in COPY),
    "tests/gaps.py": LICENCE + "\n\nimport os\nfrom a import (\n    b,\n)\n".join(COPY) + "\n",
    "src/brackets.cc": "// SPDX-License-Identifier: Apache-2.0\n" + "\n}\n".join(COPY) + "\n",
    "docs/crlf.txt": "\r\n".join(["One of our own.", *COPY, ""]),
    "patches/core/hook.patch.orig": "\n".join(COPY),
}


@pytest.mark.parametrize("name", COPIES)
def test_three_lines_of_upstream_are_found(clean: ToyCheckout, problems: Callable[[], list[str]], name: str) -> None:
    clean.write(name, COPIES[name])
    (problem,) = problems()
    assert problem.startswith(f"fork: {name}:")
    assert ORIGIN in problem


def test_three_lines_of_upstream_are_found_in_a_patch(clean: ToyCheckout, problems: Callable[[], list[str]]) -> None:
    hunks = [(4, marked("core/hook", "x")), (8, marked("core/hook", "y", *COPY[:2])), (9, [COPY[2]])]
    clean.patch("core/hook", {ENGINE: hunks}, listed=False)
    assert [problem for problem in problems() if ORIGIN in problem]


def test_a_passage_is_reported_once(clean: ToyCheckout, problems: Callable[[], list[str]]) -> None:
    clean.write("notes.md", PRISTINE["sglang/engine.py"])
    assert len(problems()) == 1


def test_common_ground_is_not_reported(clean: ToyCheckout) -> None:
    brackets = "}\n)\n]\n" * 3
    imports = "import os\nimport re\nfrom a import b\nimport sys\n"
    clean.release({**PRISTINE, "sglang/common.py": brackets + imports})
    clean.write("notes.md", "\n".join(["Two lines alone:", *COPY[:2], "and then words of our own.", brackets, imports]))
    assert clean.run("lint") == 0


def test_the_text_of_the_licence_may_be_shared(clean: ToyCheckout, problems: Callable[[], list[str]]) -> None:
    clean.write("LICENSE", PRISTINE["sglang/engine.py"])
    assert clean.run("lint") == 0
    clean.write("docs/LICENSE", PRISTINE["sglang/engine.py"])
    assert len(problems()) == 1


def test_what_git_ignores_is_not_scanned(clean: ToyCheckout) -> None:
    clean.write("build/copy.py", PRISTINE["sglang/engine.py"])
    assert clean.run("lint") == 0


def test_without_the_wheel_the_rest_is_checked(clean: ToyCheckout, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(clean.layout.upstream)
    clean.write("notes.md", "\n".join(COPY))
    capsys.readouterr()
    assert clean.run("lint") == 0
    assert "no upstream wheel here, so no Base hash and no scan" in capsys.readouterr().out
    clean.overlay("sglang/tool.py", "x = 1\n")
    assert clean.run("lint") == 1


def test_the_table_is_made_from_the_headers(clean: ToyCheckout) -> None:
    text = (clean.layout.patches / "README.md").read_text()
    assert "| `core/hook` | feature | 1 | insert a few lines | the toy is grown up |\n" in text
    assert "\n1 patches, 1 hunks, 2 added lines.\n<!-- end of table -->\n" in text


def test_the_readme_has_a_row_for_each_series(clean: ToyCheckout) -> None:
    with (clean.layout.patches / "series").open("a") as series:
        series.write("# rest\n")
    clean.cover("rest")
    assert clean.run("table") == 0
    text = (clean.layout.root / "README.md").read_text()
    assert "| [toy](patches/covers/toy.md) | insert a few lines |\n" in text
    assert "| [rest](patches/covers/rest.md) | make it better |\n\n1 patches, 1 hunks, 2 added lines.\n" in text


@pytest.mark.parametrize(
    ("series", "message"),
    [
        ("core/hook.patch\n", "expected a heading such as '# fixes' first, got core/hook.patch"),
        ("# toy\ncore/hook.patch\n# toy\n", "expected the heading 'toy' once, got it again; join the two"),
    ],
)
def test_a_series_that_cannot_be_read_is_one_line(
    clean: ToyCheckout, capsys: pytest.CaptureFixture[str], series: str, message: str
) -> None:
    clean.write("patches/series", series)
    capsys.readouterr()
    assert clean.run("lint") == 1
    assert capsys.readouterr().err == f"fork: patches/series: {message}\n"
