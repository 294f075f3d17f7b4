# SPDX-License-Identifier: Apache-2.0
"""Requests that trees or chains cannot serve: refused before the scheduler has them, and once more at admission."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sglang.srt.sm120.request_form import is_integer
from sglang.srt.sm120.requests import values_of
from sglang.srt.speculative.ddtree_algorithm import ALGORITHM, is_ddtree
from sglang.srt.speculative.ddtree_args import budgets_of
from sglang.srt.speculative.ddtree_budget import REQUEST_PARAMETER

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def check_speculation(obj: Any, server_args: ServerArgs) -> None:
    """Refuse what the server's speculative algorithm cannot serve, for `sm120.requests.check_request`.

    Raises:
        ValueError: naming the option, what was expected and what came.
    """
    for options in values_of(obj, "sampling_params"):
        _check_budget(options, server_args)
    for hidden_states in values_of(obj, "return_hidden_states"):
        reason = speculation_refusal(server_args.speculative_algorithm, hidden_states)
        if reason is not None:
            raise ValueError(reason)


def _check_budget(options: Mapping[str, Any], server_args: ServerArgs) -> None:
    """A request may lower the tree's budget: ``custom_params: {"ddtree_budget": n}``."""
    custom = options.get("custom_params")
    if not isinstance(custom, Mapping) or (budget := custom.get(REQUEST_PARAMETER)) is None:
        return
    if not is_ddtree(server_args.speculative_algorithm):
        raise ValueError(f"custom_params.{REQUEST_PARAMETER}: only with --speculative-algorithm DDTREE; drop it")
    largest = budgets_of(server_args)[-1]
    if not is_integer(budget) or not 1 <= budget <= largest:
        raise ValueError(f"custom_params.{REQUEST_PARAMETER}: expected an integer from 1 to {largest}, got {budget!r}")


def speculation_refusal(algorithm: str | None, return_hidden_states: Any) -> str | None:
    """Why this speculative algorithm, as resolved from the command line, cannot serve a request, or None.

    Verification captures the layers that the drafter reads, not the last one, which the option promises.
    """
    if return_hidden_states and algorithm in (ALGORITHM, "DFLASH"):
        return (
            f"return_hidden_states: not supported with --speculative-algorithm {algorithm}; "
            "drop it or use a server without speculative decoding"
        )
    return None


def drafting_refusal(req: Any) -> str | None:
    """What the DFLASH family cannot serve, for `sm120.requests.admission_refusal`.

    Seeded min-p is refused for DFLASH too: SGLang's sampler asserts on it in prefill, and the scheduler would stop.
    """
    from sglang.srt.runtime_context import get_exec, get_spec
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    params, algorithm = req.sampling_params, get_spec().speculative_algorithm
    if not SpeculativeAlgorithm.from_string(algorithm).is_dflash_family():
        return None
    reason = speculation_refusal(algorithm, req.return_hidden_states)
    if reason is not None or not get_exec().deterministic.enable_deterministic_inference:
        return reason
    if params.min_p > 0:
        return "min_p: not supported with --enable-deterministic-inference; drop the option or the flag"
    if params.sampling_seed is not None and params.top_k > 1 and not is_ddtree(algorithm):
        return f"sampling_seed: not supported with --speculative-algorithm {algorithm}; drop it or use DDTREE"
    return None
