# SPDX-License-Identifier: Apache-2.0
"""Checks of a grammar where a request enters, so that a bad one gets HTTP 400 before a stream begins.

The grammar is compiled as the scheduler will compile it, but over an alphabet of bytes: that takes a millisecond for a
usual schema, whatever the size of the model's vocabulary.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from sglang.srt.sm120.grammar_hazards import hazard, takes_long

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend

GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
# Named after the request's field in front, since a client of the OpenAI endpoints may not know it.
_ORIGIN = "also from response_format, tools and tool_choice"
_MAX_REASON_CHARS = 200
_NUM_BYTES = 256
_CACHED_GRAMMARS = 256
_MAX_PREFIXES = 256  # looked at for the longest answer


def check_grammar(options: Mapping[str, Any], reasons_first: bool = False) -> None:
    """Refuse a grammar that does not compile with xgrammar, accepts nothing, or conflicts with another option.

    It conflicts with a stop string that every answer begins with, and with ``min_new_tokens`` beyond its longest answer.
    Nobody is answered while a grammar is compiled here, so one that takes long is left to the scheduler, which compiles
    beside its work and ends a bad request with the same status, after a stream has begun.

    Args:
        options: the sampling options as the client sent them.
        reasons_first: whether the answer may begin with reasoning, which no grammar binds.

    Raises:
        ValueError: naming the field, what was expected and what came.
    """
    for name in GRAMMARS:
        text = options.get(name)
        if not text and text != 0:
            continue
        if not isinstance(text, str):
            came = type(text).__name__
            raise ValueError(f"{name}: expected a string, got {came}; serialise it first")  # noqa: TRY004 (HTTP 400)
        kind = "json" if name == "json_schema" else name
        reason, begins_with = _inspect(kind, text)
        if reason is not None:
            raise ValueError(f"{name} ({_ORIGIN}): expected a grammar that compiles, got an error: {reason}")
        stops = options.get("stop") or ()
        for stop in (stops,) if isinstance(stops, str) else stops:
            if stop and stop in begins_with:
                raise ValueError(
                    f"stop: expected strings that the {name} can do without, got {stop!r}, which every answer has at "
                    "its start; drop the stop string or the grammar"
                )
        least = options.get("min_new_tokens") or 0
        # A token has at least one byte.
        if least > 0 and not reasons_first and (longest := _longest_answer(kind, text)) is not None and least > longest:
            raise ValueError(
                f"min_new_tokens (min_tokens): expected at most {longest}, the bytes of the longest answer that the {name} "
                f"allows, got {least}; lower it or change the grammar"
            )


@functools.lru_cache(_CACHED_GRAMMARS)
def _inspect(kind: str, text: str) -> tuple[str | None, str]:
    """Why the grammar cannot be used, or None; and the text that every answer begins with."""
    import xgrammar

    from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject

    reason = hazard(kind, text)
    if reason is not None or takes_long(kind, text):
        return reason, ""
    try:
        grammar = _byte_backend()._init_value_dispatch((kind, text), False)
    except Exception as error:  # noqa: BLE001 (what SGLang lets through here, the scheduler would meet too)
        return _form_error(kind, error), ""
    if isinstance(grammar, InvalidGrammarObject):
        return _one_line(grammar.error_message), ""
    mask = xgrammar.allocate_token_bitmask(1, _NUM_BYTES + 1)  # SGLang's own is pinned, which needs a device
    grammar.fill_vocab_mask(mask, 0)
    if not bool(mask.any()):
        return "no answer would be legal", ""
    try:
        forced = grammar.try_jump_forward(None)
    except UnicodeDecodeError:
        return "every answer would begin with what is no Unicode text", ""
    return None, "" if forced is None else forced[1]


def _form_error(kind: str, error: Exception) -> str:
    """What to say of an error that is none of xgrammar's own, which explain themselves."""
    if kind == "structural_tag" and isinstance(error, (AssertionError, AttributeError, KeyError, TypeError)):
        missing = f", without {error}" if isinstance(error, KeyError) else ""
        return f"it is no object with type and format, or with structures (begin, schema, end) and triggers{missing}"
    return f"{type(error).__name__} {error}".strip()


@functools.lru_cache(_CACHED_GRAMMARS)
def _longest_answer(kind: str, text: str) -> int | None:
    """Bytes of the longest answer; None for a grammar that has too many answers to look at, or no longest one."""
    import xgrammar

    if takes_long(kind, text):
        return None
    matcher = _byte_backend()._init_value_dispatch((kind, text), False).matcher
    mask = xgrammar.allocate_token_bitmask(1, _NUM_BYTES + 1)
    longest, pending = 0, [b""]
    for _ in range(_MAX_PREFIXES):
        if not pending:
            return longest
        prefix = pending.pop()
        matcher.reset()
        matcher.accept_string(prefix)
        matcher.fill_next_token_bitmask(mask)
        bits = mask[0, :, None] >> torch.arange(32, dtype=torch.int32) & 1
        legal = bits.flatten()[: _NUM_BYTES + 1].nonzero().flatten().tolist()
        if _NUM_BYTES in legal:
            longest = max(longest, len(prefix))
        pending += [prefix + bytes([byte]) for byte in legal if byte != _NUM_BYTES]
    return None


def only_stops_legal(grammar: BaseGrammarObject, stops: Collection[int], vocab_size: int) -> bool:
    """Whether a grammar's state allows none but these tokens. The state stays as it is."""
    import xgrammar

    mask = xgrammar.allocate_token_bitmask(1, vocab_size)  # all tokens, which a grammar that waits leaves alone
    grammar.fill_vocab_mask(mask, 0)
    for token in stops:
        mask[0, token // 32] &= ~torch.tensor(1 << token % 32, dtype=torch.int64).to(torch.int32)
    return not bool(mask.any())


def _one_line(message: str) -> str:
    """xgrammar's message without its timestamp, source line and the expression that it checked."""
    message = re.sub(r"^\[[\d:]+\] \S+:\d+: (?:Check failed: \(.*?\) is false: )?", "", message)
    return " ".join(message.split())[:_MAX_REASON_CHARS]


class _ByteTokenizer:
    """The alphabet of bytes, in the form in which SGLang's backend takes a tokenizer that knows xgrammar."""

    def init_xgrammar(self) -> tuple[Any, None]:
        from xgrammar import TokenizerInfo, VocabType

        vocabulary = [f"<0x{byte:02X}>" for byte in range(_NUM_BYTES)] + ["</s>"]
        return TokenizerInfo(vocabulary, VocabType.BYTE_FALLBACK, stop_token_ids=[_NUM_BYTES]), None


@functools.cache
def _byte_backend() -> XGrammarGrammarBackend:
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend

    return XGrammarGrammarBackend(_ByteTokenizer(), _NUM_BYTES + 1)
