# SPDX-License-Identifier: Apache-2.0
"""Grammars that end the process which compiles them, or hold it for minutes: refused before the compiler sees them.

Others merely take seconds to compile. Whoever must not wait asks `takes_long` first.

xgrammar reads past a NUL character in a regular expression, past the vocabulary for a token id, and recurses without a
bound into nested JSON. Neither of the first two raises an exception, and nor does the third.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MAX_NESTING = 128  # of arrays and objects; compiling takes time that grows with the cube of it
MAX_REPEATS = 100_000  # of one quantifier; every repetition is a rule of the compiled grammar
# Compiled within half a second on one core. Wildcards in a row, the worst that was found, cost the square of their number.
_QUICK_TEXT, _QUICK_EXPRESSIONS = 16_384, 512
_NUL = "a regular expression without the character NUL expected; write it as \\x00"
_TOKENS = "text expected, which the check of a grammar reads byte by byte, got token ids; write their text"
_TOKEN_FORMATS = frozenset({"token", "exclude_token", "any_tokens", "token_triggered_tags"})
_LITERALS = re.compile(r'"(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*')
_QUANTIFIER = re.compile(r"\{\s*(\d+)\s*(?:,\s*(\d*)\s*)?\}")


def hazard(kind: str, text: str) -> str | None:
    """Why a grammar must not be compiled, or None; what is wrong in other ways is left to the compiler.

    Args:
        kind: "json", "regex", "ebnf" or "structural_tag".
    """
    if kind == "regex":
        return _regex_hazard(text)
    if kind == "ebnf":
        return _ebnf_hazard(text)
    try:
        parts = list(_parts(json.loads(text)))
    except RecursionError:
        return _too_deep()
    except ValueError:
        return None
    if any(depth > MAX_NESTING for depth, _ in parts):
        return _too_deep()
    if kind == "structural_tag" and any(_is_token_format(part) for _, part in parts):
        return _TOKENS
    found = (_ebnf_hazard(rules) if is_ebnf else _regex_hazard(rules) for is_ebnf, rules in _expressions(kind, parts))
    return next((reason for reason in found if reason is not None), None)


def takes_long(kind: str, text: str) -> bool:
    """Whether a grammar without a hazard may take more than half a second to compile."""
    if len(text) > _QUICK_TEXT:
        return True
    expressions = [text]
    if kind in ("json", "structural_tag"):
        try:
            expressions = [rules for _, rules in _expressions(kind, list(_parts(json.loads(text))))]
        except ValueError:
            return False
    repeats = 1
    for rules in expressions:
        for found in _QUANTIFIER.findall(rules):
            repeats *= max(1, *(int(digits or 0) for digits in found))  # they may be nested
    return sum(map(len, expressions)) > _QUICK_EXPRESSIONS or repeats > MAX_REPEATS


def _is_token_format(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("type"), str) and part["type"] in _TOKEN_FORMATS


def _expressions(kind: str, parts: Iterable[tuple[int, Any]]) -> Iterator[tuple[bool, str]]:
    """Expressions inside a schema or a structural tag, each with whether it is EBNF rather than a regular expression."""
    for _, part in parts:
        if isinstance(part, Mapping):
            names = part.get("patternProperties")
            for pattern in (part.get("pattern"), *(names if isinstance(names, Mapping) else ())):
                if isinstance(pattern, str):
                    yield False, pattern
            if kind == "structural_tag" and isinstance(part.get("grammar"), str):
                yield True, part["grammar"]


def _regex_hazard(text: str) -> str | None:
    return _NUL if "\0" in text else _repeats_hazard(text)


def _ebnf_hazard(text: str) -> str | None:
    rules = _LITERALS.sub(" ", text)
    return _TOKENS if re.search(r"\b(?:Exclude)?Token\s*\(", rules) else _repeats_hazard(rules)


def _repeats_hazard(text: str) -> str | None:
    for digits in (part for found in _QUANTIFIER.findall(text) for part in found):
        number = digits.lstrip("0")
        if len(number) > len(str(MAX_REPEATS)) or int(number or 0) > MAX_REPEATS:
            return f"at most {MAX_REPEATS} repetitions expected, got {number[:20]}"
    return None


def _too_deep() -> str:
    return f"at most {MAX_NESTING} nested arrays and objects expected, got more"


def _parts(value: Any) -> Iterator[tuple[int, Any]]:
    """A JSON value and all that is in it, each with the number of arrays and objects around it."""
    pending = [(0, value)]
    while pending:
        depth, part = pending.pop()
        yield depth, part
        inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        pending += [(depth + 1, each) for each in inner]
