# SPDX-License-Identifier: Apache-2.0
"""The patch form: what parses, what is refused, and where inserted lines land."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import ENGINE, PRISTINE, digest, marked, patch_text

from fork_tools import patch
from fork_tools.errors import ForkError
from fork_tools.patch import Insertion

NAME = "core/call-hook"
BASES = {ENGINE: digest(PRISTINE["sglang/engine.py"])}
GOOD = patch_text(NAME, {ENGINE: [(2, marked(NAME, "first", "second")), (7, marked(NAME, "third"))]}, BASES)

lines = st.lists(st.text("abc ", max_size=4), min_size=1, max_size=12)


@st.composite
def files_with_insertions(draw: st.DrawFn) -> tuple[str, list[Insertion]]:
    """A text that ends in a newline, and insertions at distinct lines of it, in any order."""
    content = draw(lines)
    anchors = draw(st.lists(st.integers(0, len(content)), unique=True, max_size=5))
    added = [tuple(f"+{anchor}.{number}" for number in range(draw(st.integers(1, 3)))) for anchor in anchors]
    return "\n".join(content) + "\n", [
        Insertion(NAME, ENGINE, anchor, new) for anchor, new in zip(anchors, added, strict=True)
    ]


def test_reads_every_part() -> None:
    one = patch.parse(NAME, GOOD)
    assert one.fields["Why"] == "The toy needs them, and says so on two lines."
    assert one.base == BASES
    assert [(insertion.after, len(insertion.lines)) for insertion in one.insertions] == [(2, 2), (7, 1)]
    assert one.insertions[0].lines == ("first  # sm120: core/call-hook", "second")
    assert patch.problems(one) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("@@ -7,0 +10 @@", "@@ -7,0 +10 @@ def step(self):", "and nothing more"),
        ("@@ -7,0 +10 @@", "@@ -7,1 +10 @@", "and nothing more"),
        ("@@ -7,0 +10 @@", "@@ -7,0 +8 @@", r"expected \+10 .* got \+8"),
        ("@@ -7,0 +10 @@", "@@ -7,0 +10,2 @@", "expected 1 as the number of added lines, got 2"),
        ("@@ -7,0 +10 @@", "@@ -2,0 +5 @@", "expected an anchor after line 2, got 2"),
        ("+second", "+second\n+x\n+y", "expected 1 to 3 added lines, got 4"),
        ("+second", " second", "expected a file header, a hunk or an added line"),
        ("+second", "-second", "expected a file header, a hunk or an added line"),
        ("+second", "+second\n\\ No newline at end of file", "expected a file header, a hunk or an added line"),
        (f"+++ b/{ENGINE}", "+++ b/python/other.py", r"expected '\+\+\+ b/python/sglang/engine.py'"),
        ("sha256:", "md5:", "expected 'Base: <path> sha256:"),
        ("Kind: feature", "Kind: feature\nKind: fix", "expected one Kind field"),
        ("From: A", "A", "expected 'From: name <mail>' first"),
    ],
)
def test_refuses_another_form(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ForkError, match=message) as error:
        patch.parse(NAME, GOOD.replace(old, new))
    assert str(error.value).startswith(f"{NAME}:")


def test_refuses_a_file_twice() -> None:
    again = f"--- a/{ENGINE}\n+++ b/{ENGINE}\n@@ -9,0 +10 @@\n+more\n"
    with pytest.raises(ForkError, match="expected each file once"):
        patch.parse(NAME, GOOD + again)


@pytest.mark.parametrize("field", [field for field in patch.FIELDS if field != "Base"])
def test_names_a_missing_field(field: str) -> None:
    text = patch_text(NAME, {ENGINE: [(2, marked(NAME, "first"))]}, BASES, **{field.replace("-", "_"): None})
    found = [problem for problem in patch.problems(patch.parse(NAME, text)) if "got none" in problem]
    assert found == [f"expected a {field} field, got none"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Kind: feature", "Kind: hack", "Kind among"),
        ("Upstream: not-sent, a toy", "Upstream: not-sent", "Upstream as a URL"),
        ("Upstream: not-sent, a toy", "Upstream: rejected, kept", "Upstream as a URL"),
        ("Subject: core: insert", "Subject: insert", "starts with 'core: '"),
        ("insert a few lines", "insert " + "many " * 14 + "lines", "at most 72 characters"),
        ("<maintainer@example.org>", "maintainer", "From: name <mail>"),
        ("first  # sm120: core/call-hook", "first", "to end in '# sm120: core/call-hook'"),
        ("first  # sm120: core/call-hook", "first  # sm120: core/other", "to end in '# sm120: core/call-hook'"),
        (f"Base: {ENGINE}", "Base: python/sglang/router.py", f"expected a Base for {ENGINE}, got none"),
    ],
)
def test_names_what_to_correct(old: str, new: str, message: str) -> None:
    assert old in GOOD
    assert any(message in problem for problem in patch.problems(patch.parse(NAME, GOOD.replace(old, new))))


@given(files_with_insertions(), st.randoms(use_true_random=False))
def test_merge_inserts_after_the_pristine_lines(case: tuple[str, list[Insertion]], chance: random.Random) -> None:
    text, insertions = case
    at = {insertion.after: insertion.lines for insertion in insertions}
    expected = [*at.get(0, ())]
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        expected += [line, *at.get(number, ())]
    chance.shuffle(insertions)
    assert patch.merge(text.encode(), insertions).decode() == "\n".join(expected) + "\n"


@given(files_with_insertions())
def test_rendered_text_reads_back(case: tuple[str, list[Insertion]]) -> None:
    one = patch.Patch(NAME, "From: A <a@b>", {}, {}, tuple(case[1]))
    read = patch.parse(NAME, patch.render(one, one.header)).insertions
    assert read == tuple(sorted(case[1], key=lambda insertion: insertion.after))


def test_git_applies_a_patch_to_its_base_with_the_same_result(tmp_path: Path) -> None:
    (tmp_path / ENGINE).parent.mkdir(parents=True)
    (tmp_path / ENGINE).write_text(PRISTINE["sglang/engine.py"])
    subprocess.run(["git", "apply", "--unidiff-zero"], input=GOOD, text=True, cwd=tmp_path, check=True)
    merged = patch.merge(PRISTINE["sglang/engine.py"].encode(), patch.parse(NAME, GOOD).insertions)
    assert (tmp_path / ENGINE).read_bytes() == merged


def test_two_hunks_at_one_anchor_are_refused_by_name() -> None:
    other = patch_text("core/other", {ENGINE: [(7, marked("core/other", "x"))]}, BASES)
    with pytest.raises(ForkError, match="after line 7, got core/call-hook and core/other"):
        patch.check_anchors([patch.parse(NAME, GOOD), patch.parse("core/other", other)])


@pytest.mark.parametrize(("text", "after"), [("a\nb\n", 3), ("a\nb", 2), ("", 1)])
def test_an_anchor_beyond_the_end_is_refused(text: str, after: int) -> None:
    with pytest.raises(ForkError, match=f"got {after}"):
        patch.merge(text.encode(), [Insertion(NAME, ENGINE, after, ("x",))])
