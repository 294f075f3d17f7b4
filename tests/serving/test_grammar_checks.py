# SPDX-License-Identifier: Apache-2.0
"""What is said about a grammar before its request reaches the scheduler."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang.srt.sm120 import grammars
from sglang.srt.sm120.grammars import check_grammar

OBJECT = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
TAG = '{"type": "structural_tag", "format": {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}}'

FORMAT = '{"type": "structural_tag", "format": {%s}}'


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
        {"regex": "yes|no{1,3}", "min_new_tokens": 4},
        {"regex": "[0-9]{3}", "min_new_tokens": 90},
        {"regex": "[0-9]+", "min_new_tokens": 90},
        {"regex": r"a\x00b", "stop": ["x"]},
        {"regex": "a{100000}"},
        {"json_schema": '{"const": "\\u0000"}'},
        {"json_schema": '{"const": ' + "[" * 127 + "]" * 127 + "}"},
        {"ebnf": 'root ::= "Token(999999)" [Token("{9999999}] # Token(999999)'},
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
        ({"structural_tag": "{}"}, "structural_tag .*got an error: it is no object with type and format, or with stru"),
        ({"structural_tag": "5"}, "structural_tag .*got an error: it is no object with type and format"),
        ({"structural_tag": '{"structures": [{"end": "x"}], "triggers": ["x"]}'}, "structural_tag .*, without 'begin'"),
        ({"json_schema": OBJECT, "stop": "{"}, "stop: expected strings that the json_schema can do without, got '{'"),
        ({"regex": "def [a-z]+", "stop": ["x", "ef "]}, "stop: .*regex can do without, got 'ef '"),
        ({"structural_tag": TAG, "stop": ["<t>"]}, "stop: .*structural_tag can do without, got '<t>'"),
        ({"regex": "yes|no{1,3}", "min_new_tokens": 5}, r"min_new_tokens \(min_tokens\): .*at most 4.*regex.*got 5"),
        ({"regex": "\u20ac?", "min_new_tokens": 4}, "min_new_tokens .*at most 3.*got 4"),
        ({"regex": "\0"}, "regex .*without the character NUL"),
        ({"regex": "a{100001}"}, "regex .*at most 100000 repetitions expected, got 100001"),
        ({"regex": r"\ud800"}, "regex .*no Unicode text"),
        ({"ebnf": 'root ::= "a"{2,99999999999}'}, "ebnf .*at most 100000 repetitions expected, got 99999999999"),
        ({"ebnf": "root ::= Token(99999999)"}, "ebnf .*text expected.*token ids"),
        ({"json_schema": '{"type": "string", "pattern": "\\u0000"}'}, "json_schema .*without the character NUL"),
        ({"json_schema": '{"patternProperties": {"\\u0000": {}}}'}, "json_schema .*without the character NUL"),
        ({"json_schema": '{"const": ' + "[" * 129 + "]" * 129 + "}"}, "json_schema .*at most 128 nested"),
        ({"json_schema": '{"const": ' + "[" * 50_000 + "]" * 50_000 + "}"}, "json_schema .*at most 128 nested"),
        ({"structural_tag": FORMAT % '"type": "regex", "pattern": "\\u0000"'}, "structural_tag .*the character NUL"),
        ({"structural_tag": FORMAT % '"type": "token", "token": 99999'}, "structural_tag .*token ids"),
        (
            {"structural_tag": FORMAT % '"type": "grammar", "grammar": "root ::= Token(99999)"'},
            "structural_tag .*token",
        ),
        ({"ebnf": 'root ::= ""', "min_new_tokens": 1}, "min_new_tokens .*at most 0.*ebnf.*got 1"),
    ],
)
def test_unusable_grammars_are_named(options: dict[str, Any], message: str) -> None:
    """BUG-034: the field, what was expected and what came, in one line."""
    with pytest.raises(ValueError, match=message) as error:
        check_grammar(options)
    assert "\n" not in str(error.value) and "/project/" not in str(error.value)
    assert "Check failed" not in str(error.value), "an expression of the library's source says nothing to a client"


def test_reasoning_may_be_longer_than_the_grammar_s_answers() -> None:
    check_grammar({"regex": "yes|no", "min_new_tokens": 9}, reasons_first=True)


@pytest.mark.parametrize(
    "options",
    [
        {"regex": ".*" * 300},
        {"regex": "((a{1000}){1000}){1000}"},
        {"regex": "|".join(str(number) for number in range(1000))},
        {"ebnf": "root ::= " + " ".join(["[a-z]*"] * 100)},
        {"json_schema": json.dumps({"enum": list(range(20_000))})},
        {"json_schema": json.dumps({"anyOf": [{"type": "string", "pattern": ".*" * 100}] * 3})},
        {"structural_tag": FORMAT % ('"type": "grammar", "grammar": "%s"' % ("a" * 600))},
    ],
)
def test_large_grammars_are_left_to_the_scheduler(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """The check runs where requests arrive: while it compiles, nobody is answered."""
    compiled: list[object] = []
    monkeypatch.setattr(grammars, "_byte_backend", lambda: compiled.append(None))
    check_grammar({**options, "min_new_tokens": 3})
    assert not compiled
