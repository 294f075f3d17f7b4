# SPDX-License-Identifier: Apache-2.0
"""Server arguments of DDTREE: the budget, the widths that follow from it, and everything that is refused at start-up."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.sm120.defrag_args import MODE_VARIABLE, DefragMode, check_requested, defrag_mode, refuse_defrag
from sglang.srt.sm120.disconnects import notice_disconnects
from sglang.srt.sm120.memory_budget import lower_default_fraction
from sglang.srt.sm120.startup import StartupError
from sglang.srt.sm120.variables import check_names
from sglang.srt.sm120.verify_route import refuse_without_card
from sglang.srt.speculative.ddtree_algorithm import is_ddtree
from sglang.srt.speculative.ddtree_budget import AUTO, auto_budgets

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

LENGTHS_VARIABLE = "SGLANG_SM120_SIMULATE_ACC_LENS"
MIN_BUDGET = 1
MAX_BUDGET = 64
# A compromise for one stream and few: a larger tree accepts more, at a cost that a batch feels
# (tests/serving/results/h200_decode_rank.json). With the root it has 16 rows, which matrix tiles take whole.
DEFAULT_BUDGET = 15
SUPPORTED_PAGE_SIZES = (1, 16, 32, 64)


def verify_width(budget: int, block_size: int) -> int:
    """Rows per request of a verify pass: the root and `budget` nodes, at least one drafter block.

    The drafter writes its block into the first slots of the same window, hence the lower bound; a smaller tree is
    padded with rows that nothing reaches.
    """
    return max(budget + 1, block_size)


def resolve_server_args(server_args: ServerArgs) -> None:
    """Validate a DDTREE configuration and set the widths in place.

    Afterwards ``speculative_dflash_block_size`` is the drafter's block, ``speculative_num_draft_tokens`` the (largest)
    verify width and ``speculative_ddtree_budget`` the budget as text, a number or auto. Called once, from
    ``ServerArgs.__post_init__``.

    Raises:
        StartupError: for an option, a model pair or a device that cannot be served.
    """
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.speculative.ddtree_simulate import simulated_lengths

    asked = _parse_budget(server_args.speculative_ddtree_budget)
    _refuse_unsupported_options(server_args)
    refuse_defrag(server_args, resolved_view(server_args).page_size)
    drafter = _load_drafter_config(server_args)
    block_size = _check_pair(server_args, drafter)
    budgets = auto_budgets(block_size) if asked == AUTO else (int(asked),)
    if asked == AUTO and not _decode_graphs_on(server_args):
        raise StartupError(
            "--speculative-ddtree-budget: auto measures the cost of a step on decode CUDA graphs, which the CPU has not and "
            "--cuda-graph-backend-decode disabled turns off; give a number"
        )
    simulated_lengths(budgets, block_size)  # refuses what it cannot force
    budget = budgets[-1]
    width = verify_width(budget, block_size)
    for flag, value, expected in (
        ("--speculative-num-draft-tokens", server_args.speculative_num_draft_tokens, width),
        ("--speculative-dflash-block-size", server_args.speculative_dflash_block_size, block_size),
    ):
        if value not in (None, expected):
            raise StartupError(
                f"{flag}: DDTREE derives it ({expected}), got {value}; drop the flag, size the tree with --speculative-ddtree-budget"
            )

    server_args.speculative_num_draft_tokens = block_size
    server_args.speculative_dflash_block_size = block_size
    speculative_hook._handle_dflash(server_args)
    server_args.speculative_num_draft_tokens = width
    server_args.speculative_ddtree_budget = str(asked)
    lower_default_fraction(server_args, drafter, [verify_width(rung, block_size) for rung in budgets])
    if budget < block_size - 1:
        logger.warning(
            "DDTREE: budget %d cuts the most likely chain of %d tokens, so a step may accept less than DFLASH does.",
            budget,
            block_size - 1,
        )
    logger.info(
        "DDTREE: budget %s nodes under the root, verify width %d, drafter block %d.",
        "/".join(map(str, budgets)),
        width,
        block_size,
    )


def budgets_of(server_args: ServerArgs) -> tuple[int, ...]:
    """The budgets of a resolved configuration, ascending: one, or those that auto chooses from."""
    asked = server_args.speculative_ddtree_budget
    return auto_budgets(int(server_args.speculative_dflash_block_size)) if asked == AUTO else (int(asked),)


def _decode_graphs_on(server_args: ServerArgs) -> bool:
    from sglang.srt.model_executor.cuda_graph_config import Backend

    return bool(server_args.device == "cuda" and server_args.cuda_graph_config.decode.backend != Backend.DISABLED)


def check_early(server_args: ServerArgs) -> None:
    """What must be checked, or set, before anything else reads the drafter's config, for every algorithm.

    Raises:
        StartupError: for an unknown SGLANG_SM120 variable or value, a budget, defragmentation or accept lengths by
            budget without DDTREE, or a drafter that is missing or no DFlash drafter.
    """
    check_names(os.environ)
    notice_disconnects()
    refuse_without_card()
    defragments = defrag_mode() is not DefragMode.OFF
    check_requested()
    if is_ddtree(server_args.speculative_algorithm):
        _load_drafter_config(server_args)
    elif server_args.speculative_ddtree_budget is not None:
        raise StartupError(
            "--speculative-ddtree-budget: expected --speculative-algorithm DDTREE with it, "
            f"got {server_args.speculative_algorithm}; add the one or drop the other"
        )
    elif defragments:
        raise StartupError(
            f"{MODE_VARIABLE}={defrag_mode().value}: expected --speculative-algorithm DDTREE, "
            f"got {server_args.speculative_algorithm}; unset the variable"
        )
    elif os.environ.get(LENGTHS_VARIABLE):
        raise StartupError(
            f"{LENGTHS_VARIABLE}: expected --speculative-algorithm DDTREE, got {server_args.speculative_algorithm}; "
            "unset the variable"
        )


def _parse_budget(budget: int | str | None) -> int | str:
    """A number of nodes, or auto. The command line gives text, Python may give a number."""
    if budget is None:
        return DEFAULT_BUDGET
    text = str(budget).strip()
    if text == AUTO:
        return AUTO
    if (
        isinstance(budget, bool)
        or not (text.isascii() and text.isdecimal())
        or not MIN_BUDGET <= int(text) <= MAX_BUDGET
    ):
        raise StartupError(
            f"--speculative-ddtree-budget: expected {MIN_BUDGET} to {MAX_BUDGET} nodes under the root or auto, got {budget}"
        )
    return int(text)


def _refuse_unsupported_options(server_args: ServerArgs) -> None:
    """Name the first option that DDTREE cannot honour."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.environ import envs

    view = resolved_view(server_args)
    model_config = server_args.get_model_config()
    backends = set(server_args._resolved_attention_backends())
    page_sizes = ", ".join(map(str, SUPPORTED_PAGE_SIZES))
    fraction = server_args.mem_fraction_static
    refusals: tuple[tuple[Any, str], ...] = (
        (view.enable_dp_attention, "--enable-dp-attention is not supported; run tensor parallelism alone"),
        (server_args.pp_size != 1, f"--pp-size must be 1, got {server_args.pp_size}"),
        (
            server_args.disaggregation_mode != "null",
            f"PD disaggregation is not supported, got --disaggregation-mode {server_args.disaggregation_mode}",
        ),
        (server_args.enable_two_batch_overlap, "--enable-two-batch-overlap is not supported; drop the flag"),
        (server_args.enable_pdmux, "--enable-pdmux is not supported; drop the flag"),
        (server_args.dcp_size != 1, f"--dcp-size must be 1, got {server_args.dcp_size}"),
        (server_args.enable_hisparse, "--enable-hisparse is not supported; drop the flag"),
        (
            server_args.enable_return_routed_experts or server_args.enable_return_indexer_topk,
            "--enable-return-routed-experts and --enable-return-indexer-topk are not supported, they record by cache slot",
        ),
        (server_args.speculative_adaptive, "--speculative-adaptive is for EAGLE; drop the flag"),
        (server_args.speculative_num_steps not in (None, 1), "--speculative-num-steps is for EAGLE; drop the flag"),
        (server_args.speculative_eagle_topk not in (None, 1), "--speculative-eagle-topk is for EAGLE; drop the flag"),
        (
            (server_args.speculative_accept_threshold_single, server_args.speculative_accept_threshold_acc)
            != (1.0, 1.0),
            "accept thresholds other than 1 would change the distribution; drop --speculative-accept-threshold-*",
        ),
        (
            not 0 < (0.5 if fraction is None else fraction) < 1,
            f"--mem-fraction-static: expected more than 0 and less than 1, got {fraction}",
        ),
        (
            view.page_size not in SUPPORTED_PAGE_SIZES,
            f"--page-size: expected one of {page_sizes}, got {view.page_size}",
        ),
        (
            backends != {"triton"},
            f"--attention-backend must be triton (no other backend takes a tree mask), got {'/'.join(sorted(map(str, backends)))}",
        ),
        (
            mambaish_config(model_config) is not None,
            "targets with recurrent layers are not supported: their state cannot follow a tree",
        ),
        (model_config.is_hybrid_swa, "targets with sliding-window layers are not supported"),
        (
            envs.SGLANG_SIMULATE_ACC_LEN.get() > 0 and envs.SGLANG_SIMULATE_ACC_TOKEN_MODE.get() != "fixed",
            "SGLANG_SIMULATE_ACC_TOKEN_MODE must be fixed",
        ),
    )
    for refused, reason in refusals:
        if refused:
            raise StartupError(f"DDTREE: {reason}")


