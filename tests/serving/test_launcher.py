# SPDX-License-Identifier: Apache-2.0
"""The launcher says why it cannot start a server; that it starts them is what the other tests of this folder show."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from serving.launcher import Launcher


def test_imports_that_fail_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no module named sglang' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    launcher = Launcher(tmp_path / "launcher.log")
    with pytest.raises(RuntimeError, match="launcher: expected an answer, got none\nno module named sglang"):
        launcher.start([], tmp_path / "server.log")
    launcher.close()
