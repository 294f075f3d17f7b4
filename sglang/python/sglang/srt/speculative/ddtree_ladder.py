# SPDX-License-Identifier: Apache-2.0
"""The verify widths that a server has captured, one rung a budget, and the choice among them before each pass.

A fixed budget is a ladder of one rung. Under auto the draft pass builds the largest tree, and a smaller rung takes its
first rows: trees are nested. Every rung has an attention backend and graphs of its own, as SGLang's adaptive EAGLE has
per number of steps; which rung is active is the pair that the target's runner holds.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.sm120.memory_budget import AttentionScratch, VerifyShape, check_room
from sglang.srt.sm120.verify_route import drop_unread_mask, route_of, workspace_for, workspace_of
from sglang.srt.speculative.ddtree_args import verify_width
from sglang.srt.speculative.ddtree_budget import BudgetController, Pace, StepCosts, request_budget
from sglang.srt.speculative.ddtree_metrics import max_depth
from sglang.srt.speculative.ddtree_simulate import simulate_acceptance, simulated_lengths
from sglang.srt.speculative.ddtree_tree import TreeBuffers
from sglang.srt.speculative.ddtree_walk import WalkBuffers

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

MEASURED_REPLAYS = 5
# The longest context that steps are measured at: the kernel's time grows evenly from about there on.
MEASURED_CONTEXT = 8192


@dataclass(eq=False)
class Rung:
    """One verify width.

    budget         nodes under the root
    tree           what a pass of this width verifies
    captured_walk  results of the greedy walk at the end of its graphs
    attn_backend   the target's backend for this width
    graph_runner   its captured passes; None without CUDA graphs
    capture_bytes  what `Ladder.capture_smaller` saw its capture take; 0 for the largest, which SGLang captures
    dropped_bytes  what its capture took and `Ladder.drop_unread_masks` gave back
    """

    budget: int
    tree: TreeBuffers
    captured_walk: WalkBuffers
    attn_backend: Any
    graph_runner: Any
    capture_bytes: int = 0
    dropped_bytes: int = 0

    @property
    def width(self) -> int:
        return self.tree.width


@dataclass
class VerifiedPass:
    """What a pass tells about budgets, on its way to the host.

    index     of its rung
    whole     requests whose trees no request parameter has cut
    foretold  fp32 [bs, rungs + 1]  drafts that the drafter expected to be accepted, by budget; last `Pace.rest`
    rows      int64 [bs, D]  accepted rows; 0 for the root, -1 behind the last
    copied    when both have arrived
    """

    index: int
    whole: list[int]
    foretold: torch.Tensor
    rows: torch.Tensor
    copied: torch.cuda.Event


class Ladder:
    """The rungs of one worker, ascending by budget.

    Args:
        runner: the target's, with its attention backend made and nothing captured yet.
        budgets: ascending; more than one is auto.
        block_size: of the drafter.
        tp_group: the target's tensor-parallel group, whose ranks must choose alike.
    """

    def __init__(self, runner: ModelRunner, budgets: Sequence[int], block_size: int, tp_group: Any) -> None:
        max_requests = int(runner.req_to_token_pool.size)
        self._runner = runner
        self._tp_group = tp_group
        self._controller: BudgetController | None = None
        self._verified: deque[int] = deque(maxlen=4)  # rung indices of passes whose results the host has not seen
        self._passes: deque[VerifiedPass] = deque()
        self._whole: list[int] = []
        self._used = [0] * len(budgets)
        self._last_nodes = torch.tensor(budgets, device=runner.device) - 1
        self._simulated = simulated_lengths(budgets, block_size)
        self._foretold = torch.zeros((max_requests, len(budgets) + 1), device=runner.device)
        self._pace = Pace()
        self.rungs = []
        for budget in budgets:
            width = verify_width(budget, block_size)
            tree = TreeBuffers.allocate(max_requests, budget, block_size - 1, runner.device, width=width)
            walk = WalkBuffers.allocate(max_requests, block_size - 1, runner.device)
            self.rungs.append(Rung(budget, tree, walk, runner.attn_backend, None))
        self._attach(self.largest)

    @property
    def largest(self) -> Rung:
        """The rung whose tree the draft pass builds; SGLang's own start-up captures it."""
        return self.rungs[-1]

    def of_width(self, width: int) -> Rung:
        return next(rung for rung in self.rungs if rung.width == width)

    def check_room(self, draft_runner: Any) -> None:
        """Refuse a start whose capture would run out of memory; call with pools and backends in place.

        Raises:
            StartupError: naming the missing bytes and the flag to change.
        """
        from sglang.srt.model_executor.cuda_graph_config import Backend
        from sglang.srt.model_executor.runner.base_cuda_graph_runner import get_batch_sizes_to_capture
        from sglang.srt.utils import get_available_gpu_memory

        runner, args = self._runner, self._runner.server_args
        if runner.device != "cuda" or args.cuda_graph_config.decode.backend == Backend.DISABLED:
            return
        shape = VerifyShape(
            captured=max(get_batch_sizes_to_capture(runner, self.largest.width)[0]),
            widths=tuple(rung.width for rung in self.rungs),
            block_size=self.largest.tree.max_depth + 1,
            context_len=int(runner.model_config.context_len),
            vocab_size=int(runner.model_config.vocab_size),
            tp_size=self._tp_group.world_size,
            target=AttentionScratch.of(runner.attn_backend),
            drafter=AttentionScratch.of(draft_runner.attn_backend),
        )
        needed = shape.capture_bytes()
        # The largest rung has its workspace already.
        needed["workspace"] = sum(workspace_for(runner.attn_backend, rung.width) for rung in self.rungs[:-1])
        free = int(get_available_gpu_memory(runner.device, runner.gpu_id) * 2**30)
        total = int(runner.pre_model_load_memory * 2**30)
        check_room(needed, free, runner.mem_fraction_static, total)

    def capture_smaller(self) -> None:
        """Capture the other rungs and measure them all; call when the largest and the drafter are captured."""
        from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
        from sglang.srt.runtime_context import get_context
        from sglang.srt.utils import get_available_gpu_memory

        self.largest.graph_runner = self._runner.decode_cuda_graph_runner
        for rung in self.rungs[:-1]:
            start, free = time.perf_counter(), get_available_gpu_memory(self._runner.device, self._runner.gpu_id)
            get_context().override("ddtree.rung", speculative_num_draft_tokens=rung.width)
            try:
                rung.attn_backend = self._runner._get_attention_backend(init_new_workspace=True)
                self._attach(rung)
                rung.graph_runner = DecodeCudaGraphRunner(
                    self._runner, attn_backend=rung.attn_backend, speculative_num_draft_tokens=rung.width
                )
            finally:
                get_context().override("ddtree.rung", speculative_num_draft_tokens=self.largest.width)
            used = free - get_available_gpu_memory(self._runner.device, self._runner.gpu_id)
            rung.capture_bytes = int(used * 2**30) - workspace_of(rung.attn_backend)
            logger.info(
                "DDTREE auto: captured budget %d in %.1f s, %.2f GB.", rung.budget, time.perf_counter() - start, used
            )

    def drop_unread_masks(self) -> None:
        """Free what SGLang allocated for masks of the context's length; call when a rung has been captured."""
        for rung in self.rungs:
            rung.dropped_bytes = drop_unread_mask(rung.attn_backend)

    def measure(self, draft_runner: Any) -> None:
        """Fill the cost table from the captured graphs; every rank takes the first one's figures."""
        drafting = _replay_seconds(draft_runner)
        slots = int(self._runner.token_to_kv_pool.size)
        for rung in self.rungs:
            _vary_tokens(rung.graph_runner.buffers.input_ids, int(self._runner.model_config.vocab_size))
        verifying = [_replay_seconds(rung.graph_runner) for rung in self.rungs]
        attending = [_seconds_per_token(rung.attn_backend, rung.graph_runner, slots) for rung in self.rungs]
        table = StepCosts(
            short={size: [drafting[size] + costs[size] for costs in verifying] for size in drafting},
            per_token={size: [slopes[size] for slopes in attending] for size in drafting},
        )
        costs = self._tp_group.broadcast_object(table, src=0)
        self._controller = BudgetController([rung.budget for rung in self.rungs], costs)
        logger.info(
            "DDTREE auto: milliseconds per step at a short context, budgets %s; by batch size %s; for each 1,000 tokens of "
            "context beyond it %s.",
            "/".join(str(rung.budget) for rung in self.rungs),
            _describe(costs.short, 1e3),
            _describe(costs.per_token, 1e6),
        )

    def foretell(self, batch_size: int) -> None:
        """Sum up what the drafter expects of each budget, for `record`; call behind the build of the largest trees."""
        if len(self.rungs) > 1 and self._simulated is not None:
            for index, length in enumerate(self._simulated):
                self._foretold[:batch_size, index] = length - 1
        elif len(self.rungs) > 1:
            expected = self.largest.tree.scores[:batch_size, 1:].exp().cumsum(1)
            self._foretold[:batch_size, :-1] = expected.index_select(1, self._last_nodes)

    def choose(self, reqs: Sequence[Any], total_context: int) -> Rung:
        """Pick the rung of the next pass, cut its trees to what requests ask for, and make it the target's.

        `total_context` is the host's figure for the tokens of all contexts.
        """
        limits = [request_budget(req.sampling_params) for req in reqs]
        index = 0
        if self._controller is not None:
            self._learn()
            context = total_context / len(reqs)
            index = self._controller.choose(limits, context)
            self._pace.step((index, len(reqs)), self._controller.costs(len(reqs), context)[index])
        rung = self.rungs[index]
        if rung is not self.largest:
            rung.tree.copy_prefix_from(self.largest.tree, len(reqs))
        self._whole = [row for row, limit in enumerate(limits) if limit is None or limit >= rung.budget]
        if len(self._whole) < len(reqs):
            rows = torch.tensor([rung.budget if limit is None else limit for limit in limits])
            if rung.tree.parents.is_cuda:
                rows = rows.pin_memory()
            rung.tree.cut(rows.to(rung.tree.parents.device, non_blocking=True))
        self._verified.append(index)
        self._used[index] += 1
        self._runner.attn_backend = rung.attn_backend
        if rung.graph_runner is not None:
            self._runner.decode_cuda_graph_runner = rung.graph_runner
        return rung

    def simulate(self, rung: Rung, walk: WalkBuffers, batch_size: int) -> None:
        """Overwrite the results of a pass's walk where acceptance is forced."""
        if self._simulated is not None:
            last = self.rungs.index(rung) + 1
            budgets = [each.budget for each in self.rungs[:last]]
            longest = max_depth(rung.budget, rung.tree.max_depth + 1) + 1
            simulate_acceptance(walk, batch_size, self._simulated[:last], budgets, longest)

    def interrupt(self) -> None:
        """Something else than a decode step runs next; times from step to step leave it out."""
        self._pace.interrupt()

    def record(self, rung: Rung, walk: WalkBuffers, batch_size: int) -> None:
        """Start copies of what the pass that was walked tells about budgets; the host sees them two passes later."""
        if self._controller is None:
            return
        foretold = self._foretold[:batch_size]
        # The first rank's clock counts, and travels with its figures.
        foretold[:, -1] = self._pace.rest()
        if self._tp_group.world_size > 1:
            self._tp_group.broadcast(foretold, src=0)
        # Whole rows lie together, so that this is one copy.
        results = walk.packed[:batch_size].to("cpu", non_blocking=True)
        copied = torch.cuda.Event()
        found = VerifiedPass(
            self.rungs.index(rung),
            self._whole,
            foretold.to("cpu", non_blocking=True),
            results[:, : walk.accept_index.shape[1]],
            copied,
        )
        copied.record()
        self._passes.append(found)

    def observe(self) -> int:
        """The budget of the oldest pass whose results the host has not seen; call when it sees them."""
        index = self._verified.popleft() if self._verified else len(self.rungs) - 1
        return self.rungs[index].budget

    def describe(self) -> str:
        """For the decode log, under auto: how many passes each budget had since the last call."""
        if self._controller is None:
            return ""
        used, self._used = self._used, [0] * len(self.rungs)
        budgets = "/".join(str(rung.budget) for rung in self.rungs)
        return f"passes with budget {budgets}: {'/'.join(map(str, used))}, "

    def _attach(self, rung: Rung) -> None:
        route = route_of(rung.attn_backend)
        if route is not None:
            route.tree_mask = rung.tree.mask

    def _learn(self) -> None:
        """Hand the controller the passes before the last.

        Their results have been processed, so their copies are over and waiting for them is free; and every rank takes
        the same passes, which a query for readiness would not guarantee.
        """
        assert self._controller is not None
        while len(self._passes) > 1:
            seen = self._passes.popleft()
            if not seen.whole:
                continue
            seen.copied.synchronize()
            rows = seen.rows.numpy()[seen.whole]
            drafts = rows[rows > 0]
            foretold = seen.foretold.numpy()
            self._controller.observe(
                seen.index,
                len(seen.whole),
                foretold[seen.whole, :-1].sum(0).tolist(),
                [int((drafts <= rung.budget).sum()) for rung in self.rungs[: seen.index + 1]],
                float(foretold[0, -1]),
            )


