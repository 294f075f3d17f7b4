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
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "models"))

from rank_shape import draft_config, target_config

from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.sm120.memory_budget import AttentionScratch, VerifyShape
from sglang.srt.speculative import ddtree_args, ddtree_budget

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
        assert result[weights] == pytest.approx(measured[weights], rel=0.001)
    assert measured["workspace"] <= result["workspace"] < 2**26
    for pool in ("kv", "draft_kv"):
        assert result[pool] / result["tokens"] * 400_000 == pytest.approx(measured[pool], rel=0.001)
    fixed = ("weights", "draft_weights", "workspace", "mask", "logits", "graphs")
    held = sum(measured[owner] for owner in fixed if owner in measured)
    assert sum(result[owner] for owner in fixed) == pytest.approx(held, rel=0.03)


@pytest.mark.parametrize("config, billions", [(DEEPSEEK_V3, 671), (KIMI_K2, 1026)])
def test_published_parameter_counts(plan: ModuleType, config: dict[str, Any], billions: float) -> None:
    parameters = plan.target_weights(config, 1).stored / plan.BF16
    assert parameters / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    "quantisation, bytes_per_weight",
    [
        (None, 2.0),
        (INT4, 0.5625),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1 + 4 / 16384),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5625),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": {"num_bits": 8}}, 0.5625),
        (INT4 | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, 0.5625),
        ({"config_groups": {"all": {"weights": {"num_bits": 4}, "input_activations": {"num_bits": 8}}}}, 0.5625),
        ({"config_groups": {"all": {"weights": {"num_bits": 4, "type": "float"}}}}, 0.5625),
    ],
)
def test_quantised_experts(plan: ModuleType, quantisation: dict[str, Any] | None, bytes_per_weight: float) -> None:
    config = KIMI_K2 | {"quantization_config": quantisation}
    assert plan.expert_bytes_per_weight(config) == bytes_per_weight
    plain, small = (plan.target_weights(shape, 8) for shape in (KIMI_K2, config))
    assert small.experts == pytest.approx(plain.experts * bytes_per_weight / 2)
    everything = quantisation is not None and quantisation.get("quant_method") == "fp8"
    assert (small.attention < plain.attention) is everything


def test_ranks_share_heads_and_experts_and_keep_the_latent(plan: ModuleType) -> None:
    one, eight = plan.target_weights(KIMI_K2, 1), plan.target_weights(KIMI_K2, 8)
    assert eight.experts == one.experts / 8
    assert one.attention / 8 < eight.attention < one.attention / 3
    held_whole = 61 * 7168 * (1536 + 512 + 64) + 60 * 7168 * 384  # down-projections and routers
    assert 8 * eight.stored - one.stored == 7 * held_whole * plan.BF16
    rotary = 262_144 * 64 * 4
    assert one.copies - rotary == 8 * (eight.copies - rotary) == 61 * 64 * (128 + 128) * 512 * plan.BF16
    assert plan.draft_kv_bytes(KIMI_DRAFTER, 8) == 3072 and plan.draft_kv_bytes(KIMI_DRAFTER, 16) == 3072


def test_kimi_in_int4_on_eight_cards_of_96_gib(plan: ModuleType) -> None:
    result = plan.plan(KIMI_K2 | {"quantization_config": INT4}, KIMI_DRAFTER, 8, 95 * GIB, budget=16, concurrency=2)
    used = sum(value for name, value in result.items() if name not in OTHERS)
    assert 95 * GIB - 80_000 < used <= 95 * GIB
    assert result["context_per_request"] > 32_768


@pytest.mark.scenario("BUG-054")
@pytest.mark.parametrize("quantisation", [None, INT4])
def test_the_fraction_gives_the_pools_what_was_planned(
    plan: ModuleType, monkeypatch: pytest.MonkeyPatch, quantisation: dict[str, Any] | None
) -> None:
    """SGLang sizes the pools by what is free once both models are loaded."""
    card = (95 if quantisation else 400) * GIB
    config = KIMI_K2 | {"quantization_config": quantisation}
    result = plan.plan(config, KIMI_DRAFTER, 8, card, budget=16, concurrency=4)
    free = (card - result["weights"] - result["draft_weights"]) / GIB
    fraction = SimpleNamespace(mem_fraction_static=result["mem_fraction_static"])
    world = SimpleNamespace(world_size=8, cpu_group=None)
    monkeypatch.setattr(kv_cache_configurator, "get_available_gpu_memory", lambda *_, **__: free)
    monkeypatch.setattr(kv_cache_configurator, "get_world_group", lambda: world)
    monkeypatch.setattr(kv_cache_configurator, "get_schedule", lambda: fraction)
    configurator: Any = SimpleNamespace(device="cuda", gpu_id=0, mambaish_config=None)
    pools = kv_cache_configurator.KVCacheConfigurator._profile_available_bytes(configurator, card / GIB)
    planned = result["kv"] + result["draft_kv"]
    assert planned - card / 1000 <= pools <= planned, "the flag has three digits"


