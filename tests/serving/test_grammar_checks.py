# SPDX-License-Identifier: Apache-2.0
"""What is said about a grammar before its request reaches the scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from sglang.srt.sm120.grammars import check_grammar

OBJECT = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
TAG = '{"type": "structural_tag", "format": {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}}'


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"json_schema": OBJECT},
        {"json_schema": "$$ANY$$", "stop": ["{"]},
        {"json_schema": OBJECT, "stop": ["}", "\n\n"]},
        {"json_schema": "", "regex": None},
        {"regex": "[0-9]+", "stop": "1"},
        {"regex": "\u20ac?a", "stop": [""]},
        {"ebnf": 'root ::= "a" | "b"', "stop": ["a"]},
        {"structural_tag": TAG},
    ],
)
def test_usable_grammars_pass(options: dict[str, Any]) -> None:
    check_grammar(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json_schema": 5}, "json_schema: expected a string, got int; serialise it first"),
        ({"regex": False}, "regex: expected a string, got bool"),
        (
            {"json_schema": "{"},
            r"json_schema \(also from response_format.*compiles, got an error: .*Failed to parse JSON",
        ),
        ({"json_schema": "[]"}, "should be an object or bool"),
        ({"ebnf": 'root ::= root "a"'}, "no answer would be legal"),
        ({"regex": "(a"}, "regex .*compiles, got an error: Regex parsing error"),
        ({"ebnf": "foo"}, "ebnf .*compiles, got an error: EBNF parser error at line 1"),
        ({"structural_tag": "{}"}, "structural_tag .*compiles, got an error: AssertionError"),
        ({"structural_tag": '{"structures": [{"end": "x"}], "triggers": ["x"]}'}, "structural_tag .*KeyError 'begin'"),
        ({"json_schema": OBJECT, "stop": "{"}, "stop: expected strings that the json_schema can do without, got '{'"),
        ({"regex": "def [a-z]+", "stop": ["x", "ef "]}, "stop: .*regex can do without, got 'ef '"),
        ({"structural_tag": TAG, "stop": ["<t>"]}, "stop: .*structural_tag can do without, got '<t>'"),
    ],
)
def test_unusable_grammars_are_named(options: dict[str, Any], message: str) -> None:
    """BUG-034: the field, what was expected and what came, in one line."""
    with pytest.raises(ValueError, match=message) as error:
        check_grammar(options)
    assert "\n" not in str(error.value) and "/project/" not in str(error.value)
