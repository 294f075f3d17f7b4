# SPDX-License-Identifier: Apache-2.0
"""Torch bodies for the sampling kernels that speculative verification takes from ``sgl_kernel``."""

import torch


def top_k_renorm(probs: torch.Tensor, top_k: torch.Tensor | int) -> torch.Tensor:
    """Keep the ``top_k`` ([rows] or a number) most likely tokens of each row and rescale the row to sum 1.

    Tokens that tie with the last one kept are kept as well.
    """
    num_tokens = probs.shape[-1]
    rank = torch.as_tensor(top_k).reshape(-1, 1).expand(len(probs), 1).long().clamp(1, num_tokens) - 1
    threshold = probs.sort(dim=-1, descending=True).values.gather(-1, rank)
    return _rescale(probs.masked_fill(probs < threshold, 0))


def top_p_renorm(probs: torch.Tensor, top_p: torch.Tensor | float) -> torch.Tensor:
    """Keep the smallest set of most likely tokens that reaches ``top_p`` ([rows] or a number); rescale to sum 1."""
    limit = torch.as_tensor(top_p, dtype=probs.dtype).reshape(-1, 1)
    values, order = probs.sort(dim=-1, descending=True, stable=True)
    reached_before = values.cumsum(-1) - values
    kept = values.masked_fill(reached_before >= limit, 0)
    kept[:, 0] = values[:, 0]
    return _rescale(torch.zeros_like(probs).scatter_(-1, order, kept))


def _rescale(probs: torch.Tensor) -> torch.Tensor:
    return probs / probs.sum(dim=-1, keepdim=True)


def sample_chain(
    *,
    candidates: torch.Tensor,
    target_probs: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    threshold_single: float,
    threshold_acc: float,
    retrive_index: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    accept_token_num: torch.Tensor,
    accept_index: torch.Tensor,
    predicts: torch.Tensor,
    **unused: object,
) -> None:
    """Verify chains of drafted tokens by sampling from the target; results are written into the last three tensors.

    Row ``t`` of a chain accepts candidate ``t + 1`` with its target probability (divided by ``threshold_acc``, or
    always from ``threshold_single`` on). The first rejection draws from the row without the rejected token, which
    together gives the target's distribution when both thresholds are 1.

    Args:
        candidates: [bs, T] int64, column 0 is the last committed token.
        target_probs: [bs, T, vocab] float32.
        uniform_samples: [bs, T] float32 in [0, 1), one per candidate.
        uniform_samples_for_final_sampling: [bs] float32 in [0, 1), for the token after the path.
        threshold_single: see above.
        threshold_acc: see above.
        retrive_index: [bs, T] int64 row numbers of the candidates.
        retrive_next_sibling: [bs, T] int64, -1 everywhere: trees are refused with ValueError.
        accept_token_num: [bs] int32, out: accepted candidates, 0 to T - 1.
        accept_index: [bs, T] int32, out: rows of the accepted path, then -1.
        predicts: [bs * T] int32, out: the token that follows each row on the accepted path.
        unused: links and drafter probabilities, which say nothing new about a chain of certain candidates.
    """
    del unused
    if bool((retrive_next_sibling >= 0).any()):
        raise ValueError("sample_chain: a chain expected, got a tree (a node with a sibling)")
    length = _accepted_length(candidates, target_probs, uniform_samples, threshold_single, threshold_acc)
    token = _draw_after(candidates, target_probs, uniform_samples_for_final_sampling, length)
    column = torch.arange(candidates.shape[1])
    accept_index.copy_(torch.where(column <= length[:, None], retrive_index, -1))
    accept_token_num.copy_(length)
    following = torch.cat([candidates[:, 1:], candidates[:, :1]], dim=1)
    following[torch.arange(len(length)), length] = token
    predicts[retrive_index.flatten()] = following.flatten().to(predicts.dtype)


def _accepted_length(
    candidates: torch.Tensor, probs: torch.Tensor, uniform: torch.Tensor, threshold_single: float, threshold_acc: float
) -> torch.Tensor:
    """Number of candidates accepted before the first rejection: [bs] int64."""
    prob = probs[:, :-1].gather(-1, candidates[:, 1:, None]).squeeze(-1)
    accepted = (uniform[:, :-1] * threshold_acc < prob) | (prob >= threshold_single)
    return accepted.to(torch.int64).cumprod(dim=1).sum(dim=1)


def _draw_after(
    candidates: torch.Tensor, probs: torch.Tensor, uniform: torch.Tensor, length: torch.Tensor
) -> torch.Tensor:
    """Token after the accepted path: [bs] int64, drawn from its last row without the candidate rejected there."""
    request = torch.arange(len(length))
    last = probs[request, length].clone()
    rejected = request[length < candidates.shape[1] - 1]
    last[rejected, candidates[rejected, length[rejected] + 1]] = 0
    cumulative = last.cumsum(-1)
    draw = uniform[:, None] * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, draw, right=True).squeeze(-1)
    return torch.minimum(token, _last_possible(last))


def _last_possible(probs: torch.Tensor) -> torch.Tensor:
    """Highest token id with a positive probability per row: the bound when rounding lets a draw pass the total."""
    num_tokens = probs.shape[-1]
    return num_tokens - 1 - (probs.flip(-1) > 0).to(torch.int8).argmax(-1)
