# SPDX-License-Identifier: Apache-2.0
"""The plain PyTorch implementation, and the operator on a CPU, against the oracle."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases.mla_tree_verify import SMALL_CASES, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from problem import SCALE, Problem, make_problem

import sgl_kernel_sm120 as kernels

WORKSPACE = torch.empty(16, dtype=torch.uint8)


def assert_close(problem: Problem) -> None:
    """fp32 against fp32: what remains is the rounding of the output."""
    torch.testing.assert_close(problem.out.float(), problem.expected(torch.float32), rtol=2**-8, atol=1e-4)
    problem.guards.check()


@pytest.mark.parametrize("case", SMALL_CASES, ids=str)
def test_close_to_the_oracle(case: Case) -> None:
    problem = make_problem(case, "cpu")
    kernels.mla_tree_verify_torch(*problem.arguments(), scale=SCALE, mask_is_full=problem.mask_is_full)  # type: ignore[arg-type]
    assert_close(problem)


@pytest.mark.parametrize("case", [c for c in SMALL_CASES if c.layout == "strided" or c.mask != "full"], ids=str)
def test_operator_on_cpu(case: Case) -> None:
    problem = make_problem(case, "cpu")
    arguments = (*problem.arguments(), WORKSPACE)
    kernels.mla_tree_verify(*arguments, scale=SCALE, mask_is_full=problem.mask_is_full)  # type: ignore[arg-type]
    assert_close(problem)
    problem.out.fill_(float("nan"))
    torch.ops.sgl_kernel_sm120.mla_tree_verify(*arguments, SCALE, problem.mask_is_full, None)
    assert_close(problem)


def test_prepared_call_serves_several_layers() -> None:
    first, second = (make_problem(Case("layer", (40, 3), 2, 5, mask="compact"), "cpu", seed) for seed in (0, 1))
    call = kernels.PreparedCall(*first.arguments(), WORKSPACE, scale=SCALE, mask_is_full=False)  # type: ignore[arg-type]
    assert bool(first.out.isnan().all()), "nothing is computed before the call"
    call(first.q, first.kv_pool, first.out)
    assert_close(first)
    # Another layer: its own queries and keys, everything else as prepared.
    layer = dataclasses.replace(first, q=second.q, kv_pool=first.kv_pool.roll(64, -1), out=second.out)
    call(layer.q, layer.kv_pool, layer.out)
    assert_close(layer)


def test_long_prefix_crosses_chunks() -> None:
    problem = make_problem(Case("chunks", (20_000,), 2, 3), "cpu")
    kernels.mla_tree_verify_torch(*problem.arguments(), scale=SCALE)  # type: ignore[arg-type]
    assert_close(problem)


def test_compiled_call_keeps_the_operator() -> None:
    problem = make_problem(Case("compiled", (40, 3), 2, 5), "cpu")

    def call(q: torch.Tensor) -> None:
        kernels.mla_tree_verify(q * 1, *problem.arguments()[1:], WORKSPACE, scale=SCALE)  # type: ignore[arg-type]

    torch.compile(call, fullgraph=True, backend="aot_eager")(problem.q)
    assert_close(problem)


def test_operator_schema_and_fake() -> None:
    problem = make_problem(Case("schema", (40, 3), 2, 5), "cpu")
    arguments = (*problem.arguments(), WORKSPACE, SCALE, True, None)
    operator = torch.ops.sgl_kernel_sm120.mla_tree_verify.default
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@settings(max_examples=25, deadline=None)
@given(
    case=st.builds(
        Case,
        name=st.just("random"),
        prefixes=st.lists(st.integers(0, 60), min_size=1, max_size=4).map(tuple),
        heads=st.integers(1, 4),
        tokens=st.integers(1, 20),
        mask=st.sampled_from(["full", "compact", "bool"]),
        tree=st.sampled_from(["random", "chain", "alone", "permuted", "partial"]),
        slots=st.sampled_from(["random", "repeated", "last"]),
        layout=st.sampled_from(["dense", "strided"]),
        int64_indptr=st.booleans(),
    ),
    seed=st.integers(0, 10_000),
)
def test_any_shape(case: Case, seed: int) -> None:
    problem = make_problem(case, "cpu", seed)
    kernels.mla_tree_verify_torch(*problem.arguments(), scale=SCALE, mask_is_full=problem.mask_is_full)  # type: ignore[arg-type]
    assert_close(problem)
