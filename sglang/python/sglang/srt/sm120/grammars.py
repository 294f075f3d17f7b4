# SPDX-License-Identifier: Apache-2.0
"""Checks of a grammar where a request enters, so that a bad one gets HTTP 400 before a stream begins.

The grammar is compiled as the scheduler will compile it, but over an alphabet of bytes: that takes a millisecond for a
usual schema, whatever the size of the model's vocabulary.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend

GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
# Named after the request's field in front, since a client of the OpenAI endpoints may not know it.
_ORIGIN = "also from response_format, tools and tool_choice"
_MAX_REASON_CHARS = 200
_NUM_BYTES = 256
_CACHED_GRAMMARS = 256


def check_grammar(options: Mapping[str, Any]) -> None:
    """Refuse a grammar that does not compile with xgrammar, accepts nothing, or begins with one of the stop strings.

    Args:
        options: the sampling options as the client sent them.

    Raises:
        ValueError: naming the field, what was expected and what came.
    """
    for name in GRAMMARS:
        text = options.get(name)
        if not text and text != 0:
            continue
        if not isinstance(text, str):
            kind = type(text).__name__
            raise ValueError(f"{name}: expected a string, got {kind}; serialise it first")  # noqa: TRY004 (HTTP 400)
        reason, begins_with = _inspect("json" if name == "json_schema" else name, text)
        if reason is not None:
            raise ValueError(f"{name} ({_ORIGIN}): expected a grammar that compiles, got an error: {reason}")
        stops = options.get("stop") or ()
        for stop in (stops,) if isinstance(stops, str) else stops:
            if stop and stop in begins_with:
                raise ValueError(
                    f"stop: expected strings that the {name} can do without, got {stop!r}, which every answer has at "
                    "its start; drop the stop string or the grammar"
                )


@functools.lru_cache(_CACHED_GRAMMARS)
def _inspect(kind: str, text: str) -> tuple[str | None, str]:
    """Why the grammar cannot be used, or None; and the text that every answer begins with."""
    import xgrammar

    from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject

    try:
        grammar = _byte_backend()._init_value_dispatch((kind, text), False)
    except Exception as error:  # noqa: BLE001 (what SGLang lets through here, the scheduler would meet too)
        return f"{type(error).__name__} {error}".strip(), ""
    if isinstance(grammar, InvalidGrammarObject):
        return _one_line(grammar.error_message), ""
    mask = xgrammar.allocate_token_bitmask(1, _NUM_BYTES + 1)  # SGLang's own is pinned, which needs a device
    grammar.fill_vocab_mask(mask, 0)
    if not bool(mask.any()):
        return "no answer would be legal", ""
    forced = grammar.try_jump_forward(None)
    return None, "" if forced is None else forced[1]


def _one_line(message: str) -> str:
    """xgrammar's message without its timestamp and source line."""
    return " ".join(re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", message).split())[:_MAX_REASON_CHARS]


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