def _describe(table: Mapping[int, Sequence[float]], scale: float) -> str:
    return ", ".join(
        f"{size}: " + "/".join(f"{scale * cost:.2f}" for cost in row) for size, row in sorted(table.items())
    )


def _replay_seconds(graph_runner: Any) -> dict[int, float]:
    """Seconds of a replay of each captured batch size; the static inputs are those of the capture."""
    return {size: _median_seconds(graph_runner, size) for size in graph_runner.capture_bs}


def _vary_tokens(input_ids: torch.Tensor, vocab_size: int) -> None:
    """Fill the tokens of a graph with different ones: equal ones share their experts, which costs less than text does."""
    stride = 7919  # prime, so that neighbours are far apart and few repeat
    torch.remainder(torch.arange(input_ids.numel(), device=input_ids.device) * stride, vocab_size, out=input_ids)


def _seconds_per_token(backend: Any, graph_runner: Any, slots: int) -> dict[int, float]:
    """What a replay of each captured batch size costs more for each token that all its contexts are longer.

    The slot lists that the graphs read are filled with contexts of up to `MEASURED_CONTEXT` tokens all over the pool of
    `slots`; every batch overwrites them. 0 where Triton reads them: its masks would have to fit the contexts.
    """
    route, seconds = route_of(backend), dict.fromkeys(graph_runner.capture_bs, 0.0)
    if route is None or not route.reads_compact_mask:
        return seconds
    listed, starts = min(slots, backend.cuda_graph_kv_indices.shape[0]), backend.kv_indptr
    torch.arange(listed, out=backend.cuda_graph_kv_indices[:listed])
    for size in graph_runner.capture_bs:
        context = min(MEASURED_CONTEXT, max(listed // size, 1))
        starts[: size + 1].zero_()
        short = _median_seconds(graph_runner, size)
        starts[: size + 1].copy_(torch.arange(size + 1, device=starts.device) * context)
        seconds[size] = max(_median_seconds(graph_runner, size) - short, 0.0) / context
    return seconds


def _median_seconds(graph_runner: Any, size: int) -> float:
    times = []
    for _ in range(MEASURED_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph_runner.backend.replay(graph_runner._make_graph_key(size), None)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]
