# SPDX-License-Identifier: Apache-2.0
"""The fork's changes as small series with full context and cover letters, for reviewers and for `git am`.

Each patch comes with the overlay files that it is the first to call. A series without patches, at the end, brings the
files that no patch calls.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fork_tools import archive, tree
from fork_tools.archive import Files
from fork_tools.calls import called_files, import_lines
from fork_tools.covers import Cover, read_cover
from fork_tools.errors import ForkError
from fork_tools.files import replace_folder, scratch_folder
from fork_tools.layout import SOURCE_ROOT, Layout
from fork_tools.patch import Patch
from fork_tools.pin import Pin
from fork_tools.scratch import IDENTITY, ScratchRepository, source_files
from fork_tools.series import in_series_order, read_groups

COVER_LETTER = "0000-cover-letter.patch"  # the name that git gives it

_FORMAT = ("--quiet", "--numbered", "--no-signature", "--zero-commit", "--full-index", "--binary", "--cover-letter")


@dataclass(frozen=True)
class Step:
    """One mail: a patch, or None for files alone, and the overlay files that come with it."""

    patch: Patch | None
    files: frozenset[str]


@dataclass(frozen=True)
class Stage:
    """One series: its name, letter and mails, and by series the earlier files that it calls too."""

    name: str
    cover: Cover
    steps: tuple[Step, ...]
    needs: dict[str, list[str]]


def plan(layout: Layout, overlay: Files) -> list[Stage]:
    """The series of patches/series with the overlay's files dealt out to them; every file comes once."""
    patches = {f"{one.name}.patch": one for one in in_series_order(layout, tree.read_patches(layout))}
    owner: dict[str, str] = {}
    stages = []
    for group in read_groups(layout):
        steps, needs = [], dict[str, list[str]]()
        members: list[Patch | None] = [patches[name] for name in group.patches]
        for one in members or [None]:
            called, files = _calls(one, overlay, owner)
            for path in sorted(called & owner.keys()):
                if owner[path] != group.name and path not in needs.setdefault(owner[path], []):
                    needs[owner[path]].append(path)
            steps.append(Step(one, frozenset(files)))
            owner |= dict.fromkeys(files, group.name)
        stages.append(Stage(group.name, read_cover(layout, group.name), tuple(steps), needs))
    if missing := sorted(overlay.keys() - owner.keys()):
        raise ForkError(
            f"sglang/{SOURCE_ROOT}{missing[0]}: expected a patch that calls it, got none; "
            "end patches/series with a heading of its own for files that no patch calls"
        )
    return stages


def _calls(one: Patch | None, overlay: Files, owner: Mapping[str, str]) -> tuple[set[str], set[str]]:
    """The files that a patch calls, and those among them that it brings; without one, what the files left over call."""
    if one is not None:
        called = called_files(import_lines(one), overlay)
        return called, called - owner.keys()
    left = overlay.keys() - owner.keys()
    return called_files((overlay[name].data.decode() for name in left if name.endswith(".py")), overlay), left


def write_review(layout: Layout, pin: Pin, wheel: Path, out: Path) -> list[Stage]:
    """Write one folder per series to the folder `out`, each with a cover letter and its mails; returns the series.

    All are applied with `git am` to a pristine tree first, in order, and must give the bytes of build/tree.
    """
    pristine = archive.read(wheel)
    overlay = tree.read_overlay(layout)
    stages = plan(layout, overlay)
    with scratch_folder(layout.build / ".review") as scratch:
        repository = ScratchRepository(scratch / "repository")
        base = tip = repository.commit(f"{pin.name} {pin.version}\n", source_files(pristine))
        applied: list[Patch] = []
        mails = scratch / "mails"
        mails.mkdir()
        for number, stage in enumerate(stages, 1):
            start = tip
            for step in stage.steps:
                applied += [step.patch] if step.patch else []
                files = {name: overlay[name] for name in step.files} | tree.apply(pristine, applied)
                files = {SOURCE_ROOT + name: entry for name, entry in files.items()}
                message, author = _message(step, stage)
                tip = repository.commit(message, files, parent=tip, author=author)
            folder = mails / f"{number:02d}-{stage.name}"
            repository.git("format-patch", *_FORMAT, "--output-directory", str(folder), f"{start}..{tip}")
            _fill_cover(folder / COVER_LETTER, stage, pin)
        expected = source_files(tree.materialise(layout, pin, wheel))
        _verify(repository, base, mails_of(mails), expected)
        replace_folder(mails, out)
    return stages


def _message(step: Step, stage: Stage) -> tuple[str, str]:
    if step.patch is None:
        return f"{stage.cover.subject}\n\nNew files alone; see the cover letter.\n", IDENTITY
    return commit_message(step.patch), step.patch.fields["From"]


def commit_message(one: Patch) -> str:
    """Subject and header fields of a patch; its bases say nothing to a reader of the full context."""
    kept = [line for line in one.header.split("\n") if not line.startswith(("From:", "Subject:", "Base:"))]
    body = "\n".join(kept).strip()
    return f"{one.fields['Subject']}\n\n{body}\n"


def _fill_cover(path: Path, stage: Stage, pin: Pin) -> None:
    """Put the letter into the form that git has written, above git's list of the mails and their sizes."""
    lines = [stage.cover.body, f"Applies to {pin.tag}."]
    for name, files in stage.needs.items():
        lines += [f"It calls files that come with the series '{name}':"]
        lines += [f"  {SOURCE_ROOT}{file}" for file in files]
    text = path.read_text(encoding="utf-8")
    text = text.replace("*** SUBJECT HERE ***", stage.cover.subject, 1)
    path.write_text(text.replace("*** BLURB HERE ***", "\n".join(lines), 1), encoding="utf-8")


def mails_of(folder: Path) -> list[Path]:
    """The mails of all series below `folder` that `git am` takes, in order: all but the cover letters."""
    return sorted(path for path in folder.glob("*/*.patch") if path.name != COVER_LETTER)


def _verify(repository: ScratchRepository, base: str, mails: list[Path], expected: archive.Files) -> None:
    wanted = repository.commit("the tree\n", expected, parent=base, whole=True)
    repository.git("checkout", "--quiet", "--detach", base)
    repository.git("am", "--quiet", *map(str, mails))
    difference = repository.git("diff", "--name-only", wanted, "HEAD").split("\n")[0]
    if difference:
        raise ForkError(f"review: expected git am to give the tree, got another {difference}; see scripts/fork lint")
