# SPDX-License-Identifier: Apache-2.0
"""The form of a request: which names there are, and which values each of them takes.

`/generate` takes sampling parameters as a bare mapping. SGLang 0.5.17 reads them in three processes and finds a value of
another form where it is first used: `n` makes HTTP 500, or as many requests as memory holds; a `skip_special_tokens` that
is no boolean ends the detokenizer, a list for a single prompt the scheduler, and with either the server. So does a session
that is to be replaced whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_FLOAT32 = 3.4028234e38
# What a temperature of 1e-6 divides must fit float32: an infinite logit makes NaN of the probabilities, and drawing from
# them ends the server. SGLang takes lower temperatures for greedy.
MAX_BIAS = 1e30
MIN_REPETITION_PENALTY = 1e-20
# Every sample is a request of its own, made before any of them is queued.
MAX_SAMPLES = 4096
_MAX_ERRORS = 8  # described in one answer


class _Form(NamedTuple):
    expected: str
    holds: Callable[[Any], bool]


def is_integer(value: object) -> bool:
    """Whether `value` is an int; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether `value` is an int or a float that is not NaN and fits fp32; True and False are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_FLOAT32


def _texts(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(part, str) for part in value))


def _patterns(value: Any) -> bool:
    try:
        return _texts(value) and all(re.compile(part) for part in ([value] if isinstance(value, str) else value))
    except (re.error, RecursionError, OverflowError):
        return False


def _biases(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        str(token).isascii() and str(token).isdigit() and is_number(bias) and abs(bias) <= MAX_BIAS
        for token, bias in value.items()
    )


