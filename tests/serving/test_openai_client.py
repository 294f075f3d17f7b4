# SPDX-License-Identifier: Apache-2.0
"""The server with DDTREE as the `openai` client sees it."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from serving.server import ModelPair, Server, exchange

PROMPT = "def read_lines(path):\n"
PROMPTS = [
    PROMPT,
    "import os\nimport sys\n",
    "class Stack:\n    def __init__(self):\n",
    "for index in range(10):\n",
    "def main(argv=None):\n    parser = ",
    "try:\n    import json\nexcept ImportError:\n",
    "with open(name) as stream:\n",
    "    return self._items",
]
# Lengths that do not depend on what the model writes: the end-of-text token does not stop these requests.
FULL_LENGTH = {"ignore_eos": True}


@pytest.fixture
def client(serve: Callable[..., Server]) -> openai.OpenAI:
    return serve("DDTREE").client()


def complete(client: openai.OpenAI, prompt: str = PROMPT, **options: Any) -> Any:
    options = {"max_tokens": 32, "temperature": 0, "extra_body": FULL_LENGTH, **options}
    return client.completions.create(model="default", prompt=prompt, **options)


def test_models_names_the_target(client: openai.OpenAI, demo_pair: ModelPair) -> None:
    assert [model.id for model in client.models.list()] == [str(demo_pair.target)]


def test_completion_counts_its_tokens(client: openai.OpenAI, demo_pair: ModelPair) -> None:
    from transformers import AutoTokenizer

    answer = complete(client)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text
    assert answer.usage.completion_tokens == 32
    assert answer.usage.prompt_tokens == len(AutoTokenizer.from_pretrained(demo_pair.target)(PROMPT).input_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 17, 65])
def test_completion_stops_at_max_tokens(client: openai.OpenAI, max_tokens: int) -> None:
    """A verify step yields several tokens; what goes beyond the limit must not appear."""
    answer = complete(client, max_tokens=max_tokens)
    assert answer.usage.completion_tokens == max_tokens
    assert complete(client, max_tokens=65).choices[0].text.startswith(answer.choices[0].text.rstrip("\ufffd"))


def test_chat_answers_as_assistant(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "system", "content": "Write Python."}, {"role": "user", "content": "A function."}],
        max_tokens=16,
        temperature=0,
        extra_body=FULL_LENGTH,
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.usage is not None and answer.usage.completion_tokens == 16


def test_stream_is_the_whole_answer_in_parts(client: openai.OpenAI) -> None:
    whole = complete(client, max_tokens=48)
    parts = list(complete(client, max_tokens=48, stream=True, stream_options={"include_usage": True}))
    assert parts[-1].choices == []
    assert parts[-1].usage == whole.usage or parts[-1].usage.completion_tokens == 48
    text_parts = [part.choices[0].text for part in parts[:-1] if part.choices]
    assert len([text for text in text_parts if text]) > 1
    assert "".join(text_parts) == whole.choices[0].text
    assert [part.choices[0].finish_reason for part in parts[:-1] if part.choices][-1] == "length"


def test_chat_stream_ends_with_usage(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": "A class."}],
        "max_tokens": 24,
        "temperature": 0,
        "extra_body": FULL_LENGTH,
    }
    whole = client.chat.completions.create(**request)
    parts = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert parts[-1].usage.completion_tokens == 24
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_cuts_the_text_before_it(client: openai.OpenAI, stream: bool) -> None:
    """The stop string lies inside what one verify step accepts at least in some of these cases."""
    whole = complete(client, max_tokens=64).choices[0].text
    for start in (5, 14, 23):
        stop = whole[start : start + 4]
        answer = complete(client, max_tokens=64, stop=[stop], stream=stream)
        choices = [part.choices[0] for part in answer] if stream else answer.choices
        assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
        assert choices[-1].finish_reason == "stop"


def test_n_gives_as_many_choices(client: openai.OpenAI) -> None:
    single = complete(client).choices[0].text
    choices = complete(client, n=3).choices
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert [choice.text for choice in choices] == [single] * 3
    assert len({choice.text for choice in complete(client, n=4, temperature=1.0).choices}) > 1


def test_concurrent_clients_get_what_each_gets_alone(serve: Callable[..., Server]) -> None:
    server = serve("DDTREE")
    alone = [complete(server.client(), prompt).choices[0].text for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        together = list(threads.map(lambda prompt: complete(server.client(), prompt).choices[0].text, PROMPTS))
    assert together == alone


def test_plain_decoding_gives_the_same_text(serve: Callable[..., Server]) -> None:
    speculative = [complete(serve("DDTREE").client(), prompt).choices[0].text for prompt in PROMPTS]
    plain = [complete(serve(None).client(), prompt).choices[0].text for prompt in PROMPTS]
    assert speculative == plain


def test_client_that_leaves_does_no_harm(client: openai.OpenAI) -> None:
    before = complete(client).choices[0].text
    stream = complete(client, max_tokens=1000, stream=True)
    next(iter(stream))
    stream.close()
    assert complete(client).choices[0].text == before


def test_native_generate_reports_speculation(serve: Callable[..., Server]) -> None:
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 32, "temperature": 0, **FULL_LENGTH}}
    status, answer = exchange(f"{serve('DDTREE').url}/generate", json.dumps(body).encode())
    assert status == 200, answer
    meta = json.loads(answer)["meta_info"]
    assert meta["completion_tokens"] == 32
    assert meta["spec_verify_ct"] >= 1
