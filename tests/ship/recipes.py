# SPDX-License-Identifier: Apache-2.0
"""Writes the figures of docker/RECIPES.md: runs scripts/plan on the shapes that the models publish.

build/env/bin/python tests/ship/recipes.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

REPO_ROOT = Path(__file__).resolve().parents[2]
PAGE = REPO_ROOT / "docker" / "RECIPES.md"
BEGIN, END = "<!-- figures: tests/ship/recipes.py -->\n", "<!-- end of figures -->\n"
BUDGET = 15
# What the driver shows of a card of 96 GB and of one of 32 GB, rounded down.
LARGE, SMALL = 95, 31

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT4 = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
# The config.json of the models, as far as memory depends on it.
DEEPSEEK_V3: dict[str, Any] = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "vocab_size": 129280,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
}
KIMI_K26 = DEEPSEEK_V3 | {
    "num_attention_heads": 64,
    "vocab_size": 163840,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 262144,
}
GLM_FLASH = DEEPSEEK_V3 | {
    "hidden_size": 2048,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "vocab_size": 154880,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "first_k_dense_replace": 1,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "max_position_embeddings": 202752,
}
KIMI_DRAFTER: dict[str, Any] = {
    "hidden_size": 7168,
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 18432,
    "max_position_embeddings": 262144,
    "block_size": 8,
    "dflash_config": {"target_layer_ids": [1, 12, 24, 35, 47, 58]},
}
# Nobody's: what such a drafter would have, so that its place is kept free. ASSUMED says so under the table.
DEEPSEEK_DRAFTER = KIMI_DRAFTER | {"max_position_embeddings": 163840}
GLM_DRAFTER = KIMI_DRAFTER | {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "max_position_embeddings": 202752,
}


ASSUMED = (
    "No drafter of DeepSeek V3 is known and none of GLM-4.7-Flash was examined: their rows keep room for an assumed one of "
    f"{KIMI_DRAFTER['num_hidden_layers']} layers with blocks of {KIMI_DRAFTER['block_size']}, as Kimi K2.6 has, with the "
    "hidden size of the target."
)


class Recipe(NamedTuple):
    """One row of the table: a target on so many cards of so many GiB, for so many requests at once."""

    name: str
    target: dict[str, Any]
    drafter: dict[str, Any]
    cards: int
    card_gib: int
    concurrency: int


RECIPES = (
    Recipe("Kimi K2.6, INT4", KIMI_K26 | {"quantization_config": INT4}, KIMI_DRAFTER, 8, LARGE, 4),
    Recipe("Kimi K2.6, NVFP4", KIMI_K26 | {"quantization_config": NVFP4}, KIMI_DRAFTER, 8, LARGE, 4),
    Recipe("DeepSeek V3, FP8", DEEPSEEK_V3 | {"quantization_config": FP8}, DEEPSEEK_DRAFTER, 8, LARGE, 4),
    Recipe(
        "DeepSeek V3, FP8, two machines", DEEPSEEK_V3 | {"quantization_config": FP8}, DEEPSEEK_DRAFTER, 16, LARGE, 8
    ),
    Recipe("GLM-4.7-Flash, BF16", GLM_FLASH, GLM_DRAFTER, 1, LARGE, 4),
    Recipe("GLM-4.7-Flash, 4 bits, RTX 5090", GLM_FLASH | {"quantization_config": INT4}, GLM_DRAFTER, 1, SMALL, 2),
)


def planned(recipe: Recipe) -> dict[str, float]:
    """What scripts/plan answers for a recipe."""
    with tempfile.TemporaryDirectory() as folder:
        for name, config in (("target", recipe.target), ("drafter", recipe.drafter)):
            (Path(folder) / name).mkdir()
            (Path(folder) / name / "config.json").write_text(json.dumps(config))
        command = [sys.executable, str(REPO_ROOT / "scripts" / "plan"), f"{folder}/target"]
        command += ["--drafter", f"{folder}/drafter", "--budget", str(BUDGET), "--json"]
        command += ["--cards", str(recipe.cards), "--card-gib", str(recipe.card_gib)]
        command += ["--concurrency", str(recipe.concurrency)]
        result: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return result


def row(recipe: Recipe) -> str:
    """The recipe's row of the table."""
    plan = planned(recipe)
    weights = (plan["weights"] + plan["draft_weights"]) / 2**30
    cells = [recipe.name, f"{recipe.cards} of {recipe.card_gib} GiB", f"{weights:.1f}", f"{plan['tokens']:,.0f}"]
    cells += [str(recipe.concurrency), f"{plan['context_per_request']:,.0f}", f"{plan['mem_fraction_static']:.3f}"]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """The part of the page between its two marks."""
    head = "| model | cards | weights, GiB a card | tokens in the pool | requests | context of each | memory fraction |"
    return (
        "\n".join([head, "|---|---|---|---|---|---|---|", *map(row, RECIPES), "", *textwrap.wrap(ASSUMED, 118)]) + "\n"
    )


def main() -> None:
    """Put the table into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
