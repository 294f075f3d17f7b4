# SPDX-License-Identifier: Apache-2.0
"""Corpus and tokenizer of the demo pair: the standard library's Python source, a byte-level BPE over it."""

from __future__ import annotations

import random
from pathlib import Path

from demo_models import MASK_TOKEN, MAX_POSITIONS, write_json
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 1024
PAD, BOS, EOS, MASK = SPECIAL = ("<|pad|>", "<|bos|>", "<|eos|>", MASK_TOKEN)
# A word with the space before it, one digit, a run of signs, line breaks with the indent that follows, other blanks.
PIECES = r" ?[A-Za-z_]+| ?[0-9]| ?[^\sA-Za-z_0-9]+|\n[\n ]*|\s+"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:\n{% endif %}"
)


def read_source(root: Path) -> list[tuple[str, str]]:
    """Name and text of every `.py` file under `root` that is valid UTF-8, by name, without installed packages.

    Files in other encodings (a few test fixtures) are left out and counted in the printed line.
    """
    files, refused = [], 0
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if {"site-packages", "dist-packages"} & set(name.parts):
            continue
        try:
            files.append((name.as_posix(), path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            refused += 1
    characters = sum(len(text) for _, text in files)
    print(f"corpus: {len(files)} files, {characters / 1e6:.1f} M characters; {refused} files are not UTF-8")
    return files


def split_files(files: list[tuple[str, str]], seed: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Training and held-out files; one file in twenty is held out."""
    order = list(range(len(files)))
    random.Random(seed).shuffle(order)
    held_out = set(order[: max(1, len(files) // 20)])
    return (
        [file for index, file in enumerate(files) if index not in held_out],
        [file for index, file in enumerate(files) if index in held_out],
    )


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Trains the BPE; encoding puts the begin token in front."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes `tokenizer.json` and the settings that `transformers` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "mask_token": MASK,
            "add_bos_token": True,
            "clean_up_tokenization_spaces": False,
            "model_max_length": MAX_POSITIONS,
            "chat_template": CHAT_TEMPLATE,
        },
    )
