# SPDX-License-Identifier: Apache-2.0
"""Checks of a request before it reaches the scheduler, where a bad value would end every other request too.

SGLang 0.5.17 passes token ids, counts and biases on as the client sent them: an id outside the vocabulary, a top_k beyond
int32 or a bias beyond float32 raises inside the forward pass, and the server stops.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.sm120.grammars import check_grammar
from sglang.srt.speculative.ddtree_algorithm import ALGORITHM, is_ddtree
from sglang.srt.speculative.ddtree_args import budgets_of
from sglang.srt.speculative.ddtree_budget import REQUEST_PARAMETER

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

MAX_INT32 = 2**31 - 1
MAX_FLOAT32 = 3.4028234e38
_COUNTS = ("max_new_tokens", "min_new_tokens", "top_k", "n", "stream_interval")
_NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_FLAGS = ("ignore_eos", "no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens")
_STOP_TEXTS = ("stop", "stop_regex")
# Fields that SGLang fills in itself, or it would take the options for already checked.
_INTERNAL = ("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized")


def check_request(obj: Any, input_ids: Sequence[int] | None, server_args: ServerArgs, vocab_size: int) -> None:
    """Refuse a request, generation or embedding, that cannot be served; a ValueError becomes HTTP 400.

    Args:
        obj: the request as the client sent it; ``sampling_params`` is a mapping.
        input_ids: token ids of its prompt, from the client or the tokenizer.

    Raises:
        ValueError: naming the option, what was expected and what came.
    """
    if getattr(obj, "input_ids", None) is not None and input_ids:
        lowest, highest = min(input_ids), max(input_ids)
        if lowest < 0 or highest >= vocab_size:
            found = lowest if lowest < 0 else highest
            raise ValueError(f"input_ids: expected token ids from 0 to {vocab_size - 1}, got {found}")
    options = getattr(obj, "sampling_params", None)
    if not isinstance(options, Mapping):
        return
    _check_names(options)
    _check_values(options)
    _check_logprobs(obj, vocab_size)
    _check_budget(options, server_args)
    _check_stops(options, vocab_size)
    if server_args.grammar_backend == "xgrammar":
        check_grammar(options)
    processor = getattr(obj, "custom_logit_processor", None)
    if processor and server_args.enable_custom_logit_processor:
        _check_processor(processor)
    hidden_states = getattr(obj, "return_hidden_states", None)
    reason = speculation_refusal(server_args.speculative_algorithm, hidden_states)
    if reason is not None:
        raise ValueError(reason)


def check_response_format(value: Any) -> None:
    """Refuse a ``response_format`` that is no object, or whose schema is none.

    Raises:
        ValueError: naming the field; pydantic makes HTTP 400 of it.
    """
    parts = {"response_format": value}
    if isinstance(value, Mapping):
        parts["response_format.schema"] = schema = value.get("schema")
        if isinstance(schema, Mapping):
            parts["response_format.schema.properties"] = schema.get("properties")
    for name, part in parts.items():
        if part is not None and not isinstance(part, Mapping):
            raise ValueError(f"{name}: expected an object, got {part!r}")


def _check_names(options: Mapping[str, Any]) -> None:
    from sglang.srt.sampling.sampling_params import SamplingParams

    for name in options:
        if name not in SamplingParams.__struct_fields__ or name in _INTERNAL:
            raise ValueError(f"sampling_params: expected the options of SamplingParams, got {name!r}; drop it")


def _check_values(options: Mapping[str, Any]) -> None:
    for name in _COUNTS:
        value = options.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value > MAX_INT32):
            raise ValueError(f"{name}: expected an integer of at most {MAX_INT32}, got {value!r}")
    for name in _NUMBERS:
        value = options.get(name)
        if value is not None and not _is_number(value):
            raise ValueError(f"{name}: expected a number, got {value!r}")
    for name in _FLAGS:
        value = options.get(name)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{name}: expected true or false, got {value!r}")
    bias = options.get("logit_bias")
    for token, value in bias.items() if isinstance(bias, Mapping) else ():
        if not _is_number(value) or not abs(value) <= MAX_FLOAT32:
            raise ValueError(f"logit_bias: expected a finite float32 for token {token}, got {value!r}")


def _check_budget(options: Mapping[str, Any], server_args: ServerArgs) -> None:
    """A request may lower the tree's budget: ``custom_params: {"ddtree_budget": n}``."""
    custom = options.get("custom_params")
    if not isinstance(custom, Mapping) or (budget := custom.get(REQUEST_PARAMETER)) is None:
        return
    if not is_ddtree(server_args.speculative_algorithm):
        raise ValueError(f"custom_params.{REQUEST_PARAMETER}: only with --speculative-algorithm DDTREE; drop it")
    largest = budgets_of(server_args)[-1]
    if isinstance(budget, bool) or not isinstance(budget, int) or not 1 <= budget <= largest:
        raise ValueError(f"custom_params.{REQUEST_PARAMETER}: expected an integer from 1 to {largest}, got {budget!r}")


