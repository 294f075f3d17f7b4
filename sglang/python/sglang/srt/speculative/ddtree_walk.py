# SPDX-License-Identifier: Apache-2.0
"""Walk a verified draft tree: draw from the target at a node, step to the child that holds the draw.

Every emitted token is the target's own draw after exactly the tokens before it, so the output is distributed as
without speculation, greedy or sampled. The first draw without a child is the bonus token, the next tree's root.
The ratio test min(1, p / q) would be biased here, because the drafted tokens are not samples of the drafter.

Nothing here reads a value back to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.speculative.ddtree_tree import TreeBuffers

# SGLang's value of top_k for "no limit" (sampling/sampling_params.py).
TOP_K_ALL = 1 << 30

# rows int64 [bs] (current row of each request), path int64 [bs, D], step -> drawn token int64 [bs].
# path[:, :step] are the tokens drawn so far, of which row `rows` holds the last. A request that has stopped keeps its
# last row, its path ends in the bonus token, and its draw is ignored.
DrawStep = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of n rows; the flags are known on the host and speak for the whole batch.

    temperatures  fp32  [n, 1]  1 for greedy rows
    top_ks        int32 [n]     1 is greedy, TOP_K_ALL is no limit
    top_ps        fp32  [n]
    min_ps        fp32  [n]
    seeds         int64 [n], or None when no request is drawn from a seed
    """

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    seeds: torch.Tensor | None
    all_greedy: bool
    any_greedy: bool
    need_top_k: bool
    need_top_p: bool
    need_min_p: bool

    @classmethod
    def from_batch(cls, info: Any) -> SamplingRows:
        """Take one row a request from SGLang's SamplingBatchInfo."""
        return cls(
            temperatures=info.temperatures,
            top_ks=info.top_ks,
            top_ps=info.top_ps,
            min_ps=info.min_ps,
            seeds=info.sampling_seed,
            all_greedy=info.is_all_greedy,
            any_greedy=info.is_any_greedy,
            need_top_k=info.need_top_k_sampling,
            need_top_p=info.need_top_p_sampling,
            need_min_p=info.need_min_p_sampling,
        )


@dataclass
class WalkBuffers:
    """Static results of a walk; D = max_depth + 1 is the longest run, bonus included.

    packed        int64 [max_bs, 2 D + 2]  everything below, so that one copy or one broadcast moves a request's results
    accept_index  int64 [max_bs, D]  accepted rows of the request's own tree, the root (0) first; -1 from accept_lens on
    out_tokens    int64 [max_bs, D]  the tokens to commit, the bonus last; 0 from accept_lens on
    accept_lens   int64 [max_bs]     tokens to commit: accepted drafts + the bonus = accepted rows with the root
    bonus         int64 [max_bs]     the next root
    """

    packed: torch.Tensor
    accept_index: torch.Tensor
    out_tokens: torch.Tensor
    accept_lens: torch.Tensor
    bonus: torch.Tensor

    @classmethod
    def allocate(cls, max_bs: int, max_depth: int, device: torch.device | str) -> WalkBuffers:
        longest = max_depth + 1
        packed = torch.zeros((max_bs, 2 * longest + 2), dtype=torch.int64, device=device)
        packed[:, :longest] = -1
        return cls(packed, packed[:, :longest], packed[:, longest:-2], packed[:, -2], packed[:, -1])

    def set_run(self, bs: int, rows: Sequence[int], token: int) -> None:
        """Give the first `bs` requests one run that the host knows: accepted `rows`, root first, all of one token."""
        beyond = self.accept_index.shape[1] - len(rows)
        run = [*rows, *[-1] * beyond, *[token] * len(rows), *[0] * beyond, len(rows), token]
        packed = torch.tensor(run, dtype=self.packed.dtype, pin_memory=self.packed.is_cuda)
        self.packed[:bs] = packed.to(self.packed.device, non_blocking=True)


