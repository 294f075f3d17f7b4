# SPDX-License-Identifier: Apache-2.0
"""Several tool calls in one answer, accepted in runs that cut them anywhere.

A logit processor makes the demo model prefer a given text, token by token, wherever the grammar of the calls allows it,
and the scripted drafter proposes that text. So what must come is known in advance.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import requests
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from scenarios.patterns import ALL_PATTERNS, DEPTH, Pattern
from scenarios.scripted_server import ScriptedServer
from serving.processors import Recite
from serving.replay import Source, streamed_chat, whole_chat
from serving.server import stream
from serving.tool_formats import FORMATS, STRICT_TOOLS, TWO_CALLS, Calls, kimi, read_stream
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser

PROMPT = "def read_lines(path):\n"
EOS = 2  # of the demo pair
ROTATIONS = range(0, len(ALL_PATTERNS), 7)
PARAMETERS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in STRICT_TOOLS}


@pytest.fixture(scope="module")
def tokenizer(marked_tokenizer: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(marked_tokenizer)


class Recital:
    """What a request needs to be answered with a text, or where a grammar forbids it with another, and the drafter to
    propose the first one."""

    def __init__(
        self, scripted: ScriptedServer, tokenizer: PreTrainedTokenizerBase, text: str, otherwise: str = ""
    ) -> None:
        self.prompt = tokenizer(PROMPT).input_ids
        self.answer, second = (
            [*tokenizer(part, add_special_tokens=False).input_ids, EOS] for part in (text, otherwise)
        )
        texts = {"text": self.answer, "otherwise": second}
        self.options = {"custom_logit_processor": Recite.to_str(), "custom_params": texts}
        self._scripted = scripted

    def draft(self, rotation: int) -> None:
        """Propose the text from the next step on; the rotation says which runs are accepted where."""
        self.draft_by(ALL_PATTERNS[rotation:] + ALL_PATTERNS[:rotation])

    def draft_by(self, patterns: list[Pattern]) -> None:
        """Propose the text from the next step on, by patterns that follow each other with the positions."""
        self._scripted.play([[*self.prompt, *self.answer, *[0] * DEPTH]], patterns)

    def chat(self, **options: Any) -> dict[str, Any]:
        """A request for tool calls."""
        body = {"model": "default", "messages": [{"role": "user", "content": "x"}], "input_ids": self.prompt}
        tools = {"tools": STRICT_TOOLS, "tool_choice": "required"}
        return {**body, **tools, "temperature": 0, "max_tokens": 200, **self.options, **options}


def whole(scripted: ScriptedServer, body: dict[str, Any]) -> Any:
    response = requests.post(f"{scripted.server.url}/v1/chat/completions", json=body, timeout=300)
    assert response.status_code == 200, response.text
    return response.json()


def calls_of(answer: Any) -> Calls:
    """Name and arguments of the calls, after a look at their ids and schemas."""
    choice = answer["choices"][0]
    calls = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert len({call["id"] for call in calls}) == len(calls) and all(call["id"] for call in calls)
    return checked([(call["function"]["name"], call["function"]["arguments"]) for call in calls])


def streamed_calls_of(events: list[dict[str, Any]]) -> Calls:
    """The same of a stream."""
    found = read_stream(events)
    assert found["finish"] == "tool_calls" and not found["content"].strip()
    calls = [found["calls"][index] for index in range(len(found["calls"]))]
    ids = [identity for call in calls for identity in call["ids"]]
    assert len(set(ids)) == len(ids) == len(calls) and all(len(call["names"]) == 1 for call in calls)
    return checked([(call["names"][0], call["arguments"]) for call in calls])


def checked(calls: list[tuple[str, str]]) -> Calls:
    parsed = [(name, json.loads(arguments)) for name, arguments in calls]
    for name, arguments in parsed:
        jsonschema.validate(arguments, PARAMETERS[name])
    return parsed


@pytest.mark.scenario("BUG-040")
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_two_calls_in_one_answer(scripted: ScriptedServer, tokenizer: PreTrainedTokenizerBase, rotation: int) -> None:
    """BUG-034, BUG-044: whole and streamed, both calls are there with arguments that fit their schemas."""
    recital = Recital(scripted, tokenizer, kimi(TWO_CALLS))
    recital.draft(rotation)
    answer = whole(scripted, recital.chat(return_meta_info=True))
    assert calls_of(answer) == TWO_CALLS
    assert answer["usage"]["completion_tokens"] == len(recital.answer)
    histogram = answer["choices"][0]["meta_info"]["spec_accept_histogram"]
    assert len([count for count in histogram if count]) > 3, "the runs were meant to have many lengths"
    usage = {"include_usage": True}
    events = list(stream(scripted.server, "/v1/chat/completions", recital.chat(stream_options=usage)))
    assert streamed_calls_of(events[:-1]) == TWO_CALLS
    assert events[-1]["usage"] == answer["usage"]


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_the_schema_wins_over_what_is_drafted(
    scripted: ScriptedServer, tokenizer: PreTrainedTokenizerBase, rotation: int
) -> None:
    """BUG-034: the model prefers, and the drafter proposes, arguments of both calls that their schemas exclude."""
    legal = kimi(TWO_CALLS)  # the other text has as many tokens
    recital = Recital(scripted, tokenizer, legal.replace("1,", '",').replace("self", "def"), otherwise=legal)
    recital.draft(rotation)
    answer = whole(scripted, recital.chat())
    assert calls_of(answer) == TWO_CALLS and answer["usage"]["completion_tokens"] == len(recital.answer)
    assert streamed_calls_of(list(stream(scripted.server, "/v1/chat/completions", recital.chat()))) == TWO_CALLS


@pytest.mark.parametrize("branch", [0, 1, DEPTH])
def test_a_grammar_costs_no_accepted_token(
    scripted: ScriptedServer, tokenizer: PreTrainedTokenizerBase, branch: int
) -> None:
    """BUG-034: where all that is drafted is legal, each step but the last accepts all of it, on and off the spine."""
    recital = Recital(scripted, tokenizer, kimi(TWO_CALLS))
    recital.draft_by([Pattern(DEPTH, branch)])
    meta = whole(scripted, recital.chat(return_meta_info=True))["choices"][0]["meta_info"]
    assert meta["spec_verify_ct"] == -(-(len(recital.answer) - 1) // (DEPTH + 1))


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_one_call_where_parallel_calls_are_not_wanted(
    scripted: ScriptedServer, tokenizer: PreTrainedTokenizerBase, choice: str
) -> None:
    recital = Recital(scripted, tokenizer, kimi(TWO_CALLS), otherwise=kimi(TWO_CALLS[:1]))
    recital.draft(0)
    for parallel, expected in ((True, TWO_CALLS), (False, TWO_CALLS[:1])):
        body = recital.chat(tool_choice=choice, parallel_tool_calls=parallel)
        assert calls_of(whole(scripted, body)) == expected
        assert streamed_calls_of(list(stream(scripted.server, "/v1/chat/completions", body))) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_two_calls_in_every_format(scripted: ScriptedServer, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """BUG-034, BUG-040: the endpoint of another server, whose parser this is, gets the runs as this one accepts them."""
    recital = Recital(scripted, tokenizer, FORMATS[name](TWO_CALLS))
    parser = FunctionCallParser([Tool.model_validate(tool) for tool in STRICT_TOOLS], name)
    kind, tag = parser.get_structure_constraint("required")
    sampling = {"temperature": 0, "max_new_tokens": 200, "skip_special_tokens": False, kind: tag.model_dump_json()}
    sampling["custom_params"] = recital.options["custom_params"]
    body = {"input_ids": recital.prompt, "sampling_params": sampling}
    body["custom_logit_processor"] = recital.options["custom_logit_processor"]
    for rotation in ROTATIONS:
        recital.draft(rotation)
        events = list(stream(scripted.server, "/generate", body))
        assert events[-1]["output_ids"] == recital.answer
        ends = [len(event["output_ids"]) for event in events]
        tokens = [tokenizer.decode([token]) for token in recital.answer[:-1]] + [""]
        lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False) if end > begin]
        asked = {"tools": STRICT_TOOLS, "tool_choice": "required"}
        assert calls_of(whole_chat(Source(tokens, lengths, name), **asked)) == TWO_CALLS
        assert streamed_calls_of(streamed_chat(Source(tokens, lengths, name), **asked)) == TWO_CALLS
