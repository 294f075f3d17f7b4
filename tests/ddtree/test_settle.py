# SPDX-License-Identifier: Apache-2.0
"""What a step commits: the kernel gives what the tensor operations give, and both what a walk means."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields

import pytest
import torch

from sglang.srt.speculative import ddtree_commit
from sglang.srt.speculative.ddtree_commit import Settled, settle
from sglang.srt.speculative.ddtree_walk import WalkBuffers

# Requests, rows of a window, longest run.
SHAPES = [(1, 8, 8), (3, 17, 8), (5, 65, 16), (2, 2, 2), (7, 33, 5)]


def walked(shape: tuple[int, int, int], seed: int) -> tuple[WalkBuffers, torch.Tensor, torch.Tensor]:
    """A random walk with one request more than the batch, random windows and lengths."""
    bs, width, longest = shape
    generator = torch.Generator().manual_seed(seed)
    walk = WalkBuffers.allocate(bs + 1, longest - 1, "cpu")
    walk.packed.random_(0, 1000, generator=generator)
    for request in range(bs):
        length = int(torch.randint(1, longest + 1, (1,), generator=generator))
        path = torch.randperm(width - 1, generator=generator)[: length - 1].sort().values + 1
        walk.accept_lens[request] = length
        walk.accept_index[request] = -1
        walk.accept_index[request, 0] = 0
        walk.accept_index[request, 1:length] = path
    slots = torch.randperm(10**6, generator=generator)[: bs * width].view(bs, width)
    return walk, slots, torch.randint(0, 10**6, (bs,), generator=generator)


def check(found: Settled, walk: WalkBuffers, slots: torch.Tensor, committed: torch.Tensor) -> None:
    """Compare with a plain reading of the walk, request by request."""
    longest, width = walk.accept_index.shape[1], slots.shape[1]
    for request, window in enumerate(slots.tolist()):
        path = [row for row in walk.accept_index[request].tolist() if row >= 0]
        span = slice(request * longest, (request + 1) * longest)
        before = int(committed[request])
        assert int(found.accept_lens[request]) == len(path)
        assert int(found.bonus[request]) == int(walk.bonus[request])
        assert int(found.seq_lens[request]) == before + len(path)
        assert found.out_tokens[span].tolist() == walk.out_tokens[request].tolist()
        assert found.destinations[request].tolist() == window[:longest]
        assert found.sources[request].tolist() == [window[row] for row in path] + window[len(path) : longest]
        assert found.rows[span].tolist() == [request * width + row for row in path + [0] * (longest - len(path))]
        assert found.positions[span].tolist() == list(range(before, before + longest))
    assert found.accept_lens.dtype == torch.int32
    assert all(getattr(found, field.name).is_contiguous() for field in fields(found))


def on_device(walk: WalkBuffers, slots: torch.Tensor, committed: torch.Tensor) -> Settled:
    """Run the kernel on poisoned outputs, wherever the tensors are."""
    bs, longest = slots.shape[0], walk.accept_index.shape[1]
    vectors, scalars, accept_lens = (
        torch.full(shape, -7, dtype=dtype, device=slots.device)
        for shape, dtype in (((5, bs, longest), torch.int64), ((2, bs), torch.int64), ((bs,), torch.int32))
    )
    ddtree_commit.settle_on_device(walk, slots, committed, vectors, scalars, accept_lens)
    out_tokens, destinations, sources, rows, positions = vectors
    flat = (part.view(-1) for part in (rows, positions))
    return Settled(accept_lens, scalars[0], scalars[1], out_tokens.view(-1), destinations, sources, *flat)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shape", SHAPES)
def test_a_walk_is_read_as_it_is_meant(shape: tuple[int, int, int], seed: int) -> None:
    walk, slots, committed = walked(shape, seed)
    check(settle(walk, slots, committed), walk, slots, committed)


def test_the_interpreted_kernel() -> None:
    """In a process of its own: the interpreter replaces Triton's language for good."""
    subprocess.run([sys.executable, __file__], env=os.environ | {"TRITON_INTERPRET": "1"}, check=True, timeout=600)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_on_the_device(shape: tuple[int, int, int]) -> None:
    for seed in range(20):
        walk, slots, committed = walked(shape, seed)
        packed = walk.packed.cuda()
        longest = walk.accept_index.shape[1]
        moved = WalkBuffers(packed, packed[:, :longest], packed[:, longest:-2], packed[:, -2], packed[:, -1])
        check(settle(moved, slots.cuda(), committed.cuda()), walk, slots, committed)


if __name__ == "__main__":
    for one in SHAPES:
        for number in range(3):
            inputs = walked(one, number)
            check(on_device(*inputs), *inputs)
