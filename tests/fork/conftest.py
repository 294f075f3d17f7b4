# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the fork tool's tests; `fork_tools` is imported from scripts/."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from toy import ToyCheckout


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyCheckout:
    """A small checkout whose pinned wheel lies in a folder that pip takes for the package index."""
    checkout = ToyCheckout(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(checkout.index))
    return checkout
