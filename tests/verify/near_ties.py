# SPDX-License-Identifier: Apache-2.0
"""Whether two greedy bf16 decodings may differ where they do: only at a near tie of the target's logits.

Chain and tree verify a token in batches of different shape, so that sums round differently. The demo target in plain
torch, once in fp32 and many times in bf16, says how far rounding moves the logits at that place.
"""

from __future__ import annotations

from pathlib import Path

import torch
from demo_models import Target, load_pair

RUNS = 64
# Half of the distance between neighbours of 1 in bf16: up to this much moves a third of all numbers to a neighbour.
HALF_STEP = 2.0**-8


class NearTies:
    """Judges differences between two decodings of the demo target.

    Args:
        root: folder of the demo pair.
        device: where the plain target runs.
    """

    def __init__(self, root: Path, device: str) -> None:
        self._exact = load_pair(root, device)[0]
        self._rounded = load_pair(root, device)[0].to(torch.bfloat16)
        self._noise = torch.Generator(device).manual_seed(0)
        self._device = device
        for module in self._rounded.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(self._round_anew)

    def explain(self, prompt: list[int], one: list[int], other: list[int]) -> str | None:
        """None if the decodings agree or part at a near tie, else what is wrong. What follows a parting is free.

        A token may be chosen where its exact logit lies within rounding of the best, or where it is the best of one of
        several runs that round differently: a near tie of two experts moves all logits at once.
        """
        length = min(len(one), len(other))
        parted = next((index for index in range(length) if one[index] != other[index]), None)
        if parted is None:
            return None if len(one) == len(other) else f"lengths {len(one)} and {len(other)}"
        ids = torch.tensor([prompt + one[:parted]], device=self._device)
        exact, rounded = self._logits(self._exact, ids)[0], self._logits(self._rounded, ids.expand(RUNS, -1))
        # Each of the two servers may be off by twice as much as the same model in plain bf16 usually is.
        allowed = 4 * float((rounded - exact).abs().amax(1).median())
        found = set(rounded.argmax(1).tolist())
        gaps = {token: float(exact.max() - exact[token]) for token in (one[parted], other[parted])}
        wrong = {token: gap for token, gap in gaps.items() if gap > allowed and token not in found}
        if not wrong:
            return None
        return f"token {parted}: {wrong} below the best logit, {allowed} allowed, {found} are best in rounded runs"

    def _round_anew(self, module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        """Move results to neighbours at random, as another order of sums might."""
        noise = torch.rand(output.shape, generator=self._noise, device=output.device)
        return (output.float() * (1 + HALF_STEP * (2 * noise - 1))).to(output.dtype)

    @torch.inference_mode()
    def _logits(self, target: Target, ids: torch.Tensor) -> torch.Tensor:
        """Of the next token: [runs, vocabulary]."""
        hidden, _ = target(ids)
        return target.lm_head(hidden[:, -1]).float()
