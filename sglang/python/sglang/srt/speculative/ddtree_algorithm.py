# SPDX-License-Identifier: Apache-2.0
"""DDTREE as a registered speculative algorithm.

Imported at the end of ``spec_info``, so that the name resolves in every process, tokenizer workers included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.sm120.requests import add_checks
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

if TYPE_CHECKING:
    import torch

    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.server_args import ServerArgs

ALGORITHM = "DDTREE"


class DDTreeAlgorithm(CustomSpecAlgo):
    """A member of the DFLASH family: the same drafter, its block turned into a tree, verified in one pass.

    The two runners have different widths. The target verifies `verify_width` rows per request, which is what
    ``speculative_num_draft_tokens`` says everywhere; the drafter runs blocks of ``speculative_dflash_block_size``.
    """

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True

    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def create_future_map(self, device: torch.device, *pools: Any, **needs: Any) -> FutureMap:
        """The relay between overlapped steps, as the built-in algorithms make it."""
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, *pools, **needs)

    def handle_server_args(self, server_args: ServerArgs) -> None:
        from sglang.srt.speculative.ddtree_args import resolve_server_args

        resolve_server_args(server_args)

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        """Rows per request of one TARGET_VERIFY batch: the block on the drafter, the tree on the target."""
        if not is_draft_worker:
            return num_draft_tokens
        from sglang.srt.runtime_context import get_spec

        return int(get_spec().speculative_dflash_block_size)


def is_ddtree(speculative_algorithm: str | None) -> bool:
    """Whether the resolved ``--speculative-algorithm`` is DDTREE."""
    return speculative_algorithm == ALGORITHM


@SpeculativeAlgorithm.register(ALGORITHM, supports_overlap=True, spec_class=DDTreeAlgorithm)
def _create_worker(server_args: ServerArgs) -> type:
    from sglang.srt.speculative.ddtree_worker import DDTreeWorker

    return DDTreeWorker


def _check_request(obj: Any, server_args: ServerArgs) -> None:
    from sglang.srt.speculative.ddtree_requests import check_speculation

    check_speculation(obj, server_args)


def _admission_refusal(req: Any) -> str | None:
    from sglang.srt.speculative.ddtree_requests import drafting_refusal

    return drafting_refusal(req)


add_checks(_check_request, _admission_refusal)
