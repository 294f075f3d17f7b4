# SPDX-License-Identifier: Apache-2.0
"""Read a built library and refuse it if its machine code breaks a rule that sm_120 cards depend on.

    python -m sgl_kernel_sm120.inspect [--library PATH] [--json OUT.json]

Prints, per architecture and kernel: registers, stack, shared memory, blocks per SM, and instruction counts of the step
loop (32 keys, without the branch for rare steps; split_kernel_N takes N rows). Fails on a spill or any local memory access, a
stack frame, a system call in the machine code, more shared memory than a block of sm_120 may own, a missing
architecture, or missing PTX. Needs cuobjdump and nvdisasm: `pip install sgl-kernel-sm120[inspect]`, CUDA, or Triton.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sgl_kernel_sm120 import _library

ARCHITECTURES = ("sm_90", "sm_120")
PTX = "sm_120"  # PTX is listed under the machine code it targets
SHARED_LIMIT = 101_376  # bytes that a block of sm_120 may own
SHARED_PER_SM = {"sm_90": 233_472, "sm_120": 102_400}
SHARED_RESERVED = 1_024  # bytes that the system keeps per block
WARPS_PER_SM = {"sm_90": 64, "sm_120": 48}
REGISTERS_PER_SM = 65_536
KEYS_PER_STEP = 32
SHOWN = ("HMMA", "LDSM", "UBLKCP", "BAR", "SYNCS", "MUFU", "STS", "LDS", "SHFL")
LOCAL_MEMORY = ("LDL", "STL")


@dataclass
class Kernel:
    """What the machine code of one kernel for one architecture says."""

    architecture: str
    name: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    threads: int
    local_accesses: int
    system_calls: int
    loop: dict[str, int] = field(default_factory=dict)

    @property
    def blocks_per_sm(self) -> int:
        """Resident blocks by shared memory, warps and registers (allocated in units of 256 per warp)."""
        warps = self.threads // 32
        per_warp = -(-self.registers * 32 // 256) * 256
        return min(
            SHARED_PER_SM[self.architecture] // (self.shared_bytes + SHARED_RESERVED),
            WARPS_PER_SM[self.architecture] // warps,
            REGISTERS_PER_SM // (per_warp * warps),
        )


def find_tool(name: str) -> str:
    """Path of a CUDA binary tool. Errors: FileNotFoundError with the remedy."""
    candidates = [shutil.which(name)]
    if "CUDA_HOME" in os.environ:
        candidates.append(str(Path(os.environ["CUDA_HOME"]) / "bin" / name))
    candidates += [str(Path(directory) / "nvidia" / "cu13" / "bin" / name) for directory in sys.path]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        candidates.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin" / name))
    for candidate in candidates:
        if candidate and Path(candidate).is_file():
            if not os.access(candidate, os.X_OK):
                os.chmod(candidate, 0o755)
            return candidate
    raise FileNotFoundError(
        f"{name}: expected in PATH, CUDA_HOME, the nvidia-cuda packages or Triton, got none; "
        "pip install sgl-kernel-sm120[inspect]"
    )


def _output(*command: str, directory: str | None = None) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=directory).stdout


def extract_cubins(library: Path, directory: str) -> dict[str, Path]:
    """Machine code of the library by architecture."""
    _output(find_tool("cuobjdump"), "-xelf", "all", str(library.resolve()), directory=directory)
    cubins = {}
    for path in sorted(Path(directory).glob("*.cubin")):
        architecture = re.search(r"sm_\d+[af]?", path.name)
        if architecture:
            cubins[architecture.group()] = path
    return cubins


def has_ptx(library: Path) -> bool:
    """Whether the library holds PTX from which later cards can compile."""
    return PTX in _output(find_tool("cuobjdump"), "-lptx", str(library.resolve()))


def instructions(listing: str) -> dict[str, list[tuple[str, str]]]:
    """Per kernel, its (label, instruction) list; a label line has an empty instruction."""
    functions: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] | None = None
    for line in listing.splitlines():
        section = re.match(r"\s*\.section\s+\.text\.([\w$]+)", line)
        if section:
            current = functions.setdefault(section.group(1), [])
        elif line.lstrip().startswith(".section"):
            current = None
        elif current is not None:
            label = re.match(r"(\.L_x?_?\d+):", line)
            if label:
                current.append((label.group(1), ""))
            else:
                instruction = re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line)
                if instruction:
                    current.append(("", instruction.group(1)))
    return functions


def opcode(instruction: str) -> str:
    """HMMA of `@!P0 HMMA.16816.F32.BF16 R4, ...`."""
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split(None, 1)[0].split(".")[0]


def without_rare_branch(loop: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The loop less what the first branch after the reducing barrier skips: the path of rare steps."""
    labels = {label: index for index, (label, _) in enumerate(loop) if label}
    barriers = [index for index, (_, text) in enumerate(loop) if "BAR.RED" in text]
    for index in range(barriers[0] if barriers else len(loop), len(loop)):
        target = re.search(r"BRA.*?`\((\.L_x?_?\d+)\)", loop[index][1])
        if target:
            end = labels.get(target.group(1), index)
            return loop[: index + 1] + loop[max(end, index + 1) :]
    return loop


