# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities: of chosen token ids in mixed batches, and of the tokens of a chat stream."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.layers.logprob_processor import LogprobStage

Entries = dict[str, Any]


def asked_token_ids(asked: list[list[int] | None], stage: LogprobStage) -> list[list[int] | None]:
    """The token ids of each row, none as an empty list in decode; prefill tells None and empty apart."""
    return [ids or [] for ids in asked] if stage.name == "DECODE" else asked


def settle_step(
    serving: OpenAIServingChat,
    request: ChatCompletionRequest,
    content: dict[str, Any],
    index: int,
    delta: str,
    entries: Entries | None,
) -> tuple[Entries | None, list[str]]:
    """Give the entries of a streamed step their own alternatives, and a chunk of their own where there is no other.

    SGLang repeats the alternatives of the first token for all tokens of a step. It attaches the entries to the step's
    text; a step without text, such as that of the end token, it leaves out unless a parser is active.

    Args:
        content: the answer so far, as the tokenizer manager gives it.
        index: of the choice.
        delta: the step's text.
        entries: the step's ``logprobs`` as SGLang made them, None where none are asked for.

    Returns:
        The entries that are left for a chunk with text, and the chunks to send before it.
    """
    if entries is None:
        return None, []
    if request.top_logprobs and len(entries["content"]) > 1:
        entries = _aligned(serving, content["meta_info"], len(entries["content"]))
    if delta or serving.reasoning_parser or serving.tool_call_parser:
        return entries, []
    return None, [_chunk(serving, request, content, index, entries)]


def _aligned(serving: OpenAIServingChat, meta: dict[str, Any], num_tokens: int) -> Entries:
    """The entries of the last `num_tokens` tokens that `meta` counts; its lists may have grown since."""
    from sglang.srt.entrypoints.openai.protocol import ChoiceLogprobs
    from sglang.srt.entrypoints.openai.utils import to_openai_style_logprobs

    parts_only = serving.tokenizer_manager.server_args.incremental_streaming_output
    end = num_tokens if parts_only else meta["output_token_logprobs_length"]
    logprobs = to_openai_style_logprobs(
        output_token_logprobs=meta["output_token_logprobs"][end - num_tokens : end],
        output_top_logprobs=meta["output_top_logprobs"][end - num_tokens : end],
    )
    return ChoiceLogprobs(content=serving._process_logprobs_tokens(logprobs, use_token_index=True)).model_dump()


def _chunk(
    serving: OpenAIServingChat, request: ChatCompletionRequest, content: dict[str, Any], index: int, entries: Entries
) -> str:
    """An event with entries alone, in the form that SGLang gives it beside a parser."""
    from sglang.srt.entrypoints.openai.sse_utils import build_sse_content
    from sglang.srt.entrypoints.openai.usage_processor import UsageProcessor

    meta, usage = content["meta_info"], None
    if request.stream_options is not None and request.stream_options.continuous_usage_stats:
        usage = UsageProcessor.calculate_token_usage(
            prompt_tokens=serving._reported_prompt_tokens(meta),
            reasoning_tokens=meta.get("reasoning_tokens", 0),
            completion_tokens=meta.get("completion_tokens", 0),
            cached_tokens=serving._continuous_usage_cached_details(content),
        ).model_dump()
    return build_sse_content(
        chunk_id=meta["id"], created=int(time.time()), model=request.model, index=index, logprobs=entries, usage=usage
    )
