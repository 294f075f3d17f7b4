# SPDX-License-Identifier: Apache-2.0
"""Forced acceptance for step-time benchmarks on dummy weights, by SGLang's own ``SGLANG_SIMULATE_ACC_*`` variables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN, SIMULATE_ACC_METHOD, _sample_simulated_acc_len

if TYPE_CHECKING:
    from sglang.srt.speculative.ddtree_walk import WalkBuffers

# The token that SGLang's simulation emits for DFLASH and EAGLE.
FIXED_TOKEN = 100


def simulation_requested() -> bool:
    """Whether acceptance is forced; the text is meaningless then."""
    return bool(SIMULATE_ACC_LEN > 0)


def simulate_acceptance(walk: WalkBuffers, batch_size: int, max_accept: int) -> None:
    """Overwrite the results of a walk with a run along the spine, of the same drawn length for all requests.

    `max_accept` is the longest run that the tree allows, bonus included.
    """
    length = _sample_simulated_acc_len(SIMULATE_ACC_LEN, SIMULATE_ACC_METHOD, max_accept)
    rows = torch.arange(walk.accept_index.shape[1], device=walk.packed.device)
    accepted = rows < length
    walk.accept_index[:batch_size] = torch.where(accepted, rows, -1)
    walk.out_tokens[:batch_size] = torch.where(accepted, FIXED_TOKEN, 0)
    walk.accept_lens[:batch_size] = length
    walk.bonus[:batch_size] = FIXED_TOKEN
