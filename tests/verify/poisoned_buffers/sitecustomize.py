# SPDX-License-Identifier: Apache-2.0
"""Poisons what captured passes read, before each replay, and ends a server whose replay takes more than two seconds.

For servers under test, where this folder and tests/ are on Python's path. Whoever fills a static buffer must fill all that
is read of it, the rows of padding included; what an earlier batch has left there is usually harmless, this is not.
"""

from __future__ import annotations

import os
import threading
from types import ModuleType
from typing import Any

from serving.after_import import after_import

POISON = 2**31 - 1
DEADLINE_SECONDS = 2.0


def poison_replays(module: ModuleType) -> None:
    """Wraps the runner of captured passes."""
    runner_class = module.DecodeCudaGraphRunner  # type: ignore[attr-defined]
    load_batch, execute = runner_class.load_batch, runner_class.execute

    def poisoned(self: Any, forward_batch: Any, *arguments: Any, **options: Any) -> Any:
        if forward_batch.needs_forward_metadata_init():
            poison_inputs(self)
        return load_batch(self, forward_batch, *arguments, **options)

    def watched(self: Any, forward_batch: Any, *arguments: Any, **options: Any) -> Any:
        import torch

        torch.cuda.synchronize()
        watchdog = threading.Timer(DEADLINE_SECONDS, give_up)
        watchdog.start()
        output = execute(self, forward_batch, *arguments, **options)
        torch.cuda.synchronize()
        watchdog.cancel()
        return output

    runner_class.load_batch, runner_class.execute = poisoned, watched


def poison_inputs(runner: Any) -> None:
    """Fill the static inputs of a runner; `input_ids` and embeddings of padding are looked up, so they stay valid."""
    buffers, backend = runner.buffers, runner.attn_backend
    for name in ("positions", "out_cache_loc", "req_pool_indices", "seq_lens", "seq_lens_cpu"):
        getattr(buffers, name).fill_(POISON)
    buffers.input_ids.fill_(1)
    if buffers.input_embeds is not None:
        buffers.input_embeds.fill_(1e4)
    # Entry 0 of the offsets is 0 for good.
    for offsets in (backend.kv_indptr, backend.mask_indptr, backend.qo_indptr):
        offsets[1:].fill_(POISON)
    backend.cuda_graph_kv_indices.fill_(POISON)
    for hook in runner.model_runner.capture_tail_hooks:
        ladder = hook.__self__._ladder
        if runner.model_runner.is_draft_worker:
            poison_trees(ladder.largest.tree)
        else:
            for rung in ladder.rungs:
                rung.captured_walk.packed.fill_(POISON)


def poison_trees(tree: Any) -> None:
    """Fill what the draft pass writes."""
    for name in ("token_ids", "positions", "parents", "depths", "num_nodes"):
        getattr(tree, name).fill_(POISON)
    tree.scores.fill_(float("nan"))
    tree.mask.fill_(True)


def give_up() -> None:
    os.write(2, b"watchdog: a replay takes more than two seconds\n")
    os._exit(70)


after_import("sglang.srt.model_executor.runner.decode_cuda_graph_runner", poison_replays)
