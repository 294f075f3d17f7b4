# SPDX-License-Identifier: Apache-2.0
"""What the documents name exists: paths, files, links, commands, flags, variables, metrics. Figures: test_figures.py."""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parent.parent
PATH = re.compile(r"(?<![\w./-])((?:scripts|tests|patches|sglang|sgl-kernel-sm120|docker|\.ci|\.github)/[\w./*<>{}-]*)")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
ROOT_FILE = re.compile(r"`([A-Z]+(?:\.md)?|pyproject\.toml)`")
FILE = re.compile(r"`([\w./-]*[\w-]\.(?:py|cuh?|cc|h|toml|json|md|svg|txt|in|yaml|service))`")
VERB = re.compile(r"scripts/fork ([a-z]+)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
SPAN = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```(?:bash)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
VARIABLE = re.compile(r"(?<![\w-])(?:SGLANG|FUZZ|HF|PIP|UV|CUDA)_[A-Z0-9_]*[A-Z0-9]")
METRIC = re.compile(r"(sglang:[a-z0-9_]+?)(?:_total|_bucket|_sum|_count)?(?![a-z0-9_])")
FIELD = re.compile(r"`(spec_[a-z_]+)`")
# Not ours: of pip, uv, compilers and model hubs, and of docker.
FOREIGN_VARIABLES = {"PIP_INDEX_URL", "UV_DEFAULT_INDEX", "CUDA_HOME", "HF_HUB_OFFLINE"}
FOREIGN_FLAGS = {
    "--gpus",
    "--rm",
    "--shm-size",
    "--ulimit",
    "--read-only",
    "--tmpfs",
    "--build-arg",
    "--file",
    "--worker-urls",
    "--strict",
    "--disable-pip",
}


@functools.cache
def tracked() -> tuple[str, ...]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=REPO_ROOT, capture_output=True, text=True, check=True)
    return tuple(name for name in listing.stdout.split("\0") if name)


def documents() -> list[str]:
    return [name for name in tracked() if name.endswith(".md")]


def named_paths(text: str) -> set[str]:
    """Paths that `text` names; patterns such as `patches/<area>/` and stand-ins such as `x.py` are left out."""
    found = {path.rstrip(".") for path in PATH.findall(text)}
    found |= {link for link in LINK.findall(text) if "://" not in link}
    found |= set(ROOT_FILE.findall(text))
    return {path for path in found if not set(path) & set("*<>{}") and "..." not in path and Path(path).stem != "x"}


def missing(document: str, text: str) -> list[str]:
    # A package's documents may name paths from its own root.
    places = [REPO_ROOT / folder for folder in Path(document).parents]
    return sorted(path for path in named_paths(text) if not any((place / path).exists() for place in places))


@pytest.mark.parametrize("document", documents())
def test_named_paths_exist(document: str) -> None:
    assert missing(document, (REPO_ROOT / document).read_text()) == []


def test_a_missing_path_is_found() -> None:
    text = (
        "See `scripts/absent`, [notes](sub/absent.md) and `ABSENT.md`, not `patches/<area>/x.patch` or `scripts/fork`."
    )
    assert missing("README.md", text) == ["ABSENT.md", "scripts/absent", "sub/absent.md"]


def test_named_verbs_exist() -> None:
    named = {verb for document in documents() for verb in VERB.findall((REPO_ROOT / document).read_text())}
    assert {"tree", "wheel", "lint", "review", "refresh"} <= named
    for verb in sorted(named):
        help_text = subprocess.run(
            [sys.executable, REPO_ROOT / "scripts" / "fork", verb, "--help"],
            check=False,
            capture_output=True,
            text=True,
        )
        assert help_text.returncode == 0, f"scripts/fork {verb}: {help_text.stderr}"


@functools.cache
def sources() -> str:
    """The text of every file that is not a document, this one left out."""
    names = [name for name in tracked() if not name.endswith((".md", ".json", ".svg", ".safetensors"))]
    texts = (REPO_ROOT / name for name in names if name != "tests/test_documents.py")
    return "\n".join(path.read_text(errors="replace") for path in texts if path.is_file())


@functools.cache
def release(pattern: str) -> str:
    """The text of the installed SGLang's modules that match a pattern; SGLang is not imported."""
    specification = importlib.util.find_spec("sglang")
    assert specification is not None and specification.origin is not None
    return "\n".join(path.read_text() for path in sorted(Path(specification.origin).parent.glob(pattern)))


@functools.cache
def server_flags() -> frozenset[str]:
    """Flags of the server: one for each field of ServerArgs, and their aliases."""
    text = release("srt/server_args.py")
    fields = re.findall(r"^    ([a-z]\w*): A\[", text, re.MULTILINE)
    aliases = re.findall(r'"(--[a-z][a-z0-9-]*)"', text)
    return frozenset({"--" + field.replace("_", "-") for field in fields} | set(aliases))


def is_flag(flag: str, known: frozenset[str]) -> bool:
    """Whether argparse would take `flag`: as it is, or as the only one that begins so."""
    return flag in known or sum(name.startswith(flag) for name in known) == 1


def commands(document: str) -> list[list[str]]:
    """The commands in a document's code, as words: lines of fences, and spans that begin like one."""
    text = (REPO_ROOT / document).read_text()
    lines = [line for fence in FENCE.findall(text) for line in fence.replace("\\\n", " ").splitlines()]
    lines += SPAN.findall(FENCE.sub("", text))
    found = []
    for command in (command for line in lines for command in line.split(" && ")):
        try:
            words = shlex.split(command, comments=True)
        except ValueError:  # code in another language
            continue
        while words and re.fullmatch(r"[A-Z_]+=\S+", words[0]):
            del words[0]
        if words and re.match(r"scripts/|build/env/bin/|python\b|sglang$", words[0]):
            found.append(words)
    return found


def accepted_flags(words: list[str]) -> frozenset[str] | None:
    """The flags that a command of ours takes, or None when there is nothing to compare with."""
    name = Path(words[0]).name
    if words[0] == "scripts/serve" or name == "sglang":
        return server_flags()
    script = next((word for word in words if f"{word}/__main__.py" in tracked() or word in tracked()), None)
    if script is None:
        return None
    # Two commands have their arguments in a module, and one is a folder.
    places = {"scripts/fork": "scripts/fork_tools/cli.py", "scripts/doctor": "scripts/doctor_checks.py"}
    place = places.get(script, script if script in tracked() else f"{script}/__main__.py")
    return frozenset(FLAG.findall((REPO_ROOT / place).read_text()))


def test_named_files_exist() -> None:
    names = {f"/{name}" for name in tracked()}
    for document in documents():
        for file in FILE.findall((REPO_ROOT / document).read_text()):
            stand_in = Path(file).stem in ("x", "config", "OUT")
            assert stand_in or any(name.endswith(f"/{file}") for name in names), f"{document}: {file}"


def test_flags_of_named_commands_exist() -> None:
    checked = 0
    for document in documents():
        for words in commands(document):
            known = accepted_flags(words)
            for word in words[1:]:
                if known is not None and (flag := FLAG.match(word)):
                    assert is_flag(flag[0], known), f"{document}: {' '.join(words)}: {flag[0]}"
                    checked += 1
    assert checked >= 8


def test_named_flags_exist() -> None:
    known = server_flags() | set(FLAG.findall(sources())) | FOREIGN_FLAGS
    for document in documents():
        for flag in FLAG.findall((REPO_ROOT / document).read_text()):
            assert is_flag(flag, known), f"{document}: {flag}"


def test_a_flag_that_nothing_takes_is_found() -> None:
    words = shlex.split("scripts/serve --model-path x --tp 8 --speculative-budget 3")
    known = accepted_flags(words)
    assert known is not None
    assert [word for word in words if word.startswith("--") and not is_flag(word, known)] == ["--speculative-budget"]


@pytest.mark.parametrize("script", ["serve", "fork", "plan", "doctor", "image"])
def test_named_scripts_explain_themselves(script: str) -> None:
    path = REPO_ROOT / "scripts" / script
    result = subprocess.run([path, "--help"], check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert result.returncode == 0 and script in result.stdout, result.stderr


def test_named_variables_are_read() -> None:
    named = {name for document in documents() for name in VARIABLE.findall((REPO_ROOT / document).read_text())}
    assert "SGLANG_SM120_VERIFY" in named
    assert sorted(name for name in named - FOREIGN_VARIABLES if name not in sources()) == []


def test_named_metrics_exist() -> None:
    named = {name for document in documents() for name in METRIC.findall((REPO_ROOT / document).read_text())}
    text = sources() + release("srt/observability/*.py")
    assert "sglang:spec_accepted_depth" in named
    assert sorted(name for name in named if f'"{name}"' not in text) == []


def test_named_fields_of_responses_exist() -> None:
    named = {name for document in documents() for name in FIELD.findall((REPO_ROOT / document).read_text())}
    text = sources() + release("srt/managers/*.py")
    assert named and [name for name in sorted(named) if f'"{name}"' not in text] == []


def test_readme_fits_its_size() -> None:
    lines = (REPO_ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 220
    assert next(number for number, line in enumerate(lines, 1) if line.startswith("```")) <= 40
