# SPDX-License-Identifier: Apache-2.0
"""The demo pair's tokenizer with other names for some tokens, such as the markers of larger models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path


def rename_tokens(target: Path, folder: Path, names: dict[str, str]) -> None:
    """Write the tokenizer of `target` into `folder`, with new names for tokens; each becomes a marker that no text is
    merged into.

    Args:
        names: new name by the old one, as it stands in the vocabulary.
    """
    shutil.copy(target / "tokenizer_config.json", folder)
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    model = tokenizer["model"]
    model["merges"] = [pair for pair in model["merges"] if not {*pair, "".join(pair)} & set(names)]
    for old, new in names.items():
        token = model["vocab"].pop(old)
        model["vocab"][new] = token
        tokenizer["added_tokens"].append(
            {**tokenizer["added_tokens"][0], "id": token, "content": new, "special": False}
        )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def rarest_tokens(target: Path, count: int) -> list[str]:
    """The tokens with the highest ids, which were merged last, so that texts can do without them."""
    vocab = json.loads((target / "tokenizer.json").read_text())["model"]["vocab"]
    return sorted(vocab, key=vocab.get, reverse=True)[:count]
