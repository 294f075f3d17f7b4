# SPDX-License-Identifier: Apache-2.0
"""Start-up of DDTREE: the widths that follow from the budget, and every configuration that is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from serving.server import ModelPair
from sglang.srt.environ import envs
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode, get_req_to_token_extra_context_len
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.sm120.startup import StartupError
from sglang.srt.speculative import ddtree_args

BLOCK_SIZE = 8


def resolve(pair: ModelPair, *arguments: str, draft: Path | None = None) -> ServerArgs:
    return prepare_server_args(
        [
            *("--model-path", str(pair.target), "--speculative-algorithm", "DDTREE"),
            *("--speculative-draft-model-path", str(draft or pair.draft)),
            *arguments,
        ]
    )


def edited_config(folder: Path, destination: Path, **changes: Any) -> Path:
    """A copy of a model's config with some fields changed; `dflash_config` is merged."""
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"] |= changes.pop("dflash_config", {})
    destination.mkdir()
    (destination / "config.json").write_text(json.dumps(config | changes))
    return destination


@pytest.mark.parametrize("budget", [1, 6, 7, 16, 64])
def test_widths_follow_from_the_budget(demo_pair: ModelPair, budget: int) -> None:
    args = resolve(demo_pair, "--speculative-ddtree-budget", str(budget))
    assert args.speculative_ddtree_budget == str(budget) and ddtree_args.budgets_of(args) == (budget,)
    assert args.speculative_dflash_block_size == BLOCK_SIZE
    assert args.speculative_num_draft_tokens == max(budget + 1, BLOCK_SIZE)


@pytest.mark.scenario("BUG-047")
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("budget", [1, 16, 64])
def test_a_row_of_the_request_table_holds_what_a_step_reserves(
    demo_pair: ModelPair, page_size: int, budget: int
) -> None:
    """By SGLang's own sizes: a text at the limit, two windows behind it, and the rest of the last page."""
    args = resolve(demo_pair, "--speculative-ddtree-budget", str(budget), "--page-size", str(page_size))
    reserve = get_alloc_reserve_per_decode(args)
    assert reserve == 2 * max(budget + 1, BLOCK_SIZE)
    assert get_req_to_token_extra_context_len(args) >= reserve + page_size - 1


def test_default_budget_is_the_one_in_the_help(demo_pair: ModelPair, capsys: pytest.CaptureFixture[str]) -> None:
    assert ddtree_args.budgets_of(resolve(demo_pair)) == (ddtree_args.DEFAULT_BUDGET,)
    with pytest.raises(SystemExit):
        prepare_server_args(["--help"])
    help_text = " ".join(capsys.readouterr().out.split())
    limits = f"{ddtree_args.MIN_BUDGET} to {ddtree_args.MAX_BUDGET} or auto. Default {ddtree_args.DEFAULT_BUDGET}."
    assert f"Nodes of the draft tree under the root, {limits}" in help_text


