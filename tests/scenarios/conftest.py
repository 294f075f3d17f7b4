# SPDX-License-Identifier: Apache-2.0
"""The server with a scripted drafter, which several modules share, and the benchmark's helpers for import."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scenarios.scripted_server import ScriptedServer
from serving.server import ModelPair, Server
from serving.tool_formats import FORMATS, MARKER, TWO_CALLS
from serving.vocabulary import rarest_tokens, rename_tokens

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "scripts" / "bench"))


@pytest.fixture(scope="session")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the drafter reads in every step."""
    return tmp_path_factory.mktemp("script") / "script.json"


@pytest.fixture(scope="session")
def marked_tokenizer(demo_pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo pair's tokenizer, with one token for each marker of a tool call, as in the models that have these."""
    folder = tmp_path_factory.mktemp("marked")
    found = dict.fromkeys(marker for write in FORMATS.values() for marker in MARKER.findall(write(TWO_CALLS)))
    rename_tokens(demo_pair.target, folder, dict(zip(rarest_tokens(demo_pair.target, len(found)), found, strict=True)))
    return folder


@pytest.fixture(scope="module")
def scripted(
    serve: Callable[..., Server], demo_pair: ModelPair, script: Path, marked_tokenizer: Path
) -> ScriptedServer:
    """The server; its drafts are never accepted until a script is played."""
    vocab = json.loads((demo_pair.target / "config.json").read_text())["vocab_size"]
    script.write_text(json.dumps({"texts": [], "patterns": [], "vocab": vocab}))
    options = ("--enable-metrics", "--enable-custom-logit-processor", "--tool-call-parser", "kimi_k2")
    environment = {"SCRIPT": str(script), "PYTHONPATH": f"{HERE / 'scripted'}:{HERE}:{HERE.parent}"}
    server = serve("DDTREE", *options, "--tokenizer-path", str(marked_tokenizer), environment=environment)
    return ScriptedServer(server, script, vocab)
