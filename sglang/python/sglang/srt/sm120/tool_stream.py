# SPDX-License-Identifier: Apache-2.0
"""Reasoning and tool calls in a stream whose chunks hold several tokens, as every speculative run makes them.

SGLang's detectors are written for one token a chunk. One that gets a whole call at once reports its name and keeps the
arguments for the next chunk; at the end of the stream there is none, and the client gets the name with empty arguments.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from sglang.srt.sm120.tool_grammar import NativeCalls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.function_call.core_types import StreamingParseResult

# The special tokens of Kimi, DeepSeek and GLM: `<|x|>`, the same with full-width bars, and tags.
_MARKER = re.compile(r"(<[|｜][^<>|｜]+[|｜]>|</?(?:tool_call|arg_key|arg_value)>)")
# Formats whose markers are single tokens of their models, which no chunk cuts.
_DETECTORS = {"KimiK2Detector", "DeepSeekV3Detector", "DeepSeekV31Detector", "Glm4MoeDetector", "Glm47MoeDetector"}


def marker_by_marker(detector: Any, tokenizer: Any = None) -> Any:
    """`detector` as it is, or wrapped to take any chunk if its format is one of Kimi's, DeepSeek's or GLM's.

    A tokenizer of another model spells the markers with several tokens, and a chunk may end inside one. SGLang's detector
    waits for the rest of it, and only its grammars are others.
    """
    if type(detector).__name__ not in _DETECTORS:
        return detector
    return NativeCalls(detector) if _spells(tokenizer, detector.bot_token) else MarkerByMarker(detector)


def _spells(tokenizer: Any, marker: str) -> bool:
    """Whether the marker is several tokens. Without a tokenizer it is taken for one."""
    return tokenizer is not None and len(tokenizer.encode(marker)) > len(tokenizer.encode("")) + 1


class MarkerByMarker(NativeCalls):
    """A tool-call detector that sees one marker at a time; what is not here is the wrapped detector's.

    Text before the first marker passes untouched: the wrapped detector would hold back a `<` at its end, which is lost
    when the stream ends there, and DeepSeek's would remove code fences.
    """

    def __init__(self, detector: Any) -> None:
        super().__init__(detector)
        self._marked = False
        self._reported: dict[int, str] = {}

    @property
    def streamed_args_for_tool(self) -> list[str]:
        """Arguments reported so far, by call; the endpoint adds what is missing at the end of the stream.

        GLM's detector leaves out the braces of a call without arguments in its own record.
        """
        return [self._reported.get(index, "") for index in range(max(self._reported, default=-1) + 1)]

    def parse_streaming_increment(self, new_text: str, tools: Sequence[Any]) -> StreamingParseResult:
        """The text and the calls that `new_text` completes, in their order."""
        from sglang.srt.function_call.core_types import StreamingParseResult

        result = StreamingParseResult()
        for piece in _MARKER.split(new_text):
            self._marked = self._marked or _MARKER.fullmatch(piece) is not None
            if self._marked:
                self._feed(piece, tools, result)
            else:
                result.normal_text += piece
        return result

    def _feed(self, piece: str, tools: Sequence[Any], result: StreamingParseResult) -> None:
        part = self._wrapped.parse_streaming_increment(piece, tools)
        # A detector that has just reported a name has the arguments still in its buffer.
        while part.normal_text or part.calls:
            result.normal_text += part.normal_text
            result.calls.extend(part.calls)
            for call in part.calls:
                self._reported[call.tool_index] = self._reported.get(call.tool_index, "") + call.parameters
            part = self._wrapped.parse_streaming_increment("", tools)


def held_reasoning(detector: Any) -> tuple[str, str] | None:
    """At the end of a stream: what a reasoning detector held back, as (reasoning, text), or None for SGLang's own way.

    SGLang flushes detectors that report their reasoning at its end; one that streams it drops, for example, a last `<`.
    """
    from sglang.srt.parser.reasoning_parser import BaseReasoningFormatDetector

    plain = type(detector).parse_streaming_increment is BaseReasoningFormatDetector.parse_streaming_increment
    if not plain or not detector.stream_reasoning or detector._force_nonempty_content or not detector._buffer:
        return None
    held, detector._buffer = detector._buffer, ""
    return (held, "") if detector._in_reasoning else ("", held)
