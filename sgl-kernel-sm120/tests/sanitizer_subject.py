# SPDX-License-Identifier: Apache-2.0
"""The program that compute-sanitizer watches: every path of the kernels, on small problems. Plain allocations only."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "build" / "site"), str(ROOT / "tests")]

import torch
from cases.mla_tree_verify import Case
from problem import SCALE, assert_not_worse_than_torch, make_problem

import sgl_kernel_sm120 as kernels

SUBJECTS = [
    Case("ragged", (300, 0, 40), 8, 9),
    Case("slots-in-batches", (1500,), 8, 9, splits=2),
    Case("hidden-keys", (40, 100), 3, 33, tree="partial", mask="compact"),
    Case("one-split", (70,), 8, 9, splits=1, layout="strided"),
    Case("peaked", (700,), 8, 9, q_scale=20.0, splits=1),
    Case("64-rows", (900,), 16, 16, tree="partial", splits=1),
    Case("64-rows-peaked", (300,), 16, 16, q_scale=20.0, splits=2),
]

if __name__ == "__main__":
    for subject in SUBJECTS:
        problem = make_problem(subject, "cuda")
        workspace = torch.zeros(1 << 24, dtype=torch.uint8, device="cuda")
        kernels.mla_tree_verify(
            *problem.arguments(), workspace, scale=SCALE, mask_is_full=problem.mask_is_full, num_splits=subject.splits
        )  # type: ignore[misc]
        torch.cuda.synchronize()
        assert_not_worse_than_torch(problem.out, problem)
    print("subjects done")
