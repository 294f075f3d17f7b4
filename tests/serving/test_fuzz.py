# SPDX-License-Identifier: Apache-2.0
"""Whatever a client sends, it gets an answer that is no server error, and the next request is served.

Bodies come from the server's own OpenAPI schema, and from a strategy that puts values of every kind into one option of an
otherwise good request. FUZZ_REQUESTS sets how many are sent; the default keeps the run of all tests short.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.server import Server
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sm120.request_form import OPTIONS

NUM_REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "150"))
ENDPOINTS = ("/generate", "/v1/completions", "/v1/chat/completions")
GOOD: dict[str, dict[str, Any]] = {
    "/generate": {"text": "import", "sampling_params": {"max_new_tokens": 3}},
    "/v1/completions": {"model": "default", "prompt": "import", "max_tokens": 3},
    "/v1/chat/completions": {"model": "default", "messages": [{"role": "user", "content": "A"}], "max_tokens": 3},
}
FIELDS = {
    "/generate": sorted(GenerateReqInput.__dataclass_fields__),
    "/v1/completions": sorted(CompletionRequest.model_fields),
    "/v1/chat/completions": sorted(ChatCompletionRequest.model_fields),
}
# A length without a limit is a good request that writes until the context ends.
UNLIMITED = {"max_new_tokens", "max_tokens", "max_completion_tokens"}

Serve = Callable[..., Server]


@pytest.fixture(scope="module")
def fuzzed(serve: Serve) -> Iterator[Server]:
    """The default server, which must still write the same text in the end."""
    server = serve("DDTREE")
    before = good_text(server)
    yield server
    assert server.running, server.tail()
    assert good_text(server) == before
    assert "Scheduler hit an exception" not in server.output()


def good_text(server: Server) -> str:
    body = {"text": "import os\n", "sampling_params": {"max_new_tokens": 16, "temperature": 0}}
    answer = requests.post(f"{server.url}/generate", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["text"]


def send(server: Server, path: str, body: Any) -> requests.Response:
    """POST `body`, which may hold NaN and infinities as Python writes them; fail on a server error."""
    payload = body if isinstance(body, bytes) else json.dumps(body).encode(errors="surrogatepass")
    headers = {"Content-Type": "application/json"}
    response = requests.post(server.url + path, data=payload, headers=headers, timeout=120)
    assert response.status_code < 500, (path, payload[:500], response.text[:500])
    return response


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([-1, 0, 2**31, 2**63, 2**64, 10**30]),
    st.floats(width=64),
    st.text(max_size=8),
    st.sampled_from(["(", "last", "auto", "required", "\x00", "\ud800", "{", "a" * 300]),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


@st.composite
def spoiled(draw: st.DrawFn) -> tuple[str, str, dict[str, Any]]:
    """An endpoint, the option that is changed, and the body."""
    path = draw(st.sampled_from(ENDPOINTS))
    body = json.loads(json.dumps(GOOD[path]))
    names = [*FIELDS[path], "unknown"]
    if path == "/generate" and draw(st.booleans()):
        name = draw(st.sampled_from([*OPTIONS, "unknown"]))
        body["sampling_params"][name] = draw(VALUES.filter(lambda value: value is not None or name not in UNLIMITED))
    else:
        name = draw(st.sampled_from(names))
        body[name] = draw(VALUES.filter(lambda value: value is not None or name not in UNLIMITED))
    return path, name, body


@settings(
    max_examples=NUM_REQUESTS, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
)
@given(case=spoiled())
def test_one_option_of_any_value(fuzzed: Server, case: tuple[str, str, dict[str, Any]]) -> None:
    path, name, body = case
    response = send(fuzzed, path, body)
    if name == "unknown" and "JSON decode error" not in response.text:
        assert response.status_code == 400 and "unknown" in response.text


def test_bodies_from_the_schema(fuzzed: Server) -> None:
    schema = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")
    for path in ENDPOINTS:
        check_operation(fuzzed, schema[path]["POST"], path)


def check_operation(server: Server, operation: Any, path: str) -> None:
    """Send bodies that the schema of one endpoint allows, with short answers."""

    @settings(
        max_examples=max(10, NUM_REQUESTS // 6),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    @given(case=operation.as_strategy())
    def check(case: Any) -> None:
        body = case.body
        if isinstance(body, dict):
            limit = {"max_tokens": 3} if path != "/generate" else {"sampling_params": {"max_new_tokens": 3}}
            body = body | limit
        send(server, path, body)

    check()


BAD_BODIES: dict[str, bytes] = {
    "no UTF-8": b'{"prompt": "\xff\xfe", "model": "default", "max_tokens": 2}',
    "half a pair": b'{"prompt": "\\ud800", "model": "default", "max_tokens": 2}',
    "deep nesting": b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "huge number": b'{"prompt": "x", "model": "default", "max_tokens": ' + b"9" * 5_000 + b"}",
    "huge prompt": json.dumps({"prompt": "x = 1\n" * 400_000, "model": "default", "max_tokens": 2}).encode(),
    "many fields": json.dumps({"model": "default", **{f"field{n}": n for n in range(20_000)}}).encode(),
    "no body": b"",
    "null": b"null",
    "NaN": b'{"prompt": "x", "model": "default", "max_tokens": 2, "temperature": NaN}',
    "infinite": b'{"prompt": "x", "model": "default", "max_tokens": 2, "presence_penalty": -Infinity}',
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_bad_body_is_refused(fuzzed: Server, name: str) -> None:
    response = send(fuzzed, "/v1/completions", BAD_BODIES[name])
    assert response.status_code == 400, response.text[:300]
