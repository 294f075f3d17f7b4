# SPDX-License-Identifier: Apache-2.0
"""The tree kernel gives bit for bit what the tensor operations give: in Triton's interpreter here, on a GPU as built."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "sglang/python/sglang/srt/speculative"), str(Path(__file__).parent)]

from ddtree_tree import TreeBuffers, build_tree, ranks_needed
from test_tree import marginals

FIELDS = ("token_ids", "positions", "parents", "depths", "num_nodes", "scores", "mask")
# Budget, depth, ranks, rows beyond the tree. 64 nodes use every ancestor bit; a depth above the budget cuts the spine.
SHAPES = [
    (1, 1, 1, 0),
    (1, 7, 3, 3),
    (7, 7, 7, 0),
    (16, 7, 16, 0),
    (16, 7, 2, 5),
    (33, 15, 33, 2),
    (64, 7, 64, 0),
    (5, 15, 9, 4),
]
KINDS = ["smooth", "ties", "flat", "peaked", "nan", "-inf"]


def prepared(kind: str, shape: tuple[int, int, int, int], seed: int, bs: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Marginals as build_tree hands them on: no NaN, nothing above 0, descending."""
    _, depth, ranks, _ = shape
    log_probs, token_ids = marginals(bs, depth, ranks, kind, seed)
    usable = log_probs.nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp(max=0.0).cummin(-1).values
    return usable.contiguous(), token_ids.contiguous()


def poisoned(bs: int, shape: tuple[int, int, int, int], device: str) -> TreeBuffers:
    budget, depth, _, extra = shape
    buffers = TreeBuffers.allocate(bs, budget, depth, device, width=budget + 1 + extra)
    for name in FIELDS:
        getattr(buffers, name).fill_(True if name == "mask" else 12345)
    return buffers


def check(kernel: ModuleType, shape: tuple[int, int, int, int], kind: str, seed: int, device: str) -> None:
    log_probs, token_ids = prepared(kind, shape, seed)
    bs = len(log_probs)
    roots = torch.arange(2 * bs).view(bs, 2)  # columns of a block are strided
    committed = torch.arange(bs) * 10 + 40
    arguments = (log_probs, token_ids, roots[:, 1], committed)
    budget, depth, num_ranks, extra = shape
    expected = TreeBuffers.allocate(bs, budget, depth, "cpu", width=budget + 1 + extra)
    build_tree(*arguments, expected)
    for ranks in {num_ranks, min(num_ranks, ranks_needed(budget, depth))}:  # all, and those that the drafter gives
        built = poisoned(bs, shape, device)
        given = (log_probs[..., :ranks].contiguous(), token_ids[..., :ranks].contiguous(), *arguments[2:])
        kernel.build_tree_on_device(*(tensor.to(device) for tensor in given), built)
        for name in FIELDS:
            assert torch.equal(getattr(built, name).cpu(), getattr(expected, name)), (name, ranks)


@pytest.mark.parametrize("what", ["interpret", "compile"])
def test_without_a_gpu(what: str) -> None:
    """In a process of its own: the interpreter replaces Triton's language for good, and the compiler needs it whole."""
    environment = os.environ | {"TRITON_INTERPRET": str(int(what == "interpret"))}
    subprocess.run([sys.executable, __file__, what], env=environment, check=True, timeout=600)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_on_the_device(shape: tuple[int, int, int, int], kind: str) -> None:
    from sglang.srt.speculative import ddtree_tree_kernel

    for seed in range(20):
        check(ddtree_tree_kernel, shape, kind, seed, device="cuda")


def interpret() -> None:
    """Compare the interpreted kernel with the tensor operations."""
    kernel = importlib.import_module("ddtree_tree_kernel")
    for shape in SHAPES:
        for kind in KINDS:
            check(kernel, shape, kind, seed=len(kind), device="cpu")
    log_probs, token_ids = torch.zeros(1, 1, 65), torch.zeros(1, 1, 65, dtype=torch.int64)
    with pytest.raises(ValueError, match="expected a budget of at most 64, got 65"):
        kernel.build_tree_on_device(
            log_probs, token_ids, token_ids[:, 0, 0], token_ids[:, 0, 0], TreeBuffers.allocate(1, 65, 1, "cpu")
        )


def compile_for_cards() -> None:
    """Compile for sm_90 and sm_120. Arguments of value 1 become constants, as they do at run time."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    kernel = importlib.import_module("ddtree_tree_kernel")._build_tree
    pointers = {"log_probs": "*fp32", "out_scores": "*fp32", "out_mask": "*i1"}
    numbers = {"num_depths", "num_ranks", "budget", "width", "root_stride", "committed_stride"}
    for budget in (1, 16, 64):
        constants = {"ROWS": triton.next_power_of_2(budget + 1), "FRONTIER": triton.next_power_of_2(budget)}
        constants |= {"committed_stride": 1} | ({"budget": 1, "num_ranks": 1} if budget == 1 else {})
        types = {name: "i32" if name in numbers else pointers.get(name, "*i64") for name in kernel.arg_names}
        source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constants)
        for capability in (90, 120):
            compiled = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 1})
            assert compiled.asm["cubin"] and ".local" not in compiled.asm["ptx"]


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_for_cards}[sys.argv[1]]()
