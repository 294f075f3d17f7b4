# SPDX-License-Identifier: Apache-2.0
"""Where things lie in a checkout."""

from dataclasses import dataclass
from pathlib import Path

# Upstream's git keeps the package under this folder; a wheel does not. Patches and the overlay use git's paths.
SOURCE_ROOT = "python/"


@dataclass(frozen=True)
class Layout:
    """The folders of one checkout."""

    root: Path

    @property
    def pin(self) -> Path:
        return self.root / "sglang" / "UPSTREAM.toml"

    @property
    def overlay(self) -> Path:
        return self.root / "sglang" / "python"

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    @property
    def build(self) -> Path:
        return self.root / "build"

    @property
    def upstream(self) -> Path:
        return self.build / "upstream"
