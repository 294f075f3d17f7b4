# SPDX-License-Identifier: Apache-2.0
"""Requests of another form than SGLang reads: HTTP 400 with the option's name, and a server that lives on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from serving.server import Server, exchange
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sm120.request_form import check_form, describe_errors
from sglang.srt.sm120.requests import check_request

SAMPLING: dict[str, list[Any]] = {
    "n": [0, -1, 4097, 2**31, 2**64, 1.5, "2", None, [], {}, True],
    "max_new_tokens": [2**31, 1.5, "x", [1], True],
    "top_k": [2**31, 0.5, "x"],
    "stream_interval": [0, -1, "x", 1.5],
    "sampling_seed": [2**63, 0.5, "x"],
    "temperature": ["x", float("nan"), [1.0], True, 1e300],
    "top_p": [float("nan"), "x"],
    "repetition_penalty": [float("inf"), {}, 0, -1.0, 1e-21],
    "ignore_eos": [1, "x", []],
    "skip_special_tokens": [-1, 0, "true"],
    "spaces_between_special_tokens": [0],
    "no_stop_trim": ["x"],
    "stop": [5, 1.5, True, [1], [None], {"a": 1}],
    "stop_regex": [5, "(", ["[a-"], [1]],
    "stop_token_ids": [5, "5", ["5"], [[1]], [None], {}],
    "logit_bias": [
        [5],
        "x",
        {"x": 1},
        {"5": "x"},
        {"5": float("nan")},
        {"5": 1e39},
        {"5": -1.1e30},
        {"-1": 1.0},
        {"5": None},
    ],
    "custom_params": [5, "x", {"a": [[1]]}, {"a": {"b": {"c": 1}}}, {"a": 2**63}],
    "json_schema": [{}, 5, {"type": "object"}],
    "regex": [5, ["a"]],
    "unknown": [None, 1],
    "is_normalized": [True],
    "stop_strs": [["a"]],
}
SAMPLING_CASES = [(name, value) for name, values in SAMPLING.items() for value in values]

GOOD_SAMPLING: list[dict[str, Any]] = [
    {},
    {"n": 1, "max_new_tokens": None, "top_k": -1, "temperature": None, "stop": None, "logit_bias": None},
    {"n": 4096, "max_new_tokens": 2**31 - 1, "sampling_seed": -(2**63) + 1, "stream_interval": 1},
    {"logit_bias": {"5": 1e30, "6": -1e30}, "repetition_penalty": 1e-20, "temperature": 1e-6},
    {"stop": "a", "stop_regex": "a|b", "stop_token_ids": [0, 5], "logit_bias": {"5": -100, "6": 1.5}},
    {"stop": ["a", ""], "stop_regex": ["a", "[bc]+"], "stop_token_ids": [], "logit_bias": {}},
    {"ignore_eos": True, "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False},
    {"custom_params": {"a": 1, "b": [1, "x", None], "c": {"d": 1.5}}, "json_schema": "{}", "regex": ""},
]


@pytest.mark.parametrize(("name", "value"), SAMPLING_CASES, ids=lambda part: repr(part)[:24])
def test_sampling_parameter_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^'?{name}'?: expected .*, got "):
        check_form(GenerateReqInput(text="x", sampling_params={name: value}))
    with pytest.raises(ValueError, match=name):
        check_form(GenerateReqInput(text=["x", "y"], sampling_params=[{}, {name: value}]))


@pytest.mark.parametrize("sampling", GOOD_SAMPLING, ids=range(len(GOOD_SAMPLING)))
def test_good_sampling_parameters_pass(sampling: dict[str, Any]) -> None:
    check_form(GenerateReqInput(text="x", sampling_params=sampling))
    check_form(GenerateReqInput(input_ids=[[1], [2]], sampling_params=[sampling, sampling]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rid": ["a"]}, "rid: expected a single value"),
        ({"rid": []}, "rid"),
        ({"sampling_params": []}, "sampling_params"),
        ({"sampling_params": [{}]}, "sampling_params"),
        ({"sampling_params": "x"}, "sampling_params: expected an object"),
        ({"return_hidden_states": []}, "return_hidden_states"),
        ({"return_logprob": [True, False]}, "return_logprob"),
        ({"text": ["x", "y"], "rid": ["a"]}, "rid: expected one value for each of 2 prompts"),
        ({"text": ["x", "y"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["x", "y"], "sampling_params": [{}, 5]}, "sampling_params: expected an object"),
        ({"session_params": {"x": 1}}, "'x': expected an option of session_params"),
        ({"session_params": {"offset": "x"}}, "offset: expected an integer"),
        ({"session_params": [1]}, "session_params: expected an object"),
        ({"session_params": {"id": "s", "replace": True}}, "replace: expected the rid"),
        ({"lora_id": "x"}, "lora_id"),
        ({"return_entropy": True}, "return_entropy: expected false, since nothing computes it, got true"),
        ({"positional_embed_overrides": "x"}, "positional_embed_overrides: expected embeddings"),
        ({"positional_embed_overrides": []}, "positional_embed_overrides: expected a single value"),
        ({"text": None, "input_embeds": []}, "input_embeds"),
        ({"input_ids": [1]}, "input_ids: expected either text or input_ids, got both"),
        ({"input_ids": [[1]]}, "input_ids: expected either text or input_ids, got both"),
        ({"text": None, "input_embeds": [[]]}, "input_embeds"),
    ],
    ids=lambda part: str(part)[:40],
)
def test_request_of_another_form_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_form(GenerateReqInput(**{"text": "x"} | change))


@pytest.mark.parametrize(
    "good",
    [
        {"text": "x", "rid": "a", "session_params": {"id": "s", "rid": "t", "offset": -1, "replace": True}},
        {"text": ["x", "y"], "rid": ["a", "b"], "return_logprob": [True, False], "sampling_params": {"n": 2}},
        {"text": ["x"], "rid": "a", "return_hidden_states": ["last"]},
        {"input_ids": [1, 2], "top_logprobs_num": 3},
        {"input_embeds": [[0.5, 0.5]]},
    ],
    ids=range(5),
)
def test_good_requests_pass(good: dict[str, Any]) -> None:
    check_form(GenerateReqInput(**good))


def test_a_refused_stream_leaves_nothing_to_abort() -> None:
    """SGLang's task after a stream asks how many requests there were, and ends those with the client's rid."""
    obj = GenerateReqInput(text="x", rid="of-another-request", stream=True, sampling_params={"unheard_of": 1})
    with pytest.raises(ValueError, match="unheard_of"):
        check_request(obj, SimpleNamespace(), vocab_size=8, takes_media=False)
    aborted: list[str] = []
    manager = SimpleNamespace(abort_request=aborted.append)
    asyncio.run(TokenizerManager.create_abort_task(manager, obj)())
    assert aborted == []


DEFAULTS: dict[str, Any] = {
    "grammar_backend": "xgrammar",
    "tokenizer_metrics_allowed_custom_labels": None,
    "enable_return_routed_experts": False,
    "enable_return_indexer_topk": False,
    "enable_custom_logit_processor": False,
    "speculative_algorithm": None,
}


@pytest.mark.parametrize(
    ("request_fields", "server_fields", "words"),
    [
        (
            {"return_routed_experts": True},
            {"enable_return_routed_experts": True},
            "return_routed_experts: expected a server with --enable-return-routed-experts, which DDTREE cannot",
        ),
        (
            {"return_indexer_topk": True},
            {"enable_return_indexer_topk": True},
            "return_indexer_topk: expected a server with --enable-return-indexer-topk, which DDTREE cannot",
        ),
        (
            {"custom_labels": {"tenant": "a"}},
            {"tokenizer_metrics_allowed_custom_labels": ["tenant"]},
            r"custom_labels: expected names from \[\], got 'tenant'; drop it or start the server with --enable-metrics",
        ),
    ],
)
def test_what_the_server_does_not_record_is_refused(
    request_fields: dict[str, Any], server_fields: dict[str, Any], words: str
) -> None:
    """It would be missing from the answer, or from /metrics, without a word."""
    with pytest.raises(ValueError, match=words):
        check_request(GenerateReqInput(text="x", **request_fields), SimpleNamespace(**DEFAULTS), 8, False)
    check_request(GenerateReqInput(text="x", **request_fields), SimpleNamespace(**DEFAULTS | server_fields), 8, False)


MESSAGES = [{"role": "user", "content": "x"}]


def test_names_that_no_endpoint_reads_are_refused() -> None:
    with pytest.raises(ValidationError, match="'guided_json': expected a field of this endpoint"):
        CompletionRequest(model="m", prompt="x", guided_json={})
    with pytest.raises(ValidationError, match="'max_token'"):
        ChatCompletionRequest(model="m", messages=MESSAGES, max_token=5)


@pytest.mark.parametrize(
    ("name", "value"), [("best_of", 2), ("suffix", "x"), ("session_params", {"id": "s"}), ("custom_labels", {"a": "b"})]
)
def test_fields_that_are_declared_but_not_read_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=f"{name}: expected none"):
        CompletionRequest(model="m", prompt="x", **{name: value})
    assert CompletionRequest(model="m", prompt="x", best_of=1, suffix="").n == 1


def test_echo_needs_an_alternative() -> None:
    """The endpoint looks for alternatives of the prompt that nobody has computed."""
    with pytest.raises(ValidationError, match="logprobs: expected at least 1 alternative with echo, got 0"):
        CompletionRequest(model="m", prompt="x", echo=True, logprobs=0)
    assert CompletionRequest(model="m", prompt="x", echo=True, logprobs=1).echo
    assert CompletionRequest(model="m", prompt="x", logprobs=0).logprobs == 0


@pytest.mark.parametrize("name", ["extra_key", "cache_salt"])
def test_a_list_of_cache_keys_is_refused(name: str) -> None:
    """The fields are declared to take one, and the endpoint raises on it."""
    with pytest.raises(ValidationError, match=f"{name}: expected a string, got"):
        CompletionRequest(model="m", prompt=["x"], **{name: ["a"]})
    assert getattr(CompletionRequest(model="m", prompt="x", **{name: "a"}), name) == "a"


@pytest.mark.parametrize("name", ["image_data", "video_data", "audio_data"])
def test_media_are_refused_where_nothing_reads_them(name: str) -> None:
    request = GenerateReqInput(text="x", **{name: "data:,x"})
    with pytest.raises(ValueError, match=f"{name}: expected none, since the model reads text alone"):
        check_form(request)
    check_form(request, takes_media=True)


def test_fields_of_openai_that_change_no_text_pass() -> None:
    extra = {"metadata": {"a": "b"}, "store": False, "service_tier": "auto", "user": "u"}
    assert ChatCompletionRequest(model="m", messages=MESSAGES, **extra).user == "u"
    assert CompletionRequest(model="m", prompt="x", **extra).user == "u"


def errors_of(request_type: Any, **body: Any) -> Any:
    with pytest.raises(ValidationError) as raised:
        request_type(**body)
    return raised.value.errors()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"prompt": "x", "max_tokens": "many"},
            "max_tokens: Input should be a valid integer, unable to parse string as",
        ),
        ({"prompt": "x", "guided_json": {}}, "'guided_json': expected a field of this endpoint, got an unknown name"),
        (
            {"prompt": "x", "stop": 1},
            "stop.str: Input should be a valid string, got 1; stop.list[str]: Input should be",
        ),
        ({"prompt": "x", "logit_bias": {"a": "b" * 500}}, "logit_bias.a: Input should be a valid number"),
    ],
)
def test_errors_of_form_are_one_line_with_the_field(body: dict[str, Any], message: str) -> None:
    described = describe_errors(errors_of(CompletionRequest, model="m", **body))
    assert described.startswith(message) and "\n" not in described and len(described) < 400


def test_many_errors_of_form_are_counted() -> None:
    described = describe_errors(
        errors_of(CompletionRequest, model="m", prompt="x", logit_bias={str(n): "x" for n in range(99)})
    )
    assert described.count("logit_bias.") == 8 and described.endswith("; and 91 more")


# What ended the server, or was HTTP 500, in the release.
SERVED: dict[str, dict[str, Any]] = {
    "skip_special_tokens": {"sampling_params": {"skip_special_tokens": -1}},
    "n": {"sampling_params": {"n": 2**31}},
    "stop": {"sampling_params": {"stop": 5}},
    "stop_regex": {"sampling_params": {"stop_regex": "("}},
    "stop_token_ids": {"sampling_params": {"stop_token_ids": [10**6], "min_new_tokens": 2}},
    "logit_bias": {"sampling_params": {"logit_bias": {"1000000": 1.0}}},
    "return_hidden_states": {"return_hidden_states": []},
    "positional_embed_overrides": {"positional_embed_overrides": "x"},
    "lora_id": {"lora_id": ["x"]},
    "rid": {"rid": ["x"]},
    "session_params": {"session_params": {"a": 1}},
    "unknown_name": {"unknown_name": 1},
}


@pytest.mark.parametrize("name", SERVED)
def test_server_refuses_and_lives_on(name: str, serve: Callable[..., Server]) -> None:
    server = serve("DDTREE")
    good = {"text": "import", "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    status, answer = exchange(f"{server.url}/generate", json.dumps({"text": "import"} | SERVED[name]).encode())
    assert status == 400, answer
    assert name.removesuffix("_name") in answer.decode()
    status, answer = exchange(f"{server.url}/generate", json.dumps(good).encode())
    assert status == 200, answer
    assert server.running
