# SPDX-License-Identifier: Apache-2.0
"""What the server refuses: at the start with one line and a failing status, later with HTTP 400 and a reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from serving.launcher import Launcher
from serving.server import ModelPair, Server, exchange


class Case(NamedTuple):
    """A start that is refused: which drafter, which further arguments, and what the last line of output says."""

    drafter: str | None
    arguments: tuple[str, ...]
    says: tuple[str, ...]


BUDGET = "--speculative-ddtree-budget"
DRAFTER = "--speculative-draft-model-path"
START_UP_CASES = {
    "budget zero": Case("demo", (BUDGET, "0"), (BUDGET, "1 to 64", "got 0")),
    "budget above": Case("demo", (BUDGET, "65"), (BUDGET, "1 to 64", "got 65")),
    "budget negative": Case("demo", (BUDGET, "-1"), (BUDGET, "1 to 64", "got -1")),
    "budget text": Case("demo", (BUDGET, "many"), (BUDGET, "expected 1 to 64", "or auto", "got many")),
    "budget auto without graphs": Case("demo", (BUDGET, "auto"), (BUDGET, "auto measures", "give a number")),
    "drafter absent": Case("absent", (), (DRAFTER, "expected", "absent")),
    "drafter not named": Case(None, (), (DRAFTER, "drafter")),
    "drafter not DFlash": Case("target", (), (DRAFTER, "DFlash", "DeepseekV3ForCausalLM")),
    "drafter of another width": Case("wider", (), ("another target", "hidden_size")),
    "drafter of another vocabulary": Case("vocabulary", (), ("another target", "vocab_size")),
    "drafter of a deeper target": Case("deeper", (), ("another target", "num_target_layers")),
    "drafter reads the last layer": Case("last-layer", (), ("target_layer_ids", "last layer")),
    "page size": Case("demo", ("--page-size", "3"), ("--page-size", "expected", "got 3")),
    "pipeline parallelism": Case("demo", ("--pp-size", "2"), ("--pp-size", "got 2")),
}


@pytest.fixture(scope="module")
def drafters(demo_pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Drafters by name: the demo pair's, and copies of it that do not fit the target."""
    folder = tmp_path_factory.mktemp("drafters")
    config = json.loads((demo_pair.draft / "config.json").read_text())
    num_layers = json.loads((demo_pair.target / "config.json").read_text())["num_hidden_layers"]
    last_layer = {**config["dflash_config"], "target_layer_ids": [num_layers - 1]}
    changes: dict[str, dict[str, object]] = {
        "wider": {"hidden_size": 2 * config["hidden_size"]},
        "vocabulary": {"vocab_size": config["vocab_size"] + 1},
        "deeper": {"num_target_layers": num_layers + 1},
        "last-layer": {"dflash_config": last_layer},
    }
    for name, change in changes.items():
        shutil.copytree(demo_pair.draft, folder / name)
        (folder / name / "config.json").write_text(json.dumps({**config, **change}))
    return {
        "demo": demo_pair.draft,
        "target": demo_pair.target,
        "absent": folder / "absent",
        **{name: folder / name for name in changes},
    }


@pytest.fixture(scope="module")
def start_ups(
    demo_pair: ModelPair, drafters: dict[str, Path], launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int, str]]:
    """Exit status and output of each case."""
    folder, found = tmp_path_factory.mktemp("refused"), {}
    for name, case in START_UP_CASES.items():
        drafter = [] if case.drafter is None else [DRAFTER, str(drafters[case.drafter])]
        arguments = [*demo_pair.arguments(None), "--speculative-algorithm", "DDTREE", *drafter, *case.arguments]
        server = Server(folder / f"{name}.log", *arguments, launcher=launcher)
        found[name] = server.run_to_exit(), server.output()
    return found


@pytest.mark.parametrize("name", START_UP_CASES)
def test_start_is_refused_in_one_line(name: str, start_ups: dict[str, tuple[int, str]]) -> None:
    status, output = start_ups[name]
    assert status > 0, output
    assert "Traceback" not in output
    last_line = output.strip().splitlines()[-1]
    assert "error: " in last_line
    for words in START_UP_CASES[name].says:
        assert words in last_line


