# SPDX-License-Identifier: Apache-2.0
"""DDTREE's worker: DFLASH's draft, then a tree in place of the chain.

`DFlashWorkerV2` prefills, prepares the block and runs the drafter; the patch ``ddtree/verify-draft-tree`` hands over
after its draft forward. From there one decode step is: build the tree, verify it, walk it, commit the accepted rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sglang.kernels.ops.speculative import cache_locs
from sglang.srt.distributed import get_tp_group
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_observability
from sglang.srt.sm120 import memory_table
from sglang.srt.sm120.defrag import Defragmenter, SlotMetrics
from sglang.srt.sm120.metrics import scheduler_labels
from sglang.srt.sm120.verify_route import publish_routes, route_of
from sglang.srt.speculative.ddtree_args import budgets_of
from sglang.srt.speculative.ddtree_commit import Settled, move_accepted_rows, settle
from sglang.srt.speculative.ddtree_draft import TreeDrafter
from sglang.srt.speculative.ddtree_grammar import TreeGrammar
from sglang.srt.speculative.ddtree_info import DDTreeVerifyInput, expand_tree_mask, fill_tree_columns
from sglang.srt.speculative.ddtree_ladder import Ladder, Rung
from sglang.srt.speculative.ddtree_metrics import TreeMetrics, VerifyTimer, max_depth
from sglang.srt.speculative.ddtree_walk import SamplingRows, WalkBuffers, walk_logits, walk_tree
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.verify_adjustments import add_logprobs, adjust_logits, is_plain_greedy, record_run
from sglang.srt.speculative.verify_penalties import VerifyRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang.srt.distributed.parallel_state_wrapper import ParallelState
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.server_args import ServerArgs


class DDTreeWorker(DFlashWorkerV2):
    """Verifies a draft tree per request in one target pass (spec v2, with or without overlap).

    T is the verify width of the active rung, D the drafter's block size: a run has at most D tokens, the bonus included.
    """

    def __init__(
        self, server_args: ServerArgs, gpu_id: int, ps: ParallelState, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        self._budgets = budgets_of(server_args)
        widest = int(server_args.speculative_num_draft_tokens)
        # These are the drafter's own arguments: everything the base class sizes by this field has the block's width.
        block_size = int(server_args.speculative_dflash_block_size)
        server_args.override("ddtree.draft_width", speculative_num_draft_tokens=block_size)
        super().__init__(
            server_args=server_args, gpu_id=gpu_id, ps=ps, nccl_port=nccl_port, target_worker=target_worker
        )
        self.speculative_num_draft_tokens = widest  # the gauge of that name reads it here
        self._tree_drafter = TreeDrafter(self.model_runner.model.lm_head, get_tp_group(), block_size, self._budgets[-1])
        self._labels = scheduler_labels(server_args, ps)
        self._metrics: TreeMetrics | None = None
        self._slot_metrics: SlotMetrics | None = None
        if get_observability().enable_metrics and ps.tp_rank == 0:
            self._metrics = TreeMetrics(self._labels, max_depth(self._budgets[-1], block_size))
            self._slot_metrics = SlotMetrics(self._labels)
            self._verify_timer = VerifyTimer(self.device)

    def init_attention_backends(self) -> None:
        """Also allocate the static buffers: the pools exist and nothing is captured yet."""
        super().init_attention_backends()
        self.defragmenter = Defragmenter(self.model_runner, self.draft_model_runner, self._slot_metrics)
        max_requests = int(self.model_runner.req_to_token_pool.size)
        self._ladder = Ladder(self.model_runner, self._budgets, self.block_size, get_tp_group())
        # The scheduler copies a step's results while the next step runs, so two sets take turns.
        self._walks = [WalkBuffers.allocate(max_requests, self.block_size - 1, self.device) for _ in range(2)]
        self.model_runner.capture_tail_hooks.append(self._walk_in_graph)
        self.draft_model_runner.capture_tail_hooks.append(self._build_in_graph)
        self._ladder.check_room(self.draft_model_runner)

    def init_cuda_graphs(self) -> None:
        """Capture the drafter, whose graphs build the trees, and under auto the target at the other widths."""
        super().init_cuda_graphs()
        if len(self._budgets) > 1:
            self._ladder.capture_smaller()
            self._ladder.measure(self.draft_model_runner.decode_cuda_graph_runner)
        self._ladder.drop_unread_masks()
        self._report_start()

    def _report_start(self) -> None:
        """Say where this rank's memory went, in the log of the first rank and in ``/metrics``, and who verifies."""
        table = memory_table.measure(self.target_worker.model_runner, self.draft_model_runner, self._ladder.rungs)
        if self.ps.tp_rank == 0:
            memory_table.log(table)
        if get_observability().enable_metrics:
            memory_table.publish(table, self._labels)
            publish_routes({rung.width: rung.attn_backend for rung in self._ladder.rungs}, self._labels)

    def _maybe_build_draft_sampler(self) -> None:
        """No sampler for the chain in the draft graph: the tree is built there."""

    def _build_in_graph(self, runner: Any, output: Any, forward_batch: ForwardBatch, num_tokens: int) -> None:
        """The tail of the captured draft pass. With a draft window ``seq_lens`` are local, so positions tell lengths."""
        roots = forward_batch.input_ids.view(-1, self.block_size)[:, 0]
        committed = forward_batch.positions.view(-1, self.block_size)[:, 0]
        self._tree_drafter.build(output.hidden_states, roots, committed, self._ladder.largest.tree)
        self._ladder.foretell(forward_batch.batch_size)

    def _walk_in_graph(self, runner: Any, output: Any, forward_batch: ForwardBatch, num_tokens: int) -> None:
        """The tail of the captured verify pass: the greedy walk, for batches whose logits nothing adjusts."""
        rung = self._ladder.of_width(num_tokens // forward_batch.batch_size)
        draws = output.next_token_logits.argmax(-1).view(-1, rung.width)
        walk_tree(draws, rung.tree, rung.captured_walk)

    def forward_batch_generation(self, batch: ScheduleBatch, **callbacks: Any) -> GenerationBatchResult:
        """Run a prefill or a decode step; slots move before it, on its stream."""
        self.defragmenter.before_step(batch)
        if not batch.forward_mode.is_decode():
            self._ladder.interrupt()
        return super().forward_batch_generation(batch, **callbacks)

    def verify_draft_tree(
        self,
        batch: ScheduleBatch,
        draft_output: Any,
        block_ids: torch.Tensor,
        on_publish: Callable[[torch.Tensor], None] | None,
        grammar_barrier: Callable[[], None] | None = None,
    ) -> GenerationBatchResult:
        """Finish a decode step after the draft forward.

        Args:
            batch: the decode batch; ``seq_lens`` are committed lengths on the device, ``spec_info`` the draft input.
            draft_output: the drafter's output with hidden states [bs * D, hidden].
            block_ids: [bs, D] int64, the drafted block; column 0 holds the roots.
            on_publish: takes the new committed lengths [bs] as soon as they exist.
            grammar_barrier: advances the grammars over the tokens of the step before.
        """
        batch_size = block_ids.shape[0]
        committed = batch.seq_lens
        if not draft_output.can_run_graph:
            hidden = draft_output.logits_output.hidden_states
            self._tree_drafter.build(hidden, block_ids[:, 0], committed, self._ladder.largest.tree)
            self._ladder.foretell(batch_size)
        rung = self._ladder.choose(batch.reqs, batch.spec_info.reserved_seq_lens_sum)
        window_slots = self._window_slots(batch, rung.width)
        grammar = TreeGrammar.stage(rung.tree, batch_size) if batch.has_grammar else None
        logits_output, can_run_cuda_graph = self._verify(batch, window_slots, rung)
        if grammar is not None:
            grammar.mask_logits(logits_output.next_token_logits, batch, grammar_barrier)
        # The captured walk has seen the logits without masks.
        captured = can_run_cuda_graph and grammar is None
        walk = self._walk(batch, logits_output.next_token_logits, rung, captured=captured)
        settled = settle(walk, window_slots, committed)
        if on_publish is not None:
            on_publish(settled.seq_lens)
        add_logprobs(batch, logits_output, walk.accept_index[:batch_size], walk.out_tokens[:batch_size])
        self._commit(settled, logits_output.hidden_states)
        self._ladder.record(rung, walk, batch_size)
        logits_output.hidden_states = None
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=settled.out_tokens,
            accept_lens=settled.accept_lens,
            can_run_cuda_graph=can_run_cuda_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=settled.bonus, new_seq_lens=settled.seq_lens
            ),
            speculative_num_draft_tokens=self.block_size,
            new_seq_lens=settled.seq_lens,
        )

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """Record acceptance once the scheduler has a step's results on the host."""
        super().on_verify_complete_cpu(num_correct_drafts_per_req, batch_size=batch_size)
        budget = self._ladder.observe()
        if self._metrics is not None:
            self._metrics.observe(num_correct_drafts_per_req, budget, self._verify_timer.finished())

    def describe_budgets(self) -> str:
        """For the decode log: what auto chose since the last call; nothing with a fixed budget."""
        return self._ladder.describe()

    def _window_slots(self, batch: ScheduleBatch, width: int) -> torch.Tensor:
        """Cache slots of the verify window, int64 [bs, T]; read before verify, since rows may change after it."""
        batch_size = len(batch.seq_lens)
        return cache_locs.assign_extend_cache_locs_func(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=self.model_runner.req_to_token_pool.req_to_token,
            start_offset=batch.seq_lens,
            end_offset=batch.seq_lens + width,
            batch_size=batch_size,
            draft_token_num=width,
            device=self.device,
        ).view(batch_size, width)

    def _verify(
        self, batch: ScheduleBatch, window_slots: torch.Tensor, rung: Rung
    ) -> tuple[LogitsProcessorOutput, bool]:
        """Run the target over all tree rows: logits [bs * T, vocab] and the captured hidden states."""
        batch_size = window_slots.shape[0]
        draft_input = batch.spec_info
        mask, mode = _tree_mask(rung, batch_size, batch.seq_lens, draft_input.reserved_seq_lens_sum)
        verify_input = DDTreeVerifyInput(
            draft_token=rung.tree.token_ids[:batch_size].flatten(),
            positions=rung.tree.positions[:batch_size].flatten(),
            draft_token_num=rung.width,
            custom_mask=mask,
            tree_mask_mode=mode,
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        batch.out_cache_loc = window_slots.flatten()
        lengths = batch.seq_lens_cpu, batch.seq_lens_sum
        # The host's lengths lag while steps overlap; the reserve bounds what the device has.
        batch.seq_lens_cpu, batch.seq_lens_sum = draft_input.reserved_seq_lens_cpu, draft_input.reserved_seq_lens_sum
        forward_batch, _ = verify_input.prepare_for_verify(batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = lengths
        if self._metrics is not None:
            self._verify_timer.start()
        output = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )
        if self._metrics is not None:
            self._verify_timer.stop()
        return output.logits_output, output.can_run_cuda_graph

    def _walk(self, batch: ScheduleBatch, logits: torch.Tensor, rung: Rung, captured: bool) -> WalkBuffers:
        """Adjust the logits and draw along the tree; under tensor parallelism rank 0's draws count.

        `captured` says that the verify pass was a graph, whose tail has walked greedily already.
        """
        tree, batch_size = rung.tree, len(batch.sampling_info)
        walk = self._walks[0]
        self._walks.reverse()
        if captured and is_plain_greedy(batch.sampling_info):
            walk.packed[:batch_size].copy_(rung.captured_walk.packed[:batch_size])
        else:
            rows = VerifyRows(tree.token_ids[:batch_size], tree.positions[:batch_size], tree.mask[:batch_size])
            sampling_info = adjust_logits(self, batch, rows, logits)
            walk_logits(logits, tree, SamplingRows.from_batch(sampling_info), walk)
        self._ladder.simulate(rung, walk, batch_size)
        if get_tp_group().world_size > 1:
            get_tp_group().broadcast(walk.packed[:batch_size], src=0)
        record_run(self, batch, walk.out_tokens[:batch_size], walk.accept_lens[:batch_size])
        return walk

    def _commit(self, settled: Settled, hidden: torch.Tensor) -> None:
        """Keep the accepted rows: move the target's KV to the front of the window, write the drafter's KV there.

        `hidden` [bs * T, ...] holds what the drafter reads of every tree row.
        """
        destinations, sources = settled.destinations, settled.sources
        # Comparing costs nothing where host and device are one; elsewhere it would wait for the device.
        if destinations.is_cuda or not torch.equal(destinations, sources):
            move_accepted_rows(self.model_runner.token_to_kv_pool, destinations, sources)
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=hidden.index_select(0, settled.rows),
            cache_loc=destinations.flatten(),
            cache_loc_2d=destinations,
            positions=settled.positions,
            commit_lens=settled.accept_lens,
        )


def _tree_mask(
    rung: Rung, batch_size: int, prefix_lens: torch.Tensor, max_total_prefix: int
) -> tuple[torch.Tensor | None, TreeMaskMode]:
    """The flat mask in the layout that the target's attention backend reads; None where it reads a static buffer."""
    backend = rung.attn_backend
    route = route_of(backend)
    if route is None:
        return rung.tree.mask[:batch_size].flatten(), TreeMaskMode.QLEN_ONLY
    if route.reads_compact_mask:
        return None, TreeMaskMode.QLEN_ONLY
    buffer = backend.verify_mask
    if buffer is None or not buffer.fits(batch_size):
        return expand_tree_mask(rung.tree.mask[:batch_size], prefix_lens, max_total_prefix), TreeMaskMode.FULL_MASK
    if backend.enable_deterministic:
        buffer.buffer.fill_(1)  # that kernel reads the columns of the prefix as well
    fill_tree_columns(rung.tree.mask[: buffer.max_bs], prefix_lens, buffer.buffer)
    return None, TreeMaskMode.FULL_MASK