def test_an_unknown_verify_mode_ends_the_start(demo_pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SM120_VERIFY", "maybe")
    with pytest.raises(StartupError, match="SGLANG_SM120_VERIFY: expected one of auto, on, off, validate, got 'maybe'"):
        resolve(demo_pair)


@pytest.mark.parametrize("algorithm", ["DFLASH", None])
@pytest.mark.parametrize("mode", ["on", "validate"])
def test_the_kernel_is_not_asked_for_without_a_card(
    monkeypatch: pytest.MonkeyPatch, algorithm: str | None, mode: str
) -> None:
    monkeypatch.setenv("SGLANG_SM120_VERIFY", mode)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked: Any = SimpleNamespace(speculative_algorithm=algorithm, speculative_ddtree_budget=None)
    with pytest.raises(
        StartupError, match=f"SGLANG_SM120_VERIFY={mode}: expected an NVIDIA device, got none; set it to"
    ):
        ddtree_args.check_early(asked)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ddtree_args.check_early(asked)


def test_auto_needs_something_to_measure(demo_pair: ModelPair) -> None:
    with pytest.raises(StartupError, match="auto measures the cost of a step on decode CUDA graphs"):
        resolve(demo_pair, "--speculative-ddtree-budget", "auto")


@pytest.mark.parametrize("budget", ["0", "65", "-1", "many", "1.5", "\u0664"])
def test_budget_out_of_range(demo_pair: ModelPair, budget: str) -> None:
    with pytest.raises(StartupError, match=f"--speculative-ddtree-budget: expected 1 to 64 .*, got {budget}"):
        resolve(demo_pair, "--speculative-ddtree-budget", budget)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--speculative-num-draft-tokens", "5"], r"--speculative-num-draft-tokens: DDTREE derives it \(16\), got 5"),
        (["--speculative-dflash-block-size", "4"], r"--speculative-dflash-block-size: DDTREE derives it \(8\), got 4"),
        (["--page-size", "8"], "--page-size: expected one of 1, 16, 32, 64, got 8"),
        (["--mem-fraction-static", "1.0"], "--mem-fraction-static: expected more than 0 and less than 1, got 1.0"),
        (["--mem-fraction-static", "0"], "--mem-fraction-static: expected more than 0 and less than 1, got 0.0"),
        (["--mem-fraction-static", "nan"], "--mem-fraction-static: expected more than 0 and less than 1, got nan"),
        (["--enable-pdmux"], "--enable-pdmux is not supported"),
        (
            ["--enable-return-routed-experts"],
            "--enable-return-routed-experts .* not supported, they record by cache slot",
        ),
        (["--enable-return-indexer-topk"], "--enable-return-indexer-topk are not supported, they record by cache slot"),
        (["--speculative-num-steps", "5"], "--speculative-num-steps is for EAGLE"),
        (["--speculative-eagle-topk", "4"], "--speculative-eagle-topk is for EAGLE"),
        (["--speculative-accept-threshold-single", "0.5"], "accept thresholds other than 1"),
    ],
)
def test_option_refused(demo_pair: ModelPair, arguments: list[str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        resolve(demo_pair, *arguments)


@pytest.mark.parametrize("algorithm", [[], ["--speculative-algorithm", "DFLASH"]])
def test_budget_without_ddtree_is_refused(demo_pair: ModelPair, algorithm: list[str]) -> None:
    draft = ["--speculative-draft-model-path", str(demo_pair.draft)] if algorithm else []
    arguments = ["--model-path", str(demo_pair.target), *algorithm, *draft, "--speculative-ddtree-budget", "8"]
    with pytest.raises(StartupError, match="--speculative-ddtree-budget: expected --speculative-algorithm DDTREE"):
        prepare_server_args(arguments)


def test_drafter_is_required(demo_pair: ModelPair) -> None:
    with pytest.raises(StartupError, match="pass --speculative-draft-model-path"):
        prepare_server_args(["--model-path", str(demo_pair.target), "--speculative-algorithm", "DDTREE"])


def test_drafter_folder_missing(demo_pair: ModelPair, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="expected a folder with config.json, got .*nowhere"):
        resolve(demo_pair, draft=tmp_path / "nowhere")


def test_drafter_is_not_a_dflash_model(demo_pair: ModelPair) -> None:
    with pytest.raises(StartupError, match=r"expected a DFlash drafter .*, got \['DeepseekV3ForCausalLM'\]"):
        resolve(demo_pair, draft=demo_pair.target)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 512}, "made for another target: its hidden_size is 512"),
        ({"vocab_size": 999}, "made for another target: its vocab_size is 999"),
        ({"num_target_layers": 61}, "made for another target: its num_target_layers is 61"),
        ({"block_size": 1}, "expected block_size of at least 2"),
        ({"dflash_config": {"target_layer_ids": [0, 60]}}, r"target_layer_ids must lie in 0\.\..*, got 60"),
        ({"dflash_config": {"target_layer_ids": []}}, "target_layer_ids must be non-empty"),
        ({"dflash_config": {"mask_token_id": 10**6}}, "mask_token_id must be below"),
    ],
)
def test_drafter_of_another_target(demo_pair: ModelPair, tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        resolve(demo_pair, draft=edited_config(demo_pair.draft, tmp_path / "drafter", **changes))


def test_last_target_layer_is_refused(demo_pair: ModelPair, tmp_path: Path) -> None:
    last = json.loads((demo_pair.target / "config.json").read_text())["num_hidden_layers"] - 1
    drafter = edited_config(demo_pair.draft, tmp_path / "drafter", dflash_config={"target_layer_ids": [0, last]})
    with pytest.raises(StartupError, match=f"not the last layer.*, got {last}"):
        resolve(demo_pair, draft=drafter)


def test_broken_drafter_config(demo_pair: ModelPair, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    shutil.copytree(demo_pair.draft, drafter)
    (drafter / "config.json").write_text("{")
    with pytest.raises(StartupError, match="cannot read the config of .*drafter"):
        resolve(demo_pair, draft=drafter)


@pytest.mark.parametrize(("chosen", "seconds"), [(None, 1), ("7", 7)])
def test_a_client_that_left_is_looked_for_every_second(
    demo_pair: ModelPair, monkeypatch: pytest.MonkeyPatch, chosen: str | None, seconds: int
) -> None:
    """With every algorithm, unless the operator says otherwise."""
    monkeypatch.setenv("SGLANG_REQUEST_STATE_WAIT_TIMEOUT", chosen or "")
    if chosen is None:
        monkeypatch.delenv("SGLANG_REQUEST_STATE_WAIT_TIMEOUT")
    prepare_server_args(["--model-path", str(demo_pair.target)])
    assert envs.SGLANG_REQUEST_STATE_WAIT_TIMEOUT.get() == seconds
