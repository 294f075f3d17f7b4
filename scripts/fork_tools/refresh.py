# SPDX-License-Identifier: Apache-2.0
"""The series on another release, as far as git's three-way merge can carry it.

Every hunk becomes a commit of its own on the pinned release and is merged into the other one with full context. So
one hunk that conflicts takes nothing else with it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fork_tools import archive, patch, tree
from fork_tools.archive import Entry, Files
from fork_tools.errors import ForkError
from fork_tools.fetch import pip_download, sha256_of
from fork_tools.files import replace_folder, scratch_folder
from fork_tools.layout import SOURCE_ROOT, Layout
from fork_tools.patch import Insertion, Patch
from fork_tools.pin import Pin
from fork_tools.scratch import ScratchRepository, source_files

_MERGE_TREE_SINCE = (2, 38)


@dataclass(frozen=True)
class Refresh:
    """What became of the series. `by_hand` names each hunk that did not merge, with the reason."""

    wheel: str
    sha256: str
    hunks: int
    patches: int
    exported: tuple[Patch, ...]
    by_hand: tuple[tuple[Insertion, str], ...]
    overlay_clashes: tuple[str, ...]

    def report(self) -> list[str]:
        """The outcome in lines for a maintainer."""
        lines = [f"{self.wheel} sha256:{self.sha256}"]
        lines.append(f"hunks: {self.hunks - len(self.by_hand)} of {self.hunks} merged, {len(self.by_hand)} by hand")
        lines.append(f"patches: {len(self.exported)} of {self.patches} written")
        lines += [f"by hand: {insertion}: {reason}" for insertion, reason in self.by_hand]
        lines += [f"overlay: {clash}" for clash in self.overlay_clashes]
        return lines


def refresh(layout: Layout, pin: Pin, wheel: Path, version: str, out: Path) -> Refresh:
    """Carry the series to release `version`; complete patches land in `out`/patches, and patches/ is not touched."""
    with scratch_folder(layout.build / ".refresh") as scratch:
        download = pip_download(f"{pin.name}=={version}", [], scratch)
        result, texts = carry(layout, archive.read(wheel), download, scratch)
        for name, text in texts.items():
            path = scratch / "export" / "patches" / f"{name}.patch"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        (scratch / "export").mkdir(exist_ok=True)
        replace_folder(scratch / "export", out)
    return result


def carry(layout: Layout, pristine: Files, download: Path, scratch: Path) -> tuple[Refresh, dict[str, str]]:
    """Merge every hunk into the wheel `download`; returns the outcome and the text of each complete patch."""
    patches = tree.read_patches(layout)
    tree.apply(pristine, patches)
    release = archive.read(download)
    repository = ScratchRepository(scratch / "repository")
    require_merge_tree(repository.git("version"))
    base = repository.commit("pinned release\n", source_files(pristine))
    target = repository.commit("other release\n", source_files(release), parent=base, whole=True)
    exported: dict[str, tuple[Patch, str]] = {}
    by_hand: list[tuple[Insertion, str]] = []
    for one in patches:
        outcomes = [merge_hunk(repository, base, target, pristine, insertion) for insertion in one.insertions]
        moved = [outcome for outcome in outcomes if isinstance(outcome, Insertion)]
        pairs = zip(one.insertions, outcomes, strict=True)
        by_hand += [(insertion, outcome) for insertion, outcome in pairs if isinstance(outcome, str)]
        if len(moved) == len(outcomes):
            exported[one.name] = rebased(one, moved, release)
    done = tuple(rebased_patch for rebased_patch, _ in exported.values())
    tree.apply(release, done)
    clashes = tuple(tree.overlay_clashes(tree.read_overlay(layout), release))
    hunks = sum(len(one.insertions) for one in patches)
    digest = sha256_of(download)
    result = Refresh(download.name, digest, hunks, len(patches), done, tuple(by_hand), clashes)
    return result, {name: text for name, (_, text) in exported.items()}


def require_merge_tree(version: str) -> None:
    """Raise ForkError when git, whose `git version` is given, cannot merge without a work tree."""
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if found < _MERGE_TREE_SINCE:
        raise ForkError(f"git: expected 2.38 or newer for refresh, got {version.split()[-1]}; install a newer git")


def merge_hunk(
    repository: ScratchRepository, base: str, target: str, pristine: Files, insertion: Insertion
) -> Insertion | str:
    """The insertion at its place in `target`, or the reason why it has none that git is sure of."""
    entry = pristine[insertion.path.removeprefix(SOURCE_ROOT)]
    changed = Entry(patch.merge(entry.data, [insertion]), entry.executable)
    hunk = repository.commit(f"{insertion}\n", {insertion.path: changed}, parent=base)
    result = repository.run("merge-tree", "--write-tree", target, hunk)
    output = result.stdout.decode(errors="replace")
    if result.returncode != 0:
        conflict = re.search(r"CONFLICT \((.*?)\)", output)
        return f"{conflict[1]} conflict" if conflict else "git cannot merge it"
    merged = output.split()[0]
    paths = repository.git("diff", "--name-only", target, merged).splitlines()
    if len(paths) != 1:
        return f"the merge changes {len(paths)} files"
    before, after = (
        repository.run("cat-file", "blob", f"{commit}:{paths[0]}").stdout.decode() for commit in (target, merged)
    )
    return locate(replace(insertion, path=paths[0]), before, after)


def locate(insertion: Insertion, before: str, after: str) -> Insertion | str:
    """Where the lines of `insertion` stand in `after`, which must differ from `before` in nothing else."""
    old, new, count = before.split("\n"), after.split("\n"), len(insertion.lines)
    for index in range(len(new) - count + 1):
        if new[index : index + count] == list(insertion.lines) and new[:index] + new[index + count :] == old:
            return replace(insertion, after=index)
    return "the merge changes more than the inserted lines"


def rebased(one: Patch, insertions: Sequence[Insertion], release: Files) -> tuple[Patch, str]:
    """A patch with new anchors and bases, and its text."""
    base = {
        insertion.path: patch.sha256(release[insertion.path.removeprefix(SOURCE_ROOT)].data) for insertion in insertions
    }
    kept = [line for line in one.header.split("\n") if not line.startswith("Base:")]
    header = "\n".join([*kept, *(f"Base: {path} sha256:{digest}" for path, digest in sorted(base.items()))])
    text = patch.render(replace(one, insertions=tuple(insertions)), header)
    return patch.parse(one.name, text), text
