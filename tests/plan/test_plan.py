# SPDX-License-Identifier: Apache-2.0
"""scripts/plan against what an H200 held, against published model sizes, and on what it must refuse."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "models"))

from rank_shape import draft_config, target_config

GIB = 1024**3
DEEPSEEK_V3 = target_config(61) | {
    "num_attention_heads": 128,
    "vocab_size": 129280,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "first_k_dense_replace": 3,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "num_attention_heads": 64,
    "vocab_size": 163840,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
}
KIMI_DRAFTER = draft_config(61) | {"num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 18432}
OTHERS = ("tokens", "context_per_request", "mem_fraction_static")  # what is no size in bytes
INT4 = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}


@pytest.fixture(scope="module")
def plan() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("plan", str(ROOT / "scripts" / "plan"))
    spec = importlib.util.spec_from_loader("plan", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan"] = module
    loader.exec_module(module)
    return module


def test_the_rank_shape_takes_what_an_h200_showed(plan: ModuleType) -> None:
    """The server's own table of memory, of a run with pools of 400,000 tokens; what was not its own is left out."""
    results = json.loads((ROOT / "scripts" / "bench" / "results" / "h200" / "decode.json").read_text())
    measured = results["env"]["memory_bytes"]["sm120-ddtree"]
    result = plan.plan(target_config(61), draft_config(61), 1, 139.8 * GIB, budget=8, concurrency=8)
    for weights in ("weights", "draft_weights"):
        assert result[weights] == pytest.approx(measured[weights], rel=0.03)
    for pool in ("kv", "draft_kv"):
        assert result[pool] / result["tokens"] * 400_000 == pytest.approx(measured[pool], rel=0.001)
    fixed = ("weights", "draft_weights", "workspace", "mask", "logits", "graphs")
    held = sum(measured[owner] for owner in fixed if owner in measured)
    assert sum(result[owner] for owner in fixed) == pytest.approx(held, rel=0.03)


@pytest.mark.parametrize("config, billions", [(DEEPSEEK_V3, 671), (KIMI_K2, 1026)])
def test_published_parameter_counts(plan: ModuleType, config: dict[str, Any], billions: float) -> None:
    parameters = plan.target_weights(config | {"max_position_embeddings": 0}, 1).total / plan.BF16
    assert parameters / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    "quantisation, bytes_per_weight",
    [
        (None, 2.0),
        (INT4, 0.5625),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1 + 4 / 16384),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5625),
    ],
)
def test_quantised_experts(plan: ModuleType, quantisation: dict[str, Any] | None, bytes_per_weight: float) -> None:
    config = KIMI_K2 | {"quantization_config": quantisation}
    assert plan.expert_bytes_per_weight(config) == bytes_per_weight
    plain, small = (plan.target_weights(shape, 8) for shape in (KIMI_K2, config))
    assert small.experts == pytest.approx(plain.experts * bytes_per_weight / 2)
    everything = quantisation is not None and quantisation["quant_method"] == "fp8"
    assert (small.attention < plain.attention) is everything


def test_ranks_share_heads_and_experts_and_keep_the_latent(plan: ModuleType) -> None:
    one, eight = plan.target_weights(KIMI_K2, 1), plan.target_weights(KIMI_K2, 8)
    assert eight.experts == one.experts / 8
    assert one.attention / 8 < eight.attention < one.attention / 3
    assert plan.draft_kv_bytes(KIMI_DRAFTER, 8) == 3072 and plan.draft_kv_bytes(KIMI_DRAFTER, 16) == 3072


def test_kimi_in_int4_on_eight_cards_of_96_gib(plan: ModuleType) -> None:
    result = plan.plan(KIMI_K2 | {"quantization_config": INT4}, KIMI_DRAFTER, 8, 95 * GIB, budget=16, concurrency=2)
    used = sum(value for name, value in result.items() if name not in OTHERS)
    assert 95 * GIB - 80_000 < used <= 95 * GIB
    assert result["context_per_request"] > 32_768


def test_an_index_stands_in_for_the_estimate(plan: ModuleType, tmp_path: Path) -> None:
    assert plan.indexed_bytes(tmp_path) is None
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 800 * GIB}}))
    size = plan.indexed_bytes(tmp_path)
    result = plan.plan(KIMI_K2, KIMI_DRAFTER, 8, 140 * GIB, budget=16, concurrency=1, checkpoint_bytes=size)
    assert result["weights"] == 100 * GIB


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts" / "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def folder(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_table_and_json(tmp_path: Path) -> None:
    target = folder(tmp_path / "target", {"text_config": target_config(61), "model_type": "kimi_k25"})
    flags = ("--drafter", folder(tmp_path / "draft", draft_config(61)), "--cards", "1", "--card-gib", "96")
    assert "context_per_request" in run(target, *flags).stdout
    assert json.loads(run(target, *flags, "--json").stdout)["tokens"] > 500_000


@pytest.mark.parametrize(
    "target, card_gib, message",
    [
        (KIMI_K2, "96", "does not fit: .* GiB a card are missing"),
        ({"hidden_size": 512}, "96", "expected a DeepSeek-V3-shaped config, got one without 'num_hidden_layers'"),
        (KIMI_K2 | {"quantization_config": {"quant_method": "awq"}}, "96", "expected int4, fp8 or nvfp4, got awq"),
        (None, "96", "expected a folder with config.json"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    tmp_path: Path, target: dict[str, Any] | None, card_gib: str, message: str
) -> None:
    path = tmp_path / "absent" if target is None else folder(tmp_path / "target", target)
    result = run(path, "--drafter", folder(tmp_path / "draft", KIMI_DRAFTER), "--card-gib", card_gib)
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1
    assert re.search(message, result.stderr), result.stderr
