# SPDX-License-Identifier: Apache-2.0
"""Removes from an environment what a server on sm_90, sm_120 or the CPU never loads, after a check that nothing asks.

    python docker/prune.py SITE_PACKAGES

A file goes only if no remaining program or library links it (DT_NEEDED) and no remaining Python file names it, beside
those that an entry lists with the reason. Otherwise nothing is removed and the exit status is 1.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """What goes.

    pattern   glob below site-packages; a folder goes as a whole
    reason    why it is never loaded
    name      what a Python file would contain to load it
    named_by  files that contain `name` all the same, and do not load it here
    """

    pattern: str
    reason: str
    name: str
    named_by: tuple[str, ...] = ()


# A list of all libraries of CUDA, from which a caller asks for one by name.
CATALOGUE = "cuda/pathfinder/_dynamic_libs/descriptor_catalog.py"
ENTRIES = (
    Entry("nvidia_cutlass_dsl/cu12", "for drivers of CUDA 12, which the server refuses", "cutlass_dsl/cu12"),
    Entry(
        "nvidia_cutlass_dsl/dsl_packages/cutlass/_mlir/_mlir_libs/_cutlass_ir.cu12.*.so",
        "for drivers of CUDA 12, which the server refuses",
        "_cutlass_ir.cu12",
        # Explains in a comment how it takes the newest of those that are there.
        ("nvidia_cutlass_dsl/dsl_packages/cutlass/cutlass_dsl/cutlass.py",),
    ),
    Entry(
        "tokenspeed_triton/backends/amd/lib",
        "code generator for AMD cards",
        "libtriton_amd_codegen",
        ("tokenspeed_triton/backends/amd/compiler.py",),  # asked for when the target is an AMD card
    ),
    Entry("nvidia/cu13/lib/libcusolverMg.so.*", "solver over several cards", "libcusolverMg", (CATALOGUE,)),
    Entry("nvidia/cu13/lib/libnvrtc*.alt.so.*", "second build of the run-time compiler", "libnvrtc.alt"),
    Entry("xgrammar/lib/libxgrammar.a", "static library, for linking", "libxgrammar.a"),
    Entry("triton/backends/nvidia/lib/cupti/*.a", "static libraries, for linking", "cupti_static"),
)


def needed(path: Path) -> set[str]:
    """Names of the libraries that a 64-bit ELF file links, and an empty set for any other file."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        return set()
    section_table, entry_bytes, count = struct.unpack_from("<Q", data, 40)[0], *struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, section_table + index * entry_bytes) for index in range(count)]
    names = set()
    for _, kind, _, _, offset, size, link, *_ in sections:
        if kind != 6:  # SHT_DYNAMIC
            continue
        strings = sections[link][4]
        for position in range(offset, offset + size, 16):
            tag, value = struct.unpack_from("<qQ", data, position)
            if tag == 1:  # DT_NEEDED
                start = strings + value
                names.add(data[start : data.index(b"\0", start)].decode())
    return names


def files_below(path: Path) -> list[Path]:
    """`path` itself, or all files of a folder."""
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def plan(site: Path) -> dict[Entry, list[Path]]:
    """The files of each entry."""
    return {entry: [file for path in site.glob(entry.pattern) for file in files_below(path)] for entry in ENTRIES}


def objections(site: Path, planned: dict[Entry, list[Path]]) -> list[str]:
    """Why the plan must not be carried out, one line each."""
    found = [
        f"{entry.pattern}: expected files, got none; correct or drop it"
        for entry, files in planned.items()
        if not files
    ]
    going = {file for files in planned.values() for file in files}
    staying = [path for path in sorted(site.rglob("*")) if path.is_file() and path not in going]
    # A library may go from one folder and stay, under the same name, in another.
    lost = {file.name for file in going if ".so" in file.name} - {path.name for path in staying}
    for path in staying:
        where = path.relative_to(site).as_posix()
        if path.suffix == ".py":
            text = path.read_text(errors="replace")
            found += [
                f"{where}: expected no mention of {entry.name}, got one; find out whether it loads {entry.pattern}"
                for entry in planned
                if entry.name in text and where not in entry.named_by
            ]
        elif ".so" in path.name or path.stat().st_mode & 0o111:
            found += [f"{where}: expected not to link {name}, got a link; keep it" for name in needed(path) & lost]
    return found


def main() -> int:
    """Check, remove, and print what it saves."""
    site = Path(sys.argv[1])
    planned = plan(site)
    found = objections(site, planned)
    for line in found:
        print(f"prune: {line}", file=sys.stderr)
    for entry, files in planned.items() if not found else ():
        size = sum(file.stat().st_size for file in files)
        for file in files:
            file.unlink()
        print(f"prune: {size / 1e6:6.1f} MB  {entry.pattern}: {entry.reason}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