def walk_logits(
    logits: torch.Tensor,
    tree: TreeBuffers,
    params: SamplingRows,
    out: WalkBuffers,
    *,
    generator: torch.Generator | None = None,
) -> None:
    """Walk the first bs trees on the target's logits [bs * T, V], each row adjusted to the path that leads to it.

    `params` has a row a request. Sampling looks at one row a request and step, never at all bs * T of them.
    """
    width = tree.width
    bs = logits.shape[0] // width
    if logits.shape[0] != bs * width or bs != params.top_ks.shape[0]:
        raise ValueError(
            f"tree walk: logits must have {params.top_ks.shape[0]} * {width} rows, got {logits.shape[0]}; "
            "pass one sampling row per request"
        )
    if params.all_greedy:
        walk_tree(logits.argmax(-1).view(bs, width), tree, out)
        return
    first_rows = torch.arange(bs, device=logits.device) * width

    def draw(rows: torch.Tensor, path: torch.Tensor, step: int) -> torch.Tensor:
        current = logits.index_select(0, first_rows + rows).float()
        positions = tree.positions[:bs].gather(1, rows[:, None]).squeeze(1)
        return draw_tokens(current, params, positions, generator=generator)

    walk_tree(draw, tree, out, bs)


def walk_tree(draws: torch.Tensor | DrawStep, tree: TreeBuffers, out: WalkBuffers, bs: int | None = None) -> None:
    """Walk by draws of all rows, int64 [bs, T], or by a function that draws for the current rows of `bs` requests."""
    if isinstance(draws, torch.Tensor):
        _walk_known_draws(draws, tree, out)
    elif bs is None:
        raise ValueError("tree walk: a drawing function needs bs, got None; pass the number of requests")
    else:
        _walk_step_by_step(draws, tree, out, bs)


def _walk_known_draws(draws: torch.Tensor, tree: TreeBuffers, out: WalkBuffers) -> None:
    """All steps at once: a row is accepted when the draws at its ancestors pick it and every row on its path."""
    bs, width = draws.shape
    parents, rows = tree.parents[:bs], tree.rows
    picked = _first_child(
        parents[:, None, :], tree.token_ids[:bs, None, :], rows[None, :, None], draws[:, :, None], rows
    )
    on_path = picked.gather(1, parents.clamp(min=0)) == rows
    on_path[:, 0] = True
    accepted = ~(tree.mask[:bs] & ~on_path[:, None, :]).any(-1)

    # Parents come before children, so ascending rows are ascending depths.
    longest = min(out.accept_index.shape[1], width)
    path = torch.where(accepted, rows, width).sort(1).values[:, :longest]
    beyond = path == width
    drawn = draws.gather(1, path.masked_fill(beyond, 0)).masked_fill(beyond, 0)
    lens = accepted.sum(1)
    out.accept_index[:bs, :longest] = path.masked_fill(beyond, -1)
    out.accept_index[:bs, longest:] = -1
    # The draw at an accepted row is the token of the accepted row after it, and at the last one it is the bonus.
    out.out_tokens[:bs, :longest] = drawn
    out.out_tokens[:bs, longest:] = 0
    out.accept_lens[:bs] = lens
    out.bonus[:bs] = drawn.gather(1, lens[:, None] - 1).squeeze(1)


def _walk_step_by_step(draw: DrawStep, tree: TreeBuffers, out: WalkBuffers, bs: int) -> None:
    parents, tokens, rows = tree.parents[:bs], tree.token_ids[:bs], tree.rows
    accept_index, out_tokens = out.accept_index[:bs], out.out_tokens[:bs]
    accept_lens, bonus = out.accept_lens[:bs], out.bonus[:bs]
    accept_index.fill_(-1)
    out_tokens.zero_()
    accept_lens.zero_()

    current = torch.zeros(bs, dtype=torch.int64, device=tokens.device)
    walking = torch.ones(bs, dtype=torch.bool, device=tokens.device)
    for step in range(min(out_tokens.shape[1], tree.width)):
        drawn = draw(current, out_tokens, step)
        out_tokens[:, step] = drawn.masked_fill(~walking, 0)
        accept_index[:, step] = current.masked_fill(~walking, -1)
        accept_lens.add_(walking)
        bonus.copy_(torch.where(walking, drawn, bonus))
        child = _first_child(parents, tokens, current[:, None], drawn[:, None], rows)
        walking = walking & (child < tree.width)
        current = torch.where(walking, child, current)


