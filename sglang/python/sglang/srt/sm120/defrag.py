# SPDX-License-Identifier: Apache-2.0
"""Defragmentation: moves KV rows of running and cached texts into contiguous extents.

A move is planned on the device from sizes that the host knows, and runs on the stream of the forward pass just before a
decode step. That order is what makes it safe without a wait:

- the step before may still be in flight, but its writes are earlier on the same stream;
- the next step gathers its slots from the requests' rows, which are later on the same stream;
- the scheduler's stream, where results are processed and slots are freed and handed out, waits for the reads of the
  step that follows the move (SGLang's barrier after each launch), and with them for the move.

Only the committed part of a row is moved: how much of the reserve behind it is live is known to the device alone.
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.sm120.defrag_args import CHECK_VARIABLE, MODE_VARIABLE, DefragMode, check_requested, defrag_mode
from sglang.srt.sm120.kv_extents import breaks, breaks_by_chunk, sort_free, take_extent
from sglang.srt.sm120.kv_owners import Text, leaves, text_of_leaf, text_of_request
from sglang.srt.sm120.metrics import series
from sglang.srt.sm120.startup import StartupError
from sglang.srt.speculative.ddtree_commit import move_accepted_rows

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

TARGET_RUN = 64  # rows; the kernel reads 32 a step, so at most every second step meets the end of a run
STEP_BUDGET_US = 200.0  # device time of one move, below 5 % of the shortest step
IDLE_BUDGET_US = 5000.0  # between two looks for new requests
MEASURE_EVERY = 32  # decode steps
CHUNK = 256  # positions that are counted together
ROWS_A_COPY = 16  # a move is a multiple of it
MIN_ROWS, MAX_ROWS = 256, 8192  # of a move
# Entries of the free list that are sorted and searched, and of rows that are measured together: they bound what that
# takes of the device's memory and time in large pools.
LOOKAHEAD = 1 << 17
MEASURED = 1 << 20
SHOWN_REQUESTS = 4  # in the log line


class SlotMetrics:
    """Prometheus series of one scheduler; `labels` are those of its own series."""

    def __init__(self, labels: Mapping[str, Any]) -> None:
        self.run_length = series("sglang:sm120_kv_run_length", labels).labels()
        self.rows_moved = series("sglang:sm120_defrag_rows_moved", labels).labels()
        self.seconds = series("sglang:sm120_defrag_seconds", labels).labels()


class _Clock:
    """Points in time on the device; they are read when it has passed them."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu

    def mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: Any) -> bool:
        return not self._on_gpu or bool(mark.query())

    def microseconds(self, begin: Any, end: Any) -> float:
        return 1e6 * (end - begin) if not self._on_gpu else 1e3 * float(begin.elapsed_time(end))


@dataclass
class _Reading:
    """Ends of runs by request and chunk, on their way to the host."""

    rids: list[str]
    lengths: list[int]
    counts: torch.Tensor  # host int32 [requests, chunks]
    moved: torch.Tensor  # host int64 [1], rows moved since the start
    mark: Any


