# SPDX-License-Identifier: Apache-2.0
"""Entry point of the image: looks at the machine, says in one line what prevents the start, and becomes the server.

docker run ... IMAGE [SGLang's own arguments]     the server; without --model-path it serves the demo pair
docker run ... IMAGE doctor [arguments]           the checks alone
docker run ... IMAGE health                       exit status 0 when the server of this container answers
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import sys
import tempfile
import urllib.request
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import NamedTuple

import doctor_checks
from doctor_checks import Finding, Level, Questions
from serve_checks import ConfigurationError, read_configuration

SHARE = Path(__file__).resolve().parent
FLAGS = SHARE / "flags.json"
DEMO = SHARE / "demo"
# In the folder that the doctor has found writable.
ADDRESS = Path(os.environ.get("TMPDIR") or "/tmp") / "sglang-address"
DEFAULTS = {"--host": "0.0.0.0", "--port": "30000"}
CONFIG = "--config"
MODEL = ("--model-path", "--model", CONFIG)
DRAFT = ("--speculative-draft-model-path", "--speculative-draft-model")
RANKS = ("--tensor-parallel-size", "--tp-size")
ALGORITHM = "--speculative-algorithm"
BACKEND = "--attention-backend"
CPU_PLATFORM = "sm120_reference"
# Ranks of one machine meet without a socket that others reach: torch's own store listens on every address.
STORE = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
SPREAD = ("--nnodes", "--dist-init-addr", "--nccl-init-addr", "--data-parallel-size", "--dp-size")
# Tells a supervisor that starting again would find the same fault; the server itself never exits with it.
CANNOT_START = os.EX_CONFIG


class UsageError(Exception):
    """Arguments that the server would refuse; the message is one line."""


class Option(NamedTuple):
    """What may follow an option; docker/list_flags.py writes these fields."""

    takes: str  # how many values, as argparse writes that: 0, 1, ?, * or +
    kind: str  # int or float where they must be numbers, else empty


def full_name(option: str, known: Iterable[str]) -> str:
    """The option that `option` abbreviates, as argparse resolves it. Errors: UsageError."""
    if option in known:
        return option
    candidates = [name for name in known if name.startswith(option)]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise UsageError(
            f"{option}: expected one option, got {len(candidates)}, {', '.join(candidates[:3])}; write it out"
        )
    close = difflib.get_close_matches(option, known, n=1)
    remedy = f"did you mean {close[0]}?" if close else "--help lists them"
    raise UsageError(f"{option}: expected an option of SGLang, got an unknown one; {remedy}")


def is_option(word: str) -> bool:
    """Whether argparse takes a word for an option: negative numbers and texts with spaces are values."""
    return re.match(r"-[^\d.\s]", word) is not None and " " not in word


def read_options(arguments: Sequence[str], known: Mapping[str, Option]) -> dict[str, str]:
    """Option -> its first value ("" for a switch); the last of equal options counts. Errors: UsageError."""
    options = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not is_option(word):
            raise UsageError(f"{word}: expected an option, got a value that none takes; put it behind its option")
        option, separator, value = word.partition("=") if word.startswith("--") else (word, "", "")
        name = full_name(option, known)
        values = [value] if separator else []
        most = {"0": 0, "1": 1, "?": 1}.get(known[name].takes, len(words))
        while not separator and len(values) < most and words and not is_option(words[0]):
            values.append(words.pop(0))
        check_values(name, known[name], values)
        options[name] = values[0] if values else ""
    return options


def with_configuration(options: Mapping[str, str], known: Mapping[str, Option]) -> dict[str, str]:
    """`options`, before them those in the file that --config names, as SGLang takes them.

    A file that cannot be read is left to the doctor. Errors: ConfigurationError, UsageError.
    """
    found: dict[str, str] = {}
    if CONFIG in options and Path(options[CONFIG]).is_file() and os.access(options[CONFIG], os.R_OK):
        for word in read_configuration(Path(options[CONFIG])):
            name, _, value = word.partition("=")
            name = full_name(name, known)
            if known[name].takes == "1":
                check_values(name, known[name], [value])
            found[name] = value
    return found | dict(options)


def check_values(name: str, option: Option, values: Sequence[str]) -> None:
    """Refuse values that the server would refuse by number or form. Errors: UsageError."""
    if option.takes == "0" and values:
        raise UsageError(f"{name}: expected no value, got {values[0]!r}; leave it out")
    if option.takes in ("1", "+") and not values:
        raise UsageError(f"{name}: expected a value, got none; write it behind the option")
    for value in values:
        if option.kind and not is_number(option.kind, value):
            what = "a whole number" if option.kind == "int" else "a number"
            raise UsageError(f"{name}: expected {what}, got {value!r}; correct it")


def is_number(kind: str, text: str) -> bool:
    """Whether `text` is an int or a float, whichever `kind` says."""
    convert = int if kind == "int" else float
    with contextlib.suppress(ValueError):
        convert(text)
        return True
    return False


def first(options: Mapping[str, str], names: Iterable[str]) -> str | None:
    """Value of the first of `names` that is given."""
    return next((options[name] for name in names if name in options), None)


def complete(arguments: Sequence[str], options: Mapping[str, str]) -> list[str]:
    """The server's arguments: what is missing, then `arguments`."""
    added = [part for name, value in DEFAULTS.items() if name not in options for part in (name, value)]
    draft = first(options, DRAFT)
    if first(options, MODEL) is None:
        added += ["--model-path", str(DEMO / "target")]
        if draft is None:
            draft = str(DEMO / "draft")
            added += [DRAFT[0], draft]
        if BACKEND not in options:
            added += [BACKEND, "triton"]  # which DDTREE needs, and not every card has it as its default
    if draft is not None and ALGORITHM not in options:
        added += [ALGORITHM, "DDTREE"]
    return [*added, *arguments]


