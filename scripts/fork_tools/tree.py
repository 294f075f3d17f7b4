# SPDX-License-Identifier: Apache-2.0
"""The fork's source tree: the pristine wheel, the overlay's new files and the patches' insertions."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from fork_tools import archive, patch
from fork_tools.archive import Entry, Files
from fork_tools.errors import ForkError
from fork_tools.files import replace_folder, scratch_folder, sibling
from fork_tools.layout import SOURCE_ROOT, Layout
from fork_tools.metadata import fork_metadata
from fork_tools.patch import Insertion, Patch
from fork_tools.pin import Pin

STAMP = "fork-stamp.json"


def read_patches(layout: Layout) -> list[Patch]:
    """Every patch under patches/, sorted by name."""
    return [read_patch(layout, path) for path in sorted(layout.patches.rglob("*.patch"))]


def read_patch(layout: Layout, path: Path) -> Patch:
    """One patch file below patches/."""
    name = path.relative_to(layout.patches).with_suffix("").as_posix()
    try:
        return patch.parse(name, path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ForkError(f"{name}: expected UTF-8 text, got {error.reason} at byte {error.start}") from error


def read_overlay(layout: Layout) -> Files:
    """Every file of the overlay by its path in a wheel; caches and hidden files are not part of it."""
    files: Files = {}
    for path in sorted(layout.overlay.rglob("*")):
        relative = path.relative_to(layout.overlay)
        if path.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in relative.parts):
            files[relative.as_posix()] = Entry(path.read_bytes(), os.access(path, os.X_OK))
    return files


def overlay_clashes(overlay: Iterable[str], pristine: Iterable[str]) -> Iterator[str]:
    """Name each overlay file that would hide an upstream file or Python module, or be hidden by one."""
    upstream = set(pristine)
    folders = {str(folder) for name in upstream for folder in PurePosixPath(name).parents}
    modules = {_module(name): name for name in upstream}
    for name in overlay:
        parents = {str(folder) for folder in PurePosixPath(name).parents}
        hidden = {name} & (upstream | folders) or parents & upstream or {modules.get(_module(name))} - {None}
        if hidden:
            name = f"sglang/{SOURCE_ROOT}{name}"
            yield f"{name}: expected a new path, got a clash with upstream's {hidden.pop()}; rename it"


def check_overlay(overlay: Iterable[str], pristine: Iterable[str]) -> None:
    """Raise ForkError for the first of `overlay_clashes`."""
    for clash in overlay_clashes(overlay, pristine):
        raise ForkError(clash)


def _module(name: str) -> str:
    """What Python would import a file as, as a path; other files are themselves."""
    path = PurePosixPath(name)
    if path.suffix not in (".py", ".so"):
        return name
    stem = path.name.partition(".")[0]
    return str(path.parent if stem == "__init__" else path.parent / stem)


def apply(pristine: Files, patches: Sequence[Patch]) -> Files:
    """The patched files alone, by their path in a wheel.

    Raises ForkError when a file is not the one that a patch was written for, or two hunks share an anchor.
    """
    patch.check_anchors(patches)
    check_bases(pristine, patches)
    insertions: dict[str, list[Insertion]] = {}
    for one in patches:
        for insertion in one.insertions:
            insertions.setdefault(insertion.path, []).append(insertion)
    patched: Files = {}
    for path, group in insertions.items():
        name = path.removeprefix(SOURCE_ROOT)
        patched[name] = Entry(patch.merge(pristine[name].data, group), pristine[name].executable)
    return patched


def check_bases(pristine: Files, patches: Iterable[Patch]) -> None:
    """Compare each patch's Base fields with the wheel's files, and those with the wheel's RECORD."""
    record = archive.read_record(pristine)
    for one in patches:
        for path in sorted({insertion.path for insertion in one.insertions} | one.base.keys()):
            name = path.removeprefix(SOURCE_ROOT)
            if not path.startswith(SOURCE_ROOT) or name not in pristine:
                raise ForkError(f"patches/{one.name}.patch: expected a file of the release, got {path}")
            data = pristine[name].data
            found = patch.sha256(data)
            if one.base.get(path) != found:
                raise ForkError(
                    f"{path}: expected sha256 {one.base.get(path)} (patches/{one.name}.patch), got {found}; "
                    "the patch was written for another file: run scripts/fork refresh"
                )
            if record.get(name) != archive.record_digest(data):
                raise ForkError(
                    f"{path}: expected {record.get(name)} (the wheel's RECORD), got {archive.record_digest(data)}; "
                    "the wheel is damaged: run scripts/fork fetch"
                )


