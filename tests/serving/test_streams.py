# SPDX-License-Identifier: Apache-2.0
"""The time in which all streams decode, on parts that come at known times and on the demo pair."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from serving.server import Server, generate
from serving.streams import Answer, Span, follow, while_all_decode


def answer(first: float, tokens: int, steps: int, *, pause: float = 0, late: float = 0) -> Answer:
    """Its first token at `first`, then `tokens` a step every 10 seconds, with a pause behind the third step."""
    times = [first + late + 10 * number + pause * (number > 3) for number in range(steps + 1)]
    return Answer(0, [(at, 1 + number * tokens) for number, at in enumerate(times)], steps)


def test_prompts_of_others_are_left_out() -> None:
    """The first stands still from its third step, at 40, until the second's prompt is read, at 170."""
    early, late = answer(10, 5, 20, pause=130), answer(170, 3, 20)
    assert early.parts[3:6] == [(40, 16), (180, 21), (190, 26)]
    # The first ends at 340 with its 20th step, which does not count: 180 to 330 are its steps 4 to 19.
    assert while_all_decode([early, late], 1) == [Span(75, 150), Span(48, 160)]
    assert while_all_decode([late, early], 1) == [Span(48, 160), Span(75, 150)]


@pytest.mark.parametrize("late", [0.0, 0.5, 4.0])
def test_a_late_client_has_the_same_speed(late: float) -> None:
    spans = while_all_decode([answer(10, 3, 12), answer(10, 3, 12, late=late)], 1)
    assert [span.tokens / span.seconds for span in spans] == pytest.approx([0.3, 0.3])


def test_an_answer_cut_by_its_length_has_the_same_speed() -> None:
    whole = answer(10, 6, 8)
    cut = Answer(0, [*whole.parts[:-1], (90, 44)], 8)
    assert while_all_decode([cut], 1) == while_all_decode([whole], 1) == [Span(42, 70)]


def test_a_warm_up_is_left_out() -> None:
    """From the first part with so many tokens of the answer that has them last."""
    fast, slow = answer(10, 6, 10), answer(10, 3, 10)
    assert while_all_decode([fast, slow], 19) == [Span(18, 30), Span(9, 30)]
    assert while_all_decode([fast, slow], 20) == [Span(12, 20), Span(6, 20)]


def test_answers_that_are_never_written_together_say_nothing() -> None:
    """The first is written from 10 to 110, and its last step does not count."""
    early = answer(10, 3, 10)
    assert while_all_decode([early, answer(90, 3, 10)], 1) == [Span(3, 10)] * 2
    for first in (100, 110, 1000):
        assert while_all_decode([early, answer(first, 3, 10)], 1) == []


def test_too_few_tokens_say_nothing() -> None:
    assert while_all_decode([Answer(0, [(1, 1)], 0)], 1) == []
    assert while_all_decode([answer(10, 3, 10)], 31) == []


@pytest.mark.parametrize("algorithm", ["DDTREE", None])
def test_parts_are_those_of_the_answer(serve: Callable[..., Server], algorithm: str | None) -> None:
    server = serve(algorithm)
    found = follow(server, "A function.", 24)
    whole = generate(server, "A function.", max_new_tokens=24, ignore_eos=True)["meta_info"]
    times, tokens = zip(*found.parts, strict=True)
    assert found.steps == whole.get("spec_verify_ct", 0) and (found.steps > 0) == (algorithm is not None)
    assert tokens[-1] == 24 and sorted(set(tokens)) == list(tokens)
    assert found.asked < times[0] and sorted(times) == list(times)