def number(options: Mapping[str, str], names: Iterable[str], default: int) -> int:
    """A whole number among the options."""
    value = first(options, names)
    return default if value is None else int(value)


def questions(options: Mapping[str, str], environment: Mapping[str, str]) -> Questions:
    """What the doctor is to look at."""
    model = first(options, MODEL[:2])
    on_cpu = options.get("--device") == "cpu" or environment.get("SGLANG_PLATFORM") == CPU_PLATFORM
    nodes = max(number(options, ("--nnodes",), 1), 1)
    return Questions(
        model=model,
        draft=first(options, DRAFT),
        algorithm=options.get(ALGORITHM, "DDTREE"),
        configuration=options.get(CONFIG),
        host=options.get("--host", DEFAULTS["--host"]),
        port=number(options, ("--port",), int(DEFAULTS["--port"])),
        ranks=max(number(options, RANKS, 1) // nodes, 1),
        # The demo pair is there to be tried anywhere; nobody means to serve another model on the CPU by oversight.
        card_required=first(options, MODEL) is not None and not on_cpu,
    )


def keep_to_this_machine(options: Mapping[str, str], environment: MutableMapping[str, str]) -> None:
    """Let the ranks meet in a file and on the loopback interface, unless they are spread or a variable says otherwise."""
    if any(name in options for name in SPREAD):
        return
    for name in INTERFACES:
        environment.setdefault(name, "lo")
    if STORE not in environment:
        environment[STORE] = f"file://{tempfile.mkdtemp(prefix='sglang-')}/store"


def serve(arguments: Sequence[str]) -> int:
    """Replace this process by the server; returns only when something prevents that."""
    known = {name: Option(**form) for name, form in json.loads(FLAGS.read_text()).items()}
    try:
        options = with_configuration(read_options(arguments, known), known)
    except (ConfigurationError, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return CANNOT_START
    asked = questions(options, os.environ)
    if not {"--help", "-h"} & {*options, *arguments}:
        findings: list[Finding] = doctor_checks.examine(asked)
        reported = [one for one in findings if one.level is Level.FATAL] or findings
        for finding in reported:
            print(f"error: {finding.text}" if finding.level is Level.FATAL else f"doctor: {finding}", file=sys.stderr)
        if doctor_checks.is_fatal(findings):
            return CANNOT_START
        ADDRESS.write_text(health_address(asked))
        keep_to_this_machine(options, os.environ)
    command = [sys.executable, "-m", "sglang.launch_server", *complete(arguments, options)]
    sys.stderr.flush()
    os.execv(sys.executable, command)


def health_address(asked: Questions) -> str:
    """Where the server answers inside this container."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(
        asked.host, f"[{asked.host}]" if ":" in asked.host else asked.host
    )
    return f"http://{host}:{asked.port}/health"


def health() -> int:
    """Exit status of the container's health check."""
    try:
        with urllib.request.urlopen(ADDRESS.read_text(), timeout=15) as answer:
            return 0 if answer.status == 200 else 1
    except OSError as error:
        print(f"health: expected an answer with status 200, got '{error}'", file=sys.stderr)
        return 1


def main(arguments: Sequence[str]) -> int:
    """Do what the first argument says; without a command, serve."""
    command = arguments[0] if arguments else ""
    if command == "doctor":
        return doctor_checks.main(arguments[1:])
    if command == "health":
        return health()
    if command and not command.startswith("-"):
        print(
            f"error: {command}: expected an option, doctor or health, got this; options begin with --", file=sys.stderr
        )
        return CANNOT_START
    return serve(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
