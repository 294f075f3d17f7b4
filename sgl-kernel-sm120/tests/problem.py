# SPDX-License-Identifier: Apache-2.0
"""Tensors of a case, with poison in everything unused and sentinels around everything used, and the comparison."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from cases.mla_tree_verify import Case
from ref.mla_tree_verify import attention

DIM_QK, DIM_V = 576, 512
SCALE = 192**-0.5
GUARD_BYTES = 256
GUARD_VALUE = 0xA5


@dataclass
class Guards:
    """Buffers with a sentinel on either side."""

    buffers: list[torch.Tensor] = field(default_factory=list)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        """A tensor whose neighbours are watched; contents are 0xFF bytes: NaN, or -1."""
        count = 1
        for size in shape:
            count *= size
        num_bytes = count * dtype.itemsize
        padded = -(-num_bytes // 16) * 16
        buffer = torch.full((padded + 2 * GUARD_BYTES,), GUARD_VALUE, dtype=torch.uint8, device=device)
        inner = buffer[GUARD_BYTES : GUARD_BYTES + num_bytes]
        inner.fill_(0xFF)
        self.buffers.append(buffer)
        return inner.view(dtype).view(shape)

    def copy(self, source: torch.Tensor, device: str) -> torch.Tensor:
        """A watched copy of `source`."""
        return self.empty(tuple(source.shape), source.dtype, device).copy_(source)

    def check(self) -> None:
        for buffer in self.buffers:
            for guard in (buffer[:GUARD_BYTES], buffer[-GUARD_BYTES:]):
                assert bool((guard == GUARD_VALUE).all()), "a sentinel beside a buffer was overwritten"


def tree_mask(kind: str, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """[T, T] bool. random: ancestors in a random tree; permuted: the same with its tokens in any order; alone: each
    token sees itself; partial: some tokens see nothing and some are seen by nobody."""
    if kind == "chain":
        return torch.ones(tokens, tokens, dtype=torch.bool).tril()
    mask = torch.eye(tokens, dtype=torch.bool)
    if kind == "alone":
        return mask
    for token in range(1, tokens):
        parent = int(torch.randint(0, token, (1,), generator=generator))
        mask[token] |= mask[parent]
    if kind == "permuted":
        order = torch.randperm(tokens, generator=generator)
        mask = mask[order][:, order]
    if kind == "partial":
        mask[::3] = False
        mask[:, 1::4] = False
    return mask


@dataclass
class Problem:
    """The arguments of one call and what the comparison needs."""

    case: Case
    q: torch.Tensor
    kv_pool: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    out_cache_loc: torch.Tensor
    qo_indptr: torch.Tensor
    custom_mask: torch.Tensor | None
    mask_indptr: torch.Tensor | None
    out: torch.Tensor
    guards: Guards
    trees: list[torch.Tensor]

    def arguments(self) -> tuple[torch.Tensor | None, ...]:
        """Positional arguments of mla_tree_verify up to `out`."""
        return (
            self.q, self.kv_pool, self.kv_indptr, self.kv_indices, self.qo_indptr, self.out_cache_loc,
            self.custom_mask, self.mask_indptr, self.out,
        )  # fmt: skip

    @property
    def mask_is_full(self) -> bool:
        return self.case.mask in ("full", "bool")

    def expected(self, dtype: torch.dtype) -> torch.Tensor:
        """[bs * T, H, 512] fp32 by the oracle with products in `dtype`."""
        parts = []
        ends, tokens = self.kv_indptr.tolist(), self.case.tokens
        for request, tree in enumerate(self.trees):
            rows = slice(request * tokens, (request + 1) * tokens)
            slots = torch.cat([self.kv_indices[ends[request] : ends[request + 1]], self.out_cache_loc[rows]])
            keys = self.kv_pool[slots].view(len(slots), DIM_QK)
            parts.append(attention(self.q[rows], keys, tree.to(self.q.device), SCALE, dtype))
        return torch.cat(parts)


def _slots(case: Case, num_slots: int, generator: torch.Generator) -> torch.Tensor:
    total = sum(case.prefixes) + len(case.prefixes) * case.tokens
    if case.slots == "repeated":
        return torch.full((total,), num_slots // 2)
    if case.slots == "last":
        return num_slots - 1 - torch.arange(total) % 64
    return torch.randperm(num_slots - 1, generator=generator)[:total] + 1


def _rows(case: Case, width: int, guards: Guards, device: str) -> torch.Tensor:
    rows = len(case.prefixes) * case.tokens
    if case.layout == "dense":
        return guards.empty((rows, case.heads, width), torch.bfloat16, device)
    # A slice of a wider buffer, heads outermost: both strides differ from the dense ones.
    wide = guards.empty((case.heads, rows, width + 64), torch.bfloat16, device)
    return wide[:, :, 32 : 32 + width].transpose(0, 1)


def make_problem(case: Case, device: str, seed: int = 0) -> Problem:
    """Random tensors of a case; slots that the case does not use hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    guards = Guards()
    batch, tokens = len(case.prefixes), case.tokens
    prefix_total = sum(case.prefixes)
    num_slots = prefix_total + batch * tokens + 100
    slots = _slots(case, num_slots, generator)
    pool = guards.empty((num_slots, 1, DIM_QK), torch.bfloat16, device)
    used = torch.unique(slots)
    keys = torch.randn(len(used), 1, DIM_QK, device=device, generator=torch.Generator(device).manual_seed(seed))
    pool[used.to(device)] = keys.to(torch.bfloat16)
    pool[0] = 1.0
    q = _rows(case, DIM_QK, guards, device)
    q.copy_(torch.randn(batch * tokens, case.heads, DIM_QK, generator=generator) * case.q_scale)
    out = _rows(case, DIM_V, guards, device)
    trees = [tree_mask(case.tree, tokens, generator) for _ in range(batch)]
    masks = []
    for prefix, tree in zip(case.prefixes, trees, strict=True):
        # The prefix columns of a full mask are never read.
        masks.append(
            (
                torch.cat([torch.zeros(tokens, prefix, dtype=torch.bool), tree], 1)
                if case.mask in ("full", "bool")
                else tree
            ).flatten()
        )
    starts = torch.tensor([0] + [len(mask) for mask in masks]).cumsum(0)
    custom_mask = None
    if case.mask != "none":
        dtype = torch.bool if case.mask == "bool" else torch.uint8
        custom_mask = guards.copy(torch.cat(masks).to(dtype), device)
    indptr_dtype = torch.int64 if case.int64_indptr else torch.int32
    ends = torch.tensor((0, *case.prefixes)).cumsum(0)
    return Problem(
        case=case,
        q=q,
        kv_pool=pool,
        kv_indptr=guards.copy(ends.to(torch.int32), device),
        kv_indices=guards.copy(slots[:prefix_total], device),
        qo_indptr=guards.copy((torch.arange(batch + 1) * tokens).to(indptr_dtype), device),
        out_cache_loc=guards.copy(slots[prefix_total:], device),
        custom_mask=custom_mask,
        mask_indptr=None if custom_mask is None else guards.copy(starts, device),
        out=out,
        guards=guards,
        trees=trees,
    )


