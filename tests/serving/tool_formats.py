# SPDX-License-Identifier: Apache-2.0
"""Tool calls as the models of Kimi, DeepSeek and GLM write them, and what a client puts together from a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

Calls = Sequence[tuple[str, dict[str, Any]]]


def kimi(calls: Calls) -> str:
    parts = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(parts)}<|tool_calls_section_end|>"


def deepseek(calls: Calls, line_break: str = "") -> str:
    parts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return f"<｜tool▁calls▁begin｜>{line_break.join(parts)}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Calls) -> str:
    parts = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return f"<｜tool▁calls▁begin｜>{''.join(parts)}<｜tool▁calls▁end｜>"


def glm(calls: Calls, line_break: str = "\n") -> str:
    def value(argument: Any) -> str:
        return argument if isinstance(argument, str) else json.dumps(argument)

    def pairs(arguments: dict[str, Any]) -> str:
        return "".join(
            f"<arg_key>{key}</arg_key>{line_break}<arg_value>{value(argument)}</arg_value>{line_break}"
            for key, argument in arguments.items()
        )

    return line_break.join(f"<tool_call>{name}{line_break}{pairs(arguments)}</tool_call>" for name, arguments in calls)


MARKER = re.compile(r"(<[|｜][^<>|｜]+[|｜]>|</?(?:think|tool_call|arg_key|arg_value)>)")


def tokens_of(text: str) -> list[str]:
    """Markers are one token; the rest falls into words and single other characters."""
    pieces = [piece for piece in MARKER.split(text) if piece]
    return [
        token
        for piece in pieces
        for token in ([piece] if MARKER.fullmatch(piece) else re.findall(r" ?\w+|.|\n", piece))
    ]


def read_stream(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a client puts together from the deltas."""
    found: dict[str, Any] = {"reasoning": "", "content": "", "calls": {}, "finish": None, "logprobs": []}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            found["reasoning"] += delta.get("reasoning_content") or ""
            found["content"] += delta.get("content") or ""
            found["finish"] = choice["finish_reason"] or found["finish"]
            found["logprobs"] += (choice["logprobs"] or {}).get("content", [])
            for call in delta.get("tool_calls") or []:
                entry = found["calls"].setdefault(call["index"], {"ids": [], "names": [], "arguments": ""})
                entry["ids"] += [call["id"]] if call["id"] else []
                entry["names"] += [call["function"]["name"]] if call["function"]["name"] else []
                entry["arguments"] += call["function"]["arguments"] or ""
    return found


# By the name of SGLang's parser, with the separators that the models write.
FORMATS: dict[str, Callable[[Calls], str]] = {
    "kimi_k2": kimi,
    "deepseekv3": lambda calls: deepseek(calls, line_break="\n"),
    "deepseekv31": deepseek_v31,
    "glm47": lambda calls: glm(calls, line_break=""),
}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def strict_tool(name: str, **properties: Any) -> dict[str, Any]:
    """A tool whose arguments are exactly these properties."""
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "strict": True, "parameters": schema}}


STRICT_TOOLS = [strict_tool("add", a=DIGIT, b=DIGIT), strict_tool("get", key={"enum": ["self", "args", "None"]})]
TWO_CALLS: Calls = [("add", {"a": 1, "b": 2}), ("get", {"key": "self"})]
