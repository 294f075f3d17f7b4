# SPDX-License-Identifier: Apache-2.0
"""Moves of KV rows against SGLang's own pools, allocator and radix tree: nothing is lost, nothing waits."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.sm120 import defrag
from sglang.srt.sm120.defrag import Defragmenter, unknown_holder
from sglang.srt.sm120.kv_owners import leaves, text_of_leaf, text_of_request
from slots.toy import ToyServer, fragmented_server

PREFIXES = ([1] * 24, [1] * 12 + [2] * 20, [3] * 40)
STEPS = ("admit", "chunk", "insert", "decode", "decode", "decode", "finish", "retract", "move", "move", "idle")
Program = list[tuple[str, int]]


@pytest.fixture(autouse=True)
def auto_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every server of a test moves slots; the toy has no scheduler to hook."""
    monkeypatch.setenv("SGLANG_SM120_DEFRAG", "auto")
    monkeypatch.setattr(defrag, "_install_idle_hook", lambda: None)
    monkeypatch.setattr(defrag, "MEASURE_EVERY", 2)
    monkeypatch.setattr(defrag, "CHUNK", 16)
    monkeypatch.setattr(defrag, "MIN_ROWS", 32)


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SM120_DEFRAG_CHECK", "1")


def make_defragmenter(server: ToyServer) -> Defragmenter:
    return Defragmenter(server.runner(server.pools[0]), server.runner(server.pools[1]), metrics=None)


def idle_scheduler(server: ToyServer) -> Any:
    return SimpleNamespace(is_fully_idle=lambda: not server.requests, tree_cache=server.tree)


def run(program: Program, server: ToyServer, defragmenter: Defragmenter) -> int:
    """Run a program of (step, seed), checking after each; returns the rows moved."""
    for step, seed in program:
        chance = random.Random(seed)
        req = chance.choice(server.running) if server.running else None
        if step in ("admit", "chunk"):
            prompt = [*chance.choice(PREFIXES), *chance.choices((4, 5), k=chance.randint(1, 40))]
            server.admit(prompt, chunked=step == "chunk")
        elif step == "move":
            defragmenter.before_step(server.batch())
        elif step == "idle":
            defragmenter.on_idle(idle_scheduler(server))
        elif step == "finish" and server.chunked is not None and chance.random() < 0.5:
            server.finish(server.chunked, insert=True)
        elif req is not None and step == "insert":
            server.insert(req)
        elif req is not None and step == "decode":
            server.insert(req)
            server.decode(req, chance.choices((4, 5, 6), k=chance.randint(1, 4)))
        elif req is not None:
            server.finish(req, insert=step == "finish")
        server.check()
    return int(defragmenter._moved)


def random_program(seed: int, length: int) -> Program:
    chance = random.Random(seed)
    return [(chance.choice(STEPS), chance.randrange(2**16)) for _ in range(length)]


@pytest.mark.scenario("BUG-045")
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 2**16)), min_size=10, max_size=60))
def test_any_program_keeps_every_row(program: Program) -> None:
    server = ToyServer()
    run(program, server, make_defragmenter(server))


@pytest.mark.usefixtures("every_step")
@pytest.mark.scenario("BUG-051")
@pytest.mark.scenario("BUG-052")
@pytest.mark.parametrize("seed", range(4))
def test_a_move_before_every_step_keeps_every_row(seed: int) -> None:
    """Aborts and retractions free slots that have just moved, and slots that have just become free are moved to."""
    server = ToyServer()
    assert run(random_program(seed, 200), server, make_defragmenter(server)) > 0


def test_runs_become_long() -> None:
    server = fragmented_server()
    defragmenter = make_defragmenter(server)
    lengths = []
    for _ in range(12):
        defragmenter.before_step(server.batch())
        server.check()
        lengths.append(defragmenter.run_length())
    # 65 positions; the answers came in pieces of two slots from the first reserve on.
    assert lengths[1] < 5
    assert lengths[-1] > 12
    rids = {req.rid[-8:] for req in server.running}
    line = defragmenter.describe()
    assert line.startswith(f"kv run length: {lengths[-1]:.1f} (")
    assert len(rids) == 2 and all(f"{rid}=" in line for rid in rids)


def test_all_holders_of_a_shared_prefix_follow() -> None:
    server = fragmented_server()
    first, second = server.running
    before = server.table[first.req_pool_idx, :24].tolist()
    text = text_of_request(first, server.running, server.tree.root_node)
    make_defragmenter(server)._exchange(text, 0, 48)
    after = server.table[first.req_pool_idx, :24].tolist()
    assert set(before).isdisjoint(after)
    assert server.table[second.req_pool_idx, :24].tolist() == after
    server.check()


