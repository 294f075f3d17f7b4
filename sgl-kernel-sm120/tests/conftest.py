# SPDX-License-Identifier: Apache-2.0
"""Builds the package from this source before any test imports it, and skips GPU tests where there is no GPU."""

import faulthandler
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "build" / "site"), str(ROOT / "build_tools"), str(ROOT / "tests")]

import toolchain

toolchain.build_in_place(ROOT, ROOT / "build" / "site")
# The folder may not have been there when it was put on the path, which Python remembers.
importlib.invalidate_caches()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device that the kernels are built for")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def watchdog(request: pytest.FixtureRequest) -> Iterator[None]:
    """A GPU test that hangs ends the run: a kernel that never returns cannot be interrupted."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    faulthandler.dump_traceback_later(300 if "sanitizer" in request.node.nodeid else 60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
