# SPDX-License-Identifier: Apache-2.0
"""A move among the streams of a scheduler on a GPU: it queues behind the step in flight, and nobody waits for it."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.sm120 import defrag
from sglang.srt.sm120.defrag import Defragmenter
from sglang.srt.sm120.kv_extents import take_extent
from sglang.srt.sm120.kv_owners import text_of_request
from slots.toy import fragmented_server

pytestmark = pytest.mark.gpu

SLEEP_CYCLES = 1_000_000_000  # about half a second, far longer than the host needs for what follows


@pytest.mark.scenario("BUG-051")
def test_a_move_queues_behind_the_step_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late step still writes to slots of a text and to slots that its request has lost; both come before the move."""
    monkeypatch.setenv("SGLANG_SM120_DEFRAG", "auto")
    monkeypatch.setattr(defrag, "_install_idle_hook", lambda: None)
    # Every move goes to other slots, contiguous or not.
    monkeypatch.setattr(defrag, "take_extent", lambda free, slots, always: take_extent(free, slots, always=True))
    server = fragmented_server(device="cuda")
    defragmenter = Defragmenter(server.runner(server.pools[0]), server.runner(server.pools[1]), metrics=None)
    req = server.running[0]
    text = text_of_request(req, server.running, server.tree.root_node)
    layers = [layer for pool in server.pools for layer in pool.kv_buffer]
    expected = [layer[text.slots(server.table, 0, 48)] for layer in layers]
    schedule, forward = torch.cuda.current_stream(), torch.cuda.Stream()
    # Warm up, so that nothing below allocates from the driver, which would wait.
    forward.wait_stream(schedule)
    batch = server.batch()  # making it waits for the device
    with torch.cuda.stream(forward):
        defragmenter._measure(batch)
        defragmenter._exchange(text, 0, 48)
    torch.cuda.synchronize()
    defragmenter._readings.clear()
    server.check()
    rows, free = text.slots(server.table, 0, 48), server.allocator.free_pages.clone()
    torch.cuda.synchronize()

    with torch.cuda.stream(forward):
        for layer in layers:
            layer[rows] = -7
            layer[free] = -9
        torch.cuda._sleep(SLEEP_CYCLES)
        for layer, values in zip(layers, expected, strict=True):
            layer[rows] = values
        late = torch.cuda.Event()
        late.record()
        defragmenter._measure(batch)
        defragmenter._exchange(text, 0, 48)
        moved = torch.cuda.Event()
        moved.record()
    assert not late.query(), "the host must not have waited for the step in flight"

    schedule.wait_event(moved)  # the scheduler's barrier after a launch
    taken = server.alloc(48)
    assert taken is not None
    forward.wait_stream(schedule)
    with torch.cuda.stream(forward):
        for layer in layers:
            layer[taken] = -11
    torch.cuda.synchronize()
    assert set(server.table[req.req_pool_idx, :48].tolist()).isdisjoint(taken.tolist())
    for layer, values in zip(layers, expected, strict=True):
        assert torch.equal(layer[server.table[req.req_pool_idx, :48].to(torch.int64)], values)


@pytest.mark.parametrize("seed", range(2))
def test_a_move_before_every_step_keeps_every_row(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setenv("SGLANG_SM120_DEFRAG", "auto")
    monkeypatch.setenv("SGLANG_SM120_DEFRAG_CHECK", "1")
    monkeypatch.setattr(defrag, "_install_idle_hook", lambda: None)
    server = fragmented_server(3, device="cuda")
    defragmenter = Defragmenter(server.runner(server.pools[0]), server.runner(server.pools[1]), metrics=None)
    torch.manual_seed(seed)
    for turn in range(60):
        defragmenter.before_step(server.batch())
        server.check()
        if server.running and turn % 3 == 0:
            server.decode(server.running[turn % len(server.running)], [5])
    assert int(defragmenter._moved) > 0
