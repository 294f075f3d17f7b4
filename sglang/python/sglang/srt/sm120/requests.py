# SPDX-License-Identifier: Apache-2.0
"""Checks of a request before it reaches the scheduler, where a bad value would end every other request too.

SGLang 0.5.17 passes token ids on as the client sent them: one outside the vocabulary raises inside the forward pass, and
the server stops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang.srt.sm120.grammars import check_grammar
from sglang.srt.sm120.pool_limit import limit_length
from sglang.srt.sm120.request_form import MAX_INT32, check_form

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import ServerArgs

    # Takes the request as the client sent it; raises ValueError as `check_request` does.
    Check = Callable[[Any, ServerArgs], None]
    # Takes the scheduler's request; the reason to refuse it, or None.
    Verdict = Callable[[Req], str | None]

_feature_checks: list[tuple[Check, Verdict]] = []


def add_checks(check: Check, verdict: Verdict) -> None:
    """Let `check_request` and `admission_refusal` ask a feature what it cannot serve."""
    _feature_checks.append((check, verdict))


def check_request(obj: Any, server_args: ServerArgs, vocab_size: int, takes_media: bool) -> None:
    """Refuse a request, generation or embedding, that cannot be served; a ValueError becomes HTTP 400.

    Called before SGLang normalizes the request, so that a field may hold one value, or a list with one for each prompt.

    Args:
        obj: the request as the client sent it.
        takes_media: whether the model reads images, videos or audio.

    Raises:
        ValueError: naming the option, what was expected and what came.
    """
    try:
        _check_parts(obj, server_args, vocab_size, takes_media)
    except ValueError:
        # The task that ends a stream's requests two seconds after its answer reads both, which normalizing would set.
        obj.is_single, obj.rid = False, []
        raise


def _check_parts(obj: Any, server_args: ServerArgs, vocab_size: int, takes_media: bool) -> None:
    check_form(obj, takes_media)
    _check_token_ids(getattr(obj, "input_ids", None), vocab_size)
    for options in values_of(obj, "sampling_params"):
        _check_values(options, vocab_size)
        if server_args.grammar_backend == "xgrammar":
            check_grammar(options, reasons_first=bool(getattr(obj, "require_reasoning", False)))
    _check_logprobs(obj, vocab_size)
    _check_labels(obj, server_args)
    _check_captures(obj, server_args)
    if server_args.enable_custom_logit_processor:
        for processor in values_of(obj, "custom_logit_processor"):
            _check_processor(processor)
    for check, _ in _feature_checks:
        check(obj, server_args)


def values_of(obj: Any, name: str) -> list[Any]:
    """The values that a field gives the prompts of a request; absent ones are left out."""
    value = getattr(obj, name, None)
    return [part for part in (value if isinstance(value, list) else [value]) if part]


def _check_token_ids(prompts: Sequence[Any] | None, vocab_size: int) -> None:
    if prompts is None:
        return
    for ids in prompts if prompts and isinstance(prompts[0], list) else [prompts]:
        if not ids:
            raise ValueError("input_ids: expected token ids, got an empty list; leave it out to send text")
        found = next((token for token in ids if not 0 <= token < vocab_size), None)
        if found is not None:
            raise ValueError(f"input_ids: expected token ids from 0 to {vocab_size - 1}, got {found}")


def _check_values(options: Mapping[str, Any], vocab_size: int) -> None:
    """What depends on the model; the form of the values has been checked (`request_form`)."""
    named = {"logit_bias": options.get("logit_bias"), "stop_token_ids": options.get("stop_token_ids")}
    for name, tokens in named.items():
        outside = next((token for token in tokens or () if not 0 <= int(token) < vocab_size), None)
        if outside is not None:
            raise ValueError(f"{name}: expected token ids from 0 to {vocab_size - 1}, got {outside}")


def _check_logprobs(obj: Any, vocab_size: int) -> None:
    """More alternatives than tokens, or a start before the prompt, would raise in the forward pass."""
    bounds = {"top_logprobs_num": (0, vocab_size), "logprob_start_len": (-1, MAX_INT32)}
    for name, (lowest, highest) in bounds.items():
        for value in values_of(obj, name):
            if not lowest <= value <= highest:
                raise ValueError(f"{name}: expected an integer from {lowest} to {highest}, got {value}")


def _check_labels(obj: Any, server_args: ServerArgs) -> None:
    """A label that the series in /metrics lack ends the process that counts, and with it the server.

    Without /metrics it would be dropped. A name that the operator allows passes there all the same: the endpoints take
    such labels from a header, which a proxy may add to every request.
    """
    known = server_args.tokenizer_metrics_allowed_custom_labels or []
    unknown = next((name for name in getattr(obj, "custom_labels", None) or () if name not in known), None)
    if unknown is not None:
        raise ValueError(
            f"custom_labels: expected names from {known}, got {unknown!r}; drop it or start the server with "
            "--enable-metrics and --tokenizer-metrics-allowed-custom-labels"
        )


def _check_captures(obj: Any, server_args: ServerArgs) -> None:
    """What the server has not been started to record would be missing from the answer without a word."""
    for name in ("return_routed_experts", "return_indexer_topk"):
        if getattr(obj, name, False) and not getattr(server_args, f"enable_{name}"):
            flag = f"--enable-{name.replace('_', '-')}"
            raise ValueError(
                f"{name}: expected a server with {flag}, which DDTREE cannot have, got one without; drop it"
            )


def _check_processor(text: Any) -> None:
    """The scheduler loads the processor when it builds a batch, and stops when that fails."""
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    try:
        CustomLogitProcessor.from_str(text)
    except Exception as error:
        raise ValueError(f"custom_logit_processor: expected a class from to_str(), got {error!r}") from error


def admission_refusal(scheduler: Scheduler, req: Req) -> str | None:
    """The scheduler's last check of a request, which also caps its length by the KV pool; the reason to refuse it, or None.

    Clients that bypass the tokenizer's check meet the features' verdicts here.
    """
    reasons = (verdict(req) for _, verdict in _feature_checks)
    reason = next((reason for reason in reasons if reason is not None), None) or limit_length(scheduler, req)
    if reason is not None:
        # A refused request is still prefilled: the sampler must not meet what was refused.
        req.sampling_params.min_p = 0.0
    return reason
