# SPDX-License-Identifier: Apache-2.0
"""What is asked of defragmentation, and the servers on which it cannot be had."""

from __future__ import annotations

import os
from enum import Enum
from typing import TYPE_CHECKING

from sglang.srt.sm120.startup import StartupError

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

MODE_VARIABLE = "SGLANG_SM120_DEFRAG"
CHECK_VARIABLE = "SGLANG_SM120_DEFRAG_CHECK"


class DefragMode(Enum):
    """Values of ``SGLANG_SM120_DEFRAG``."""

    OFF = "off"  # slots are handed out in order and run lengths are reported, nothing moves
    IDLE = "idle"  # cached texts are moved while nothing runs
    AUTO = "auto"  # also running ones, between decode steps


def defrag_mode() -> DefragMode:
    """The mode that the environment asks for; raises StartupError for anything else."""
    value = os.environ.get(MODE_VARIABLE, "") or DefragMode.OFF.value
    try:
        return DefragMode(value)
    except ValueError:
        expected = ", ".join(mode.value for mode in DefragMode)
        raise StartupError(f"{MODE_VARIABLE}: expected one of {expected}, got {value!r}; unset it") from None


def check_requested() -> bool:
    """Whether each step moves a window, contiguous or not, and compares the rows of all layers: slow, for tests.

    Raises:
        StartupError: for an unknown value, or where nothing moves that could be checked.
    """
    value = os.environ.get(CHECK_VARIABLE, "")
    if value not in ("", "1"):
        raise StartupError(f"{CHECK_VARIABLE}: expected 1 or nothing, got {value!r}; unset it")
    if value and defrag_mode() is DefragMode.OFF:
        raise StartupError(
            f"{CHECK_VARIABLE}: expected {MODE_VARIABLE}=idle or auto with it, got off; set or unset both"
        )
    return bool(value)


def refuse_defrag(server_args: ServerArgs, page_size: int) -> None:
    """Stop the start where the mode cannot be honoured.

    Raises:
        StartupError: naming the option that others hold slots by, or that has none to move.
    """
    mode = defrag_mode()
    if mode is DefragMode.OFF:
        return
    refusals = (
        (page_size != 1, f"--page-size 1, got {page_size}"),
        (server_args.enable_hierarchical_cache, "no --enable-hierarchical-cache, which copies slots on its own stream"),
        (server_args.enable_lmcache, "no --enable-lmcache, which copies slots on its own stream"),
        (server_args.enable_flexkv, "no --enable-flexkv, which copies slots on its own stream"),
        (server_args.enable_streaming_session, "no --enable-streaming-session, which holds slots of its own"),
        (server_args.enable_memory_saver, "no --enable-memory-saver, which takes the pools away while nothing runs"),
        (server_args.disable_radix_cache, "no --disable-radix-cache, whose requests nobody can count"),
    )
    for refused, expected in refusals:
        if refused:
            raise StartupError(f"{MODE_VARIABLE}={mode.value}: expected {expected}; drop one of them")
