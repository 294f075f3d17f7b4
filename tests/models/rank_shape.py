# SPDX-License-Identifier: Apache-2.0
"""Writes a target and a drafter with the shape that one GPU of eight sees of Kimi K2.6, for runs on dummy weights.

    python tests/models/rank_shape.py OUT [--layers 61]

Attention is exact: 61 layers of 8 heads over the full latent of 512 + 64, hidden size 7168. Experts are thinned to 32
of width 256 (30 GB in bf16), so that the step's other parts cost about what a rank of the real model costs. The drafter
is Kimi-K2.6-DFlash at tensor parallelism 8: 6 layers, one KV head, blocks of 8. Text means nothing; step times do.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

TOKENIZER = Path(__file__).resolve().parent / "demo" / "target"
VOCAB_SIZE, HIDDEN_SIZE, CONTEXT = 163840, 7168, 262144
DRAFT_LAYERS, BLOCK_SIZE = 6, 8


def shared() -> dict[str, Any]:
    """What both models have in common."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "max_position_embeddings": CONTEXT,
        "dtype": "bfloat16",
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "intermediate_size": 2304,
        "num_attention_heads": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def target_config(num_layers: int) -> dict[str, Any]:
    """config.json of the target."""
    return shared() | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": num_layers,
        "num_key_value_heads": 8,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 256,
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
    }


def draft_config(num_layers: int) -> dict[str, Any]:
    """config.json of the drafter; it reads six layers spread over the target, fewer of a short one."""
    first, last = (1, num_layers - 3) if num_layers > 3 else (0, 0)
    read = sorted({round(first + index * (last - first) / (DRAFT_LAYERS - 1)) for index in range(DRAFT_LAYERS)})
    return shared() | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": DRAFT_LAYERS,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "block_size": BLOCK_SIZE,
        "num_target_layers": num_layers,
        "dflash_config": {"mask_token_id": VOCAB_SIZE - 2, "target_layer_ids": read},
    }


def write_pair(root: Path, num_layers: int) -> None:
    """Write ``target/`` and ``draft/`` below `root`, with the demo pair's tokenizer."""
    for name, config in (("target", target_config(num_layers)), ("draft", draft_config(num_layers))):
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        for path in TOKENIZER.glob("tokenizer*"):
            shutil.copy(path, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a model pair of the shape of one rank of Kimi K2.6.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=61)
    args = parser.parse_args()
    write_pair(args.out, args.layers)


if __name__ == "__main__":
    main()
