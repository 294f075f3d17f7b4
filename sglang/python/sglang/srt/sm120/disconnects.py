# SPDX-License-Identifier: Apache-2.0
"""How soon the server notices that a client has left."""

from __future__ import annotations

POLL_SECONDS = 1


def notice_disconnects() -> None:
    """Look every second whether the client of a request that does not stream is still there; SGLang looks every four.

    The setting is SGLang's own, read when its tokenizer manager is imported; one from the environment stays.
    """
    from sglang.srt.environ import envs

    if not envs.SGLANG_REQUEST_STATE_WAIT_TIMEOUT.is_set():
        envs.SGLANG_REQUEST_STATE_WAIT_TIMEOUT.set(POLL_SECONDS)
