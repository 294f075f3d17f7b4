# SPDX-License-Identifier: Apache-2.0
"""The kernel against the oracle, on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from cases.mla_tree_verify import CASES, Case
from hypothesis import given, settings
from hypothesis import strategies as st
from problem import SCALE, Problem, assert_not_worse_than_torch, make_problem

import sgl_kernel_sm120 as kernels

pytestmark = pytest.mark.gpu


def make_workspace(problem: Problem, case: Case) -> torch.Tensor:
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    size = kernels.workspace_bytes(len(case.prefixes), case.tokens, case.heads, num_sms, case.splits)
    return problem.guards.empty((max(size, 16),), torch.uint8, "cuda")


def run(problem: Problem, workspace: torch.Tensor) -> torch.Tensor:
    case = problem.case
    kernels.mla_tree_verify(
        *problem.arguments(), workspace, scale=SCALE, mask_is_full=problem.mask_is_full, num_splits=case.splits
    )  # type: ignore[misc]
    return problem.out


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of a tensor, in which NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_close_to_the_oracle(case: Case, record_property: Callable[[str, object], None]) -> None:
    problem = make_problem(case, "cuda")
    workspace = make_workspace(problem, case)
    before = [None if tensor is None else tensor.clone() for tensor in problem.arguments()[:-1]]
    out = run(problem, workspace).clone()
    torch.cuda.synchronize()
    problem.guards.check()
    for tensor, copy in zip(problem.arguments()[:-1], before, strict=True):
        assert tensor is None or torch.equal(bits(tensor), bits(copy)), "an input was written"
    record_property("error_ratio", assert_not_worse_than_torch(out, problem))


@pytest.mark.parametrize("case", [c for c in CASES if c.layout == "strided"], ids=str)
def test_writes_nothing_between_strided_rows(case: Case) -> None:
    problem = make_problem(case, "cuda")
    run(problem, make_workspace(problem, case))
    heads_first = problem.out.transpose(0, 1)
    shape, strides = (*heads_first.shape[:2], 576), (*heads_first.stride()[:2], 1)
    wide = torch.as_strided(heads_first, shape, strides, heads_first.storage_offset() - 32)
    assert bool(wide[..., :32].isnan().all() and wide[..., -32:].isnan().all())


def test_nan_in_unseen_keys_changes_nothing() -> None:
    case = Case("unseen", (40, 0), 8, 33, tree="partial")
    problem = make_problem(case, "cuda")
    workspace = make_workspace(problem, case)
    clean = run(problem, workspace).clone()
    for request, tree in enumerate(problem.trees):
        unseen = (~tree.any(0)).nonzero().flatten() + request * case.tokens
        problem.kv_pool[problem.out_cache_loc[unseen.cuda()]] = float("nan")
    problem.out.fill_(float("nan"))
    assert torch.equal(run(problem, workspace), clean)


def test_nan_in_a_seen_key_reaches_the_rows_that_see_it() -> None:
    case = Case("seen", (100, 50), 8, 9)
    problem = make_problem(case, "cuda")
    problem.kv_pool[problem.kv_indices[120]] = float("nan")
    out = run(problem, make_workspace(problem, case))
    assert bool(out[case.tokens :].isnan().all()) and not bool(out[: case.tokens].isnan().any())


def test_padding_rows_are_finite() -> None:
    case = Case("padding", (100, 0, 1), 8, 9)
    problem = make_problem(case, "cuda")
    problem.kv_indices[100:] = 0
    problem.out_cache_loc[9:] = 0
    for mask_value in (0, 1):
        problem.custom_mask[int(problem.mask_indptr[1]) :] = mask_value  # type: ignore[index]
        problem.out.fill_(float("nan"))
        assert bool(run(problem, make_workspace(problem, case)).isfinite().all())


def test_pool_beyond_two_gigabytes() -> None:
    case = Case("large-pool", (5000,), 8, 9)
    problem = make_problem(case, "cuda")
    num_slots = 4_000_000
    pool = torch.full((num_slots, 1, 576), float("nan"), dtype=torch.bfloat16, device="cuda")
    shift = num_slots - len(problem.kv_pool)
    pool[shift:] = problem.kv_pool
    small = run(problem, make_workspace(problem, case)).clone()
    problem.kv_pool = pool
    problem.kv_indices += shift
    problem.out_cache_loc += shift
    problem.out.fill_(float("nan"))
    assert torch.equal(run(problem, make_workspace(problem, case)), small)


def test_prefix_of_a_million() -> None:
    case = Case("million", (1_000_000,), 8, 2)
    problem = make_problem(case, "cuda")
    out = run(problem, make_workspace(problem, case)).clone()
    assert_not_worse_than_torch(out, problem)


def test_cases_cover_every_kind_of_block() -> None:
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    plans = [kernels.plan(len(case.prefixes), case.tokens, case.heads, num_sms) for case in CASES]
    assert {plan.block_rows for plan in plans} == {32, 64}


REPEATED = [
    Case("ragged", (5000, 70), 16, 16),
    Case("many-steps", (4099,), 16, 33, tree="partial", splits=7),
    Case("row-blocks", (20_000,), 64, 9),
    Case("64-rows", (9000,), 16, 16, splits=1),
    Case("one-split", (9000, 3, 800), 8, 33, splits=1),
]


@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_repeatable(case: Case) -> None:
    problem = make_problem(case, "cuda")
    workspace = make_workspace(problem, case)
    first = run(problem, workspace).clone()
    for _ in range(300):
        problem.out.fill_(float("nan"))
        workspace.fill_(0xFF)
        assert torch.equal(run(problem, workspace), first)


def test_registered_operator_matches_and_has_a_fake() -> None:
    case = Case("operator", (300, 20), 8, 9)
    problem = make_problem(case, "cuda")
    workspace = make_workspace(problem, case)
    expected = run(problem, workspace).clone()
    problem.out.fill_(float("nan"))
    arguments = (*problem.arguments(), workspace, SCALE, True, None)
    torch.ops.sgl_kernel_sm120.mla_tree_verify(*arguments)
    assert torch.equal(problem.out, expected)
    torch.library.opcheck(
        torch.ops.sgl_kernel_sm120.mla_tree_verify.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


shapes = st.builds(
    Case,
    name=st.just("random"),
    prefixes=st.lists(st.integers(0, 700), min_size=1, max_size=5).map(tuple),
    heads=st.integers(1, 24),
    tokens=st.integers(1, 65),
    mask=st.sampled_from(["full", "compact", "bool"]),
    tree=st.sampled_from(["random", "chain", "alone", "permuted", "partial"]),
    slots=st.sampled_from(["random", "repeated", "last"]),
    q_scale=st.sampled_from([0.1, 1.0, 6.0]),
    layout=st.sampled_from(["dense", "strided"]),
    int64_indptr=st.booleans(),
    splits=st.one_of(st.none(), st.integers(1, 40)),
)


@settings(max_examples=150, deadline=None)
@given(case=shapes, seed=st.integers(0, 10_000))
def test_any_shape(case: Case, seed: int) -> None:
    problem = make_problem(case, "cuda", seed)
    out = run(problem, make_workspace(problem, case)).clone()
    problem.guards.check()
    # Few numbers make the largest error of the bf16 reference a noisy yardstick.
    assert_not_worse_than_torch(out, problem, factor=3.0)


def capture(problem: Problem, workspace: torch.Tensor) -> torch.cuda.CUDAGraph:
    run(problem, workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(problem, workspace)
    return graph


def replace_in_place(problem: Problem, case: Case, seed: int) -> Problem:
    """New lengths, slots and trees in the buffers that a graph has captured; returns the problem to compare with."""
    new = make_problem(case, "cuda", seed)
    offset = int(torch.randint(0, 50, (1,), generator=torch.Generator().manual_seed(seed)))
    problem.kv_pool[offset : offset + len(new.kv_pool)] = new.kv_pool
    for name in ("q", "kv_indptr", "qo_indptr", "mask_indptr"):
        getattr(problem, name).copy_(getattr(new, name))
    problem.out_cache_loc.copy_(new.out_cache_loc + offset)
    problem.kv_indices[: len(new.kv_indices)] = new.kv_indices + offset
    problem.custom_mask[: len(new.custom_mask)] = new.custom_mask  # type: ignore[index,arg-type]
    return dataclasses.replace(problem, case=case, trees=new.trees)


@pytest.mark.parametrize(("batch", "heads", "tokens", "replays"), [(1, 8, 9, 1000), (4, 8, 9, 300), (3, 16, 33, 200)])
def test_graph_replays_equal_eager_calls(batch: int, heads: int, tokens: int, replays: int) -> None:
    largest = Case("largest", (9000,) * batch, heads, tokens)
    problem = make_problem(largest, "cuda")
    workspace, eager_workspace = make_workspace(problem, largest), make_workspace(problem, largest)
    graph = capture(problem, workspace)
    generator = torch.Generator().manual_seed(1)
    for replay in range(replays):
        if replay % 20 == 0:
            limit = (40, 700, 9000)[replay // 20 % 3]
            prefixes = tuple(torch.randint(0, limit, (batch,), generator=generator).tolist())
            current = replace_in_place(problem, dataclasses.replace(largest, prefixes=prefixes), replay)
            problem.out.fill_(float("nan"))
            eager = run(current, eager_workspace).clone()
            if replay % 100 == 0:
                assert_not_worse_than_torch(eager, current)
        problem.out.fill_(float("nan"))
        workspace.fill_(0xFF)
        graph.replay()
        assert torch.equal(problem.out, eager)
    problem.guards.check()


def test_two_graphs_on_two_streams() -> None:
    problems, graphs, expected = [], [], []
    for seed in (0, 1):
        case = Case("stream", (3000 + seed, 100), 8, 9)
        problem = make_problem(case, "cuda", seed)
        graphs.append(capture(problem, make_workspace(problem, case)))
        graphs[-1].replay()
        problems.append(problem)
        expected.append(problem.out.clone())
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(200):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for problem, out in zip(problems, expected, strict=True):
        assert torch.equal(problem.out, out)


def test_follows_any_kind_of_work_in_a_graph() -> None:
    case = Case("after-memset", (3000, 5), 8, 9)
    problem = make_problem(case, "cuda")
    workspace = make_workspace(problem, case)
    eager = run(problem, workspace).clone()
    source = problem.q.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.q.copy_(source)  # a memory copy node
        run(problem, workspace)
        workspace.zero_()  # a memory set node
        problem.q.mul_(1.0)  # a kernel
        run(problem, workspace)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run(problem, workspace)
        torch.cuda.current_stream().wait_stream(side)
    for _ in range(20):
        problem.out.fill_(float("nan"))
        problem.q.fill_(float("nan"))
        graph.replay()
        assert torch.equal(problem.out, eager)


def test_neither_synchronises_nor_allocates() -> None:
    case = Case("quiet", (3000, 5), 8, 9)
    problem = make_problem(case, "cuda")
    workspace = make_workspace(problem, case)
    run(problem, workspace)
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            run(problem, workspace)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
