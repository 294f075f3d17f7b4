# SPDX-License-Identifier: Apache-2.0
"""The inspection of the built library, and that it can fail."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import toolchain

from sgl_kernel_sm120 import _library, inspect

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def built() -> list[inspect.Kernel]:
    return inspect.read_library(_library.LIBRARY_PATH)


def test_built_library_is_clean(built: list[inspect.Kernel]) -> None:
    assert inspect.violations(built, inspect.has_ptx(_library.LIBRARY_PATH)) == []
    assert {(k.architecture, k.name) for k in built} == {
        (architecture, name)
        for architecture in ("sm_90", "sm_120")
        for name in ("split_kernel_32", "split_kernel_64", "combine_kernel")
    }


# Products, loads of fragments and copies of a step, per warp. 32 rows: 36 products for the scores and 32 for the values;
# 18 + 4 + 8 loads. 64 rows: 72 and 64; 36 + 8 + 8. Both: 2 keys of each of 2 stages.
STEPS = {"split_kernel_32": (68, 30, 4), "split_kernel_64": (136, 52, 4)}


def test_step_is_what_the_design_says(built: list[inspect.Kernel]) -> None:
    for kernel in built:
        if kernel.name not in STEPS:
            continue
        assert kernel.blocks_per_sm >= 1 and 90_000 < kernel.shared_bytes <= inspect.SHARED_LIMIT
        assert (kernel.loop["HMMA"], kernel.loop["LDSM"], kernel.loop["UBLKCP"]) == STEPS[kernel.name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"local_accesses": 2}, "expected no local memory, got 2"),
        ({"stack_bytes": 8}, "expected no stack, got 8"),
        ({"system_calls": 1}, "expected no __cuda_syscall, got 1"),
        ({"shared_bytes": 101_377}, "expected at most 101376 bytes shared, got 101377"),
    ],
)
def test_broken_rules_are_named(built: list[inspect.Kernel], change: dict[str, int], message: str) -> None:
    bad = [dataclasses.replace(built[0], **change), *built[1:]]  # type: ignore[arg-type]
    (line,) = inspect.violations(bad, ptx=True)
    assert message in line


def test_missing_architecture_is_named(built: list[inspect.Kernel]) -> None:
    (line,) = inspect.violations([k for k in built if k.architecture == "sm_90"], ptx=True)
    assert "expected machine code for sm_120" in line
    (line,) = inspect.violations(built, ptx=False)
    assert "expected PTX" in line


SPILLING = """
extern "C" __global__ void __launch_bounds__(256, 8) split_kernel(float* x, int n) {
  float values[64];
  for (int i = 0; i < 64; i++) values[i] = x[i * n];
  for (int i = 0; i < n; i++) x[i] = values[(i * 7 + n) % 64];
}
extern "C" __attribute__((visibility("default"))) int sgl_sm120_abi_version() { return 2; }
extern "C" int sgl_sm120_error_string(int) { return 0; }
extern "C" int sgl_sm120_mla_tree_verify_splits() { return 0; }
extern "C" int sgl_sm120_mla_tree_verify_block_rows() { return 0; }
extern "C" int sgl_sm120_mla_tree_verify_workspace_bytes() { return 0; }
extern "C" int sgl_sm120_mla_tree_verify_shared_bytes() { return 200000; }
extern "C" int sgl_sm120_mla_tree_verify() { return 0; }
"""


def test_bad_library_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, library = tmp_path / "bad.cu", tmp_path / "bad.so"
    source.write_text(SPILLING)
    nvcc = toolchain.find_nvcc()
    command = [str(nvcc), "-shared", "-Xcompiler", "-fPIC", "-gencode", "arch=compute_120,code=sm_120"]
    libraries = nvcc.resolve().parent.parent / "lib"
    subprocess.run([*command, "-L", str(libraries), "-o", str(library), str(source)], check=True)
    assert inspect.main(["--library", str(library), "--json", str(tmp_path / "out.json")]) == 1
    errors = capsys.readouterr().err
    for message in (
        "machine code for sm_90",
        "expected PTX",
        "no local memory",
        "no stack",
        "bytes shared, got 200000",
    ):
        assert message in errors


def test_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.main([]) == 0
    printed = capsys.readouterr().out
    assert "sm_120 split_kernel_64" in printed and "HMMA 68" in printed


def test_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="no-such-tool: expected in PATH"):
        inspect.find_tool("no-such-tool")


SECOND_PTXAS = "nvidia-cuda-nvcc==13.5.37"


@pytest.fixture(scope="module")
def newer_ptxas() -> Path:
    """An assembler five releases newer than the compiler's; two cannot be installed side by side."""
    directory = ROOT / "build" / "second-ptxas"
    ptxas = directory / "ptxas"
    if not ptxas.is_file():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(directory), SECOND_PTXAS]
        fetched = subprocess.run(command, check=False, capture_output=True, text=True)
        if fetched.returncode:
            pytest.skip(f"pip cannot fetch {SECOND_PTXAS}: {fetched.stderr.strip().splitlines()[-1]}")
        (wheel,) = directory.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if name.endswith("/bin/ptxas")]
            ptxas.write_bytes(archive.read(member))
        wheel.unlink()
        ptxas.chmod(0o755)
    return ptxas


def test_second_assembler_spills_nothing(newer_ptxas: Path, tmp_path: Path) -> None:
    ptx = tmp_path / "kernels.ptx"
    nvcc = str(toolchain.find_nvcc())
    target = ["-gencode", "arch=compute_120,code=compute_120", "-ptx", "-std=c++17", "-O3"]
    subprocess.run([nvcc, *target, "-o", str(ptx), str(ROOT / "csrc" / "capi.cu")], check=True)
    for architecture in ("sm_120", "sm_121"):
        command = [str(newer_ptxas), f"-arch={architecture}", "-v", "-o", str(tmp_path / "kernels.cubin"), str(ptx)]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        assert report.count("0 bytes spill stores, 0 bytes spill loads") == 3, report
