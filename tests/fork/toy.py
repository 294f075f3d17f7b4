# SPDX-License-Identifier: Apache-2.0
"""A checkout in small: a wheel of a few files, an overlay and patches, written without the code under test."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from fork_tools import cli
from fork_tools.layout import Layout

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
CPYTHON = f"cp{PYTHON.replace('.', '')}"
ENGINE = "python/sglang/engine.py"

PRISTINE = {
    "sglang/__init__.py": "answer = 42\n",
    "sglang/_version.py": "version = '1.0'\nversion_tuple = (1, 0)\n",
    "sglang/engine.py": "".join(f"step_{number} = {number} * scale\n" for number in range(1, 21)),
    "sglang/router.py": "".join(f"route_{number} = table[{number}]\n" for number in range(1, 11)),
    "sglang/layers/__init__.py": "",
}

Hunks = Mapping[str, Sequence[tuple[int, Sequence[str]]]]


def digest(text: str | bytes) -> str:
    """Hex sha256 of a text."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def wheel_name(version: str) -> str:
    """File name of the toy wheel for the running Python."""
    return f"sglang-{version}-{CPYTHON}-{CPYTHON}-manylinux_2_17_x86_64.whl"


def write_wheel(folder: Path, files: Mapping[str, str], version: str = "1.0", wrong_record: str = "") -> Path:
    """Write a toy wheel; RECORD lies about the file `wrong_record`."""
    info = f"sglang-{version}.dist-info"
    content = dict(files)
    content[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\nRequires-Dist: a\n\nText.\n"
    )
    content[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {CPYTHON}-{CPYTHON}-manylinux_2_17_x86_64\n"
    )
    content[f"{info}/entry_points.txt"] = "[console_scripts]\nsglang = sglang.main:Main\n"
    rows = []
    for name, text in content.items():
        recorded = "something else" if name == wrong_record else text
        code = base64.urlsafe_b64encode(hashlib.sha256(recorded.encode()).digest()).decode().rstrip("=")
        rows.append(f"{name},sha256={code},{len(recorded)}\n")
    content[f"{info}/RECORD"] = "".join(rows) + f"{info}/RECORD,,\n"
    path = folder / wheel_name(version)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in content.items():
            archive.writestr(name, text)
    return path


def patch_text(name: str, hunks: Hunks, bases: Mapping[str, str], **overrides: str | None) -> str:
    """A patch in the fork's form. An override replaces a field (`Remove_when`), or drops it when None."""
    fields: dict[str, str | None] = {
        "From": "A Maintainer <maintainer@example.org>",
        "Subject": f"{name.split('/')[0]}: insert a few lines",
        "Why": "The toy needs them,\n and says so on two lines.",
        "Kind": "feature",
        "Upstream": "not-sent, a toy",
        "Remove-when": "the toy is grown up",
        "Test": "tests/test_toy.py",
    }
    fields |= {field.replace("_", "-"): value for field, value in overrides.items()}
    lines = [f"{field}: {value}" for field, value in fields.items() if value is not None]
    lines += [f"Base: {path} sha256:{bases[path]}" for path in hunks if path in bases] + ["---"]
    for path, insertions in hunks.items():
        lines += [f"--- a/{path}", f"+++ b/{path}"]
        shift = 1
        for after, added in insertions:
            count = "" if len(added) == 1 else f",{len(added)}"
            lines += [f"@@ -{after},0 +{after + shift}{count} @@", *(f"+{line}" for line in added)]
            shift += len(added)
    return "\n".join(lines) + "\n"


def marked(name: str, *lines: str) -> list[str]:
    """`lines` with the marker of patch `name` at the end of the first."""
    return [f"{lines[0]}  # sm120: {name}", *lines[1:]]


class ToyCheckout:
    """A checkout below `root/checkout`, and a package index in `root/index`."""

    def __init__(self, root: Path) -> None:
        self.layout = Layout(root / "checkout")
        self.index = root / "index"
        self.index.mkdir()
        self.layout.overlay.mkdir(parents=True)
        self.layout.patches.mkdir()
        self.pristine = dict(PRISTINE)
        self.release(PRISTINE)
        self.write("patches/series", "# toy\n")
        for page in ("README.md", "patches/README.md"):
            self.write(page, "# Page\n<!-- table: scripts/fork table -->\n<!-- end of table -->\n")
        self.cover("toy")
        self.write("tests/test_toy.py", "# SPDX-License-Identifier: Apache-2.0\n")
        self.write(".gitignore", "/build/\n")
        subprocess.run(["git", "init", "--quiet", str(self.layout.root)], check=True)

    def release(self, files: Mapping[str, str], version: str = "1.0", wrong_record: str = "", pin: bool = True) -> Path:
        """Put a wheel into the index, and pin it as one that has been fetched."""
        wheel = write_wheel(self.index, files, version, wrong_record)
        if pin:
            self.pristine = dict(files)
            self.layout.upstream.mkdir(parents=True, exist_ok=True)
            shutil.copy(wheel, self.layout.upstream)
            self.pin(digest(wheel.read_bytes()), version)
        return wheel

    def pin(self, sha256: str, version: str = "1.0", extra: str = "") -> None:
        """Write UPSTREAM.toml."""
        self.write(
            "sglang/UPSTREAM.toml",
            f'name = "sglang"\nversion = "{version}"\ntag = "v{version}"\nrevision = 3\nlicence = "Apache-2.0"\n'
            f'requires = ["dill"]\n[[wheel]]\npython = "{PYTHON}"\nfilename = "{wheel_name(version)}"\n'
            f'sha256 = "{sha256}"\n[entry-points."sglang.platforms"]\nreference = "sglang.reference:activate"\n{extra}',
        )

    def write(self, name: str, text: str) -> Path:
        """Write a file of the checkout."""
        path = self.layout.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def overlay(self, name: str, text: str = "# SPDX-License-Identifier: Apache-2.0\n") -> None:
        """Write an overlay file, given by its path in the wheel."""
        self.write(f"sglang/python/{name}", text)

    def patch(self, name: str, hunks: Hunks, listed: bool = True, **overrides: str | None) -> Path:
        """Write a patch with right bases, and list it."""
        bases = {path: digest(self.pristine[path.removeprefix("python/")]) for path in hunks}
        if listed:
            with (self.layout.patches / "series").open("a") as series:
                series.write(f"{name}.patch\n")
        return self.write(f"patches/{name}.patch", patch_text(name, hunks, bases, **overrides))

    def heading(self, name: str) -> None:
        """Begin another series, with its letter."""
        with (self.layout.patches / "series").open("a") as series:
            series.write(f"# {name}\n")
        self.cover(name)

    def cover(self, name: str, **sections: str) -> Path:
        """Write the cover letter of a series; a keyword replaces the text of a section (`How_to_see_it`)."""
        texts = {
            "What is wrong": "It is small.",
            "How to see it": "Look.",
            "What the change does": "It grows.",
            "Tests": "None.",
        }
        texts |= {section.replace("_", " "): text for section, text in sections.items()}
        body = "\n".join(f"## {section}\n{text}\n" for section, text in texts.items())
        return self.write(f"patches/covers/{name}.md", f"# {name}: make it better\n\n{body}")

    def run(self, *arguments: str) -> int:
        """Run a verb of the tool on this checkout."""
        return cli.main(["--root", str(self.layout.root), *arguments])

    def tree(self, name: str) -> str:
        """A file of build/tree."""
        return (self.layout.build / "tree" / name).read_text()