def errors(got: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """(largest absolute error, root mean square error)."""
    difference = (got.float() - expected).abs()
    return float(difference.max()), float(difference.square().mean().sqrt())


def cosine_gap(got: torch.Tensor, expected: torch.Tensor) -> float:
    """1 - cosine similarity, in fp64."""
    a, b = got.double().flatten(), expected.double().flatten()
    if not float(b.norm()):
        return float(a.norm())
    return float(1 - (a @ b) / (a.norm() * b.norm()))


def assert_not_worse_than_torch(got: torch.Tensor, problem: Problem, factor: float = 2.0) -> float:
    """The error may be `factor` times that of the same maths in bf16; returns the larger ratio of the two errors."""
    expected = problem.expected(torch.float32)
    same_maths = problem.expected(torch.bfloat16).to(torch.bfloat16)
    assert torch.equal(got.isnan(), expected.isnan()), "NaN must appear exactly where the oracle has it"
    finite = ~expected.isnan()
    got, expected, same_maths = got[finite], expected[finite], same_maths[finite]
    ours, theirs = errors(got, expected), errors(same_maths, expected)
    floor = (1e-6, 1e-7)
    for name, our, their, least in zip(("largest", "rms"), ours, theirs, floor, strict=True):
        assert our <= factor * their + least, f"{name} error {our:.3e}, of the same maths in bf16 {their:.3e}"
    gap = cosine_gap(got, expected)
    assert gap <= max(5e-6, factor * cosine_gap(same_maths, expected)), f"cosine gap {gap:.2e}"
    return max(our / (their + least) for our, their, least in zip(ours, theirs, floor, strict=True))
