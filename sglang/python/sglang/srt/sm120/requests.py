# SPDX-License-Identifier: Apache-2.0
"""Checks of a request before it reaches the scheduler, where a bad value would end every other request too.

SGLang 0.5.17 passes token ids on as the client sent them: one outside the vocabulary raises inside the forward pass, and
the server stops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.speculative.ddtree_algorithm import is_ddtree
from sglang.srt.speculative.ddtree_args import budgets_of
from sglang.srt.speculative.ddtree_budget import REQUEST_PARAMETER

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


def check_request(obj: Any, input_ids: Sequence[int] | None, server_args: ServerArgs, vocab_size: int) -> None:
    """Refuse a request, generation or embedding, that cannot be served; a ValueError becomes HTTP 400.

    Args:
        obj: the request as the client sent it; ``sampling_params`` is a mapping.
        input_ids: token ids of its prompt, from the client or the tokenizer.

    Raises:
        ValueError: naming the option, what was expected and what came.
    """
    if getattr(obj, "input_ids", None) is not None and input_ids:
        lowest, highest = min(input_ids), max(input_ids)
        if lowest < 0 or highest >= vocab_size:
            found = lowest if lowest < 0 else highest
            raise ValueError(f"input_ids: expected token ids from 0 to {vocab_size - 1}, got {found}")
    options = getattr(obj, "sampling_params", None)
    if not isinstance(options, Mapping):
        return
    _check_values(options, vocab_size)
    _check_budget(options, server_args)
    if is_ddtree(server_args.speculative_algorithm):
        reason = tree_refusal(obj.return_logprob, obj.return_hidden_states, options)
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
    if isinstance(budget, bool) or not isinstance(budget, int) or not 1 <= budget <= largest:
        raise ValueError(f"custom_params.{REQUEST_PARAMETER}: expected an integer from 1 to {largest}, got {budget!r}")


def _check_values(options: Mapping[str, Any], vocab_size: int) -> None:
    """What depends on the model; the form of the values has been checked (`request_form`)."""
    named = {"logit_bias": options.get("logit_bias"), "stop_token_ids": options.get("stop_token_ids")}
    for name, tokens in named.items():
        outside = next((token for token in tokens or () if not 0 <= int(token) < vocab_size), None)
        if outside is not None:
            raise ValueError(f"{name}: expected token ids from 0 to {vocab_size - 1}, got {outside}")


def tree_refusal(return_logprob: Any, return_hidden_states: Any, options: Mapping[str, Any]) -> str | None:
    """Why DDTREE cannot serve a request with these options, or None."""
    asked = {"logprobs": return_logprob, "return_hidden_states": return_hidden_states}
    asked |= {name: options.get(name) for name in _GRAMMARS}
    for name, value in asked.items():
        if value:
            name = f"{name} (also from response_format and tool_choice)" if name in _GRAMMARS else name
            return f"{name}: not supported with --speculative-algorithm DDTREE; drop it or use a server without DDTREE"
    return None


def admission_refusal(req: Any) -> str | None:
    """The scheduler's last check of a request in the DFLASH family, for clients that bypass the tokenizer's.

    Seeded min-p is refused for DFLASH too: SGLang's sampler asserts on it in prefill, and the scheduler would stop.
    """
    from sglang.srt.runtime_context import get_exec, get_spec

    params = req.sampling_params
    if is_ddtree(get_spec().speculative_algorithm):
        options = {name: getattr(params, name) for name in _GRAMMARS}
        reason = tree_refusal(req.return_logprob, req.return_hidden_states, options)
        if reason is not None:
            return reason
    if params.min_p > 0 and get_exec().deterministic.enable_deterministic_inference:
        return "min_p: not supported with --enable-deterministic-inference; drop the option or the flag"
    return None