class Defragmenter:
    """Measures the runs of the running requests of one worker, and moves rows as the mode says.

    Args:
        target: runner of the target, with its pools.
        draft: runner of the drafter, whose pool has the same slot numbers.
        metrics: where to report, if anywhere.
    """

    def __init__(self, target: ModelRunner, draft: ModelRunner, metrics: SlotMetrics | None) -> None:
        self.mode = defrag_mode()
        self._check = check_requested()
        self._pools = (target.token_to_kv_pool, draft.token_to_kv_pool)
        self._table = target.req_to_token_pool.req_to_token
        self._allocator = target.token_to_kv_pool_allocator
        self._metrics = metrics
        self._on_gpu = self._table.is_cuda
        self._clock = _Clock(self._on_gpu)
        self._moved = torch.zeros(1, dtype=torch.int64, device=self._table.device)
        self._rows_reported = 0
        self._readings: deque[_Reading] = deque()
        self._timings: deque[tuple[Any, Any, int]] = deque()
        self._runs: dict[str, tuple[int, int]] = {}  # by rid: positions, runs
        self._windows: deque[tuple[str, int]] = deque()  # rid and first position, the most fragmented first
        self._rows = MIN_ROWS
        self._steps = 0
        self._is_checked = False
        self._idle_work: Iterator[None] | None = None
        # Pages of several tokens are extents already.
        self._has_slots = isinstance(self._allocator, TokenToKVPoolAllocator)
        if self.mode is not DefragMode.OFF:
            _install_idle_hook()
            logger.info("%s=%s: KV rows move into contiguous slots.", MODE_VARIABLE, self.mode.value)

    # ---------------------------------------------------------------- before a step

    def before_step(self, batch: ScheduleBatch) -> None:
        """Sort the free slots and measure now and then; in auto mode, move one window.

        Call it on the forward pass's stream, before the pass, for prefill too.
        """
        self._idle_work = None
        if not self._has_slots or not batch.forward_mode.is_decode() or not batch.reqs:
            return
        self._collect()
        self._steps += 1
        if self._steps % MEASURE_EVERY == 1:
            sort_free(self._next_free())
            self._measure(batch)
        if self.mode is DefragMode.AUTO and self._may_move(batch.tree_cache):
            self._move_window(batch)

    def _measure(self, batch: ScheduleBatch) -> None:
        """Start to read the runs of all running requests; the host gets them some steps later."""
        lengths = [int(req.kv_committed_len) for req in batch.reqs]
        on_device = torch.tensor(lengths, pin_memory=self._on_gpu).to(self._table.device, non_blocking=True)
        width = max(lengths)
        groups = zip(
            *(part.split(max(1, MEASURED // width)) for part in (batch.req_pool_indices, on_device)), strict=True
        )
        found = [breaks_by_chunk(self._table[rows, :width], lens, CHUNK) for rows, lens in groups]
        counts = self._to_host(torch.cat(found))
        moved = self._to_host(self._moved)
        self._readings.append(_Reading([req.rid for req in batch.reqs], lengths, counts, moved, self._clock.mark()))

    def _to_host(self, values: torch.Tensor) -> torch.Tensor:
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=self._on_gpu).copy_(values, non_blocking=True)

    def _collect(self) -> None:
        """Take in what the device has finished."""
        while self._readings and self._clock.passed(self._readings[0].mark):
            reading = self._readings.popleft()
            runs = (reading.counts.sum(1) + 1).tolist()
            self._runs = dict(zip(reading.rids, zip(reading.lengths, runs, strict=True), strict=True))
            self._windows = self._fragmented(reading) if self.run_length() < TARGET_RUN else deque()
            self._report_rows(int(reading.moved))
            if self._metrics is not None:
                self._metrics.run_length.set(self.run_length())
        while self._timings and self._clock.passed(self._timings[0][1]):
            begin, end, rows = self._timings.popleft()
            self._pace(self._clock.microseconds(begin, end), rows)

    def _report_rows(self, total: int) -> None:
        """Take in the rows moved since the start; a reading may be older than what idle work has reported."""
        total = max(total, self._rows_reported)
        if self._metrics is not None:
            self._metrics.rows_moved.inc(total - self._rows_reported)
        self._rows_reported = total

    def _pace(self, microseconds: float, rows: int) -> None:
        """Fit the next move to the budget by what this one took, planning included; at most twice as many rows."""
        if self._metrics is not None:
            self._metrics.seconds.inc(microseconds / 1e6)
        fitting = min(2.0, STEP_BUDGET_US / max(microseconds, 1.0)) * rows
        self._rows = int(min(max(fitting, MIN_ROWS), MAX_ROWS)) // ROWS_A_COPY * ROWS_A_COPY

    def run_length(self) -> float:
        """Mean run length of the requests that ran at the last measurement, in rows; 0 before the first."""
        runs = sum(runs for _, runs in self._runs.values())
        return sum(length for length, _ in self._runs.values()) / runs if runs else 0.0

    def describe(self) -> str:
        """For the decode log: the mean run length and those of the most fragmented requests."""
        if not self._runs:
            return ""
        by_request = sorted((length / runs, rid) for rid, (length, runs) in self._runs.items())
        # Clients choose these names: ends tell them apart, and nothing in them may begin a line of the log.
        shown = " ".join(f"{ascii(rid[-8:])[1:-1]}={run:.1f}" for run, rid in by_request[:SHOWN_REQUESTS])
        return f"kv run length: {self.run_length():.1f} ({shown}), "

    # ---------------------------------------------------------------- moves

    def _may_move(self, tree_cache: Any) -> bool:
        """Whether every holder of a slot is one that this module knows; if not, say so once and stay off."""
        if not self._is_checked:
            reason = unknown_holder(tree_cache, self._pools)
            if reason is not None:
                logger.warning("%s=%s is off: %s.", MODE_VARIABLE, self.mode.value, reason)
                self.mode = DefragMode.OFF
            self._is_checked = True
        return self.mode is not DefragMode.OFF and self._allocator.is_not_in_free_group

    def _move_window(self, batch: ScheduleBatch) -> None:
        if self._check:
            self._move_any(batch)
        else:
            self._move_fragmented(batch)

    def _fragmented(self, reading: _Reading) -> deque[tuple[str, int]]:
        """The windows of a measurement whose runs are short on average, the worst first."""
        width = max(1, self._rows // CHUNK)
        padded = torch.nn.functional.pad(reading.counts, (0, -reading.counts.shape[1] % width))
        ends = padded.view(len(padded), -1, width).sum(-1).tolist()
        found = [
            (count, rid, window * width * CHUNK)
            for rid, counts in zip(reading.rids, ends, strict=True)
            for window, count in enumerate(counts)
            if count * TARGET_RUN > width * CHUNK
        ]
        return deque((rid, first) for _, rid, first in sorted(found, reverse=True))

    def _move_fragmented(self, batch: ScheduleBatch) -> None:
        """Move the worst window whose request still runs, if it may move: one look a step bounds the host's work."""
        if len(self._next_free()) < ROWS_A_COPY:
            return
        running = {req.rid: req for req in batch.reqs}
        while self._windows:
            rid, first = self._windows.popleft()
            if rid in running:
                text = text_of_request(running[rid], batch.reqs, batch.tree_cache.root_node)
                self._move(text, max(first, text.start), self._rows)
                return

    def _move_any(self, batch: ScheduleBatch) -> None:
        """For the check: move the next window of the next request, contiguous or not."""
        req = batch.reqs[self._steps % len(batch.reqs)]
        text = text_of_request(req, batch.reqs, batch.tree_cache.root_node)
        windows = max(1, (text.stop - text.start) // ROWS_A_COPY)
        self._move(text, text.start + self._steps * 7 % windows * ROWS_A_COPY, 2 * ROWS_A_COPY)

    def _move(self, text: Text, start: int, num_rows: int) -> bool:
        """Move up to `num_rows` rows from position `start` on; False when there is nothing to move, or no room."""
        num_rows = min(num_rows, text.stop - start, len(self._next_free())) // ROWS_A_COPY * ROWS_A_COPY
        if num_rows <= 0:
            return False
        begin = self._clock.mark()
        self._exchange(text, start, num_rows)
        self._timings.append((begin, self._clock.mark(), num_rows))
        return True

    def _exchange(self, text: Text, start: int, num_rows: int) -> None:
        sources = text.slots(self._table, start, start + num_rows)
        before = [layer[sources] for layer in self._layers()] if self._check else []
        destinations, moved = take_extent(self._next_free(), sources, always=self._check)
        move_slots(self._pools, destinations, sources)
        text.repoint(self._table, start, destinations)
        self._moved += moved * num_rows
        if self._check and not all(
            torch.equal(rows, layer[destinations]) for rows, layer in zip(before, self._layers(), strict=True)
        ):
            raise RuntimeError(f"{CHECK_VARIABLE}: expected the moved rows of {num_rows} slots, got others; set it off")

    def _next_free(self) -> torch.Tensor:
        return self._allocator.free_pages[:LOOKAHEAD]

    def _layers(self) -> list[torch.Tensor]:
        return [layer for pool in self._pools for layer in layers_of(pool)]

    # ---------------------------------------------------------------- while nothing runs

    def on_idle(self, scheduler: Any) -> None:
        """Move windows of cached texts for a while; call when nothing runs and no result is outstanding."""
        if self.mode is DefragMode.OFF or not self._has_slots or not scheduler.is_fully_idle():
            return
        if not self._may_move(scheduler.tree_cache):
            return
        if self._idle_work is None:
            self._idle_work = self._repair_tree(scheduler.tree_cache)
        start = time.perf_counter()
        for _ in self._idle_work:
            if 1e6 * (time.perf_counter() - start) > IDLE_BUDGET_US:
                break
        self._collect()

    def _repair_tree(self, tree_cache: Any) -> Iterator[None]:
        """One window after the other, until every cached text has been looked at since the last step."""
        self._synchronize()
        sort_free(self._next_free())
        for leaf in list(leaves(tree_cache.root_node)):
            first = 0
            # Each turn asks the tree again: between two calls it may have split, evicted or forgotten the node.
            while (text := text_of_leaf(leaf, tree_cache.root_node)) is not None and first < text.stop:
                rows = min(self._rows, text.stop - first)
                ends = int(breaks(text.slots(self._table, first, first + rows)).sum())
                if self._check or ends * TARGET_RUN > rows:
                    self._move(text, first, rows)
                    self._synchronize()
                first += rows
                yield  # also without a move: looking at a large tree takes longer than a request should wait
        self._report_rows(int(self._moved))

    def _synchronize(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


def move_slots(pools: Sequence[KVCache], destinations: torch.Tensor, sources: torch.Tensor) -> None:
    """Copy rows of every layer of every pool.

    Args:
        pools: with the same slot numbers.
        destinations, sources: int64 [rows], a multiple of `ROWS_A_COPY`; disjoint, or equal.
    """
    for pool in pools:
        if destinations.is_cuda:
            move_accepted_rows(pool, destinations.view(-1, ROWS_A_COPY), sources.view(-1, ROWS_A_COPY))
        else:
            for layer in layers_of(pool):
                layer[destinations] = layer[sources]


def layers_of(pool: Any) -> list[torch.Tensor]:
    """The buffers [slots, ...] of a pool: one a layer for MLA, keys then values otherwise."""
    latent = getattr(pool, "kv_buffer", None)
    return list(latent) if latent is not None else [*pool.k_buffer, *pool.v_buffer]


def unknown_holder(tree_cache: Any, pools: Sequence[Any]) -> str | None:
    """Why slots must stay where they are on this server, or None."""
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache.radix_cache import RadixCache

    known = {f"{prefix}{kind}TokenToKVPool" for prefix in ("", "Reference") for kind in ("MLA", "MHA")}
    if type(tree_cache) is not RadixCache:
        return f"expected SGLang's RadixCache, got {type(tree_cache).__name__}"
    unknown = next((type(pool).__name__ for pool in pools if type(pool).__name__ not in known), None)
    if unknown is not None:
        return f"expected an MLA or MHA pool, got {unknown}"
    if envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get():
        return "SGLANG_ENABLE_OVERLAP_PLAN_STREAM prepares steps on a stream of its own"
    return None


@functools.cache
def _install_idle_hook() -> None:
    """Have the scheduler of this process call us while nothing runs, through SGLang's hook registry."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    found = tuple(inspect.signature(Scheduler.on_idle).parameters)
    if found != ("self",):
        raise StartupError(f"{MODE_VARIABLE}: Scheduler.on_idle(self) expected, got {found}; is this SGLang 0.5.17?")
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.on_idle", _before_idle, HookType.BEFORE)
    HookRegistry.apply_hooks()
    if not hasattr(Scheduler.on_idle, "__wrapped__"):  # the registry logs what goes wrong, and goes on
        raise StartupError(
            f"{MODE_VARIABLE}: Scheduler.on_idle expected to be hooked; the log has the reason, unset it"
        )


def _before_idle(scheduler: Any) -> None:
    scheduler.draft_worker.defragmenter.on_idle(scheduler)