COMPLETION = {"model": "default", "prompt": "import os\n", "max_tokens": 4}
REQUEST_CASES: dict[str, tuple[bytes, str]] = {
    "malformed JSON": (b'{"prompt": "import os', "json"),
    "not an object": (b"[1, 2]", "valid"),
    "prompt missing": (json.dumps({"model": "default"}).encode(), "prompt"),
    "max_tokens text": (json.dumps({**COMPLETION, "max_tokens": "many"}).encode(), "max_tokens"),
    "max_tokens negative": (json.dumps({**COMPLETION, "max_tokens": -1}).encode(), "max_"),
    "temperature negative": (json.dumps({**COMPLETION, "temperature": -1}).encode(), "temperature"),
    "top_p zero": (json.dumps({**COMPLETION, "top_p": 0}).encode(), "top_p"),
    "hidden states": (json.dumps({**COMPLETION, "return_hidden_states": True}).encode(), "return_hidden_states"),
    "regex that is open": (json.dumps({**COMPLETION, "regex": "[a-z"}).encode(), "regex"),
    "ebnf without a rule": (json.dumps({**COMPLETION, "ebnf": 'root ::= "a" rest'}).encode(), "ebnf"),
    "schema of an unknown type": (json.dumps({**COMPLETION, "json_schema": '{"type": "set"}'}).encode(), "json_schema"),
    "grammar without an answer": (json.dumps({**COMPLETION, "ebnf": 'root ::= root "a"'}).encode(), "no answer"),
    "schema that is no JSON": (json.dumps({**COMPLETION, "json_schema": "{"}).encode(), "json_schema"),
    "two grammars": (json.dumps({**COMPLETION, "regex": "a", "ebnf": 'root ::= "a"'}).encode(), "regex"),
    "grammar against a stop": (
        json.dumps({**COMPLETION, "json_schema": '{"type": "object"}', "stop": ["{"]}).encode(),
        "stop",
    ),
    "response_format text": (json.dumps({**COMPLETION, "response_format": "json"}).encode(), "response_format"),
    "token id above": (json.dumps({**COMPLETION, "prompt": [1, 10**6]}).encode(), "input_ids"),
    "token id negative": (json.dumps({**COMPLETION, "prompt": [-1]}).encode(), "input_ids"),
    "top_k beyond int32": (json.dumps({**COMPLETION, "top_k": 2**31}).encode(), "top_k"),
    "logit_bias beyond float32": (json.dumps({**COMPLETION, "logit_bias": {"10": 1e39}}).encode(), "logit_bias"),
}
NATIVE_CASES: dict[str, dict[str, Any]] = {
    "max_new_tokens fraction": {"sampling_params": {"max_new_tokens": 1.5}},
    "max_new_tokens text": {"sampling_params": {"max_new_tokens": "x"}},
    "temperature text": {"sampling_params": {"temperature": "a"}},
    "logit_bias text": {"sampling_params": {"logit_bias": {"10": "x"}}},
    "top_k beyond int32": {"sampling_params": {"top_k": 2**31, "temperature": 1}},
    "stop number": {"sampling_params": {"stop": 5}},
    "stop list of numbers": {"sampling_params": {"stop": [5]}},
    "stop_regex open": {"sampling_params": {"stop_regex": "("}},
    "stop_token_ids text": {"sampling_params": {"stop_token_ids": "x"}},
    "stop_token_ids above": {"sampling_params": {"stop_token_ids": [10**6], "min_new_tokens": 2}},
    "ignore_eos text": {"sampling_params": {"ignore_eos": "x"}},
    "no_stop_trim text": {"sampling_params": {"no_stop_trim": "x"}},
    "skip_special_tokens number": {"sampling_params": {"skip_special_tokens": 3}},
    "stream_interval text": {"sampling_params": {"stream_interval": "x"}},
    "unheard_of option": {"sampling_params": {"unheard_of": 1}},
    "is_normalized from outside": {"sampling_params": {"is_normalized": True}},
    "regex number": {"sampling_params": {"regex": 5}},
    "json_schema object": {"sampling_params": {"json_schema": {"type": "object"}}},
    "structural_tag number": {"sampling_params": {"structural_tag": "5"}},
    "structural_tag list": {"sampling_params": {"structural_tag": "[]"}},
    "structural_tag unknown": {"sampling_params": {"structural_tag": '{"type": "structural_tag", "format": {}}'}},
    "input_ids empty beside text": {"input_ids": []},
    "input_ids beside text": {"input_ids": [1, 2]},
    "input_ids nested beside text": {"input_ids": [[1]]},
    "input_ids with an empty prompt": {"text": None, "input_ids": [[1, 2], []]},
    "input_ids above": {"text": None, "input_ids": [1, 2, 10**6]},
    "input_ids negative": {"text": None, "input_ids": [-5, 3]},
    "return_hidden_states": {"return_hidden_states": True},
    "top_logprobs_num above": {"return_logprob": True, "top_logprobs_num": 10**6},
    "top_logprobs_num negative": {"return_logprob": True, "top_logprobs_num": -1},
    "logprob_start_len negative": {"return_logprob": True, "logprob_start_len": -2},
    "return_hidden_states last": {"return_hidden_states": "last"},
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CHAT_CASES: dict[str, dict[str, Any]] = {
    "response_format": {"response_format": "json"},
    "response_format type": {"response_format": {"type": "set"}},
    "schema missing": {"response_format": {"type": "json_schema"}},
    "schema number": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": 5}}},
    "json_schema type": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "set"}}}
    },
    "response_format.schema text": {"response_format": {"type": "json_schema", "schema": "{}"}},
    "parameters of a tool": {
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "nope"}}}],
        "tool_choice": "required",
    },
    "tool unknown": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "absent"}}},
    "tool_choice unknown": {"tools": [TOOL], "tool_choice": "sometimes"},
    "tools missing": {"tool_choice": "required"},
}


