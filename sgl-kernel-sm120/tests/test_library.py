# SPDX-License-Identifier: Apache-2.0
"""The compiled library: its interface, its plans, its errors, and its build."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest
import toolchain

import sgl_kernel_sm120 as kernels
from sgl_kernel_sm120 import _library

ROOT = Path(__file__).resolve().parents[1]
HEADER = ROOT / "csrc" / "include" / "sgl_kernel_sm120.h"


def compile_and_run(source: str, directory: Path) -> str:
    (directory / "probe.c").write_text(source)
    subprocess.run(["cc", f"-I{HEADER.parent}", "-o", "probe", "probe.c"], check=True, cwd=directory)
    return subprocess.run([str(directory / "probe")], check=True, capture_output=True, text=True).stdout


def test_ctypes_mirror_matches_the_header(tmp_path: Path) -> None:
    names = [field[0] for field in _library.MlaTreeVerifyArgs._fields_]
    lines = [
        f'printf("{name} %zu %zu\\n", offsetof(SglSm120MlaTreeVerify, {name}), sizeof(((SglSm120MlaTreeVerify*)0)->{name}));'
        for name in names
    ]
    constants = ["ABI_VERSION", "MAX_BATCH", "MAX_TREE", "MAX_HEADS", "MAX_SMS"]
    lines += [f'printf("{name} %d\\n", SGL_SM120_{name});' for name in constants]
    lines.append('printf("sizeof %zu\\n", sizeof(SglSm120MlaTreeVerify));')
    headers = "#include <stddef.h>\n#include <stdio.h>\n#include <sgl_kernel_sm120.h>\n"
    printed = compile_and_run(headers + "int main(void) {\n" + "\n".join(lines) + "\n}\n", tmp_path)
    expected = []
    for name in names:
        descriptor = getattr(_library.MlaTreeVerifyArgs, name)
        expected.append(f"{name} {descriptor.offset} {descriptor.size}")
    expected += [f"{name} {getattr(_library, name)}" for name in constants]
    expected.append(f"sizeof {ctypes.sizeof(_library.MlaTreeVerifyArgs)}")
    assert printed.split("\n")[:-1] == expected


def test_mirror_has_every_field_of_the_header() -> None:
    code = re.sub(r"//.*", "", HEADER.read_text())
    declaration = re.search(r"typedef struct \w+ \{(.*?)\}", code, re.DOTALL)
    assert declaration is not None
    fields = re.findall(r"(\w+);", declaration.group(1))
    assert fields == [field[0] for field in _library.MlaTreeVerifyArgs._fields_]


def fake_library(directory: Path, source: str) -> Path:
    (directory / "fake.c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "fake.so", "fake.c"], check=True, cwd=directory)
    return directory / "fake.so"


def test_older_library_is_refused(tmp_path: Path) -> None:
    path = fake_library(tmp_path, "int sgl_sm120_abi_version(void) { return 0; }")
    with pytest.raises(ImportError, match="expected interface version 2, got 0; run scripts/setup --kernel"):
        _library.load_library(path)


def test_foreign_library_is_refused(tmp_path: Path) -> None:
    path = fake_library(tmp_path, "int nothing(void) { return 0; }")
    with pytest.raises(
        ImportError, match="expected interface version 2, got a library without one; run scripts/setup --kernel"
    ):
        _library.load_library(path)


def test_missing_library_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match="expected the compiled kernels, got '.*'; run scripts/setup --kernel, or"):
        _library.load_library(tmp_path / "none.so")


@pytest.mark.parametrize(
    "change", [("batch_size", 0), ("num_tokens", 66), ("num_heads", 0), ("num_splits", 0), ("workspace_bytes", 0)]
)
def test_c_interface_refuses_bad_ranges(change: tuple[str, int]) -> None:
    args = _library.MlaTreeVerifyArgs(
        batch_size=1, num_tokens=9, num_heads=8, num_splits=4, num_sms=132, workspace_bytes=1 << 30
    )
    setattr(args, *change)
    code = _library.library().sgl_sm120_mla_tree_verify(ctypes.byref(args), None)
    with pytest.raises(kernels.KernelError, match="invalid argument"):
        _library.check(code, "mla_tree_verify")


def test_cuda_errors_carry_their_text() -> None:
    with pytest.raises(kernels.KernelError, match=r"error 209 \(no kernel image is available"):
        _library.check(209, "mla_tree_verify")


@pytest.mark.parametrize("num_sms", [0, -1, _library.MAX_SMS + 1, 2**31 - 1])
def test_the_library_plans_for_no_impossible_card(num_sms: int) -> None:
    library = _library.library()
    assert library.sgl_sm120_mla_tree_verify_splits(1, 9, 8, num_sms) == 0
    assert library.sgl_sm120_mla_tree_verify_block_rows(1, 9, 8, num_sms) == 0


@pytest.mark.parametrize("num_sms", [132, 188, 170, 48])
def test_plan_fills_whole_waves(num_sms: int) -> None:
    for batch in (1, 2, 3, 8, 16, 77, 128):
        for heads in (1, 8, 16, 64, 128):
            for tokens in (1, 9, 33, 65):
                plan = kernels.plan(batch, tokens, heads, num_sms)
                assert plan.block_rows in (32, 64)
                per_split = batch * -(-heads * tokens // plan.block_rows)
                waves = -(-per_split * plan.num_splits // num_sms)
                assert plan.num_splits >= 1
                if plan.num_splits > 1:
                    assert waves <= 4 and plan.workspace_bytes == batch * plan.num_splits * heads * tokens * 1028
                    # One split more would open another wave.
                    assert per_split * (plan.num_splits + 1) > waves * num_sms


def test_workspace_of_a_common_batch_is_small() -> None:
    for num_sms in (132, 170, 188):
        assert kernels.workspace_bytes(8, 9, 8, num_sms) <= 24e6


def test_plan_depends_on_shapes_alone() -> None:
    assert kernels.plan(1, 9, 8, 188) is kernels.plan(1, 9, 8, 188)
    assert kernels.plan(1, 9, 8, 188, 64).num_splits == 64


def test_compiler_is_found_in_cuda_home_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "bin" / "nvcc"
    compiler.parent.mkdir()
    compiler.write_text("")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert toolchain.find_nvcc() == compiler
    command = toolchain.compile_command(compiler, Path("capi.cu"), Path("out.so"))
    assert all(target in command for target in toolchain.TARGETS)


def test_packaged_compiler_is_a_build_requirement_without_another(monkeypatch: pytest.MonkeyPatch) -> None:
    import build_backend

    monkeypatch.setattr(build_backend.build_meta, "get_requires_for_build_wheel", lambda settings: [])
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", "")
    assert set(toolchain.PYPI_TOOLCHAIN) <= set(build_backend.get_requires_for_build_wheel())
    monkeypatch.setattr(toolchain, "find_system_nvcc", lambda: Path("/nvcc"))
    assert not set(toolchain.PYPI_TOOLCHAIN) & set(build_backend.get_requires_for_build_wheel())


def test_compiler_of_the_packages_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "nvidia" / "cu13" / "bin" / "nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text("")
    monkeypatch.setattr(toolchain, "find_system_nvcc", lambda: None)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert toolchain.find_nvcc() == compiler


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "find_system_nvcc", lambda: None)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(FileNotFoundError, match="nvcc: expected in CUDA_HOME, PATH or the .*, got none; set CUDA_HOME"):
        toolchain.find_nvcc()


def test_wheel_tag_follows_the_newest_glibc_symbol(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(b"GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_2.17")
    assert toolchain.wheel_platform(library).startswith("manylinux_2_34_")


def test_library_is_built_from_this_source() -> None:
    site = Path(kernels.__file__).parents[1]
    assert (site / "source.sha256").read_text() == toolchain.source_digest(ROOT)


def test_library_needs_no_cuda_libraries() -> None:
    listing = subprocess.run(
        ["readelf", "-d", str(_library.LIBRARY_PATH)], check=True, capture_output=True, text=True
    ).stdout
    needed = re.findall(r"NEEDED.*\[(.*?)\]", listing)
    assert needed and not [name for name in needed if "cuda" in name or "torch" in name], needed


def test_package_imports_in_a_fresh_process() -> None:
    code = "import sgl_kernel_sm120 as k; print(k.plan(1, 9, 8, 188).num_splits)"
    environment = {"PYTHONPATH": str(Path(kernels.__file__).parents[1]), "PATH": ""}
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environment)
    assert result.returncode == 0 and int(result.stdout) >= 1, result.stderr


def test_the_readme_s_example_runs_on_a_cpu() -> None:
    example = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    code = example.replace('"cuda")', '"cpu")') + "\nprint(bool(out.isfinite().all()))"
    environment = {"PYTHONPATH": str(Path(kernels.__file__).parents[1]), "PATH": ""}
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environment)
    assert result.returncode == 0 and result.stdout == "True\n", result.stderr


def test_the_design_note_has_the_library_s_shared_memory() -> None:
    sizes = (_library.library().sgl_sm120_mla_tree_verify_shared_bytes(rows) for rows in (32, 64))
    cells = " | ".join(f"{size:,} bytes" for size in sizes)
    note = (ROOT / "docs" / "mla_tree_verify.md").read_text()
    assert f"| shared memory (limit of sm_120: 101,376) | {cells} |" in note