def _first_child(
    parents: torch.Tensor, tokens: torch.Tensor, parent: torch.Tensor, token: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Smallest row with this parent and token, else T; the last dimension runs over the T rows and is reduced."""
    return torch.where((parents == parent) & (tokens == token), rows, rows.shape[0]).amin(-1)


def draw_tokens(
    logits: torch.Tensor,
    params: SamplingRows,
    positions: torch.Tensor,
    *,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Draw one token per row as SGLang's sampler does: temperature, softmax, top-k and top-p jointly, min-p.

    logits [n, V]; positions int64 [n] of the tokens whose logits they are; returns int64 [n]. Rows of top_k 1 are
    argmax. With seeds the draw is SGLang's `multinomial_with_seed`, keyed by seed and position, and a row draws the
    same token as in plain decoding when it is alone in its batch. Without seeds `generator`, or the device's default
    one, is used.
    """
    greedy = logits.argmax(-1) if params.any_greedy or params.all_greedy else None
    if greedy is not None and params.all_greedy:
        return greedy
    probs = torch.softmax(logits.float() / params.temperatures.view(-1, 1), dim=-1)
    filtered = params.need_top_k or params.need_top_p or params.need_min_p
    if params.seeds is not None:
        drawn = _draw_seeded(probs, params, positions, filtered)
    elif filtered:
        kept, token_ids = _filter_sorted(probs, params)
        drawn = token_ids.gather(1, _draw_column(kept, generator)).squeeze(1)
    else:
        drawn = _draw_column(probs, generator).squeeze(1)
    return drawn if greedy is None else torch.where(params.top_ks <= 1, greedy, drawn)


def _filter_sorted(probs: torch.Tensor, params: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities in descending order with the excluded ones at 0 (not normalised again), and their token ids.

    Top-p looks at the mass before a token in the unfiltered distribution, which makes top-k and top-p joint.
    """
    kept, token_ids = probs.sort(dim=-1, descending=True)
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    excluded = (ranks >= params.top_ks.view(-1, 1)) | (kept.cumsum(-1) - kept > params.top_ps.view(-1, 1))
    if params.need_min_p:
        excluded |= kept < kept[:, :1] * params.min_ps.view(-1, 1)
    return kept.masked_fill(excluded, 0.0), token_ids


def _draw_column(weights: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """One column [n, 1] per row in proportion to its weight: the first arrival of an exponential race.

    torch.multinomial would check its input on the host.
    """
    arrivals = torch.empty_like(weights).exponential_(generator=generator).clamp_(min=torch.finfo(weights.dtype).tiny)
    return (weights / arrivals).argmax(-1, keepdim=True)


def _draw_seeded(probs: torch.Tensor, params: SamplingRows, positions: torch.Tensor, filtered: bool) -> torch.Tensor:
    """The seeded draw is keyed by column: a token id where a row filters nothing, else a rank in sorted order.

    SGLang's sampler chooses between the two for the whole batch, so there a seeded row depends on its neighbours. Here
    each row's own parameters decide.
    """
    assert params.seeds is not None
    if not filtered:
        return _multinomial_with_seed(torch.log(probs), params.seeds, positions).squeeze(1)
    kept, token_ids = _filter_sorted(probs, params)
    by_rank = token_ids.gather(1, _multinomial_with_seed(kept.double().log_(), params.seeds, positions)).squeeze(1)
    by_id = _multinomial_with_seed(torch.log(probs), params.seeds, positions).squeeze(1)
    unfiltered = (params.top_ks == TOP_K_ALL) & (params.top_ps == 1.0) & (params.min_ps <= 0.0)
    return torch.where(unfiltered, by_id, by_rank)


def _multinomial_with_seed(log_probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    from sglang.srt.layers.sampler import multinomial_with_seed

    return multinomial_with_seed(log_probs, seeds, positions)


def accepted_slots(out_cache_loc: torch.Tensor, accept_index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cache slots that the commit copies between: accepted rows move to the front of the request's window.

    out_cache_loc int64 [bs, T], slots of the tree rows; accept_index int64 [bs, D] as in WalkBuffers.
    Returns destinations and sources, both int64 [bs, min(D, T)]; they are equal where the path is 0, 1, 2, ...
    Beyond the accept length a slot is copied onto itself. A copy must read all sources before it writes.
    """
    longest = min(out_cache_loc.shape[1], accept_index.shape[1])
    rows = accept_index[:, :longest]
    front = torch.arange(longest, device=rows.device)
    rows = torch.where(rows < 0, front, rows)
    return out_cache_loc[:, :longest], out_cache_loc.gather(1, rows)
