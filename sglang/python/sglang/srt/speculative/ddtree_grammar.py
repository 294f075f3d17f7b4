# SPDX-License-Identifier: Apache-2.0
"""Grammars on draft trees: one vocabulary mask a node, from the request's matcher led along the node's path.

A row behind an illegal token gets no mask and needs none: its parent's mask excludes the token, so no draw leads there.
The same holds behind the token that ends a grammar, since the scheduler cuts the accepted run there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang.srt.constrained.base_grammar_backend import GrammarMask
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar
from sglang.srt.speculative.ddtree_tree import tree_links
from sglang.srt.speculative.spec_utils import GrammarTree, traverse_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
        if grammar_barrier is not None:
            grammar_barrier()
        masked = [(index, req.grammar) for index, req in enumerate(batch.reqs) if req.grammar is not None]
        if not masked:
            return
        links = self.tree.resolve()
        num_requests, width = links[0].shape
        vocab_size = batch.sampling_info.vocab_size
        rows = masked[0][1].allocate_vocab_mask(vocab_size, num_requests * width, "cpu")
        for index, grammar in masked:
            _fill_rows(grammar, [link[index] for link in links], rows[index * width : (index + 1) * width], vocab_size)
        batch.sampling_info.grammar_mask = None  # that of the prefill, which the sampler would apply instead
        GrammarMask(masked[0][1], rows.to(logits.device, non_blocking=True)).apply(logits)


def _fill_rows(grammar: Any, links: Sequence[torch.Tensor], rows: torch.Tensor, vocab_size: int) -> None:
    """Fill the bit masks of one tree, int32 [T, vocab / 32], all bits set; the matcher ends in the state it came in.

    xgrammar leads its matcher along the tree in one call. SGLang's own traversal, in Python, is for what wraps a matcher,
    such as a grammar that begins after the reasoning.
    """
    if type(grammar) is XGrammarGrammar:
        grammar.matcher.traverse_draft_tree(*links, rows)
        # It excludes every token where no draw leads; a softmax over that is NaN.
        rows[(rows == 0).all(1)] = -1
    else:
        traverse_tree(*links, grammar, rows, vocab_size=vocab_size)