def _check_stops(options: Mapping[str, Any], vocab_size: int) -> None:
    for name in _STOP_TEXTS:
        value = options.get(name)
        texts = [value] if isinstance(value, str) else [] if value is None else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{name}: expected a string or a list of strings, got {value!r}")
        for text in texts if name == "stop_regex" else ():
            try:
                re.compile(text)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"stop_regex: expected regular expressions, got {text!r}: {error}") from None
    token_ids = options.get("stop_token_ids") or []
    for token in token_ids if isinstance(token_ids, list) else [token_ids]:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise ValueError(f"stop_token_ids: expected token ids from 0 to {vocab_size - 1}, got {token!r}")


def _check_logprobs(obj: Any, vocab_size: int) -> None:
    """More alternatives than tokens, or a start before the prompt, would raise in the forward pass."""
    bounds = {"top_logprobs_num": (0, vocab_size), "logprob_start_len": (-1, MAX_INT32)}
    for name, (lowest, highest) in bounds.items():
        value = getattr(obj, name, None)
        if isinstance(value, int) and not lowest <= value <= highest:
            raise ValueError(f"{name}: expected an integer from {lowest} to {highest}, got {value}")


def _check_processor(text: Any) -> None:
    """The scheduler loads the processor when it builds a batch, and stops when that fails."""
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    try:
        CustomLogitProcessor.from_str(text)
    except Exception as error:
        raise ValueError(f"custom_logit_processor: expected a class from to_str(), got {error!r}") from error


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def speculation_refusal(algorithm: str | None, return_hidden_states: Any) -> str | None:
    """Why this speculative algorithm, as resolved from the command line, cannot serve a request, or None.

    Verification captures the layers that the drafter reads, not the last one, which the option promises.
    """
    if return_hidden_states and algorithm in (ALGORITHM, "DFLASH"):
        return (
            f"return_hidden_states: not supported with --speculative-algorithm {algorithm}; "
            "drop it or use a server without speculative decoding"
        )
    return None


def admission_refusal(req: Any) -> str | None:
    """The scheduler's last check of a request in the DFLASH family, for clients that bypass the tokenizer's.

    Seeded min-p is refused for DFLASH too: SGLang's sampler asserts on it in prefill, and the scheduler would stop.
    """
    from sglang.srt.runtime_context import get_exec, get_spec

    params, algorithm = req.sampling_params, get_spec().speculative_algorithm
    reason = speculation_refusal(algorithm, req.return_hidden_states)
    if reason is not None or not get_exec().deterministic.enable_deterministic_inference:
        return reason
    if params.min_p > 0:
        return "min_p: not supported with --enable-deterministic-inference; drop the option or the flag"
    if params.sampling_seed is not None and params.top_k > 1 and not is_ddtree(algorithm):
        return f"sampling_seed: not supported with --speculative-algorithm {algorithm}; drop it or use DDTREE"
    return None
