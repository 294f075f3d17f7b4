# SPDX-License-Identifier: Apache-2.0
"""The environment variables of the fork, each declared once; ``docker/OPERATING.md`` has its table from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sglang.srt.sm120.startup import StartupError

PREFIX = "SGLANG_SM120_"


@dataclass(frozen=True)
class Variable:
    """One variable: what it may hold, what its absence means, and what it does."""

    name: str
    values: str
    default: str
    text: str


VARIABLES = (
    Variable(
        "SGLANG_SM120_VERIFY",
        "auto, on, off, validate",
        "auto",
        "Who computes verify attention: the kernel on compute capability 12.x and Triton elsewhere; the kernel or no start; "
        "Triton; or both, compared on the device.",
    ),
    Variable(
        "SGLANG_SM120_VERIFY_FAULT",
        "1",
        "unset",
        "For tests of validate mode: falsifies one element of each compared output, which must be reported.",
    ),
    Variable(
        "SGLANG_SM120_MAX_BODY_MIB",
        "a number from 1 on",
        "32",
        "Largest body of a request in MiB; a larger one gets HTTP 413 before it is parsed.",
    ),
    Variable(
        "SGLANG_SM120_DEFRAG",
        "off, idle, auto",
        "off",
        "Moves KV rows into neighbouring slots: never; cached texts while nothing runs; or running requests too, between "
        "decode steps. Needs DDTREE and page size 1.",
    ),
    Variable(
        "SGLANG_SM120_DEFRAG_CHECK",
        "1",
        "unset",
        "For tests of moves: every decode step moves rows, which are compared in all layers. Slow.",
    ),
    Variable(
        "SGLANG_SM120_SIMULATE_ACC_LENS",
        "one number for each budget, as in 4.7,5.4,5.9",
        "unset",
        "For benchmarks on dummy weights: forces so many tokens per step for each budget of DDTREE, ascending, as "
        "`SGLANG_SIMULATE_ACC_LEN` does for all. The text means nothing.",
    ),
)


def check_names(environment: Mapping[str, str]) -> None:
    """Refuse a misspelt variable, which would be ignored without a word.

    Raises:
        StartupError: naming the first variable with the fork's prefix that is none of its own.
    """
    known = [variable.name for variable in VARIABLES]
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known:
            raise StartupError(
                f"{name}: expected one of {', '.join(known)}, got an unknown variable; correct or unset it"
            )