@pytest.mark.parametrize("budget, widths", [(15, (16,)), (None, (8, 16, 32))])
@pytest.mark.parametrize("tp_size, concurrency", [(1, 1), (8, 4), (8, 48)])
def test_the_plan_leaves_what_the_server_will_ask_for(
    plan: ModuleType, tp_size: int, concurrency: int, budget: int | None, widths: tuple[int, ...]
) -> None:
    """What is missing beside the pools ends a start (memory_budget.py)."""
    result = plan.plan(KIMI_K2, KIMI_DRAFTER, tp_size, 4000 * GIB, budget=budget, concurrency=concurrency)
    needed = VerifyShape(
        captured=concurrency,
        widths=widths,
        block_size=8,
        context_len=262_144,
        vocab_size=163_840,
        tp_size=tp_size,
        target=AttentionScratch(64 // tp_size, 256, 512),
        drafter=AttentionScratch(64 // tp_size, 8, 128),
    ).capture_bytes()
    graphs = len(widths) * concurrency * GIB / 8
    assert sum(needed.values()) <= result["graphs"] + result["logits"] <= 2 * sum(needed.values()) + graphs


@pytest.mark.parametrize("block", [4, 8, 17, 24, 64])
def test_auto_is_what_the_server_chooses_from(plan: ModuleType, block: int) -> None:
    assert plan.AUTO == ddtree_budget.AUTO and plan.MAX_BUDGET == ddtree_args.MAX_BUDGET
    assert plan.verify_widths(None, block) == tuple(budget + 1 for budget in ddtree_budget.auto_budgets(block))


def test_auto_keeps_room_for_its_largest_tree(tmp_path: Path) -> None:
    target, drafter = folder(tmp_path / "target", KIMI_K2), folder(tmp_path / "draft", KIMI_DRAFTER)
    flags = (target, "--drafter", drafter, "--card-gib", "400", "--json", "--budget")
    auto, small, large = (json.loads(run(*flags, budget).stdout) for budget in ("auto", "15", "31"))
    assert auto["logits"] == large["logits"] > small["logits"]
    assert auto["graphs"] > large["graphs"] and auto["tokens"] < large["tokens"] < small["tokens"]


def test_without_a_drafter_plain_decoding_is_planned(tmp_path: Path) -> None:
    target = folder(tmp_path / "target", KIMI_K2)
    flags = (target, "--card-gib", "400", "--json")
    plain = json.loads(run(*flags).stdout)
    assert not {"draft_weights", "draft_kv", "mask", "workspace"} & set(plain)
    assert plain["kv"] == plain["tokens"] * 61 * 576 * 2
    assert plain["logits"] == 4 * 163_840 * 4
    drafted = json.loads(run(*flags, "--drafter", folder(tmp_path / "draft", KIMI_DRAFTER)).stdout)
    assert plain["weights"] == drafted["weights"] and plain["tokens"] > drafted["tokens"]


def test_a_budget_without_a_drafter_is_refused(tmp_path: Path) -> None:
    result = run(folder(tmp_path / "target", KIMI_K2), "--card-gib", "400", "--budget", "8")
    assert result.stderr == "plan: --budget: expected --drafter beside it, got --budget 8 alone\n"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_size": 2048}, "hidden_size is 2048, the target has 7168"),
        ({"vocab_size": 129_280}, "vocab_size is 129280, the target has 163840"),
        ({"num_target_layers": 47}, "num_target_layers is 47, the target has 61"),
        ({"dflash_config": {"num_target_layers": 47}}, "num_target_layers is 47, the target has 61"),
    ],
)
def test_a_drafter_of_another_target_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    drafter = folder(tmp_path / "draft", KIMI_DRAFTER | change)
    result = run(folder(tmp_path / "target", KIMI_K2), "--drafter", drafter, "--card-gib", "400")
    expected = f"plan: --drafter: it was made for another target: its {message}\n"
    assert (result.returncode, result.stderr) == (1, expected)


def test_a_drafter_that_states_no_vocabulary_is_taken(plan: ModuleType) -> None:
    left_out = ("vocab_size", "num_target_layers")
    drafter = {name: value for name, value in KIMI_DRAFTER.items() if name not in left_out}
    plan.check_pair(KIMI_K2, drafter)


@pytest.mark.parametrize(
    "card_gib, missing", [("300", "GiB a card are missing"), ("419", "leave none of them a context")]
)
def test_too_many_requests_are_told_to_be_fewer(tmp_path: Path, card_gib: str, missing: str) -> None:
    target, drafter = folder(tmp_path / "target", KIMI_K2), folder(tmp_path / "draft", KIMI_DRAFTER)
    flags = (target, "--drafter", drafter, "--card-gib", card_gib, "--concurrency")
    many = run(*flags, "2000")
    assert many.returncode == 1 and len(many.stderr.splitlines()) == 1
    assert missing in many.stderr and many.stderr.endswith("use more or larger cards or lower --concurrency\n")
    assert run(*flags, "1").returncode == 0


