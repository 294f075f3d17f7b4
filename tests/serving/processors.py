# SPDX-License-Identifier: Apache-2.0
"""Custom logit processors that decide by what a request has generated; test servers import them from here."""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor


class NoRecentToken(CustomLogitProcessor):
    """Bans what the last outputs were."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or []):
            recent = list(params["__req__"].output_ids)[-params["window"] :]
            logits[row, recent] = -float("inf")
        return logits


class ForceAtLength(CustomLogitProcessor):
    """A thinking budget in small: after so many outputs the next one is given."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or []):
            if len(params["__req__"].output_ids) == params["length"]:
                logits[row] = -float("inf")
                logits[row, params["token"]] = 0.0
        return logits


class Recite(CustomLogitProcessor):
    """Prefers the tokens of a text, each in its place, to those of another text, and these to all others."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or []):
            length = len(params["__req__"].output_ids)
            for name, preference in (("text", 2e4), ("otherwise", 1e4)):
                if length < len(params[name]):
                    logits[row, params[name][length]] += preference
        return logits
