# SPDX-License-Identifier: Apache-2.0
"""A target without MLA for the demo pair's drafter: a small Llama with grouped queries and drawn weights.

Only some tokens are ever drawn or drafted, so that drafts of a drafter of another model are accepted by chance.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 4, 256, 8, 2, 32, 512, 1024
USED_TOKENS = range(100, 130)
PROMPTS = [list(range(200 + start, 212 + start)) for start in range(24)]


def write_target(root: Path, tokenizer: Path) -> None:
    """Write the model into `root`, in fp32, with the tokenizer of the folder `tokenizer`."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "max_position_embeddings": 4096, "tie_word_embeddings": False, "attention_bias": False,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (root / "config.json").write_text(json.dumps(config))
    for path in tokenizer.glob("tokenizer*"):
        shutil.copy(path, root)
    save_file(_weights(), str(root / "model.safetensors"))


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 2 / columns**0.5

    weights = {"model.embed_tokens.weight": drawn(VOCAB, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    weights["lm_head.weight"] = torch.zeros(VOCAB, HIDDEN)
    weights["lm_head.weight"][USED_TOKENS.start : USED_TOKENS.stop] = drawn(len(USED_TOKENS), HIDDEN)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}{norm}.weight"] = torch.ones(HIDDEN)
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weights[f"{name}self_attn.{part}_proj.weight"] = drawn(heads * HEAD_DIM, HIDDEN)
        weights[f"{name}self_attn.o_proj.weight"] = drawn(HIDDEN, HEADS * HEAD_DIM)
        for part, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            weights[f"{name}mlp.{part}_proj.weight"] = drawn(*shape)
    return weights
