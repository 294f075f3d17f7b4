# SPDX-License-Identifier: Apache-2.0
"""What becomes of every request option with DDTREE, found by asking the server.

    build/env/bin/python tests/serving/options.py

sends each option of `options.toml` to a server with DDTREE and to one without speculation, and writes `OPTIONS.md`.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from serving.server import ModelPair, Server
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sm120.request_form import OPTIONS

PAGE = HERE / "OPTIONS.md"
DEMO = HERE.parent / "models" / "demo"
CONCURRENCY = 8
WORKS, REFUSED, DIFFERS, INTERNAL = "works", "refused", "differs", "not for clients"
PATHS = {
    "sampling": "/generate",
    "generate": "/generate",
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}
TITLES = {
    "sampling": "`sampling_params` of `/generate`",
    "generate": "`/generate`",
    "completions": "`/v1/completions`",
    "chat": "`/v1/chat/completions`",
}
FIELDS = {
    "sampling": set(OPTIONS),
    "generate": set(GenerateReqInput.__dataclass_fields__),
    "completions": set(CompletionRequest.model_fields),
    "chat": set(ChatCompletionRequest.model_fields),
}
# What depends on the clock, on chance, or on what the server has served before.
_VOLATILE = {
    *("id", "created", "model", "metadata", "cached_tokens", "cached_tokens_details"),
    *("e2e_latency", "response_sent_to_client_ts", "request_received_ts"),
}


@dataclass(frozen=True)
class Option:
    """One option of one endpoint.

    ``body`` is a whole request, None for options that are not sent, with ``why``; ``known`` says how a text may differ;
    ``alone``: it shares no batch.
    """

    section: str
    name: str
    body: dict[str, Any] | None
    random: bool
    why: str
    known: str
    alone: bool


def read_options() -> list[Option]:
    """All options, in the order of `options.toml`."""
    entries = tomllib.loads((HERE / "options.toml").read_text())
    sections = {
        "sampling": entries["sampling"],
        "generate": entries["generate"],
        **{
            endpoint: {name: entry for name, entry in entries["openai"].items() if name in FIELDS[endpoint]}
            for endpoint in ("completions", "chat")
        },
    }
    return [_option(section, name, entry) for section, part in sections.items() for name, entry in part.items()]


def _option(section: str, name: str, entry: dict[str, Any]) -> Option:
    why = entry.get("internal", "")
    value = entry.get("value", entry.get(section))
    added = {**entry.get("with", {}), name: value}
    sampling = {"max_new_tokens": 12, "temperature": 0}
    if section == "sampling":
        body = {"text": "import os\n", "sampling_params": sampling | added}
    elif section == "generate":
        body = {"text": "import os\n", "sampling_params": sampling} | added
    else:
        prompt = (
            {"prompt": "import os\n"} if section == "completions" else {"messages": [{"role": "user", "content": "A"}]}
        )
        body = {"model": "default", "max_tokens": 12, "temperature": 0} | prompt | added
    body = {key: part for key, part in body.items() if key not in entry.get("without", ())}
    return Option(
        section,
        name,
        None if why else body,
        bool(entry.get("random")),
        why,
        entry.get("known", ""),
        bool(entry.get("alone")),
    )


def ask(server: Server, option: Option) -> tuple[int, Any]:
    """Status and answer: parsed JSON, or the list of a stream's events."""
    response = requests.post(server.url + PATHS[option.section], json=option.body, timeout=120)
    if not response.headers["content-type"].startswith("text/event-stream"):
        return response.status_code, response.json()
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return response.status_code, [json.loads(line) for line in lines]


def outcome(tree: Server, plain: Server, option: Option) -> tuple[str, str]:
    """What becomes of an option with DDTREE, and why: one of WORKS, REFUSED, DIFFERS, INTERNAL."""
    if option.body is None:
        return INTERNAL, option.why
    status, answer = ask(tree, option)
    if status != 200:
        return REFUSED, _message(answer)
    plain_status, expected = ask(plain, option)
    if plain_status != 200:
        return DIFFERS, f"without speculation: HTTP {plain_status}"
    if isinstance(answer, list):
        answer, expected = _joined(answer), _joined(expected)
    found, wanted = (_compared(part, option.random) for part in (answer, expected))
    return (WORKS, "") if found == wanted else (DIFFERS, option.known or f"{found} instead of {wanted}"[:200])


def outcomes(tree: Server, plain: Server) -> list[tuple[Option, tuple[str, str]]]:
    """Every option with what becomes of it; several are asked at once, so that they share batches."""
    options = read_options()
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        shared = [None if option.alone else pool.submit(outcome, tree, plain, option) for option in options]
    return [
        (option, future.result() if future else outcome(tree, plain, option))
        for option, future in zip(options, shared, strict=True)
    ]


def _message(answer: Any) -> str:
    text = answer.get("message") or answer.get("error", {}).get("message") or str(answer)
    return re.sub(r"\s+", " ", text).replace("|", "\\|")[:160]


def _joined(events: list[dict[str, Any]]) -> Any:
    """A stream as one answer: the last event of /generate, else the text and the usage of all events."""
    if "text" in events[-1]:
        return events[-1]
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(choice.get("text") or (choice.get("delta") or {}).get("content") or "" for choice in choices)
    return {"text": text, "usage": [event["usage"] for event in events if event.get("usage")][-1:]}


def _compared(answer: Any, random: bool) -> Any:
    """The part of an answer that must not depend on speculation: names of all fields, and values that are not floats.

    Of random texts only the names are compared.
    """
    if isinstance(answer, dict):
        kept = {name: part for name, part in answer.items() if name not in _VOLATILE and not name.startswith("spec_")}
        return {name: _compared(part, random) for name, part in sorted(kept.items())}
    if isinstance(answer, list):
        return [] if random else [_compared(part, random) for part in answer]
    return None if random or isinstance(answer, float) else answer


def render(found: list[tuple[Option, tuple[str, str]]]) -> str:
    """The page."""
    counts = {kind: sum(became == kind for _, (became, _) in found) for kind in (WORKS, REFUSED, INTERNAL)}
    lines = [
        "# Request options with DDTREE",
        "",
        "What the server does with every option of its three endpoints. `works`: the answer has what the one without",
        "speculation has, the same text where it is not random. `refused`: HTTP 400 with this message, as for a name that is",
        "not listed. `not for clients`: SGLang's own parts fill it in, or another kind of server reads it; not sent here.",
        "",
        f"{counts[WORKS]} work, {counts[REFUSED]} are refused on a server with default arguments, {counts[INTERNAL]} are not",
        "for clients. Made by `build/env/bin/python tests/serving/options.py` from `tests/serving/options.toml`.",
    ]
    for section, title in TITLES.items():
        lines += ["", f"## {title}", "", "| option | | why |", "|---|---|---|"]
        lines += [f"| `{option.name}` | {kind} | {why} |" for option, (kind, why) in found if option.section == section]
    return "\n".join(lines) + "\n"


def main() -> None:
    pair = ModelPair(DEMO / "target", DEMO / "draft")
    with tempfile.TemporaryDirectory() as folder:
        tree = Server(Path(folder) / "tree.log", *pair.arguments("DDTREE"))
        plain = Server(Path(folder) / "plain.log", *pair.arguments(None))
        with tree, plain:
            found = outcomes(tree, plain)
    PAGE.write_text(render(found))
    for option, (kind, why) in found:
        if kind == DIFFERS:
            print(f"{option.section} {option.name}: {why}", file=sys.stderr)


if __name__ == "__main__":
    main()
