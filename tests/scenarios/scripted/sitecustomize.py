# SPDX-License-Identifier: Apache-2.0
"""Replaces the drafter of a server under test by a script, where this folder and tests/ are on Python's path.

SCRIPT names a JSON file: the token ids of whole texts, and the patterns that steps follow in turn. The drafter finds the
text by the root's token and position, so that texts should differ there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from serving.after_import import after_import


def scripted_build(drafter: Any, hidden: Any, roots: Any, committed: Any, buffers: Any) -> None:
    """`TreeDrafter.build` with the script in place of the drafter's scores."""
    import torch
    from patterns import DEPTH, Pattern, propose

    from sglang.srt.speculative.ddtree_tree import build_tree

    script = json.loads(Path(os.environ["SCRIPT"]).read_text())
    proposals = []
    for root, position in zip(roots.tolist(), committed.tolist(), strict=True):
        matches = [text for text in script["texts"] if len(text) > position + DEPTH and text[position] == root]
        # Beyond the end of a text, and in a server's own warm-up, nothing is accepted.
        text = matches[0] if matches else [0] * (position + DEPTH + 1)
        pattern = Pattern(*script["patterns"][position % len(script["patterns"])]) if matches else Pattern(0, 0)
        proposals.append(propose(pattern, text[position + 1 :], script["vocab"]))
    log_probs, token_ids = (torch.stack(part) for part in zip(*proposals, strict=True))
    build_tree(log_probs, token_ids, roots, committed, buffers)


def replace_build(module: ModuleType) -> None:
    """Let the drafter follow the script."""
    module.TreeDrafter.build = scripted_build


if "SCRIPT" in os.environ:
    after_import("sglang.srt.speculative.ddtree_draft", replace_build)
