# SPDX-License-Identifier: Apache-2.0
"""Bytes of a token in both KV pools: the drafter's are counted from its own shape."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.rank_shape import write_pair
from sglang.srt import runtime_context
from sglang.srt.model_executor import pool_configurator
from sglang.srt.server_args import prepare_server_args
from sglang.srt.sm120 import memory
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

TARGET_CELL = 61 * 1152


@pytest.mark.parametrize(
    "tp_size, kv_heads, head_dim, expected",
    [
        (8, 8, 128, 2 * 6 * 1 * 128 * 2),
        (1, 8, 128, 2 * 6 * 8 * 128 * 2),
        (16, 8, 128, 2 * 6 * 1 * 128 * 2),
        (2, 4, None, 2 * 6 * 2 * (7168 // 64) * 2),
    ],
)
def test_a_token_of_the_drafter(tp_size: int, kv_heads: int, head_dim: int | None, expected: int) -> None:
    drafter = SimpleNamespace(
        num_hidden_layers=6,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=7168,
        num_attention_heads=64,
    )
    assert memory.draft_kv_bytes_per_token(drafter, tp_size, element_size=2) == expected


class Algorithm:
    def __init__(self, dflash: bool) -> None:
        self._dflash = dflash

    def is_dflash_family(self) -> bool:
        return self._dflash


class Configurator:
    """Stands for SGLang's: an estimate that took six drafter layers for layers of the target."""

    _cell_size = TARGET_CELL * 67 // 61

    def _compute_cell_size(self, kvc: Any, num_layers: int) -> int:
        assert num_layers == 61
        return TARGET_CELL


def inputs(folder: Path, dflash: bool = True, **changes: Any) -> SimpleNamespace:
    config = {"model_type": "qwen3", "num_hidden_layers": 6, "num_key_value_heads": 8, "head_dim": 128}
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 512, "num_attention_heads": 8}))
    args = SimpleNamespace(
        speculative_draft_model_path=str(folder),
        speculative_draft_model_revision=None,
        speculative_draft_attention_backend="triton",
        trust_remote_code=False,
        json_model_override_args="{}",
        dcp_size=1,
    )
    fields = {
        "server_args": args,
        "spec_algorithm": Algorithm(dflash),
        "is_draft_worker": False,
        "kv_cache_dtype": torch.bfloat16,
        "model_config": SimpleNamespace(dtype=torch.bfloat16),
    }
    return SimpleNamespace(**fields | changes)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(attn_tp_size=8))


@pytest.mark.usefixtures("ranks")
def test_both_pools_are_counted(tmp_path: Path) -> None:
    assert memory.price_draft_kv(Configurator(), inputs(tmp_path), 61) == TARGET_CELL + 3072


@pytest.mark.usefixtures("ranks")
def test_a_quantised_pool_holds_the_drafter_too_unless_it_runs_on_fa4(tmp_path: Path) -> None:
    kvc = inputs(tmp_path, kv_cache_dtype=torch.float8_e4m3fn)
    assert memory.price_draft_kv(Configurator(), kvc, 61) == TARGET_CELL + 1536
    kvc.server_args.speculative_draft_attention_backend = "fa4"
    assert memory.price_draft_kv(Configurator(), kvc, 61) == TARGET_CELL + 3072


@pytest.mark.parametrize("changes", [{"dflash": False}, {"is_draft_worker": True}])
def test_others_keep_their_estimate(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert memory.price_draft_kv(Configurator(), inputs(tmp_path, **changes), 61) == Configurator._cell_size


@pytest.mark.scenario("BUG-055")
@pytest.mark.parametrize("algorithm", ["DFLASH", "DDTREE"])
def test_sglang_sizes_both_pools_by_their_own_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    """Its own pool configurator, for 61 MLA layers and a drafter of 6 layers with one KV head of 128 on a rank."""
    write_pair(tmp_path, num_layers=61)
    args = prepare_server_args(
        [
            *("--model-path", str(tmp_path / "target"), "--load-format", "dummy", "--kv-cache-dtype", "bf16"),
            *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(tmp_path / "draft")),
        ]
    )
    ranks = SimpleNamespace(attn_tp_size=1)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: ranks)
    monkeypatch.setattr(pool_configurator, "get_parallel", lambda: ranks)
    kvc: Any = SimpleNamespace(
        kv_cache_dtype_str="bf16",
        kv_cache_dtype=torch.bfloat16,
        model_config=args.get_model_config(),
        server_args=args,
        layer_info=SimpleNamespace(start_layer=0, end_layer=61, num_effective_layers=61),
        spec_algorithm=SpeculativeAlgorithm.from_string(algorithm),
        spec_aux_config=SimpleNamespace(dflash_draft_num_layers=6),
        is_draft_worker=False,
        use_mla_backend=True,
        ps=SimpleNamespace(pp_size=1),
    )
    token = TARGET_CELL + 2 * 6 * 128 * 2
    pools = pool_configurator.DefaultPoolConfigurator(kvc).calculate_pool_sizes(1000 * token + token // 2, 1)
    assert pools.max_total_num_tokens == 1000
