# SPDX-License-Identifier: Apache-2.0
"""What an image carries: its bill of materials, and the licences in one table.

    python docker/inventory.py SITE_PACKAGES PYTHON_BOM DEBIAN_PACKAGES OUT_FOLDER

PYTHON_BOM is what `cyclonedx-py environment` writes about SITE_PACKAGES, DEBIAN_PACKAGES what dpkg-query writes: a name,
a version and an architecture on each line. OUT_FOLDER gets sbom.json (CycloneDX) and LICENSES.md, in which a package
whose licence nothing names has UNNAMED.
"""

from __future__ import annotations

import email
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

DOCUMENTS = Path("/usr/share/doc")
# A phrase near the beginning of a licence's text, and its name.
TITLES = {
    "apache license": "Apache License",
    "mit license": "MIT License",
    "nvidia": "NVIDIA",
    "gnu lesser": "GNU Lesser General Public License",
    "gnu general": "GNU General Public License",
    "redistribution and use in source and binary forms": "BSD License",
}
# Short names of a machine-readable copyright file, and the common licences that an older one refers to.
SHORT_NAME = re.compile(r"^License:[ \t]*(\S.*)$", flags=re.MULTILINE)
COMMON = re.compile(r"/usr/share/common-licenses/([\w.+-]*\w)")


UNNAMED = "none named"


def declared(component: dict[str, Any]) -> list[str]:
    """Licences that the package's metadata declares, as identifiers or names, best first."""
    found = []
    for entry in component.get("licenses", ()):
        licence = entry.get("license", {})
        text = entry.get("expression") or licence.get("id") or licence.get("name", "")
        if text.startswith("declared license of "):  # of a package whose own words are no name that cyclonedx-py knows
            text = licence.get("text", {}).get("content", "").strip()
        text = text.rpartition(" :: ")[2]
        # Some packages put the whole text where its name belongs.
        found.append(text if "\n" not in text and len(text) <= 100 else title(text))
    return [text for text in dict.fromkeys(found) if text and text != "UNKNOWN"]


def title(text: str) -> str:
    """The name that a licence's text gives itself, or an empty string."""
    start = " ".join(text[:2000].lower().split())
    return next((name for phrase, name in TITLES.items() if phrase in start), "")


def from_files(site: Path, name: str) -> str:
    """Licence of a Python package whose metadata names none, by its own words or the texts beside the metadata."""
    wanted = re.sub(r"[-_.]+", "_", name).lower()
    for info in sorted(site.glob("*.dist-info")):
        if re.sub(r"[-_.]+", "_", info.name.rpartition(".dist-info")[0].rpartition("-")[0]).lower() != wanted:
            continue
        # Which cyclonedx-py leaves out where it is none of the names that it knows.
        words = email.message_from_string((info / "METADATA").read_text(errors="replace")).get("License", "").strip()
        if words and "\n" not in words and not words.startswith("Copyright"):
            return words
        texts = sorted(path for path in info.rglob("*") if re.match(r"(?i)licen[cs]e|copying|notice", path.name))
        for path in texts:
            if path.is_file() and (found := title(path.read_text(errors="replace"))):
                return found
    return ""


def of_debian(text: str) -> list[str]:
    """Licences that a copyright file of Debian names."""
    names = [match.strip() for match in SHORT_NAME.findall(text)]
    return sorted(set(names or COMMON.findall(text)))


def python_components(site: Path, bom: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Components of cyclonedx-py with a licence each, without links and descriptions."""
    for component in bom["components"]:
        licences = declared(component) or [from_files(site, component["name"]) or UNNAMED]
        kept = {key: component[key] for key in ("bom-ref", "name", "version", "purl", "type") if key in component}
        yield kept | {"licenses": [{"license": {"name": name}} for name in licences]}


def debian_components(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """A component for each installed package of Debian."""
    for line in lines:
        name, version, architecture = line.split("\t")
        purl = f"pkg:deb/debian/{name}@{version.replace('+', '%2B').replace(':', '%3A')}?arch={architecture}"
        text = DOCUMENTS / name / "copyright"
        licences = (of_debian(text.read_text(errors="replace")) or [f"see {text}"]) if text.is_file() else [UNNAMED]
        yield {
            "bom-ref": purl,
            "name": name,
            "version": version,
            "purl": purl,
            "type": "library",
            "licenses": [{"license": {"name": licence}} for licence in licences],
        }


def table(components: Iterable[dict[str, Any]]) -> list[str]:
    """Rows of the table of licences."""
    rows = []
    for component in sorted(components, key=lambda one: one["name"].lower()):
        names = ", ".join(entry["license"]["name"] for entry in component["licenses"])
        rows.append(f"| {component['name']} | {component['version']} | {names.replace('|', '/')} |")
    return rows


def page(python: list[dict[str, Any]], debian: list[dict[str, Any]]) -> str:
    """LICENSES.md."""
    head = ["| package | version | licence |", "|---|---|---|"]
    unnamed = [one["name"] for one in python + debian if one["licenses"][0]["license"]["name"] == UNNAMED]
    silent = f"These neither name a licence nor hold the text of one: {', '.join(f'`{name}`' for name in unnamed)}."
    return "\n".join(
        [
            "# What the image carries, and under which licences",
            "",
            "Written by `docker/inventory.py` in the build of the image, from the metadata of the packages. The texts are in",
            "the image: beside each Python package's metadata, and in `/usr/share/doc` for Debian's.",
            "",
            *([silent, ""] if unnamed else ()),
            f"## {len(python)} Python packages",
            "",
            *head,
            *table(python),
            "",
            f"## {len(debian)} packages of Debian",
            "",
            *head,
            *table(debian),
            "",
        ]
    )


def validate(text: str) -> None:
    """Check the bill against CycloneDX's schema. Errors: SystemExit."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        sys.exit(f"inventory: expected a valid bill of materials, got {error}")


def main() -> None:
    """Read, merge, check and write."""
    site, bom_path, debian_path, out = map(Path, sys.argv[1:])
    bom = json.loads(bom_path.read_text())
    python = list(python_components(site, bom))
    debian = list(debian_components(debian_path.read_text().splitlines()))
    text = json.dumps(bom | {"components": python + debian}, indent=1) + "\n"
    validate(text)
    out.mkdir(parents=True, exist_ok=True)
    (out / "sbom.json").write_text(text)
    (out / "LICENSES.md").write_text(page(python, debian))


if __name__ == "__main__":
    main()
