# SPDX-License-Identifier: Apache-2.0
"""The fork's own metadata: version, requirements and entry points on top of those of the release."""

import configparser
import io

from fork_tools.archive import Entry, Files, dist_info
from fork_tools.errors import ForkError
from fork_tools.pin import Pin

VERSION_FILE = "sglang/_version.py"


def fork_metadata(pin: Pin, pristine: Files) -> Files:
    """The fork's dist-info folder made from the release's, without a RECORD."""
    old = dist_info(pristine)
    new = f"{pin.name}-{pin.fork_version}.dist-info"
    files = {
        name.replace(old, new, 1): entry
        for name, entry in pristine.items()
        if name.startswith(f"{old}/") and name != f"{old}/RECORD"
    }
    metadata, entry_points = f"{new}/METADATA", f"{new}/entry_points.txt"
    files[metadata] = Entry(_stamp_metadata(pin, files[metadata].data.decode()).encode())
    present = files[entry_points].data.decode() if entry_points in files else ""
    files[entry_points] = Entry(_add_entry_points(pin, present).encode())
    return files


def stamp_version(pin: Pin, text: str) -> str:
    """The generated version module with the fork's version in the place of the release's."""
    numbers = ", ".join(pin.version.split("."))
    local = pin.fork_version.partition("+")[2]
    text = _replace_once(VERSION_FILE, text, f"'{pin.version}'", f"'{pin.fork_version}'")
    return _replace_once(VERSION_FILE, text, f"({numbers})", f"({numbers}, '{local}')")


def _stamp_metadata(pin: Pin, text: str) -> str:
    text = _replace_once("METADATA", text, f"\nVersion: {pin.version}\n", f"\nVersion: {pin.fork_version}\n")
    added = "".join(f"Requires-Dist: {requirement}\n" for requirement in pin.requires)
    header, _, description = text.partition("\n\n")
    return f"{header}\n{added}\n{description}"


def _add_entry_points(pin: Pin, text: str) -> str:
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names are case-sensitive
    parser.read_string(text)
    for group, added in pin.entry_points.items():
        if not parser.has_section(group):
            parser.add_section(group)
        for name, target in added.items():
            if parser.has_option(group, name):
                raise ForkError(f"UPSTREAM.toml: expected a new entry point in {group}, got {name}, which upstream has")
            parser.set(group, name, target)
    out = io.StringIO()
    parser.write(out)
    return out.getvalue()


def _replace_once(name: str, text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise ForkError(f"{name}: expected {old.strip()!r} once, got it {text.count(old)} times; the release differs")
    return text.replace(old, new)