def materialise(layout: Layout, pin: Pin, wheel: Path) -> Files:
    """The whole fork in memory: source files as in build/tree, and the fork's metadata."""
    pristine = archive.read(wheel)
    old = archive.dist_info(pristine)
    source = {name: entry for name, entry in pristine.items() if not name.startswith(f"{old}/")}
    return source | changes(layout, pristine) | fork_metadata(pin, pristine)


def changes(layout: Layout, pristine: Files) -> Files:
    """The new and the patched files alone, by their path in a wheel."""
    overlay = read_overlay(layout)
    check_overlay(overlay, pristine)
    return overlay | apply(pristine, read_patches(layout))


def write_delta(layout: Layout, wheel: Path, out: Path) -> int:
    """Replace the folder `out` by `changes`; returns the number of files.

    Laid over an installed release they are the fork but for its entry points: no CPU platform, no limit of bodies.
    """
    files = changes(layout, archive.read(wheel))
    with scratch_folder(sibling(out, "partial")) as partial:
        write_files(partial, files)
        replace_folder(partial, out)
    return len(files)


def inputs_digest(layout: Layout, wheel_sha256: str) -> str:
    """A digest of everything that the tree and the fork's wheel are made from, this tool included."""
    sources = {f"tool/{path.name}": path for path in Path(__file__).parent.glob("*.py")}
    sources |= {f"patches/{path.relative_to(layout.patches)}": path for path in layout.patches.rglob("*.patch")}
    content = {name: path.read_bytes() for name, path in {"pin": layout.pin, **sources}.items()}
    content |= {f"overlay/{name}": bytes([one.executable]) + one.data for name, one in read_overlay(layout).items()}
    digest = hashlib.sha256(wheel_sha256.encode())
    for name, data in sorted(content.items()):
        digest.update(f"{name} {len(data)} ".encode() + data)
    return digest.hexdigest()


def build_tree(layout: Layout, pin: Pin, wheel: Path, wheel_sha256: str, out: Path) -> bool:
    """Write the fork to the folder `out`; returns False when it is there already, unchanged.

    The folder appears complete or not at all. A folder that this tool did not make is never replaced.
    """
    inputs = inputs_digest(layout, wheel_sha256)
    stamp = _read_stamp(out)
    if stamp == {"inputs": inputs, "files": _listing(out)}:
        return False
    if stamp is None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ForkError(f"{out}: expected a new or empty folder, or an earlier tree, got something else; move it away")
    files = materialise(layout, pin, wheel)
    with scratch_folder(sibling(out, "partial")) as partial:
        write_files(partial, files)
        stamp = {"inputs": inputs, "files": _listing(partial)}
        (partial / archive.dist_info(files) / STAMP).write_text(json.dumps(stamp), encoding="utf-8")
        replace_folder(partial, out)
    return True


def write_files(folder: Path, files: Mapping[str, Entry]) -> None:
    """Write `files` below the empty `folder`."""
    for parent in {folder / PurePosixPath(name).parent for name in files}:
        parent.mkdir(parents=True, exist_ok=True)
    for name, entry in files.items():
        path = folder / name
        path.write_bytes(entry.data)
        path.chmod(entry.mode)


def _read_stamp(out: Path) -> dict[str, str] | None:
    try:
        (path,) = out.glob(f"*.dist-info/{STAMP}")
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def _listing(folder: Path) -> str:
    """A digest of the names, sizes and times below a folder: cheap, and different after any edit by hand."""
    digest = hashlib.sha256()
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        digest.update(f"{os.path.relpath(root, folder)}\n".encode())
        for name in sorted(set(names) - {STAMP}):
            status = os.stat(os.path.join(root, name))
            digest.update(f"{name} {status.st_size} {status.st_mtime_ns} {status.st_mode}\n".encode())
    return digest.hexdigest()
