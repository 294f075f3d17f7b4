# SPDX-License-Identifier: Apache-2.0
"""The longest text that the KV pool holds for one request, so that a request never outgrows it.

SGLang 0.5.17 leaves out what a verify step reserves beyond the text. A request that nearly fills the pool is admitted, and
once no other is left to retract it ends with HTTP 500 and without its text. In plain decoding with pages of more than one
token, a prompt that reaches the last page gets no token, and one beyond it waits for ever at the head of the queue.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)


class PoolLimit(NamedTuple):
    """A KV pool, in tokens: its size, its pages, and what a decode step reserves beyond the text (0 without drafts)."""

    pool: int
    page: int
    reserve: int

    def room(self, prompt: int) -> int:
        """The most tokens that can follow a prompt of this many; negative for one that is too long by itself.

        SGLang schedules a prefill when its pages, the new tokens and one more page are less than the pool.
        """
        pages = -(-prompt // self.page) * self.page
        scheduled = self.pool - pages - self.page - 1
        return min(scheduled, self.pool - self.page - self.reserve - prompt) if self.reserve else scheduled

    def longest_prompt(self, new_tokens: int) -> int:
        """The most tokens of a prompt that `new_tokens` can follow."""
        scheduled = (self.pool - self.page - 1 - new_tokens) // self.page * self.page
        return min(scheduled, self.pool - self.page - self.reserve - new_tokens) if self.reserve else scheduled


def limit_length(scheduler: Scheduler, req: Req) -> str | None:
    """Cap a request's ``max_new_tokens`` by its room in the pool, so that it ends with finish reason "length" there.

    Under ``--allow-auto-truncate`` a prompt that leaves no room is cut.

    Returns:
        Why the request cannot be served, or None.
    """
    limit = _limit_of(scheduler)
    params, num_prompt = req.sampling_params, len(req.origin_input_ids)
    # A verify step may be launched before the host knows that the prefill was all that was asked for.
    needed = 1 if limit.reserve or params.max_new_tokens != 0 else 0
    longest = limit.longest_prompt(needed)
    if num_prompt > longest:
        if not scheduler.server_args.allow_auto_truncate or longest < 1:
            return _refusal(num_prompt, longest, limit)
        logger.warning("Prompt of request %s: %d tokens, cut to %d for the KV pool.", req.rid, num_prompt, longest)
        req.origin_input_ids = req.origin_input_ids[:longest]
        num_prompt = longest
    room = limit.room(num_prompt)
    params.max_new_tokens = room if params.max_new_tokens is None else min(params.max_new_tokens, room)
    return None


def _limit_of(scheduler: Scheduler) -> PoolLimit:
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    args = scheduler.server_args
    reserve = 0 if scheduler.spec_algorithm.is_none() else get_alloc_reserve_per_decode(args)
    return PoolLimit(scheduler.max_total_num_tokens * args.dcp_size, scheduler.page_size, reserve)


def _refusal(num_prompt: int, longest: int, limit: PoolLimit) -> str:
    beside = f" beside the {limit.reserve} that a verify step reserves" if limit.reserve else ""
    return (
        f"prompt: expected at most {max(longest, 0)} tokens, which is what the KV pool of {limit.pool} holds{beside}, "
        f"got {num_prompt}; shorten it or raise --max-total-tokens or --mem-fraction-static"
    )
