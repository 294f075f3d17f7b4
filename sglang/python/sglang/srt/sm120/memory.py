# SPDX-License-Identifier: Apache-2.0
"""What a token costs in the KV pools of a target and its DFLASH drafter, and what a request's row must hold.

SGLang 0.5.17 takes the drafter's layers for layers of the target. For an MLA target with a GQA drafter that is wrong
in both directions: Kimi K2.6 at tensor parallelism 8 is priced 5 % too high, at 1 so low that the pools do not fit.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def draft_kv_bytes_per_token(drafter: Any, tp_size: int, element_size: int) -> int:
    """Bytes of keys and values that one token takes in a rank's drafter pool.

    Args:
        drafter: its Hugging Face config (a Qwen3-like GQA model).
        tp_size: ranks that share its heads; a rank has at least one KV head.
        element_size: bytes of a stored element.
    """
    heads = max(1, int(drafter.num_key_value_heads) // tp_size)
    head_dim = getattr(drafter, "head_dim", None) or int(drafter.hidden_size) // int(drafter.num_attention_heads)
    return 2 * int(drafter.num_hidden_layers) * heads * int(head_dim) * element_size


def price_draft_kv(configurator: Any, kvc: Any, num_layers: int) -> int:
    """Bytes per token of both pools, for the pool configurator of the target; its own figure for other algorithms.

    Args:
        configurator: SGLang's, whose ``_cell_size`` is its own estimate.
        kvc: what it is configured from.
        num_layers: the target's layers on this rank.
    """
    import torch

    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.utils.hf_transformers_utils import get_config

    args = kvc.server_args
    if not kvc.spec_algorithm.is_dflash_family() or kvc.is_draft_worker or args.dcp_size > 1:
        return int(configurator._cell_size)
    revision = args.speculative_draft_model_revision
    overrides = json.loads(args.json_model_override_args)
    drafter = get_config(args.speculative_draft_model_path, args.trust_remote_code, revision, overrides)
    # A fa4 drafter keeps the model's own type (mem_cache/kv_cache_dtype.py).
    own_type = args.speculative_draft_attention_backend == "fa4"
    dtype = kvc.model_config.dtype if own_type else kvc.kv_cache_dtype
    draft_bytes = draft_kv_bytes_per_token(drafter, get_parallel().attn_tp_size, torch._utils._element_size(dtype))
    return int(configurator._compute_cell_size(kvc, num_layers)) + draft_bytes


def row_headroom(server_args: ServerArgs) -> int:
    """Slots that a request's row needs beyond the context length for the DFLASH family's reserve, else 0.

    A decode step reserves two verify windows past the committed length and may round up to whole pages. A narrower
    row spills into the next request's row, since nothing checks the bound.
    """
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    if not SpeculativeAlgorithm.from_string(server_args.speculative_algorithm).is_dflash_family():
        return 0
    return 2 * int(server_args.max_speculative_num_draft_tokens or 0) + server_args.page_size + 4
