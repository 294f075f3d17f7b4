# SPDX-License-Identifier: Apache-2.0
"""Torch bodies of small device kernels against loops over requests."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.platforms.reference import kernels, memory

LENGTHS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=6)


def random_table(num_requests: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(1, 10_000, (num_requests + 2, 96), generator=generator, dtype=torch.int32)
    return table, torch.randperm(num_requests + 2, generator=generator)[:num_requests]


@given(LENGTHS, st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_positions(lengths: list[tuple[int, int]], seed: int) -> None:
    prefix, new = (torch.tensor(lens, dtype=torch.int32) for lens in zip(*lengths, strict=True))
    positions, starts = kernels.extend_positions(prefix, new, int(new.sum()))
    expected = [position for p, n in lengths for position in range(p, p + n)]
    assert positions.tolist() == expected and positions.dtype == torch.int64
    assert starts.tolist() == [sum(n for _, n in lengths[:i]) for i in range(len(lengths))]
    assert kernels.extend_positions(prefix[:0], new, int(new.sum()))[0].tolist() == [
        t for _, n in lengths for t in range(n)
    ]


def test_positions_for_another_number_of_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="7 tokens expected, got lengths for 5"):
        kernels.extend_positions(torch.tensor([0, 0]), torch.tensor([2, 3]), 7)


@given(LENGTHS, st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_slots_of_a_prefill(lengths: list[tuple[int, int]], seed: int) -> None:
    table, rows = random_table(len(lengths), seed)
    before = table.clone()
    prefix, new = (torch.tensor(lens) for lens in zip(*lengths, strict=True))
    prefixes = [torch.arange(p) + 20_000 + 100 * i for i, (p, _) in enumerate(lengths)]
    slots = torch.arange(int(new.sum())) + 50_000
    pool = SimpleNamespace(req_to_token=table)
    kernels.write_request_slots(pool, rows, prefix, prefixes, prefix + new, slots)
    first = 0
    for row, own, (p, n) in zip(rows.tolist(), prefixes, lengths, strict=True):
        before[row, :p], before[row, p : p + n] = own.int(), slots[first : first + n].int()
        first += n
    assert torch.equal(table, before)


@given(LENGTHS, st.integers(1, 17), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_slots_are_read_per_request(lengths: list[tuple[int, int]], width: int, seed: int) -> None:
    table, rows = random_table(len(lengths), seed)
    start = torch.tensor([p for p, _ in lengths])
    got = kernels.gather_extend_slots(rows, table, start, width)
    expected = [table[row, p : p + width] for row, (p, _) in zip(rows, lengths, strict=True)]
    assert torch.equal(got, torch.cat(expected).long())
    last = kernels.last_prefix_slot(table, rows, start)
    assert last.tolist() == [int(table[r, p - 1]) if p else -1 for r, (p, _) in zip(rows, lengths, strict=True)]


@given(LENGTHS, st.sampled_from([1, 4, 16]), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_paged_allocator_fills_pages(lengths: list[tuple[int, int]], page_size: int, seed: int) -> None:
    """Slot and position agree within a page, no slot is given twice, and the last page of a prefix is filled first."""
    allocator = make_allocator(page_size, num_pages=800)
    prefix, new = (torch.tensor(lens) for lens in zip(*lengths, strict=True))
    free_before = allocator.available_size()
    first = extend(allocator, torch.zeros_like(prefix), prefix, torch.full_like(prefix, -1))
    last = torch.tensor([int(slots[-1]) if len(slots) else -1 for slots in first])
    second = extend(allocator, prefix, prefix + new, last)
    totals = prefix + new
    third = allocator.alloc_decode(totals + 1, totals + 1, torch.stack([slots[-1] for slots in second]))
    requests = [torch.cat([a, b, c[None]]) for a, b, c in zip(first, second, third, strict=True)]
    everything = torch.cat(requests)
    assert len(everything.unique()) == len(everything) and int(everything.min()) >= page_size
    num_pages = 0
    for slots in requests:
        position = torch.arange(len(slots))
        assert torch.equal(slots % page_size, position % page_size)
        pages = slots // page_size
        assert torch.equal(pages, pages[position // page_size * page_size])
        num_pages += len(pages.unique())
    assert free_before - allocator.available_size() == num_pages * page_size


def test_paged_allocator_refuses_more_than_it_has() -> None:
    allocator = make_allocator(16, num_pages=3)
    zero, lens = torch.tensor([0, 0]), torch.tensor([20, 17])
    assert allocator.alloc_extend(zero, zero, lens, lens, zero - 1, 37) is None
    assert allocator.available_size() == 48


def make_allocator(page_size: int, num_pages: int) -> memory.ReferencePagedAllocator:
    return memory.ReferencePagedAllocator(
        num_pages * page_size, page_size=page_size, dtype=torch.float32, device="cpu", kvcache=None, need_sort=False
    )


def extend(
    allocator: memory.ReferencePagedAllocator, prefix: torch.Tensor, total: torch.Tensor, last: torch.Tensor
) -> list[torch.Tensor]:
    new = total - prefix
    return list(allocator.alloc_extend(prefix, prefix, total, total, last, int(new.sum())).split(new.tolist()))


def test_pools_refuse_what_they_cannot_hold() -> None:
    with pytest.raises(ValueError, match="index_head_dim=128"):
        memory.ReferenceMLATokenToKVPool(index_head_dim=128)
    with pytest.raises(ValueError, match="page size 1 expected .* got 16"):
        memory.ReferenceSlotAllocator(64, page_size=16)


def test_bitmask_keeps_only_allowed_tokens() -> None:
    mask = kernels.allocate_bitmask(vocab_size=40, batch_size=2)
    assert mask.shape == (2, 2) and bool((mask == -1).all()) and not mask.is_pinned()
    mask[1] = torch.tensor([0b101, 0b10])
    logits = torch.arange(80.0).view(2, 40)
    kernels.apply_bitmask(logits, mask)
    assert torch.equal(logits[0], torch.arange(40.0))
    assert logits[1].isfinite().nonzero().flatten().tolist() == [0, 2, 33]