@pytest.fixture
def server(serve: Callable[..., Server]) -> Server:
    """A server with DDTREE."""
    return serve("DDTREE")


@pytest.mark.parametrize("name", REQUEST_CASES)
def test_request_is_refused_with_a_reason(name: str, server: Server) -> None:
    body, subject = REQUEST_CASES[name]
    status, answer = exchange(f"{server.url}/v1/completions", body)
    assert status == 400, answer
    assert subject in answer.decode().lower()
    assert ".py" not in answer.decode(), "nothing of the machine"


@pytest.mark.parametrize("name", NATIVE_CASES)
def test_native_request_is_refused_with_a_reason(name: str, server: Server) -> None:
    status, answer = exchange(f"{server.url}/generate", json.dumps({"text": "import", **NATIVE_CASES[name]}).encode())
    assert status == 400, answer
    assert name.split()[0] in answer.decode()


@pytest.mark.parametrize("name", CHAT_CASES)
def test_chat_request_is_refused_with_a_reason(name: str, server: Server) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4, **CHAT_CASES[name]}
    status, answer = exchange(f"{server.url}/v1/chat/completions", json.dumps(body).encode())
    assert status == 400, answer
    assert name.split()[0] in answer.decode().lower()


@pytest.mark.parametrize("option", ["return_hidden_states", "json_schema"])
def test_refused_stream_sends_no_token(option: str, server: Server) -> None:
    body = {**COMPLETION, "stream": True, option: True if option == "return_hidden_states" else "{"}
    _, answer = exchange(f"{server.url}/v1/completions", json.dumps(body).encode())
    assert option in answer.decode() and "400" in answer.decode()
    assert '"text"' not in answer.decode()


def test_chain_refuses_hidden_states(serve: Callable[..., Server]) -> None:
    """Without overlap the release lets the option through and returns nothing."""
    server = serve("DFLASH", "--disable-overlap-schedule", "--enable-return-hidden-states")
    body = json.dumps({"text": "import", "return_hidden_states": True}).encode()
    status, answer = exchange(f"{server.url}/generate", body)
    assert status == 400, answer
    assert "return_hidden_states" in answer.decode() and "DFLASH" in answer.decode()


def test_prompt_beyond_the_context_is_refused(server: Server, demo_pair: ModelPair) -> None:
    context = json.loads((demo_pair.target / "config.json").read_text())["max_position_embeddings"]
    body = {**COMPLETION, "prompt": [5] * (context + 1)}
    status, answer = exchange(f"{server.url}/v1/completions", json.dumps(body).encode())
    assert status == 400, answer
    assert str(context) in answer.decode()


def test_server_answers_after_refusals(server: Server) -> None:
    for body, _ in REQUEST_CASES.values():
        exchange(f"{server.url}/v1/completions", body)
    for case in NATIVE_CASES.values():
        exchange(f"{server.url}/generate", json.dumps({"text": "import", **case}).encode())
    status, answer = exchange(f"{server.url}/v1/completions", json.dumps(COMPLETION).encode())
    assert status == 200, answer
    assert json.loads(answer)["usage"]["completion_tokens"] <= COMPLETION["max_tokens"]
