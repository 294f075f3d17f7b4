# SPDX-License-Identifier: Apache-2.0
"""SGLang's OpenAI endpoints without a model: they answer with a text that is known, cut into chunks that are given.

The endpoint objects are SGLang's own. Only their source of tokens is replaced, so that one text can be streamed with
every run length that a verify step may accept.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion

PROMPT_TOKENS = 7


@dataclass
class Source:
    """What a tokenizer manager offers to the endpoints, answering with `tokens` in chunks of `lengths` tokens.

    Logprobs are those of the position: token i has -i, and its one alternative is itself.
    """

    tokens: Sequence[str]
    lengths: Sequence[int]
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    finish: dict[str, Any] = field(default_factory=lambda: {"type": "stop", "matched": None})

    def __post_init__(self) -> None:
        self.server_args = SimpleNamespace(
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            default_chat_template_kwargs=None,
            incremental_streaming_output=False,
            stream_response_default_include_usage=False,
            enable_cache_report=False,
            tokenizer_metrics_allowed_custom_labels=None,
        )
        self.model_config = SimpleNamespace(
            get_default_sampling_params=dict, hf_config=SimpleNamespace(model_type="toy", architectures=["Toy"])
        )
        self.tokenizer = MagicMock(encode=lambda text: [], chat_template=None)
        self.request_logger = MagicMock()

    def generate_request(self, adapted: Any, raw: Any) -> AsyncIterator[dict[str, Any]]:
        """The answers in the order of the stream; a request that does not stream gets the last one alone."""
        return self._answers(adapted.stream)

    def create_abort_task(self, adapted: Any) -> None:
        """Nothing runs that would have to be aborted."""

    async def _answers(self, stream: bool) -> AsyncIterator[dict[str, Any]]:
        ends = [sum(self.lengths[: index + 1]) for index in range(len(self.lengths))]
        assert ends[-1] == len(self.tokens)
        for end in ends if stream else ends[-1:]:
            yield self._answer(end)

    def _answer(self, end: int) -> dict[str, Any]:
        meta = {
            "id": "answer",
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": end,
            "cached_tokens": 0,
            "weight_version": "default",
            "finish_reason": dict(self.finish) if end == len(self.tokens) else None,
            "output_token_logprobs": [(-float(i), i, self.tokens[i]) for i in range(end)],
            "output_top_logprobs": [[(-float(i), i, self.tokens[i])] for i in range(end)],
            "output_token_logprobs_length": end,
        }
        return {"text": "".join(self.tokens[:end]), "index": 0, "output_ids": list(range(end)), "meta_info": meta}


def whole_chat(source: Source, **options: Any) -> dict[str, Any]:
    """The answer of the chat endpoint without streaming."""
    return _whole(_chat(source), _chat_request(False, options))


def streamed_chat(source: Source, **options: Any) -> list[dict[str, Any]]:
    """The events of the chat endpoint's stream."""
    return _events(_chat(source), _chat_request(True, options))


def whole_completion(source: Source, **options: Any) -> dict[str, Any]:
    """The answer of the completions endpoint without streaming."""
    return _whole(_completions(source), CompletionRequest(model="toy", prompt="x", stream=False, **options))


def streamed_completion(source: Source, **options: Any) -> list[dict[str, Any]]:
    """The events of the completions endpoint's stream."""
    return _events(_completions(source), CompletionRequest(model="toy", prompt="x", stream=True, **options))


def random_lengths(rng: random.Random, num_tokens: int, longest: int = 16) -> list[int]:
    """Run lengths from 1 to `longest` that add up to `num_tokens`."""
    lengths: list[int] = []
    while (left := num_tokens - sum(lengths)) > 0:
        lengths.append(min(left, rng.randint(1, longest)))
    return lengths


def _chat(source: Source) -> OpenAIServingChat:
    template = SimpleNamespace(force_reasoning=False, reasoning_config=None, chat_template_name=None)
    return OpenAIServingChat(source, template)


def _completions(source: Source) -> OpenAIServingCompletion:
    return OpenAIServingCompletion(source, SimpleNamespace(completion_template_name=None))


def _chat_request(stream: bool, options: dict[str, Any]) -> ChatCompletionRequest:
    return ChatCompletionRequest(model="toy", messages=[{"role": "user", "content": "x"}], stream=stream, **options)


def _whole(endpoint: Any, request: Any) -> dict[str, Any]:
    adapted = SimpleNamespace(stream=False)
    answer = asyncio.run(endpoint._handle_non_streaming_request(adapted, request, None))
    return json.loads(answer.model_dump_json())


def _events(endpoint: Any, request: Any) -> list[dict[str, Any]]:
    async def collect() -> list[str]:
        response = await endpoint._handle_streaming_request(SimpleNamespace(stream=True), request, None)
        return [part async for part in response.body_iterator]

    lines = "".join(asyncio.run(collect())).splitlines()
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]
