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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.sm120.memory_budget import AttentionScratch, VerifyShape, check_room
from sglang.srt.sm120.verify_route import drop_unread_mask, route_of, workspace_of
from sglang.srt.speculative.ddtree_args import verify_width
from sglang.srt.speculative.ddtree_budget import BudgetController, request_budget
from sglang.srt.speculative.ddtree_tree import TreeBuffers
from sglang.srt.speculative.ddtree_walk import WalkBuffers

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

MEASURED_REPLAYS = 5


@dataclass
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
        self._gains: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        self._last_nodes = torch.tensor(budgets, device=runner.device) - 1
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
        free = int(get_available_gpu_memory(runner.device, runner.gpu_id) * 2**30)
        total = int(runner.pre_model_load_memory * 2**30)
        check_room(shape.capture_bytes(), free, runner.mem_fraction_static, total)

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
        table = {
            size: [drafting[size] + costs[size] for costs in map(_replay_seconds, (r.graph_runner for r in self.rungs))]
            for size in drafting
        }
        costs = self._tp_group.broadcast_object(table, src=0)
        self._controller = BudgetController([rung.budget for rung in self.rungs], costs)
        logger.info(
            "DDTREE auto: milliseconds per step at a short context, budgets %s; by batch size %s.",
            "/".join(str(rung.budget) for rung in self.rungs),
            ", ".join(f"{size}: " + "/".join(f"{1e3 * s:.2f}" for s in row) for size, row in sorted(costs.items())),
        )

    def choose(self, reqs: Sequence[Any]) -> Rung:
        """Pick the rung of the next pass, cut its trees to what requests ask for, and make it the target's."""
        limits = [request_budget(req.sampling_params) for req in reqs]
        index = 0
        if self._controller is not None:
            self._observe_gains(len(reqs))
            wanted = None if None in limits else max(limit for limit in limits if limit is not None)
            index = self._controller.choose(len(reqs), wanted)
        rung = self.rungs[index]
        if rung is not self.largest:
            rung.tree.copy_prefix_from(self.largest.tree, len(reqs))
        if any(limit is not None for limit in limits):
            rows = torch.tensor([rung.budget if limit is None else limit for limit in limits])
            if rung.tree.parents.is_cuda:
                rows = rows.pin_memory()
            rung.tree.cut(rows.to(rung.tree.parents.device, non_blocking=True))
        self._verified.append(index)
        self._runner.attn_backend = rung.attn_backend
        if rung.graph_runner is not None:
            self._runner.decode_cuda_graph_runner = rung.graph_runner
        return rung

    def observe(self, accepted_per_request: Sequence[int]) -> int:
        """Take the oldest pass's accepted drafts, once they are on the host; returns the budget that it had."""
        index = self._verified.popleft() if self._verified else len(self.rungs) - 1
        if self._controller is not None and accepted_per_request:
            self._controller.observe_accepted(index, sum(accepted_per_request) / len(accepted_per_request))
        return self.rungs[index].budget

    def _attach(self, rung: Rung) -> None:
        route = route_of(rung.attn_backend)
        if route is not None:
            route.tree_mask = rung.tree.mask

    def _observe_gains(self, batch_size: int) -> None:
        """Start a copy of this tree's expected gains and take those of the pass before the last.

        That pass's results have been processed, so its event is over and waiting for it is free; and every rank takes
        the same pass, which a query for readiness would not guarantee.
        """
        assert self._controller is not None
        expected = self.largest.tree.scores[:batch_size, 1:].exp().cumsum(1).mean(0)
        gains = expected.index_select(0, self._last_nodes)
        if self._tp_group.world_size > 1:
            self._tp_group.broadcast(gains, src=0)
        copied = torch.cuda.Event()
        host = gains.to("cpu", non_blocking=True)
        copied.record()
        self._gains.append((host, copied))
        if len(self._gains) > 2:
            host, copied = self._gains.popleft()
            copied.synchronize()
            self._controller.observe_gains(host.tolist())


def _replay_seconds(graph_runner: Any) -> dict[int, float]:
    """Median time of a replay of each captured batch size; the static inputs are those of the capture."""
    seconds = {}
    for size in graph_runner.capture_bs:
        times = []
        for _ in range(MEASURED_REPLAYS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph_runner.backend.replay(graph_runner._make_graph_key(size), None)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        seconds[size] = sorted(times)[len(times) // 2]
    return seconds
