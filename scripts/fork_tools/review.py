# SPDX-License-Identifier: Apache-2.0
"""The fork's changes as a series with full context, for reviewers and for `git am`."""

from pathlib import Path

from fork_tools import archive, tree
from fork_tools.errors import ForkError
from fork_tools.files import replace_folder, scratch_folder
from fork_tools.layout import SOURCE_ROOT, Layout
from fork_tools.patch import Patch
from fork_tools.pin import Pin
from fork_tools.scratch import ScratchRepository, source_files
from fork_tools.series import in_series_order

_OVERLAY_MESSAGE = "overlay: add the fork's new files\n\nPatches call them; upstream's files stay as they are.\n"


def write_review(layout: Layout, pin: Pin, wheel: Path, out: Path) -> int:
    """Write one mail per patch, after one for the overlay, to the folder `out`; returns their number.

    The series is applied with `git am` to a pristine tree first, and must give the bytes of build/tree.
    """
    pristine = archive.read(wheel)
    patches = in_series_order(layout, tree.read_patches(layout))
    with scratch_folder(layout.build / ".review") as scratch:
        repository = ScratchRepository(scratch / "repository")
        base = repository.commit(f"{pin.name} {pin.version}\n", source_files(pristine))
        tip = base
        overlay = {SOURCE_ROOT + name: entry for name, entry in tree.read_overlay(layout).items()}
        if overlay:
            tip = repository.commit(_OVERLAY_MESSAGE, overlay, parent=tip)
        for count, one in enumerate(patches, 1):
            files = {SOURCE_ROOT + name: entry for name, entry in tree.apply(pristine, patches[:count]).items()}
            tip = repository.commit(commit_message(one), files, parent=tip, author=one.fields["From"])
        mails = scratch / "mails"
        options = ["--quiet", "--no-numbered", "--no-signature", "--zero-commit", "--full-index", "--binary"]
        repository.git("format-patch", *options, "--output-directory", str(mails), f"{base}..{tip}")
        _verify(repository, base, sorted(mails.glob("*.patch")), source_files(tree.materialise(layout, pin, wheel)))
        replace_folder(mails, out)
    return len(list(out.glob("*.patch")))


def commit_message(one: Patch) -> str:
    """Subject and header fields of a patch; its bases say nothing to a reader of the full context."""
    kept = [line for line in one.header.split("\n") if not line.startswith(("From:", "Subject:", "Base:"))]
    body = "\n".join(kept).strip()
    return f"{one.fields['Subject']}\n\n{body}\n"


def _verify(repository: ScratchRepository, base: str, mails: list[Path], expected: archive.Files) -> None:
    wanted = repository.commit("the tree\n", expected, parent=base, whole=True)
    repository.git("checkout", "--quiet", "--detach", base)
    repository.git("am", "--quiet", *map(str, mails))
    difference = repository.git("diff", "--name-only", wanted, "HEAD").split("\n")[0]
    if difference:
        raise ForkError(f"review: expected git am to give the tree, got another {difference}; see scripts/fork lint")
