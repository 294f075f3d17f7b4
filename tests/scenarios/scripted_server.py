# SPDX-License-Identifier: Apache-2.0
"""A server whose drafter follows a script."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scenarios.patterns import Pattern
from serving.server import Server, generate


class ScriptedServer:
    """The server, and the file that its drafter reads in every step."""

    def __init__(self, server: Server, script: Path, vocab: int) -> None:
        self.server, self._script, self._vocab = server, script, vocab

    def play(self, texts: Sequence[Sequence[int]], patterns: Sequence[Pattern]) -> None:
        """From the next step on draft from `texts` by `patterns`; without texts draft what is never accepted."""
        script = json.dumps({"texts": texts, "patterns": patterns, "vocab": self._vocab})
        self._script.with_suffix(".new").write_text(script)
        self._script.with_suffix(".new").rename(self._script)

    def generate(self, ids: list[int], new_tokens: int, **options: Any) -> Any:
        return generate(self.server, ids, **{"max_new_tokens": new_tokens, "ignore_eos": True, **options})