def _load_drafter_config(server_args: ServerArgs) -> Any:
    """The drafter's Hugging Face config, checked to be a DFlash drafter."""
    from sglang.srt.utils.hf_transformers_utils import get_config

    path = server_args.speculative_draft_model_path
    if path is None:
        raise StartupError("DDTREE needs a DFlash drafter: pass --speculative-draft-model-path")
    if path.startswith(("/", ".", "~")) and not (Path(path).expanduser() / "config.json").is_file():
        raise StartupError(f"--speculative-draft-model-path: expected a folder with config.json, got {path}")
    overrides = json.loads(server_args.json_model_override_args)
    try:
        config = get_config(
            path, server_args.trust_remote_code, server_args.speculative_draft_model_revision, overrides
        )
    except Exception as error:
        raise StartupError(
            f"--speculative-draft-model-path: cannot read the config of {path}: {_first_line(error)}; pass the folder of a DFlash drafter"
        ) from error
    architectures = getattr(config, "architectures", None) or []
    if "DFlashDraftModel" not in architectures:
        raise StartupError(
            f"--speculative-draft-model-path: expected a DFlash drafter (DFlashDraftModel), got {architectures} in {path}"
        )
    return config


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _check_pair(server_args: ServerArgs, drafter: Any) -> int:
    """Check that the drafter was made for this target; return its block size.

    A drafter of another model may load and then accept almost nothing, so every size that must agree is compared.
    """
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

    path = server_args.speculative_draft_model_path
    target = server_args.get_model_config().hf_text_config
    try:
        parsed = parse_dflash_draft_config(draft_hf_config=drafter)
    except ValueError as error:
        raise StartupError(f"drafter {path}: {error}") from error
    num_layers = int(target.num_hidden_layers)
    pairs = (
        ("hidden_size", getattr(drafter, "hidden_size", None), target.hidden_size),
        ("vocab_size", getattr(drafter, "vocab_size", None), target.vocab_size),
        ("num_target_layers", parsed.num_target_layers, num_layers),
    )
    for name, drafted, expected in pairs:
        if drafted is not None and int(drafted) != int(expected):
            raise StartupError(
                f"drafter {path} was made for another target: its {name} is {drafted}, the target {server_args.model_path} has {expected}"
            )
    if not parsed.block_size or parsed.block_size < 2:
        raise StartupError(f"drafter {path}: expected block_size of at least 2 in config.json, got {parsed.block_size}")
    for layer in parsed.target_layer_ids or ():
        # Hidden states are captured as the next layer's input, so the last layer's output is never seen.
        if not 0 <= layer < num_layers - 1:
            raise StartupError(
                f"drafter {path}: target_layer_ids must lie in 0..{num_layers - 2} (not the last layer), got {layer}"
            )
    if parsed.mask_token_id is not None and parsed.mask_token_id >= int(target.vocab_size):
        raise StartupError(
            f"drafter {path}: mask_token_id must be below the target's vocab_size {target.vocab_size}, got {parsed.mask_token_id}"
        )
    return int(parsed.block_size)
