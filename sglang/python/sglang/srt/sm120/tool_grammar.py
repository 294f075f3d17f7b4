# SPDX-License-Identifier: Apache-2.0
"""Grammars of tool calls in the formats of Kimi, DeepSeek and GLM.

SGLang 0.5.17 makes them without ``parallel_tool_calls``, so that false has no effect. Those of DeepSeek do not fit what
the models write: V3's ends the section of calls after the first one, and V3.1's leaves out the marker that begins it,
without which the parser finds no call in the answer. xgrammar has tags for both.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xgrammar import StructuralTag

    from sglang.srt.entrypoints.openai.protocol import Tool, ToolChoice

# What xgrammar calls the formats whose detectors do not name one.
_NAMES = {"DeepSeekV3Detector": "deepseek_r1", "DeepSeekV31Detector": "deepseek_v3_1"}


class NativeCalls:
    """A tool-call detector with grammars that fit its format; what is not here is the wrapped detector's."""

    def __init__(self, detector: Any) -> None:
        self._wrapped = detector

    def __getattr__(self, name: str) -> Any:
        if name == "_wrapped":
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    def get_structural_tag_name(self) -> str | None:
        """xgrammar's name of the format, or None where it has none."""
        return _NAMES.get(type(self._wrapped).__name__) or self._wrapped.get_structural_tag_name()

    def get_structural_tag(
        self,
        tools: Sequence[Tool] | None = None,
        tool_choice: ToolChoice | Literal["auto", "required"] = "auto",
        thinking_mode: bool = False,
        parallel_tool_calls: bool = True,
    ) -> StructuralTag | None:
        """The grammar of an answer with calls, at most one without `parallel_tool_calls`; None for SGLang's own way."""
        from sglang.srt.function_call.base_format_detector import BaseFormatDetector

        if type(self._wrapped).__name__ in _NAMES:
            tag = BaseFormatDetector.get_structural_tag(self, tools, tool_choice, thinking_mode)
        else:
            tag = self._wrapped.get_structural_tag(tools, tool_choice, thinking_mode)
        return tag if tag is None or parallel_tool_calls else with_one_call(tag)

    def get_auto_tool_call_structural_tag(
        self, tools: Sequence[Tool] | None = None, thinking_mode: bool = False, parallel_tool_calls: bool = True
    ) -> StructuralTag | None:
        """The grammar where the model chooses whether to call: only one call at most needs one."""
        return None if parallel_tool_calls else self.get_structural_tag(tools, "auto", thinking_mode, False)


def with_one_call(tag: StructuralTag) -> StructuralTag:
    """The same grammar, whose repeated parts end after the first one."""
    found = json.loads(tag.model_dump_json(by_alias=True))
    _end_after_first(found["format"])
    return type(tag).model_validate(found)


def _end_after_first(part: Any) -> None:
    if isinstance(part, list):
        for element in part:
            _end_after_first(element)
    elif isinstance(part, dict):
        if part.get("type") in ("triggered_tags", "tags_with_separator"):
            part["stop_after_first"] = True
        for name, inner in part.items():
            if name != "json_schema":
                _end_after_first(inner)