def test_help_says_what_each_option_is() -> None:
    text = " ".join(run("--help").stdout.split())
    for option in ("--drafter DRAFTER", "--cards CARDS", "--budget BUDGET", "--concurrency CONCURRENCY", "--json"):
        assert re.search(rf" {option} [^-][^()]*\(default: [^N)]+\)", text), option
    assert "(default: 8)" in text and "(default: 15)" in text and "(default: 4)" in text and "(required)" in text


def test_an_index_corrects_the_estimate(plan: ModuleType, tmp_path: Path) -> None:
    """What the estimate does not know is shared by the ranks; what each rank holds whole stays."""
    assert plan.indexed_bytes(tmp_path) is None
    known = int(plan.target_weights(KIMI_K2, 1).stored)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": known + 80 * GIB}}))
    weights = [
        plan.plan(KIMI_K2, KIMI_DRAFTER, 8, 400 * GIB, budget=16, concurrency=1, checkpoint_bytes=size)["weights"]
        for size in (None, known, plan.indexed_bytes(tmp_path))
    ]
    assert weights[1] == weights[0] and weights[2] == weights[0] + 10 * GIB


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
        (KIMI_K2, "96", "does not fit: .* GiB a card are missing; use more or larger cards$"),
        ({"hidden_size": 512}, "96", "expected a DeepSeek-V3-shaped config, got one without 'num_hidden_layers'"),
        (KIMI_K2 | {"quantization_config": {"quant_method": "awq"}}, "96", "expected int4, fp8 or nvfp4, got awq"),
        (None, "96", "expected a folder with config.json"),
        (KIMI_K2, "0", "--card-gib: expected 1 or more, got 0.0"),
        (KIMI_K2, "nan", "--card-gib: expected 1 or more, got nan"),
        (KIMI_K2, "inf", "--card-gib: expected 1 or more, got inf"),
        (
            KIMI_K2 | {"num_attention_heads": 60},
            "96",
            r"--cards: expected a divisor of the target's 60 heads, got 8 \(the default is 8\)",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    tmp_path: Path, target: dict[str, Any] | None, card_gib: str, message: str
) -> None:
    path = tmp_path / "absent" if target is None else folder(tmp_path / "target", target)
    result = run(path, "--drafter", folder(tmp_path / "draft", KIMI_DRAFTER), "--card-gib", card_gib)
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1
    assert re.search(message, result.stderr), result.stderr


@pytest.mark.parametrize(
    "flag, value, expected",
    [
        ("--cards", "0", "1 or more, got 0"),
        ("--concurrency", "0", "1 or more, got 0"),
        ("--budget", "0", "1 to 64 or auto, got 0"),
        ("--budget", "many", "1 to 64 or auto, got many"),
        ("--budget", "65", "1 to 64 or auto, got 65"),
    ],
)
def test_a_flag_out_of_bounds_is_named(tmp_path: Path, flag: str, value: str, expected: str) -> None:
    target, drafter = folder(tmp_path / "target", KIMI_K2), folder(tmp_path / "draft", KIMI_DRAFTER)
    result = run(target, "--drafter", drafter, "--card-gib", "96", flag, value)
    assert (result.returncode, result.stderr) == (1, f"plan: {flag}: expected {expected}\n")


@pytest.mark.parametrize("name", ["block_size", "hidden_size", "num_key_value_heads"])
def test_a_drafter_of_another_kind_is_named(tmp_path: Path, name: str) -> None:
    drafter = {key: value for key, value in KIMI_DRAFTER.items() if key != name}
    paths = folder(tmp_path / "target", KIMI_K2), "--drafter", folder(tmp_path / "draft", drafter)
    result = run(*paths, "--card-gib", "4000")
    message = f"plan: --drafter: expected the config of a DFlash drafter, got one without '{name}'\n"
    assert (result.returncode, result.stderr) == (1, message)


@pytest.mark.parametrize("text", ["[]", "{}", '{"metadata": {}}', '{"metadata": {"total_size": null}}', "{"])
def test_a_broken_index_is_named(tmp_path: Path, text: str) -> None:
    target = folder(tmp_path / "target", KIMI_K2)
    (target / "model.safetensors.index.json").write_text(text)
    result = run(target, "--drafter", folder(tmp_path / "draft", KIMI_DRAFTER), "--card-gib", "4000")
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1
    assert "model.safetensors.index.json: expected metadata.total_size" in result.stderr


def test_a_config_that_is_no_object_is_named(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text("[1]")
    result = run(target, "--drafter", folder(tmp_path / "draft", KIMI_DRAFTER), "--card-gib", "96")
    assert result.stderr == f"plan: {target}: expected an object in config.json, got a list\n"
