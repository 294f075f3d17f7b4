# SPDX-License-Identifier: Apache-2.0
"""Whether two greedy bf16 decodings may differ where they do: only at a near tie of the target's logits.

Chain and tree verify a token in batches of different shape, so that sums round differently. The demo target in plain
torch, once in fp32 and once in bf16, says how far rounding moves the logits at that place.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))

from demo_models import Target, load_pair


class NearTies:
    """Judges differences between two decodings of the demo target.

    Args:
        root: folder of the demo pair.
        device: where the plain target runs.
    """

    def __init__(self, root: Path, device: str) -> None:
        self._exact = load_pair(root, device)[0]
        self._rounded = load_pair(root, device)[0].to(torch.bfloat16)
        self._device = device

    def explain(self, prompt: list[int], one: list[int], other: list[int]) -> str | None:
        """None if the decodings agree or part at a near tie, else what is wrong. What follows a parting is free."""
        length = min(len(one), len(other))
        parted = next((index for index in range(length) if one[index] != other[index]), None)
        if parted is None:
            return None if len(one) == len(other) else f"lengths {len(one)} and {len(other)}"
        ids = torch.tensor([prompt + one[:parted]], device=self._device)
        exact, rounded = self._logits(self._exact, ids), self._logits(self._rounded, ids)
        # Each of the two servers may be off by twice as much as the same model in plain bf16.
        allowed = 4 * float((exact - rounded).abs().max())
        best = float(exact.max())
        gaps = [best - float(exact[token]) for token in (one[parted], other[parted])]
        if max(gaps) <= allowed:
            return None
        return f"token {parted}: {one[parted]} and {other[parted]} lie {gaps} below the best logit, {allowed} allowed"

    @torch.inference_mode()
    def _logits(self, target: Target, ids: torch.Tensor) -> torch.Tensor:
        hidden, _ = target(ids)
        return target.lm_head(hidden[0, -1]).float()