def step_loop(body: list[tuple[str, str]]) -> dict[str, int]:
    """Instruction counts of the shortest loop that holds the most matrix products."""
    labels = {label: index for index, (label, _) in enumerate(body) if label}
    best: collections.Counter[str] = collections.Counter()
    for index, (_, instruction) in enumerate(body):
        target = re.search(r"BRA.*?`\((\.L_x?_?\d+)\)", instruction)
        if target is None or labels.get(target.group(1), index) >= index:
            continue
        loop = [text for _, text in without_rare_branch(body[labels[target.group(1)] : index + 1]) if text]
        counts = collections.Counter(opcode(text) for text in loop)
        counts["total"] = len(loop)
        if (counts["HMMA"], -counts["total"]) > (best["HMMA"], -best["total"]):
            best = counts
    return dict(best) if best["HMMA"] else {}


def resources(cubin: Path) -> dict[str, dict[str, int]]:
    """REG, STACK, SHARED and so on of each kernel."""
    text = _output(find_tool("cuobjdump"), "-res-usage", str(cubin))
    found = re.findall(r"Function (\w+):\s*\n\s*(.*)", text)
    return {name: {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", line)} for name, line in found}


def read_library(library: Path) -> list[Kernel]:
    """All kernels of all architectures in the library."""
    kernels = []
    loaded = _library.load_library(library)
    with tempfile.TemporaryDirectory() as directory:
        for architecture, cubin in extract_cubins(library, directory).items():
            usage = resources(cubin)
            listing = _output(find_tool("nvdisasm"), "-c", str(cubin))
            for name, body in instructions(listing).items():
                texts = [text for _, text in body if text]
                used = usage[name]
                is_split = "split_kernel" in name
                tiles = re.search(r"BlockILi(\d)E", name)
                rows = 16 * int(tiles.group(1)) if tiles else 0
                dynamic = int(loaded.sgl_sm120_mla_tree_verify_shared_bytes(rows)) if is_split else 0
                short = f"split_kernel_{rows}" if is_split else "combine_kernel" if "combine_kernel" in name else name
                kernels.append(
                    Kernel(
                        architecture=architecture,
                        name=short,
                        registers=used["REG"],
                        stack_bytes=used["STACK"] + used["LOCAL"],
                        # The listed size includes what the system keeps.
                        shared_bytes=max(used["SHARED"] - SHARED_RESERVED, 0) + dynamic,
                        threads=256,
                        local_accesses=sum(opcode(text) in LOCAL_MEMORY for text in texts),
                        system_calls=sum("__cuda_syscall" in text for text in texts),
                        loop=step_loop(body) if is_split else {},
                    )
                )
    return kernels


def violations(kernels: list[Kernel], ptx: bool) -> list[str]:
    """Broken rules, one line each."""
    broken = []
    present = {kernel.architecture for kernel in kernels}
    for architecture in ARCHITECTURES:
        if architecture not in present:
            broken.append(
                f"library: expected machine code for {architecture}, got {sorted(present)}; build that target"
            )
    if not ptx:
        broken.append("library: expected PTX for later cards, got none; build code=compute_120 as well")
    for kernel in kernels:
        where = f"{kernel.architecture} {kernel.name}"
        if kernel.local_accesses:
            broken.append(
                f"{where}: expected no local memory, got {kernel.local_accesses} accesses; lower its registers"
            )
        if kernel.stack_bytes:
            broken.append(
                f"{where}: expected no stack, got {kernel.stack_bytes} bytes; look for indexed register arrays"
            )
        if kernel.system_calls:
            broken.append(f"{where}: expected no __cuda_syscall, got {kernel.system_calls}; use .shared::cta copies")
        if kernel.shared_bytes > SHARED_LIMIT:
            broken.append(f"{where}: expected at most {SHARED_LIMIT} bytes shared, got {kernel.shared_bytes}")
    return broken


def print_table(kernels: list[Kernel]) -> None:
    print(f"{'':24}registers stack shared  blocks/SM  step loop ({KEYS_PER_STEP} keys, per warp)")
    for kernel in kernels:
        loop = " ".join(f"{name} {kernel.loop.get(name, 0)}" for name in ("total", *SHOWN)) if kernel.loop else ""
        print(
            f"{kernel.architecture:7}{kernel.name:17}{kernel.registers:9} {kernel.stack_bytes:5} {kernel.shared_bytes:6}"
            f"  {kernel.blocks_per_sm:9}  {loop}"
        )


def main(arguments: list[str] | None = None) -> int:
    """Print the table; the exit status is 1 if a rule is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, default=_library.LIBRARY_PATH)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    kernels = read_library(options.library)
    print_table(kernels)
    broken = violations(kernels, has_ptx(options.library))
    for line in broken:
        print(line, file=sys.stderr)
    if options.json:
        rows = [asdict(kernel) | {"blocks_per_sm": kernel.blocks_per_sm} for kernel in kernels]
        options.json.write_text(json.dumps({"kernels": rows, "violations": broken}, indent=1))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
