# SPDX-License-Identifier: Apache-2.0
"""Where a request ends inside a run of accepted tokens: SGLang's own request object, driven run by run on the host.

The oracle looks at the whole sequence token by token, as plain decoding would meet it.
"""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sm120.finish import end_run

# Tokens of one or several letters, so that a stop string straddles tokens, and the three bytes of one character.
PIECES = [b"", b"a", b"b", b"c", b"ab", b"bc", b"ca", b"abc", b" ", *(bytes([byte]) for byte in "\u20ac".encode())]
EOS = 0
EURO = [9, 10, 11]
STOPS = ["ab", "bca", "c a", "\u20ac", "abcabc", "bb"]


class Tokenizer:
    """Decodes `PIECES`; encodes a text as one token, as a tokenizer with a large vocabulary would."""

    eos_token_id = EOS
    additional_stop_token_ids = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1]

    def decode(self, token_ids: Any) -> str:
        return b"".join(PIECES[token] for token in token_ids).decode(errors="replace")


def make_request(**options: Any) -> Req:
    """A request after its prefill, with nothing generated yet."""
    tokenizer = Tokenizer()
    params = SamplingParams(**{"max_new_tokens": 64, **options})
    params.normalize(tokenizer)
    req = Req("request", "", array("q", [1, 2]), params, eos_token_ids={EOS}, vocab_size=len(PIECES))
    req.tokenizer = tokenizer
    req.kv_committed_len = 2
    return req


def feed(req: Req, run: list[int]) -> list[int]:
    """What the scheduler does with one run; returns the tokens that are kept."""
    req.kv_committed_len += len(run)
    req.output_ids.extend(run)
    kept = end_run(req, list(run))
    req.update_finish_state(len(kept))
    return kept


def outcome(req: Req) -> tuple[list[int], str | None, Any]:
    """Kept tokens, kind of the finish, and what matched."""
    reason = req.finished_reason.to_json() if req.finished_reason else {"type": None}
    return list(req.output_ids_through_stop), reason["type"], reason.get("matched")


def expected(tokens: list[int], stops: list[str], stop_ids: set[int], limit: int, ignore_eos: bool) -> Any:
    """The oracle: the first token after which something ends the request; a stop beats the length."""
    for count in range(1, len(tokens) + 1):
        text = Tokenizer().decode(tokens[:count])
        for stop in stops:
            if stop in text:
                return tokens[:count], "stop", stop
        if not ignore_eos and tokens[count - 1] in stop_ids | {EOS}:
            return tokens[:count], "stop", tokens[count - 1]
        if count == limit:
            return tokens[:count], "length", None
    return tokens, None, None


@pytest.mark.parametrize("seed", range(400))
def test_run_ends_where_plain_decoding_ends(seed: int) -> None:
    """BUG-030, BUG-031, BUG-032: random runs of up to 32 tokens, every order of stops and length."""
    draw = random.Random(seed)
    tokens = [draw.choice([*range(1, 9), *EURO, *EURO]) for _ in range(draw.randint(1, 40))]
    if draw.random() < 0.5:
        tokens[draw.randrange(len(tokens))] = EOS
    stops = draw.sample(STOPS, draw.randint(0, 2))
    stop_ids = set(draw.sample(range(1, 9), draw.randint(0, 1)))
    limit, ignore_eos = draw.randint(1, 40), draw.random() < 0.3
    req = make_request(stop=stops or None, stop_token_ids=stop_ids, max_new_tokens=limit, ignore_eos=ignore_eos)
    rest = list(tokens)
    while rest and not req.finished():
        size = draw.randint(1, draw.choice([1, 8, 32]))
        feed(req, rest[:size])
        rest = rest[size:]
    assert outcome(req) == expected(tokens, stops, stop_ids, limit, ignore_eos)
    # Nothing after the stop is left for the radix key, and the last token has no KV of its own yet.
    assert list(req.output_ids) == outcome(req)[0]
    assert req.kv_committed_len == 2 + len(req.output_ids)


@pytest.mark.parametrize(
    ("run", "limit", "options", "end"),
    [
        ([1, 1, 8, 2, 2, 3], 5, {"stop_token_ids": {8}}, (3, "stop", 8)),
        ([1, 1, 2, 2, 2, 8], 5, {"stop_token_ids": {8}}, (5, "length", None)),
        ([1, 1, 2, 2, 8, 1], 5, {"stop_token_ids": {8}}, (5, "stop", 8)),
        ([1, 1, 2, 1, 1, 3], 3, {"stop": ["ab"]}, (3, "stop", "ab")),
        ([3, 3, 1, 2, 1, 3], 3, {"stop": ["ab"]}, (3, "length", None)),
        ([3, EOS, 1, 2], 4, {"ignore_eos": True}, (4, "length", None)),
        ([3, EOS, 1, 2], 4, {"stop": ["cab"]}, (2, "stop", EOS)),
    ],
)
def test_stop_and_length_in_one_run(run: list[int], limit: int, options: dict[str, Any], end: Any) -> None:
    """BUG-030: a stop within the limit wins, a stop beyond it yields the length."""
    req = make_request(max_new_tokens=limit, **options)
    kept = feed(req, run)
    tokens, kind, matched = outcome(req)
    assert (len(tokens), kind, matched) == end
    assert kept == run[: end[0]] == tokens


def test_stop_string_spelled_with_more_tokens_than_it_encodes_to() -> None:
    """The tokenizer makes one token of the stop string, the model spells it letter by letter, a token a step."""
    req = make_request(stop=["abcabc"])
    for token in [1, 2, 3, 1, 2]:
        feed(req, [token])
        assert not req.finished()
        assert req.check_match_stop_str_prefix(), "a stream must hold back what may become the stop string"
    feed(req, [3])
    assert outcome(req)[1:] == ("stop", "abcabc")


def test_abort_goes_before_a_stop() -> None:
    req = make_request(stop_token_ids={8})
    req.to_finish = FINISH_ABORT("gone")
    assert feed(req, [1, 8, 2]) == [1, 8, 2]
    assert outcome(req)[1] == "abort"


def test_no_token_is_asked_for() -> None:
    req = make_request(max_new_tokens=0, stop_token_ids={8})
    feed(req, [8])
    assert outcome(req) == ([], "length", None)


@pytest.mark.parametrize(("algorithm", "kept"), [(None, [1, EOS]), ("DDTREE", [1, EOS, 3])])
def test_token_after_the_end_of_a_grammar(
    algorithm: str | None, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain decoding sees the end of a grammar one token late; a speculative run has been cut before it comes here."""
    spec = SimpleNamespace(speculative_algorithm=algorithm)
    monkeypatch.setattr("sglang.srt.runtime_context.get_spec", lambda: spec)
    req = make_request(ignore_eos=True)
    feed(req, [1, EOS])
    req.grammar = SimpleNamespace(is_terminated=lambda: True)
    feed(req, [3])
    assert outcome(req) == (kept, "stop", kept[-1])
