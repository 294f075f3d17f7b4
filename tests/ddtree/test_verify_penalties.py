# SPDX-License-Identifier: Apache-2.0
"""Penalties of verify rows against a plain count along each path, one row and one token at a time."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ddtree_tree import TreeBuffers, build_tree

from sglang.srt.speculative.verify_penalties import OutputCounts, Penalties, VerifyRows, penalize

VOCABULARY, DEPTH, BUDGET = 12, 4, 11
PROMPT = 7


@dataclass
class Request:
    """What the penalties read of SGLang's Req."""

    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0
    least: int = 0
    stops: tuple[int, ...] = ()
    eos: int | None = None
    output: list[int] = field(default_factory=list)

    def as_req(self) -> Any:
        return SimpleNamespace(
            origin_input_ids=[1] * PROMPT,
            output_ids=self.output,
            tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=self.eos),
            sampling_params=SimpleNamespace(
                frequency_penalty=self.frequency,
                presence_penalty=self.presence,
                repetition_penalty=self.repetition,
                min_new_tokens=self.least,
                stop_token_ids=set(self.stops),
            ),
        )

    def penalised(self, logits: list[float], generated: list[int]) -> list[float]:
        """Logits of the next token after `generated`."""
        counts, values = Counter(generated), []
        for token, logit in enumerate(logits):
            logit -= self.frequency * counts[token] + self.presence * (token in counts)
            if token in counts:
                logit = logit / self.repetition if logit > 0 else logit * self.repetition
            if len(generated) < self.least and (token in self.stops or token == self.eos):
                logit = -1e30
            values.append(logit)
        return values


BATCHES = {
    "frequency": [Request(frequency=1.7, output=[3, 3, 4]), Request(frequency=-0.3, output=[0])],
    "presence": [Request(presence=-1.1, output=[3, 3, 4]), Request(presence=2.0, output=[11])],
    "repetition": [Request(repetition=2.0, output=[5, 6, 5]), Request(repetition=0.4, output=[2])],
    "stops": [Request(least=6, stops=(0, 3, 7), output=[5, 6]), Request(least=2, eos=9, output=[2])],
    "one stop, the other request free": [Request(least=4, eos=0, output=[1]), Request(output=[0, 0])],
    "all, and a request without any": [
        Request(0.5, 1.5, 1.8, 5, (1, 2), 4, [2, 2, 7]),
        Request(output=[1]),
        Request(-2.0, -2.0, 0.6, 3, (), 0, [9] * 4),
    ],
}


def tree_rows(requests: list[Request], seed: int) -> tuple[VerifyRows, TreeBuffers]:
    """Random trees; the last request's has padding rows, since its drafter finds no second token."""
    generator = torch.Generator().manual_seed(seed)
    tree = TreeBuffers.allocate(len(requests), BUDGET, DEPTH, "cpu")
    log_probs = (
        torch.randn(len(requests), DEPTH, 4, generator=generator).log_softmax(-1).sort(-1, descending=True).values
    )
    log_probs[-1, :, 1:] = -math.inf
    tokens = torch.stack(
        [torch.randperm(4, generator=generator) * 3 % VOCABULARY for _ in range(len(requests) * DEPTH)]
    ).view(len(requests), DEPTH, 4)
    roots = torch.tensor([request.output[-1] for request in requests])
    committed = torch.tensor([PROMPT + len(request.output) - 1 for request in requests])
    build_tree(log_probs, tokens, roots, committed, tree)
    return VerifyRows(tree.token_ids, tree.positions, tree.mask), tree


def path(parents: list[int], tokens: list[int], row: int) -> list[int]:
    """Drafted tokens from below the root to `row`."""
    found: list[int] = []
    while row > 0:
        found.insert(0, tokens[row])
        row = parents[row]
    return found


def counted(requests: list[Request]) -> torch.Tensor:
    """Counts of the requests, in slots that had another owner before (BUG-025: nothing of it may be left)."""
    counts = OutputCounts(9, VOCABULARY, "cpu")
    slots = torch.tensor([5, 2, 8])[: len(requests)]
    counts.restart(torch.arange(9), [[6, 7, 7]] * 9, torch.full((9,), 10))
    first, later = [request.output[:1] for request in requests], [request.output[1:] for request in requests]
    counts.restart(slots, [[] for _ in requests], torch.tensor([ids[0] for ids in first]))
    runs = torch.full((len(requests), 6), 11)
    for index, ids in enumerate(later):
        runs[index, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
    counts.add(slots, runs, torch.tensor([len(ids) for ids in later], dtype=torch.int32))
    return counts.take(slots)


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("seed", range(4))
def test_each_row_counts_its_own_path(name: str, seed: int) -> None:
    """BUG-037: occurrence counts differ per branch."""
    batch = BATCHES[name]
    rows, tree = tree_rows(batch, seed)
    logits = torch.randn(len(batch) * tree.width, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4
    penalties = Penalties.of([request.as_req() for request in batch], "cpu")
    found = logits.clone()
    penalize(found, rows, penalties, counted(batch) if penalties.needs_counts else None)
    for index, request in enumerate(batch):
        for row in range(int(tree.num_nodes[index])):
            drafted = path(tree.parents[index].tolist(), tree.token_ids[index].tolist(), row)
            cell = index * tree.width + row
            expected = request.penalised(logits[cell].double().tolist(), request.output + drafted)
            torch.testing.assert_close(found[cell], torch.tensor(expected, dtype=torch.float32), msg=f"{index} {row}")


def test_chain_rows_see_the_rows_before_them() -> None:
    request = Request(frequency=1.0, output=[4])
    block = torch.tensor([[4, 5, 5, 4, 5]])
    logits = torch.zeros(5, VOCABULARY)
    penalties = Penalties.of([request.as_req()], "cpu")
    penalize(logits, VerifyRows.chain(block, torch.arange(5) + PROMPT), penalties, counted([request]))
    assert logits[:, 4].tolist() == [-1, -1, -1, -2, -2]
    assert logits[:, 5].tolist() == [0, -1, -2, -2, -3]
    assert not logits[:, [0, 1, 2, 3, 6, 7, 8, 9, 10, 11]].any()


def test_counts_restart_with_the_output_before_a_retraction() -> None:
    counts = OutputCounts(4, VOCABULARY, "cpu")
    slots = torch.tensor([3, 1])
    counts.restart(slots, [[1, 1, 2], []], torch.tensor([1, 5]))
    taken = counts.take(slots)
    assert taken[0].nonzero().flatten().tolist() == [1, 2] and taken[0, [1, 2]].tolist() == [3, 1]
    assert taken[1].nonzero().flatten().tolist() == [5] and not counts.take(torch.tensor([0, 2])).any()


def test_step_needs_no_values_on_the_host() -> None:
    # Tensors on the meta device have shapes and no values: a host read or a shape that depends on data raises.
    batch = BATCHES["all, and a request without any"]
    penalties = Penalties.of([request.as_req() for request in batch], "meta")
    tree = TreeBuffers.allocate(3, BUDGET, DEPTH, "meta")
    counts, slots = OutputCounts(9, VOCABULARY, "meta"), torch.empty(3, dtype=torch.int64, device="meta")
    logits = torch.empty((3 * tree.width, VOCABULARY), device="meta")
    penalize(logits, VerifyRows(tree.token_ids, tree.positions, tree.mask), penalties, counts.take(slots))
    runs = torch.empty((3, DEPTH + 1), dtype=torch.int64, device="meta")
    counts.add(slots, runs, torch.empty(3, dtype=torch.int32, device="meta"))
