# SPDX-License-Identifier: Apache-2.0
"""The grammars of tool calls allow what the models write, and no second call where one is asked for.

The texts are those of the models' own templates; SGLang's parsers are held against the same texts in test_streaming.
"""

from __future__ import annotations

from typing import Any

import pytest
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string

from serving.tool_formats import FORMATS, STRICT_TOOLS, TWO_CALLS
from sglang.srt.entrypoints.openai.protocol import Tool, ToolChoice, ToolChoiceFuncName
from sglang.srt.function_call.function_call_parser import FunctionCallParser

TOOLS = [Tool.model_validate(tool) for tool in STRICT_TOOLS]
BAD_CALL = ("add", {"a": 12, "b": 2})
NAMED = ToolChoice(function=ToolChoiceFuncName(name="get"))


def constraint(name: str, choice: Any, parallel: bool) -> Any:
    return FunctionCallParser(TOOLS, name).get_structure_constraint(choice, parallel_tool_calls=parallel)


def accepts(name: str, choice: Any, text: str, parallel: bool = True) -> bool:
    kind, tag = constraint(name, choice, parallel)
    assert kind == "structural_tag"
    return _is_grammar_accept_string(Grammar.from_structural_tag(tag), text)


@pytest.mark.parametrize("name", FORMATS)
def test_forced_calls_are_those_of_the_model(name: str) -> None:
    """BUG-034: one section with any number of calls, and nothing else."""
    write = FORMATS[name]
    assert accepts(name, "required", write(TWO_CALLS[:1])) and accepts(name, "required", write(TWO_CALLS))
    assert not accepts(name, "required", "No call.")
    assert not accepts(name, "required", write([BAD_CALL])) and not accepts(name, "required", write([("x", {})]))
    assert accepts(name, NAMED, write(TWO_CALLS[1:]))
    assert not accepts(name, NAMED, write(TWO_CALLS[:1])) and not accepts(name, NAMED, write(TWO_CALLS))


@pytest.mark.parametrize("name", FORMATS)
def test_one_call_is_all_where_parallel_calls_are_not_wanted(name: str) -> None:
    write = FORMATS[name]
    assert accepts(name, "required", write(TWO_CALLS[:1]), parallel=False)
    assert not accepts(name, "required", write(TWO_CALLS), parallel=False)
    assert accepts(name, NAMED, write(TWO_CALLS[1:]), parallel=False)
    for text, wanted in (("", True), (write(TWO_CALLS[:1]), True), (write(TWO_CALLS), False)):
        assert accepts(name, "auto", f"I look it up.{text}", parallel=False) is wanted


@pytest.mark.parametrize("name", FORMATS)
def test_calls_that_nobody_forces_need_no_grammar(name: str) -> None:
    loose = [Tool.model_validate({"type": "function", "function": {"name": "add"}})]
    assert FunctionCallParser(loose, name).get_structure_constraint("auto") is None
