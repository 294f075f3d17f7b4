# SPDX-License-Identifier: Apache-2.0
"""Best-first draft trees from per-depth marginals, as tensor operations; on CUDA one kernel does the selection.

One DFlash pass gives, for each depth, log-probabilities that do not depend on the path. A node's score is the sum of
log-probabilities along its path, and the tree holds the best `budget` nodes under the root (DDTree, arXiv 2604.12989),
with the chain of most likely tokens, the spine, seeded before everything else.

Nothing here reads a value back to the host, and every shape follows from shapes of the inputs. Results go into
static buffers, so a CUDA graph can capture the build together with the draft pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass
class TreeBuffers:
    """Static tensors of one draft tree a request; row 0 is the root, a parent's row is smaller than its children's.

    T >= budget + 1 rows. Rows from `num_nodes` on are padding: token 0, no parent, depth 0, visible to themselves alone.

    token_ids     int64 [max_bs, T]
    positions     int64 [max_bs, T]    position of the row's token: committed + depth
    parents       int64 [max_bs, T]    row of the parent; -1 for the root and for padding
    depths        int64 [max_bs, T]    0 for the root and for padding
    num_nodes     int64 [max_bs]       rows in use, the root included
    scores        fp32  [max_bs, T]    log-probability of the row's path under the drafter; 0 for the root, -inf for padding
    mask          bool  [max_bs, T, T] mask[b, i, j]: row i sees row j (itself and its ancestors)
    rows          int64 [T]            0 .. T - 1, constant
    budget        most nodes under the root
    max_depth     deepest level that a tree may have
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    num_nodes: torch.Tensor
    scores: torch.Tensor
    mask: torch.Tensor
    rows: torch.Tensor
    budget: int
    max_depth: int

    @classmethod
    def allocate(
        cls, max_bs: int, budget: int, max_depth: int, device: torch.device | str, width: int | None = None
    ) -> TreeBuffers:
        """Make buffers for `max_bs` trees of `budget` nodes under the root; each starts as a root alone.

        `width` is the number of rows, by default budget + 1; more rows are padding for ever. Raises ValueError when a
        size is below 1 or the tree does not fit the rows.
        """
        for name, value in (("max_bs", max_bs), ("budget", budget), ("max_depth", max_depth)):
            if value < 1:
                raise ValueError(f"draft tree: {name} must be at least 1, got {value}")
        width = budget + 1 if width is None else width
        if width <= budget:
            raise ValueError(f"draft tree: width must be at least {budget + 1} for budget {budget}, got {width}")
        shape = (max_bs, width)

        def full(value: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        return cls(
            token_ids=full(0),
            positions=full(0),
            parents=full(-1),
            depths=full(0),
            num_nodes=torch.ones(max_bs, dtype=torch.int64, device=device),
            scores=torch.full(shape, -math.inf, device=device).index_fill_(1, torch.tensor([0], device=device), 0.0),
            mask=torch.eye(width, dtype=torch.bool, device=device).repeat(max_bs, 1, 1),
            rows=torch.arange(width, device=device),
            budget=budget,
            max_depth=max_depth,
        )

    @property
    def max_bs(self) -> int:
        return self.token_ids.shape[0]

    @property
    def width(self) -> int:
        """Rows per request, T."""
        return self.token_ids.shape[1]

    def copy_prefix_from(self, larger: TreeBuffers, bs: int) -> None:
        """Take the first T rows of larger trees, which are the best-first trees of this budget, for `bs` requests.

        Only what verification reads is copied: tokens, positions, parents and masks. The spine must fit.
        """
        width = self.width
        self.token_ids[:bs].copy_(larger.token_ids[:bs, :width])
        self.positions[:bs].copy_(larger.positions[:bs, :width])
        self.parents[:bs].copy_(larger.parents[:bs, :width])
        self.mask[:bs].copy_(larger.mask[:bs, :width, :width])

    def cut(self, limits: torch.Tensor) -> None:
        """Make the nodes of each request beyond its own budget unreachable; limits int64 [bs]."""
        bs = limits.shape[0]
        self.parents[:bs].masked_fill_(self.rows > limits[:, None], -1)


def build_tree(
    log_probs: torch.Tensor,
    token_ids: torch.Tensor,
    root_ids: torch.Tensor,
    committed: torch.Tensor,
    buffers: TreeBuffers,
) -> None:
    """Write the best-first tree of each request into the first `bs` entries of `buffers`.

    log_probs  fp32  [bs, L, K]  per depth, in descending order; NaN counts as -inf, and so does all behind it
    token_ids  int64 [bs, L, K]  distinct within a depth
    root_ids   int64 [bs]        token of the root
    committed  int64 [bs]        tokens in the target's cache, which is the root's position

    Row order: the spine by depth, then score descending, then shallower, then the parent's row, then rank. Nodes of
    score -inf are left out, except on the spine. Raises ValueError when the shapes do not fit the buffers.
    """
    _check_shapes(log_probs, token_ids, root_ids, committed, buffers)
    bs = log_probs.shape[0]
    budget = buffers.budget
    usable = log_probs.float().nan_to_num(nan=-math.inf, posinf=0.0, neginf=-math.inf).clamp_(max=0.0).cummin(-1).values
    if usable.is_cuda:
        from sglang.srt.speculative.ddtree_tree_kernel import build_tree_on_device

        build_tree_on_device(usable, token_ids.contiguous(), root_ids, committed, buffers)
        return
    tokens, parents, depths, scores, valid = _select_nodes(usable, token_ids, budget)

    buffers.token_ids[:bs, 0] = root_ids
    nodes = slice(1, budget + 1)
    buffers.token_ids[:bs, nodes] = tokens.masked_fill(~valid, 0)
    buffers.parents[:bs, nodes] = parents.masked_fill(~valid, -1)
    buffers.depths[:bs, nodes] = depths.masked_fill(~valid, 0)
    buffers.scores[:bs, nodes] = scores.masked_fill(~valid, -math.inf)
    torch.add(buffers.depths[:bs], committed[:, None], out=buffers.positions[:bs])
    torch.add(valid.sum(1), 1, out=buffers.num_nodes[:bs])
    _write_mask(buffers, bs)


def _check_shapes(
    log_probs: torch.Tensor,
    token_ids: torch.Tensor,
    root_ids: torch.Tensor,
    committed: torch.Tensor,
    buffers: TreeBuffers,
) -> None:
    if log_probs.ndim != 3 or log_probs.shape[1] != buffers.max_depth or log_probs.shape[2] < 1:
        raise ValueError(
            f"draft tree: log_probs must be [bs, {buffers.max_depth}, K >= 1], got {list(log_probs.shape)}; "
            "allocate the buffers for the drafter's block size"
        )
    bs = log_probs.shape[0]
    if bs > buffers.max_bs:
        raise ValueError(f"draft tree: at most {buffers.max_bs} requests fit the buffers, got {bs}")
    for name, tensor, shape in (
        ("token_ids", token_ids, log_probs.shape),
        ("root_ids", root_ids, (bs,)),
        ("committed", committed, (bs,)),
    ):
        if tensor.shape != shape:
            raise ValueError(f"draft tree: {name} must be {list(shape)}, got {list(tensor.shape)}")


def ranks_needed(budget: int, max_depth: int) -> int:
    """Tokens of each depth that a tree of `budget` nodes can take up: the spine's, and one for each other node.

    `_select_nodes` has the reason. Further ranks in `build_tree` change nothing.
    """
    return budget - min(max_depth, budget) + 1


def _select_nodes(
    log_probs: torch.Tensor, token_ids: torch.Tensor, budget: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, parent rows, depths, path scores and validity of the nodes in row order, each [bs, budget].

    The spine takes min(L, budget) nodes, so at most budget - that many others are left for any one depth. A beam of
    this width plus the spine therefore keeps every node that can be chosen, and as a rank needs all ranks before it
    the same number bounds the ranks. Scores never rise along a path, hence one sort over all beams is the heap's order.
    """
    bs, max_depth, max_rank = log_probs.shape
    num_depths = min(max_depth, budget)
    beam = ranks_needed(budget, max_depth)
    num_ranks = min(max_rank, beam)

    scores = log_probs.new_zeros((bs, 1))
    paths, keys, origins = [], [], []
    for depth in range(num_depths):
        scores, key, origin = _extend_beam(scores, log_probs[:, depth, :num_ranks], beam)
        paths.append(scores)
        keys.append(key)
        origins.append(origin)

    # Beams are concatenated by depth, so a stable sort puts the shallower node first among equal scores.
    sorted_keys, chosen = torch.cat(keys, 1).sort(dim=1, descending=True, stable=True)
    chosen = chosen[:, :budget]
    valid = sorted_keys[:, :budget] > -math.inf
    origin = torch.cat(origins, 1).gather(1, chosen)
    level = chosen // beam
    parent_in_beam = origin // num_ranks
    rank = origin - parent_in_beam * num_ranks

    # One extra beam in front stands for the root (row 0): a node at `level` finds its parent's beam at the same index.
    row_of = chosen.new_zeros((bs, (num_depths + 1) * beam))
    row_of.scatter_(1, chosen + beam, torch.arange(1, budget + 1, device=chosen.device).expand(bs, -1))
    parents = row_of.gather(1, level * beam + parent_in_beam)
    tokens = token_ids.flatten(1).gather(1, level * max_rank + rank)
    return tokens, parents, level + 1, torch.cat(paths, 1).gather(1, chosen), valid


def _extend_beam(
    scores: torch.Tensor, log_probs: torch.Tensor, beam: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best `beam` children of the nodes of one beam, the spine at index 0.

    scores [bs, n] of the parents, log_probs [bs, K] of the next depth. Returns scores, sort keys (the spine's is +inf)
    and origins (parent index * K + rank), each [bs, beam]; missing children have score -inf.
    """
    candidates = (scores[:, :, None] + log_probs[:, None, :]).flatten(1)
    if candidates.shape[1] < beam:
        candidates = torch.nn.functional.pad(candidates, (0, beam - candidates.shape[1]), value=-math.inf)
    spine = candidates[:, :1].clone()
    candidates[:, 0] = math.inf
    keys, origins = candidates.sort(dim=1, descending=True, stable=True)
    keys = keys[:, :beam]
    return torch.cat([spine, keys[:, 1:]], 1), keys, origins[:, :beam]


def tree_links(parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same trees as links, for walks from the root: next_child and next_sibling, int64 [bs, T].

    parents [bs, T] as in TreeBuffers. A row's next child is its first child, the most likely one, and its next sibling the
    next child of the same parent; -1 when there is none.
    """
    width = parents.shape[1]
    rows = torch.arange(width, device=parents.device)
    is_child = parents[:, None, :] == rows[:, None]
    is_younger = (parents[:, None, :] == parents[:, :, None]) & (parents[:, :, None] >= 0) & (rows > rows[:, None])

    def first(found: torch.Tensor) -> torch.Tensor:
        row = torch.where(found, rows, width).amin(-1)
        return row.masked_fill(row == width, -1)

    return first(is_child), first(is_younger)


def _write_mask(buffers: TreeBuffers, bs: int) -> None:
    """Ancestor closure by pointer doubling: after n rounds a row sees 2^n levels of its path."""
    parents, width = buffers.parents[:bs], buffers.width
    upwards = torch.where(parents < 0, buffers.rows, parents)
    mask = (buffers.rows[:, None] == buffers.rows).expand(bs, -1, -1)
    for _ in range(min(buffers.max_depth, width - 1).bit_length()):
        mask = mask | mask.gather(1, upwards[:, :, None].expand(-1, -1, width))
        upwards = upwards.gather(1, upwards)
    buffers.mask[:bs] = mask


def draft_log_probs(logits: torch.Tensor, k: int, vocab_size: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k log-probabilities of raw draft logits, normalised over the whole vocabulary.

    logits [..., V] of any float dtype; columns from `vocab_size` on are padding and take no part.
    Returns log_probs fp32 and token ids int64, [..., k], by logit descending, then by id; see `local_top_k` for k
    above the vocabulary. Ranks that hold equal data get equal results.
    """
    num_columns = logits.shape[-1] if vocab_size is None else min(vocab_size, logits.shape[-1])
    values, token_ids, log_sum = local_top_k(logits, k, first_id=0, num_valid=num_columns)
    return values - log_sum[..., None], token_ids


def local_top_k(
    logits: torch.Tensor, k: int, first_id: int, num_valid: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One vocabulary shard's part of `draft_log_probs`, to be gathered over ranks and merged.

    logits [..., V_shard], whose first `num_valid` columns are the tokens first_id, first_id + 1, ...
    Returns the k largest logits fp32 [..., k], their global ids int64 [..., k] and the log-sum-exp fp32 [...].
    Where the shard holds fewer than k tokens, the rest are logits of -inf at id 0, which no tree takes up.
    """
    if k < 1 or not 0 <= num_valid <= logits.shape[-1]:
        raise ValueError(
            f"draft top-k: k must be at least 1, num_valid 0 to {logits.shape[-1]}, got k = {k}, num_valid = {num_valid}"
        )
    valid = logits[..., :num_valid].float()
    log_sum = valid.logsumexp(-1)
    token_ids = valid.topk(min(k, num_valid), dim=-1).indices.sort(-1).values
    # top-k leaves the order of equal logits open; by id it agrees with argmax, so that the spine is the chain's block.
    values, order = valid.gather(-1, token_ids).sort(dim=-1, descending=True, stable=True)
    token_ids = token_ids.gather(-1, order) + first_id
    if num_valid < k:
        values = torch.nn.functional.pad(values, (0, k - num_valid), value=-math.inf)
        token_ids = torch.nn.functional.pad(token_ids, (0, k - num_valid))
    return values, token_ids, log_sum


def pack_shard(values: torch.Tensor, token_ids: torch.Tensor, log_sums: torch.Tensor) -> torch.Tensor:
    """What `local_top_k` gave, as fp32 [..., 2 k + 1]: one message to the other ranks. Ids travel as the bits of int32."""
    return torch.cat([values, token_ids.int().view(torch.float32), log_sums[..., None]], -1)


def unpack_shards(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, ids and log-sum-exps of gathered messages fp32 [R, ..., 2 k + 1], as `merge_vocab_shards` takes them."""
    k = packed.shape[-1] // 2
    values, token_ids, log_sums = packed.split([k, k, 1], dim=-1)
    return values, token_ids.contiguous().view(torch.int32).long(), log_sums.squeeze(-1)


def merge_vocab_shards(
    values: torch.Tensor, token_ids: torch.Tensor, log_sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge what `local_top_k` gave on R ranks, stacked along dimension 0 in the order of their ids.

    values fp32 and token_ids int64 [R, ..., k], log_sums fp32 [R, ...]. Returns log_probs fp32 and token ids int64
    [..., k], in the order of `draft_log_probs` over the whole vocabulary.
    """
    k = values.shape[-1]
    all_values = values.movedim(0, -2).flatten(-2)
    all_ids = token_ids.movedim(0, -2).flatten(-2)
    top, order = all_values.sort(dim=-1, descending=True, stable=True)
    return top[..., :k] - log_sums.logsumexp(0)[..., None], all_ids.gather(-1, order[..., :k])
