# SPDX-License-Identifier: Apache-2.0
"""Grammars on draft trees: one vocabulary mask a node, from the request's matcher led along the node's path.

A row behind an illegal token gets no mask and needs none: its parent's mask excludes the token, so no draw leads there.
The same holds behind the token that ends a grammar, since the scheduler cuts the accepted run there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang.srt.speculative.ddtree_tree import tree_links
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.ddtree_tree import TreeBuffers


@dataclass
class TreeGrammar:
    """The trees of one step on their way to the host, where the matchers are."""

    tree: GrammarTree

    @classmethod
    def stage(cls, tree: TreeBuffers, batch_size: int) -> TreeGrammar:
        """Start to copy the first `batch_size` trees to the host; call it before the verify pass is launched."""
        return cls(GrammarTree.from_device(*tree_links(tree.parents[:batch_size]), tree.token_ids[:batch_size]))

    def mask_logits(
        self, logits: torch.Tensor, batch: ScheduleBatch, grammar_barrier: Callable[[], None] | None
    ) -> None:
        """Set the logits of every token that a grammar excludes at a node to -inf, in place.

        Call it after the launch of the verify pass: the host waits for the trees and for the tokens of the step before,
        which is the one synchronisation of a step with grammars, and walks the trees while the target computes.

        Args:
            logits: [bs * T, vocab]; rows of requests without a grammar stay as they are.
            batch: its requests carry the matchers, which end in the state they came in.
            grammar_barrier: advances the matchers over the tokens of the step before; None when nothing overlaps.
        """
        mask = build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=self.tree,
            sampling_info=batch.sampling_info,
            device=logits.device,
            barrier=grammar_barrier,
        )
        if mask is not None:
            mask.apply(logits)
