# SPDX-License-Identifier: Apache-2.0
"""Which files of the overlay a patch needs: the modules that its lines import, and what those import in turn."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath

from fork_tools.archive import Entry
from fork_tools.patch import Patch


def import_lines(one: Patch) -> list[str]:
    """The imports among a patch's lines, each of which stands alone."""
    lines = (line.strip() for insertion in one.insertions for line in insertion.lines)
    return [line for line in lines if line.startswith(("import ", "from "))]


def called_files(sources: Iterable[str], overlay: Mapping[str, Entry]) -> set[str]:
    """Paths in `overlay` of every module that Python sources reach, imports inside functions included."""
    modules = {_module(name): name for name in overlay if name.endswith(".py")}
    waiting = list(_imported(sources))
    found: set[str] = set()
    while waiting:
        module = waiting.pop()
        path = modules.get(module)
        if path in found:
            continue
        if path is not None:
            found.add(path)
            waiting += _imported([overlay[path].data.decode()])
        waiting += [module.rpartition(".")[0]] if "." in module else []
    return found


def _imported(sources: Iterable[str]) -> Iterator[str]:
    """Full names that Python sources import; of `from a import b`, both a and a.b."""
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module(name: str) -> str:
    parts = PurePosixPath(name).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