@pytest.mark.usefixtures("every_step")
def test_a_prefix_with_an_unknown_holder_stays() -> None:
    """A request between two chunks is not in the batch, but holds the prefix."""
    server = fragmented_server()
    chunked = server.admit([*PREFIXES[0], *[9] * 20], chunked=True)
    assert chunked is not None
    row = server.table[chunked.req_pool_idx, :44].tolist()
    defragmenter = make_defragmenter(server)
    for _ in range(20):
        defragmenter.before_step(server.batch())
        server.check()
    assert int(defragmenter._moved) > 0
    assert server.table[chunked.req_pool_idx, :44].tolist() == row
    assert text_of_request(server.running[0], server.running, server.tree.root_node).start == 24


@pytest.mark.usefixtures("every_step")
def test_the_reserve_of_a_request_stays() -> None:
    """How much of it is live is known to the device alone."""
    server = fragmented_server(1)
    req = server.running[0]
    tail = server.table[req.req_pool_idx, req.kv_committed_len : req.kv_allocated_len].tolist()
    defragmenter = make_defragmenter(server)
    text = text_of_request(req, server.running, server.tree.root_node)
    assert req.kv_allocated_len - req.kv_committed_len >= 4
    assert not defragmenter._move(text, req.kv_committed_len - 12, 64), "12 committed rows are no whole move"
    for _ in range(10):
        defragmenter.before_step(server.batch())
    assert int(defragmenter._moved) > 0
    assert server.table[req.req_pool_idx, req.kv_committed_len : req.kv_allocated_len].tolist() == tail


def test_a_row_that_disagrees_with_the_tree_stays() -> None:
    server = fragmented_server()
    server.running[0].cache_protected_len -= 1
    text = text_of_request(server.running[0], server.running, server.tree.root_node)
    assert text.start == text.stop
    # It still holds the prefix, so the other one's may not move either.
    other = text_of_request(server.running[1], server.running, server.tree.root_node)
    assert other.start == 24


def test_cached_texts_are_repaired_while_nothing_runs() -> None:
    server = fragmented_server()
    for req in list(server.running):
        server.finish(req, insert=True)
    defragmenter = make_defragmenter(server)
    for _ in range(10):
        defragmenter.on_idle(idle_scheduler(server))
        server.check()
    assert int(defragmenter._moved) > 0
    # A flush between two calls forgets the tree; what it held must not be written to any more.
    for number in range(2):
        server.admit([*PREFIXES[0], *[7 + number] * 30])
    defragmenter.before_step(server.batch())
    for req in list(server.running):
        server.finish(req, insert=True)
    defragmenter.on_idle(idle_scheduler(server))
    server.tree.reset()
    server.allocator.clear()
    defragmenter.on_idle(idle_scheduler(server))
    server.check()


def test_idle_work_is_cut_by_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing needs to move: a request that comes must not wait until a large tree has been looked at."""
    server = ToyServer()
    for number in range(20):
        if (req := server.admit([7 + number] * 12)) is not None:
            server.finish(req, insert=True)
    looked_at: list[Any] = []
    find = defrag.text_of_leaf
    monkeypatch.setattr(defrag, "text_of_leaf", lambda leaf, root: looked_at.append(leaf) or find(leaf, root))
    monkeypatch.setattr(defrag, "IDLE_BUDGET_US", 0.0)
    defragmenter = make_defragmenter(server)
    counts = []
    for _ in range(30):
        defragmenter.on_idle(idle_scheduler(server))
        counts.append(len(looked_at))
    assert counts[0] == 1 and max(after - before for before, after in pairwise(counts)) <= 2
    assert {id(leaf) for leaf in looked_at} == {id(leaf) for leaf in leaves(server.tree.root_node)}
    assert counts[-1] == counts[-2], "each text is looked at once after a step"


def test_a_text_that_was_evicted_or_is_in_use_again_stays() -> None:
    server = fragmented_server()
    for req in list(server.running):
        server.finish(req, insert=True)
    found = list(leaves(server.tree.root_node))
    assert len(found) == 2
    assert all(text_of_leaf(leaf, server.tree.root_node) is not None for leaf in found)
    server.tree.evict(EvictParams(num_tokens=1))
    evicted = [leaf for leaf in found if text_of_leaf(leaf, server.tree.root_node) is None]
    assert len(evicted) == 1
    left = next(leaf for leaf in found if leaf not in evicted)
    server.tree.inc_lock_ref(left)
    assert text_of_leaf(left, server.tree.root_node) is None


@pytest.mark.parametrize("num_free", [0, 15, 64])
def test_a_step_looks_at_few_windows(monkeypatch: pytest.MonkeyPatch, num_free: int) -> None:
    """In a pool without room, or with windows that may not move, the host must not go through all of them at once."""
    server = fragmented_server()
    defragmenter = make_defragmenter(server)
    taken = server.alloc(server.allocator.available_size() - num_free)
    assert taken is not None
    if num_free:
        for req in server.running:
            req.cache_protected_len -= 1  # the row disagrees with the tree: it stays where it is
    looked_at = []
    find = defrag.text_of_request
    monkeypatch.setattr(defrag, "text_of_request", lambda req, *rest: looked_at.append(req) or find(req, *rest))
    defragmenter._windows = defrag.deque((server.running[0].rid, 16 * (number % 4)) for number in range(1000))
    defragmenter._is_checked, defragmenter._steps = True, 2
    defragmenter.before_step(server.batch())
    assert len(looked_at) <= 1
    assert int(defragmenter._moved) == 0
    server.allocator.free(taken)


def test_nothing_moves_while_slots_are_being_freed() -> None:
    server = fragmented_server()
    defragmenter = make_defragmenter(server)
    server.allocator.free_group_begin()
    for _ in range(10):
        defragmenter.before_step(server.batch())
    assert int(defragmenter._moved) == 0
    server.allocator.free_group_end()


class _HostReads(TorchDispatchMode):
    """Notes operators that make the host wait for values of the device, or whose result's size depends on them."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero", "_to_copy_cpu")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in self.WAITING):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.scenario("BUG-051")
