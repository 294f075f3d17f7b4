# SPDX-License-Identifier: Apache-2.0
"""The end of a request whose decode step yields several tokens.

SGLang 0.5.17 looks for the end in a whole accepted run at once: it checks the length first, so that a stop inside the
run is missed when the run passes ``max_new_tokens``, and it keeps the tokens after the stop in the request, from where
they get into the radix key and the count of reasoning tokens. Here the run is taken token by token, as plain decoding
does.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from sglang.srt.sm120.grammars import only_stops_legal
from sglang.srt.speculative.verify_penalties import stop_ids

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def end_run(req: Req, run: list[int]) -> list[int]:
    """Cut the request and its new tokens at the first token that ends it; a stop wins over the length at that token.

    Args:
        req: ``output_ids`` ends with `run`, and ``kv_committed_len`` counts it.
        run: the tokens of one step, in order.

    Returns:
        The tokens to keep, the last of them being the stop. ``finished_reason`` is set for a stop and for a grammar that
        ends before ``min_new_tokens``; the length, an abort and the usual end of a grammar are left to
        ``Req.update_finish_state``, which follows.
    """
    first = len(req.output_ids) - len(run)
    limit = req.sampling_params.max_new_tokens
    if limit == 0:
        _keep_no_logprob(req)
    if req.finished() or first >= limit or _starved(req, run) or req.to_finish is not None or _ended_before(req, first):
        return run
    _widen_stop_window(req)
    del req.output_ids[first:]
    for token in run[: limit - first]:
        req.output_ids.append(token)
        if _stops(req, token):
            break
    kept = run[: len(req.output_ids) - first]
    # The slots of what is dropped count as allocated, not as committed: they are released with the request.
    req.kv_committed_len -= len(run) - len(kept)
    return kept


def _stops(req: Req, token: int) -> bool:
    """Whether the last token of the output, `token`, ends the request other than by its length."""
    return (
        req._check_vocab_boundary_finish([token])
        or req._check_str_based_finish(1)
        or req._check_token_based_finish([token])
        or req.finished()  # a stop_regex that cannot be searched aborts the request without a match
    )


def _ended_before(req: Req, first: int) -> bool:
    """Whether the grammar ended before the token at `first`, which is then kept out of the answer.

    Plain decoding advances a grammar after it has looked for the end. Where the end-of-text token is ignored, it
    notices a step late that the grammar is complete. Speculative decoding advances the grammar first and cuts the run.
    """
    if first == 0 or req.grammar is None or not req.grammar.is_terminated() or _drafts():
        return False
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN

    req.finished_reason = FINISH_MATCHED_TOKEN(matched=req.output_ids[first - 1])
    req.finished_len = first
    return True


def _starved(req: Req, run: list[int]) -> bool:
    """Whether the grammar leaves nothing but the end of text while ``min_new_tokens`` holds that back; ends the request.

    SGLang goes on to draw from no token at all: an illegal one, which ends the request with an abort that has no reason,
    or none, which ends the server.
    """
    grammar, least = req.grammar, req.sampling_params.min_new_tokens
    if grammar is None or len(req.output_ids) > least or _drafts() and not run:
        return False
    legal = len(req.output_ids)
    if grammar.is_terminated():
        legal -= 1  # the end itself, drawn for want of another token
    elif not (_only_stops_follow(req) if _drafts() else _only_stops_follow_in_plain_decoding(req, run)):
        return False
    if legal >= least:
        return False
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    message = (
        f"min_new_tokens (min_tokens): expected at most {legal}, after which the grammar allows nothing but the end, "
        f"got {least}; lower it or change the grammar"
    )
    req.to_finish = None
    req.finished_reason = FINISH_ABORT(message, HTTPStatus.BAD_REQUEST, "BadRequestError")
    req.finished_len = legal
    return True


def _only_stops_follow(req: Req) -> bool:
    return only_stops_legal(req.grammar, stop_ids(req), req.vocab_size)


def _only_stops_follow_in_plain_decoding(req: Req, run: list[int]) -> bool:
    """The grammar has not seen the run's one token yet."""
    try:
        req.grammar.accept_token(run[0])
    except ValueError:
        return False
    try:
        return not req.grammar.is_terminated() and _only_stops_follow(req)
    finally:
        req.grammar.rollback(1)


def _drafts() -> bool:
    from sglang.srt.runtime_context import get_spec

    return get_spec().speculative_algorithm is not None


class _NoEntries(list[Any]):
    """A list of log-probabilities that nobody asked for."""

    def append(self, entry: Any) -> None:
        """Leave the entry out."""


def _keep_no_logprob(req: Req) -> None:
    """Report no token that was not asked for: the prefill of a request for no tokens draws and scores one all the same.

    Where chosen token ids are scored in its place, plain decoding keeps these and the alternatives, so both stay.
    """
    if not req.return_logprob:
        return
    logprob = req.logprob
    logprob.output_token_logprobs_val, logprob.output_token_logprobs_idx = _NoEntries(), _NoEntries()
    if logprob.token_ids_logprob is None:
        logprob.output_top_logprobs_val, logprob.output_top_logprobs_idx = _NoEntries(), _NoEntries()


def _widen_stop_window(req: Req) -> None:
    """Look back far enough for a stop string that the model spells with more tokens than the tokenizer would.

    A token has at least one byte of text, so the number of bytes bounds the number of tokens.
    """
    params = req.sampling_params
    if params.stop_strs:
        longest = max(len(stop.encode()) for stop in params.stop_strs)
        params.stop_str_max_len = max(params.stop_str_max_len, longest)
