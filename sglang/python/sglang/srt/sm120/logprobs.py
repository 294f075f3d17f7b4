# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of chosen token ids, in batches where not every request asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.layers.logprob_processor import LogprobStage


def asked_token_ids(asked: list[list[int] | None], stage: LogprobStage) -> list[list[int] | None]:
    """The token ids of each row, none as an empty list in decode; prefill tells None and empty apart."""
    return [ids or [] for ids in asked] if stage.name == "DECODE" else asked