def test_a_move_needs_no_values_on_the_host() -> None:
    """So it can queue behind the step in flight, and all that follows it on the stream sees it done."""
    server = fragmented_server()
    defragmenter = make_defragmenter(server)
    text = text_of_request(server.running[0], server.running, server.tree.root_node)
    with _HostReads() as reads:
        defragmenter._measure(server.batch())
        defragmenter._exchange(text, text.start, 48)
    assert reads.found == []
    with _HostReads() as reads:
        bool(torch.ones(1).all())
    assert reads.found != [], "the probe must see a wait"


@pytest.mark.scenario("BUG-051")
def test_a_move_writes_into_memory_that_exists() -> None:
    """New storage would belong to the forward pass's stream, and could be reused while the scheduler still reads it."""
    server = fragmented_server()
    defragmenter = make_defragmenter(server)
    req = server.running[0]
    held = [server.allocator.free_pages, req.last_node.value, req.prefix_indices, server.table]
    addresses = [tensor.data_ptr() for tensor in held]
    text = text_of_request(req, server.running, server.tree.root_node)
    defragmenter._exchange(text, 0, 48)
    held = [server.allocator.free_pages, req.last_node.value, req.prefix_indices, server.table]
    assert [tensor.data_ptr() for tensor in held] == addresses


def test_a_move_is_fitted_to_the_budget() -> None:
    defragmenter = make_defragmenter(ToyServer())
    defragmenter._pace(100.0, 1024)
    assert defragmenter._rows == 2048
    defragmenter._pace(800.0, 4096)
    assert defragmenter._rows == 1024
    defragmenter._pace(1e6, 32)
    assert defragmenter._rows == defrag.MIN_ROWS
    defragmenter._pace(1.0, 100_000)
    assert defragmenter._rows == defrag.MAX_ROWS


def test_other_caches_and_pools_switch_it_off(caplog: pytest.LogCaptureFixture) -> None:
    server = fragmented_server()
    defragmenter = make_defragmenter(server)
    batch = server.batch()
    batch.tree_cache = object.__new__(ChunkCache)
    for _ in range(4):
        defragmenter.before_step(batch)
    lines = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert lines == ["SGLANG_SM120_DEFRAG=auto is off: expected SGLang's RadixCache, got ChunkCache."]
    assert unknown_holder(server.tree, (object(),)) == "expected an MLA or MHA pool, got object"
    assert unknown_holder(server.tree, server.pools) is None


def test_a_stream_of_its_own_for_preparation_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "1")
    server = ToyServer()
    reason = unknown_holder(server.tree, server.pools)
    assert reason == "SGLANG_ENABLE_OVERLAP_PLAN_STREAM prepares steps on a stream of its own"


@pytest.mark.usefixtures("every_step")
def test_a_lost_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    server = fragmented_server()
    defragmenter = make_defragmenter(server)
    monkeypatch.setattr(defrag, "move_slots", lambda *arguments: None)
    with pytest.raises(RuntimeError, match="expected the moved rows of 16 slots"):
        defragmenter.before_step(server.batch())


def test_slots_are_handed_out_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SM120_DEFRAG", "off")
    server = fragmented_server()
    free = server.alloc(server.allocator.available_size())
    assert free is not None
    for part in free[torch.randperm(len(free))].split(7):
        server.allocator.free(part)
    make_defragmenter(server).before_step(server.batch())
    assert server.alloc(len(free)).tolist() == sorted(free.tolist())
