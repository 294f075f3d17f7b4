# SPDX-License-Identifier: Apache-2.0
"""A seeded row draws the token that the installed SGLang's own sampler functions draw."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

COMPARE = """
import torch
from sglang.srt.layers.sampler import sampling_from_probs_torch, top_k_top_p_min_p_sampling_from_probs_torch
from sglang.srt.speculative.ddtree_walk import TOP_K_ALL, SamplingRows, draw_tokens

torch.manual_seed(0)
n, vocab = 16, 700
logits, temperatures = torch.randn(n, vocab) * 3, torch.rand(n, 1) + 0.5
seeds, positions = torch.randint(0, 2**31, (n,)), torch.randint(0, 5000, (n,))
probs = torch.softmax(logits / temperatures, -1)
for need_top_k, need_top_p in ((False, False), (True, False), (False, True), (True, True)):
    top_ks = torch.randint(2, 60, (n,)).int() if need_top_k else torch.full((n,), TOP_K_ALL, dtype=torch.int32)
    top_ps = torch.rand(n) if need_top_p else torch.ones(n)
    params = SamplingRows(
        temperatures, top_ks, top_ps, torch.zeros(n), seeds, False, False, need_top_k, need_top_p, False
    )
    if need_top_k or need_top_p:
        expected = top_k_top_p_min_p_sampling_from_probs_torch(
            probs.clone(), top_ks, top_ps, params.min_ps, False, seeds, positions
        )
    else:
        expected = sampling_from_probs_torch(probs, sampling_seed=seeds, positions=positions)
    drawn = draw_tokens(logits, params, positions)
    assert drawn.tolist() == expected.tolist(), (need_top_k, need_top_p, drawn, expected)
    assert len(set(drawn.tolist())) > 1
print("equal")
"""


def test_seeded_draws_equal_the_sampler_of_sglang() -> None:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("needs an installed SGLang; scripts/test installs it")
    # The hash is a Triton kernel: without a GPU Triton must interpret it, which is decided when Triton is imported.
    environment = os.environ | {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMPARE], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("equal")
