# SPDX-License-Identifier: Apache-2.0
"""Custom logit processors see, at each verify row, the history that plain decoding would have there."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import torch

from sglang.srt.speculative.verify_penalties import VerifyRows
from sglang.srt.speculative.verify_processors import RecentRuns, apply_processors

WIDTH, VOCABULARY = 4, 30


class MarkLength:
    """Adds the number of generated tokens to the column of the last one, and the parameter's own value to column 0."""

    def __call__(self, logits: torch.Tensor, params: list[Any]) -> torch.Tensor:
        assert len(params) == len(logits)
        for row, param in zip(logits, params, strict=True):
            generated = param["__req__"].output_ids
            row[generated[-1]] += len(generated)
            row[0] += param["value"] * param["__req__"].weight
        return logits


def test_each_row_has_the_history_of_its_path() -> None:
    """BUG-036: one call for a request's rows, with a history that ends at each row's own token."""
    tokens = torch.tensor([[9, 11, 12, 13], [8, 0, 0, 0], [7, 21, 22, 23]])
    visible = torch.eye(WIDTH, dtype=torch.bool).repeat(3, 1, 1)
    for row, ancestors in ((1, [0]), (2, [0, 1]), (3, [0])):
        visible[2, row, ancestors] = True
    visible[0] = torch.ones(WIDTH, WIDTH).tril().bool()
    reqs: list[Any] = [
        SimpleNamespace(custom_logit_processor="mark", weight=10),
        SimpleNamespace(custom_logit_processor=None),
        SimpleNamespace(custom_logit_processor="mark", weight=100),
    ]
    info: Any = SimpleNamespace(
        custom_params=[{"value": 1, "__req__": reqs[0]}, None, {"value": 2, "__req__": reqs[2]}],
        custom_logit_processor={1: (MarkLength(), torch.tensor([True, False, True]))},
    )
    logits = torch.zeros(3 * WIDTH, VOCABULARY)
    generated = [array("q", [9]), array("q", [8]), array("q", [5, 6, 7])]
    apply_processors(logits, VerifyRows(tokens, tokens, visible), info, reqs, generated)
    expected = torch.zeros(3, WIDTH, VOCABULARY)
    for row, token in enumerate([9, 11, 12, 13]):
        expected[0, row, token] = row + 1
    for row, (token, length) in enumerate([(7, 3), (21, 4), (22, 5), (23, 4)]):
        expected[2, row, token] = length
    expected[0, :, 0], expected[2, :, 0] = 10, 200
    assert torch.equal(logits.view(3, WIDTH, VOCABULARY), expected)
    assert generated == [array("q", [9]), array("q", [8]), array("q", [5, 6, 7])]


def test_output_is_completed_with_what_the_host_has_not_seen() -> None:
    runs = RecentRuns(num_requests=5, longest_run=3, device="cpu")
    slots = torch.tensor([4, 1, 0])
    runs.record(slots, torch.tensor([[50], [60], [70]]), torch.ones(3))
    runs.record(slots[:2], torch.tensor([[51, 52, 53], [61, 62, 0]]), torch.tensor([3, 2], dtype=torch.int32))
    prompt = [1] * 10

    def request(*seen: int) -> Any:
        return SimpleNamespace(origin_input_ids=prompt, output_ids=array("q", seen))

    reqs = [request(40, 50), request(60, 61, 62), request()]
    committed = torch.tensor([10 + 5 - 1, 10 + 3 - 1, 10 + 1 - 1])
    found = runs.outputs(reqs, slots, committed)
    assert [list(ids) for ids in found] == [[40, 50, 51, 52, 53], [60, 61, 62], [70]]