def _parameters(value: Any, depth: int = 2) -> bool:
    """What reaches the scheduler whole: scalars, lists of them, mappings from text to either."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) <= MAX_INT64
    if isinstance(value, list):
        return depth > 0 and all(_parameters(part, 0) for part in value)
    if isinstance(value, Mapping):
        return depth > 0 and all(isinstance(key, str) and _parameters(part, depth - 1) for key, part in value.items())
    return value is None or isinstance(value, (bool, float, str))


_COUNT = _Form(f"an integer of at most {MAX_INT32}", lambda value: is_integer(value) and value <= MAX_INT32)
_NUMBER = _Form("a number", is_number)
_FLAG = _Form("true or false", lambda value: isinstance(value, bool))
_OBJECT = _Form("an object", lambda value: isinstance(value, Mapping))
_TEXT = _Form("a string", lambda value: isinstance(value, str))
_FORMS = {
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "top_k"), _COUNT),
    "n": _Form(f"an integer from 1 to {MAX_SAMPLES}", lambda value: is_integer(value) and 1 <= value <= MAX_SAMPLES),
    "stream_interval": _Form("an integer from 1", lambda value: is_integer(value) and 1 <= value <= MAX_INT32),
    "sampling_seed": _Form("an int64", lambda value: is_integer(value) and abs(value) <= MAX_INT64),
    **dict.fromkeys(("temperature", "top_p", "min_p"), _NUMBER),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), _NUMBER),
    "repetition_penalty": _Form(
        f"a number from {MIN_REPETITION_PENALTY}", lambda value: is_number(value) and value >= MIN_REPETITION_PENALTY
    ),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"), _FLAG),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), _TEXT),
    "stop": _Form("a string or a list of strings", _texts),
    "stop_regex": _Form("a regular expression or a list of them", _patterns),
    "stop_token_ids": _Form(
        "a list of token ids", lambda value: isinstance(value, list) and all(is_integer(token) for token in value)
    ),
    "logit_bias": _Form(f"token ids with a number from {-MAX_BIAS} to {MAX_BIAS} each", _biases),
    "custom_params": _Form(
        "a mapping of strings to scalars, lists or mappings of scalars",
        lambda value: isinstance(value, Mapping) and _parameters(value),
    ),
}
OPTIONS = tuple(_FORMS)
# Fields of OpenAI's API that say who asks and how to bill it: no text depends on them.
WITHOUT_EFFECT = frozenset(
    {"metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store"}
)


# Fields that the OpenAI endpoints declare and never read, with the values that ask for nothing.
_UNREAD: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "suffix": (None, ""),
    "session_params": (None,),
    "custom_labels": (None,),
}
# One value for all prompts of a request, or a list with one for each.
_PER_PROMPT = (
    *("sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num", "return_sampling_mask"),
    *("return_hidden_states", "lora_path", "custom_logit_processor", "extra_key", "positional_embed_overrides"),
)
_SESSION = {
    "id": _TEXT,
    "rid": _TEXT,
    "offset": _Form("an integer", lambda value: is_integer(value) and abs(value) <= MAX_INT32),
    "replace": _FLAG,
    "drop_previous_output": _FLAG,
}


def check_form(obj: Any, takes_media: bool = False) -> None:
    """Refuse a request of another form than SGLang reads, before it is normalized; a ValueError becomes HTTP 400.

    Args:
        obj: the generation or embedding request as the client sent it.
        takes_media: whether the model reads images, videos or audio; one that does not would drop them.

    Raises:
        ValueError: naming the option, what was expected and what came.
    """
    num_prompts = _num_prompts(obj)
    for name in _PER_PROMPT:
        value = getattr(obj, name, None)
        if isinstance(value, list) and len(value) != num_prompts:
            expected = "a single value" if num_prompts is None else f"one value for each of {num_prompts} prompts"
            raise ValueError(f"{name}: expected {expected}, got {_shortened(value)}")
    given = getattr(obj, "sampling_params", None)
    for options in given if isinstance(given, list) else [{} if given is None else given]:
        _check_mapping("sampling_params", options, _FORMS)
    session = getattr(obj, "session_params", None)
    if session is not None:
        _check_mapping("session_params", session, _SESSION)
        if session.get("replace") and session.get("rid") is None:
            raise ValueError(
                "replace: expected the rid of the turn to replace with it, got none; open a session instead"
            )
    if not takes_media:
        _check_no_media(obj)
    _check_internal(obj)


def _num_prompts(obj: Any) -> int | None:
    """Prompts of a request that is a list of them, None for one that has a single prompt."""
    text, token_ids = getattr(obj, "text", None), getattr(obj, "input_ids", None)
    embeddings = getattr(obj, "input_embeds", None)
    if text is not None and token_ids is not None:
        raise ValueError("input_ids: expected either text or input_ids, got both; drop one")
    if text is not None:
        return len(text) if isinstance(text, list) else None
    if token_ids is not None:
        return len(token_ids) if token_ids and isinstance(token_ids[0], list) else None
    if embeddings is not None:
        if not embeddings or not all(embeddings):
            raise ValueError("input_embeds: expected vectors of numbers, got an empty list")
        return len(embeddings) if isinstance(embeddings[0][0], list) else None
    return None


def _check_no_media(obj: Any) -> None:
    from sglang.srt.multimodal.mm_utils import has_valid_data

    for name in ("image_data", "video_data", "audio_data"):
        if has_valid_data(getattr(obj, name, None)):
            raise ValueError(f"{name}: expected none, since the model reads text alone, got a value; drop it")


def _check_internal(obj: Any) -> None:
    """Fields that SGLang fills in itself, or its own callers do, and that HTTP must not; and one that nothing reads."""
    if getattr(obj, "return_entropy", False):
        raise ValueError("return_entropy: expected false, since nothing computes it, got true; drop it")
    if getattr(obj, "lora_id", None) is not None:
        raise ValueError("lora_id: expected none, since the server looks it up, got a value; use lora_path")
    overrides = getattr(obj, "positional_embed_overrides", None)
    if overrides is not None:
        from sglang.srt.managers.embed_types import PositionalEmbeds

        parts = overrides if isinstance(overrides, list) else [overrides]
        if not all(part is None or isinstance(part, PositionalEmbeds) for part in parts):
            raise ValueError("positional_embed_overrides: expected embeddings of the Python API, got another value")


def check_names(values: Any) -> None:
    """Refuse fields that the completions or the chat endpoint does not read, instead of dropping them.

    Args:
        values: the body that the client sent; one that pydantic refuses anyway is left to it.

    Raises:
        ValueError: naming the field.
    """
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest

    if not isinstance(values, Mapping) or not {"messages", "prompt"} & set(values):
        return
    request_type = ChatCompletionRequest if "messages" in values else CompletionRequest
    for name, value in values.items():
        if name in _UNREAD and value not in _UNREAD[name]:
            raise ValueError(f"{name}: expected none, since this endpoint does not read it, got {_shortened(value)}")
        if name in ("extra_key", "cache_salt") and value is not None:
            _check(name, value, _TEXT)
        if name not in request_type.model_fields and name not in WITHOUT_EFFECT:
            raise ValueError(f"{_shortened(name)}: expected a field of this endpoint, got an unknown name; drop it")
    if values.get("echo") is True and values.get("logprobs") == 0 and request_type is CompletionRequest:
        raise ValueError("logprobs: expected at least 1 alternative with echo, got 0; raise it or drop echo")


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


def describe_errors(errors: Sequence[Any]) -> str:
    """What is wrong with a body, in one line, from pydantic's errors: the field, what was expected and what came."""
    described = list(dict.fromkeys(map(_describe, errors[:_MAX_ERRORS])))
    more = [f"and {len(errors) - _MAX_ERRORS} more"] if len(errors) > _MAX_ERRORS else []
    return "; ".join(described + more)


def _describe(error: Mapping[str, Any]) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "value_error":
        return message
    field = ".".join(str(part) for part in error["loc"] if part != "body") or "body"
    if error["type"] == "json_invalid":
        return f"body: {message} at {field}: {error['ctx']['error']}"
    return f"{field}: {message}, got {_shortened(error.get('input'))}"


def _check_mapping(owner: str, options: Any, forms: Mapping[str, _Form]) -> None:
    _check(owner, options, _OBJECT)
    for name, value in options.items():
        if name not in forms:
            raise ValueError(f"{_shortened(name)}: expected an option of {owner}, got an unknown name; drop it")
        # None is SGLang's own word for the default, which only n lacks.
        if value is not None or name == "n":
            _check(name, value, forms[name])


def _check(name: str, value: Any, form: _Form) -> None:
    if not form.holds(value):
        raise ValueError(f"{name}: expected {form.expected}, got {_shortened(value)}")


def _shortened(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
