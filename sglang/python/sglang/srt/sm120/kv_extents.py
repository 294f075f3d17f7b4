# SPDX-License-Identifier: Apache-2.0
"""Extents of KV slots: the order in which slots are handed out, and the exchange of scattered slots for adjacent ones.

A run is a stretch of a text whose slots are consecutive numbers, so that its rows are one stretch of memory. Everything here works on device tensors whose sizes the host knows; nothing waits for the device.
"""

from __future__ import annotations

import torch


def sort_free(free: torch.Tensor) -> None:
    """Sort a list of free slots in place, so that the next texts get neighbours.

    SGLang's allocator takes from the front of its list and appends what is freed: in a pool that has been in use, slots
    come out in the order in which requests ended, cut finer with every turn. Its own ``need_sort`` sorts on the way of an
    allocation, whenever the list is used up. Done now and then instead, in place and on the stream of the forward
    pass, the allocation itself costs nothing more and nobody waits.

    Args:
        free: int64 [n]. Slices that were handed out before it in the same storage keep their values.
    """
    free.copy_(free.sort().values)


def breaks(slots: torch.Tensor) -> torch.Tensor:
    """Whether a run ends between each slot and the next: bool [..., n - 1] for integers [..., n]."""
    return slots[..., 1:] != slots[..., :-1] + 1


def breaks_by_chunk(slots: torch.Tensor, lengths: torch.Tensor, chunk: int) -> torch.Tensor:
    """Ends of runs in each chunk of each text.

    Args:
        slots: integers [texts, width], in the order of the text; what lies beyond its length is ignored.
        lengths: integers [texts].
        chunk: positions of a chunk.

    Returns:
        int32 [texts, chunks]; the end between positions i and i + 1 is counted in the chunk of i.
    """
    ends = breaks(slots) & (torch.arange(1, slots.shape[1], device=slots.device) < lengths[:, None])
    padded = torch.nn.functional.pad(ends, (0, -ends.shape[1] % chunk))
    return padded.view(len(slots), -1, chunk).sum(-1, dtype=torch.int32)


def take_extent(free: torch.Tensor, slots: torch.Tensor, always: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Exchange slots for the stretch of the free list that has the fewest runs, where that at least halves their runs.

    Args:
        free: int64 [n], no slot twice; rewritten in place, with the slots that become free at its end. Its storage stays
            the same, because the host may hold slices of it and drop it at any time.
        slots: int64 [k], 1 <= k <= n, none of them free.
        always: exchange without regard to the gain.

    Returns:
        (int64 [k] slots to use from now on, bool [1] whether they are others). The two sets are disjoint or equal, so a
        copy from the old to the new slots does not depend on its order.
    """
    num_slots, num_free = len(slots), len(free)
    ends = torch.nn.functional.pad(breaks(free).to(torch.int64).cumsum(0), (1, 0))
    inside = ends[num_slots - 1 :] - ends[: num_free - num_slots + 1]
    # Index tensors keep a dimension: indexing with a scalar would read it on the host.
    first = inside.argmin(0, keepdim=True)
    taken = free[first + torch.arange(num_slots, device=free.device)]
    gain = 2 * (inside[first] + 1) <= breaks(slots).sum() + 1
    moved = torch.ones_like(gain) if always else gain
    place = torch.arange(num_free - num_slots, device=free.device)
    kept = free[place + num_slots * (place >= first)]
    free.copy_(torch.cat([kept, torch.where(moved, slots, taken)]))
    return torch.where(moved, taken, slots), moved
