# SPDX-License-Identifier: Apache-2.0
"""Finds nvcc and compiles the kernel library. Needs neither torch nor a GPU."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

# nvcc's wheel leaves nvvm and crt unpinned, and newer ones emit a PTX version that this ptxas refuses.
PYPI_TOOLCHAIN = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
)
# Machine code for Hopper (where everything is measured) and sm_120, PTX for what comes after.
TARGETS = ("arch=compute_90,code=sm_90", "arch=compute_120,code=sm_120", "arch=compute_120,code=compute_120")
PACKAGE = "sgl_kernel_sm120"
LIBRARY_NAME = f"lib{PACKAGE}.so"


def find_system_nvcc() -> Path | None:
    """nvcc of CUDA_HOME, else of PATH, else None."""
    home = os.environ.get("CUDA_HOME")
    if home:
        candidate = Path(home) / "bin" / "nvcc"
        if candidate.is_file():
            return candidate
    on_path = shutil.which("nvcc")
    return Path(on_path) if on_path else None


def find_nvcc() -> Path:
    """The compiler to use: the machine's, else that of the PyPI packages. Errors: FileNotFoundError."""
    system = find_system_nvcc()
    if system is not None:
        return system
    # Not only site-packages: pip builds with a path of its own.
    for directory in sys.path:
        packaged = Path(directory) / "nvidia" / "cu13" / "bin" / "nvcc"
        if packaged.is_file():
            return packaged
    raise FileNotFoundError(
        f"nvcc: expected in CUDA_HOME, PATH or the nvidia-cuda packages, got none; "
        f"set CUDA_HOME or install {' '.join(PYPI_TOOLCHAIN)}"
    )


def compile_command(nvcc: Path, source: Path, library: Path) -> list[str]:
    """The nvcc command that builds the library from csrc/capi.cu."""
    command = [str(nvcc), "-std=c++17", "-O3", "-shared", "-Werror", "all-warnings", "-Xptxas", "-warn-spills"]
    command += ["-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall", "-Xlinker", "--exclude-libs,ALL"]
    for target in TARGETS:
        command += ["-gencode", target]
    for directory in ("lib", "lib64"):  # the PyPI packages have lib alone, which nvcc does not search
        path = nvcc.resolve().parent.parent / directory
        if path.is_dir():
            command += ["-L", str(path)]
    return [*command, "-o", str(library), str(source)]


def compile_library(root: Path, directory: Path) -> Path:
    """Build the library of the package at `root` into `directory`; returns its path. Errors: CalledProcessError."""
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / LIBRARY_NAME
    command = compile_command(find_nvcc(), root / "csrc" / "capi.cu", library)
    print(" ".join(command))
    subprocess.run(command, check=True)
    return library


def wheel_platform(library: Path) -> str:
    """The manylinux tag that the library's newest glibc symbol asks for."""
    versions = re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes())
    newest = max((int(version) for version in versions), default=17)
    return f"manylinux_2_{max(newest, 17)}_{os.uname().machine}"


def source_digest(root: Path) -> str:
    """A digest of everything the library is compiled from."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted((root / "csrc").rglob("*")):
        if path.is_file():
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def build_in_place(root: Path, site: Path) -> Path:
    """Make `site` an import path with the package at `root` and its library, compiled only if its sources changed."""
    package, stamp = site / PACKAGE, site / "source.sha256"
    digest = source_digest(root)
    if not (package / LIBRARY_NAME).is_file() or not stamp.is_file() or stamp.read_text() != digest:
        compile_library(root, package)
        stamp.write_text(digest)
    for source in (root / "python" / PACKAGE).iterdir():
        if source.is_file():
            shutil.copyfile(source, package / source.name)
    return site


if __name__ == "__main__":
    project = Path(__file__).resolve().parents[1]
    print(build_in_place(project, project / "build" / "site"))
