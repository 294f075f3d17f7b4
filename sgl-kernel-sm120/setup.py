# SPDX-License-Identifier: Apache-2.0
"""Build steps: compile the kernels into the package, and tag the wheel for any Python 3."""

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_tools"))

import toolchain


class BuildPackage(build_py):
    """Copies the Python files, then compiles the library beside them."""

    def run(self) -> None:
        super().run()
        toolchain.compile_library(ROOT, Path(self.build_lib) / "sgl_kernel_sm120")


class BuildWheel(bdist_wheel):
    """Only a C interface crosses, so one wheel serves every Python and torch on this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        library = Path(self.bdist_dir) / "sgl_kernel_sm120" / toolchain.LIBRARY_NAME
        return "py3", "none", toolchain.wheel_platform(library) if library.is_file() else super().get_tag()[2]


class BinaryDistribution(Distribution):
    """The package holds machine code although setuptools sees no extension module."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildPackage, "bdist_wheel": BuildWheel}, distclass=BinaryDistribution)
