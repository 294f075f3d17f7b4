# SPDX-License-Identifier: Apache-2.0
"""How fast streams decode together while no prompt is being read, as their clients see it.

A server reads waiting prompts before it goes on decoding, those that wait at the same time in one pass. So the speed of
whole answers depends on which requests happen to end together; the speed from when the last stream has its first token
until the first of them ends does not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from serving.server import Server, generate_body, stream

# Between two parts of an answer: a server may read long prompts of others, slowly.
READ_TIMEOUT_SECONDS = 900.0


@dataclass(frozen=True)
class Answer:
    """One streamed answer.

    asked   seconds by the client's clock when it was asked for
    parts   when each part came, and the answer's tokens with it
    steps   verify steps of the whole answer, which its last part tells; 0 in plain decoding
    """

    asked: float
    parts: list[tuple[float, int]]
    steps: int


@dataclass(frozen=True)
class Span:
    """Tokens that came between two parts of one answer, and the seconds from the one to the other."""

    tokens: int
    seconds: float


def decode(server: Server, prompt: str | list[int], new_tokens: int) -> Generator[dict[str, Any], None, None]:
    """The parts of one greedy answer, as they arrive; closing the generator ends the request."""
    body = generate_body(prompt, max_new_tokens=new_tokens, ignore_eos=True)
    return stream(server, "/generate", body, READ_TIMEOUT_SECONDS)


def follow(server: Server, prompt: str | list[int], new_tokens: int) -> Answer:
    """One greedy answer and when its parts came."""
    asked, parts, meta = time.perf_counter(), [], {}
    for part in decode(server, prompt, new_tokens):
        now, meta = time.perf_counter(), part["meta_info"]
        parts.append((now, meta["completion_tokens"]))
    return Answer(asked, parts, meta.get("spec_verify_ct", 0))


def follow_together(server: Server, prompts: Sequence[str | list[int]], new_tokens: int) -> list[Answer]:
    """What `follow` says of each prompt, all asked for at the same time."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: follow(server, prompt, new_tokens), prompts))


def while_all_decode(answers: list[Answer], warm_tokens: int) -> list[Span]:
    """What came of each answer from when all of them have `warm_tokens` until the first of them ends.

    The first part comes late at its client, with the head of the response, so `warm_tokens` should be a few steps. Each
    answer is timed by its own parts: those of one step reach their clients one after another, so that a cut at the same
    time would count a step for some answers alone. The last part of an answer, which its length may cut, is left out.
    Empty where an answer has not two parts in that time: they were not written together.
    """
    parts = [answer.parts[:-1] for answer in answers]
    begin = max(min((at for at, tokens in each if tokens >= warm_tokens), default=math.inf) for each in parts)
    end = min(max((at for at, _ in each), default=-math.inf) for each in parts)
    inside = [[(at, tokens) for at, tokens in each if begin <= at <= end] for each in parts]
    if min(map(len, inside)) < 2:
        return []
    return [Span(each[-1][1] - each[0][1], each[-1][0] - each[0][0]) for each in inside]
