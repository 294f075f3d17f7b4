# SPDX-License-Identifier: Apache-2.0
"""Every rule of the fork that a machine can check. Each function returns problems, one line each."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from fork_tools import archive, patch, table, tree
from fork_tools.covers import lint_covers
from fork_tools.errors import ForkError
from fork_tools.layout import Layout
from fork_tools.leaks import UpstreamIndex, scan
from fork_tools.patch import Patch
from fork_tools.series import read_series

MAX_HUNKS = 30
LICENCE_LINE = "SPDX-License-Identifier: Apache-2.0"
SOURCE_SUFFIXES = (".py", ".cu", ".cuh", ".cc", ".cpp", ".h", ".sh")


def lint(layout: Layout, wheel: Path | None, wheel_sha256: str) -> list[str]:
    """All problems of a checkout. Without the upstream wheel, those that can be seen without it."""
    patches, found = lint_patches(layout)
    found += lint_series(layout) + lint_covers(layout) + lint_anchors(patches)
    found += table.problems(layout, patches)
    files = repository_files(layout.root)
    found += lint_licence_lines(files)
    if wheel is not None:
        found += lint_against_upstream(layout, patches, archive.read(wheel))
        found += scan(UpstreamIndex(wheel, wheel_sha256), files)
    return found


def lint_patches(layout: Layout) -> tuple[list[Patch], list[str]]:
    """The patches that parse, and what is wrong with each patch file."""
    patches: list[Patch] = []
    found: list[str] = []
    for path in sorted(layout.patches.rglob("*.patch")):
        try:
            one = tree.read_patch(layout, path)
        except ForkError as error:
            found.append(f"patches/{error}")
            continue
        patches.append(one)
        label = path.relative_to(layout.root)
        found += [f"{label}: {problem}" for problem in patch.problems(one)]
        for name in one.fields.get("Test", "").replace(",", " ").split():
            if not (layout.root / name).exists():
                found.append(f"{label}: expected the path of a test in this repository, got '{name}'")
    return patches, found


def lint_series(layout: Layout) -> list[str]:
    """Differences between patches/series and the folder, both ways."""
    listed = read_series(layout)
    present = {path.relative_to(layout.patches).as_posix() for path in layout.patches.rglob("*.patch")}
    found = [f"patches/series: expected {name} once, got it again" for name in sorted(listed) if listed.count(name) > 1]
    found += [f"patches/series: expected a line for {name}, got none" for name in sorted(present - set(listed))]
    found += [f"patches/series: expected a file for {name}, got none" for name in sorted(set(listed) - present)]
    return found


def lint_anchors(patches: Sequence[Patch]) -> list[str]:
    """Two hunks at one place, or more hunks than a rebase by hand can bear."""
    found = []
    try:
        patch.check_anchors(patches)
    except ForkError as error:
        found.append(str(error))
    hunks = sum(len(one.insertions) for one in patches)
    if hunks > MAX_HUNKS:
        found.append(f"patches: expected at most {MAX_HUNKS} hunks in all, got {hunks}; move code to the overlay")
    return found


def lint_licence_lines(files: Mapping[str, bytes]) -> list[str]:
    """Source files that do not name their licence in the first two lines."""
    found = []
    for name, data in files.items():
        head = data.split(b"\n", 2)[:2]
        is_source = name.endswith(SOURCE_SUFFIXES) or data.startswith(b"#!")
        if is_source and not any(LICENCE_LINE.encode() in line for line in head):
            found.append(f"{name}: expected '{LICENCE_LINE}' in the first two lines, got none")
    return found


def lint_against_upstream(layout: Layout, patches: Sequence[Patch], pristine: archive.Files) -> list[str]:
    """Patches written for other files than the pinned ones, and overlay files that clash with upstream's."""
    found = []
    for one in patches:
        try:
            tree.apply(pristine, [one])
        except ForkError as error:
            found.append(str(error))
    return [*found, *tree.overlay_clashes(tree.read_overlay(layout), pristine)]


def repository_files(root: Path) -> dict[str, bytes]:
    """Content of every file that git tracks or would add."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode != 0:
        raise ForkError(
            f"{root}: expected a git checkout, got '{result.stderr.strip()}'; lint reads git's list of files"
        )
    names = sorted(set(result.stdout.split("\0")) - {""})
    return {name: (root / name).read_bytes() for name in names if (root / name).is_file()}
