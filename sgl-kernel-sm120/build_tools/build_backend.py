# SPDX-License-Identifier: Apache-2.0
"""setuptools, with the CUDA compiler from PyPI as a build requirement where the machine has none."""

from __future__ import annotations

from typing import Any

import toolchain
from setuptools import build_meta
from setuptools.build_meta import build_sdist, build_wheel, prepare_metadata_for_build_wheel

__all__ = [
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_wheel",
]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Build requirements beyond pyproject.toml; config_settings is setuptools' own."""
    requirements = list(build_meta.get_requires_for_build_wheel(config_settings))
    return requirements if toolchain.find_system_nvcc() else requirements + list(toolchain.PYPI_TOOLCHAIN)


def get_requires_for_build_sdist(config_settings: Any = None) -> list[str]:
    """Build requirements of a source distribution, which needs no compiler."""
    return list(build_meta.get_requires_for_build_sdist(config_settings))
