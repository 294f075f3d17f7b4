# SPDX-License-Identifier: Apache-2.0
"""Draft top-k, tree, penalties and walk inside one CUDA graph: replayed on new inputs they give what the CPU gives.

Tree and walks must be equal. The CPU builds from the GPU's log-probabilities, because the two round sums differently.
"""

from __future__ import annotations

import pytest
import torch
from ddtree_tree import TreeBuffers, build_tree, draft_log_probs
from ddtree_walk import TOP_K_ALL, SamplingRows, WalkBuffers, walk_logits, walk_tree
from verify_penalties import OutputCounts, Penalties, VerifyRows, penalize

pytestmark = pytest.mark.gpu

BS, DEPTH, BUDGET, VOCAB, PADDED = 3, 7, 16, 500, 512


class Step:
    """Static inputs and buffers of one step on one device. Drafter and target agree often enough to accept drafts."""

    def __init__(self, device: str) -> None:
        self.draft_logits = torch.zeros((BS, DEPTH, PADDED), device=device)
        self.target_logits = torch.zeros((BS * (BUDGET + 1), VOCAB), device=device)
        self.roots = torch.zeros(BS, dtype=torch.int64, device=device)
        self.committed = torch.zeros(BS, dtype=torch.int64, device=device)
        self.tree = TreeBuffers.allocate(BS, BUDGET, DEPTH, device)
        self.greedy = WalkBuffers.allocate(BS, DEPTH, device)
        self.sampled = WalkBuffers.allocate(BS, DEPTH, device)
        self.penalised = WalkBuffers.allocate(BS, DEPTH, device)
        self.slots = torch.tensor([4, 0, 2], device=device)
        self.counts = OutputCounts(5, VOCAB, device)
        self.penalties = Penalties(
            frequency=torch.tensor([[2.0], [0.0], [-0.5]], device=device),
            presence=torch.tensor([[0.0], [1.0], [0.7]], device=device),
            repetition=torch.tensor([[1.0], [1.5], [0.8]], device=device),
            stop_ids=torch.tensor([[7, 9], [0, 0], [0, 3]], device=device),
            stop_bias=torch.tensor([[-torch.inf, -torch.inf], [0.0, 0.0], [-torch.inf, -torch.inf]], device=device),
            stops_from=torch.full((BS, 1), 50_000, device=device),
            needs_counts=True,
            needs_repetition=True,
        )
        self.sampling = SamplingRows(
            temperatures=torch.full((BS, 1), 0.8, device=device),
            top_ks=torch.tensor([20, TOP_K_ALL, 1], dtype=torch.int32, device=device),
            top_ps=torch.tensor([0.9, 1.0, 1.0], device=device),
            min_ps=torch.tensor([0.0, 0.1, 0.0], device=device),
            seeds=None,
            all_greedy=False,
            any_greedy=True,
            need_top_k=True,
            need_top_p=True,
            need_min_p=True,
        )

    def load(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        draft = torch.randn(self.draft_logits.shape, generator=generator) * 3
        target = torch.randn((BS, BUDGET + 1, VOCAB), generator=generator)
        target += draft[:, torch.arange(BUDGET + 1).clamp(max=DEPTH - 1), :VOCAB]
        draft[..., VOCAB:] = 1000.0
        self.draft_logits.copy_(draft)
        self.target_logits.copy_(target.view(-1, VOCAB))
        self.roots.copy_(torch.randint(0, VOCAB, (BS,), generator=generator))
        self.committed.copy_(torch.randint(0, 100_000, (BS,), generator=generator))

    def draft(self) -> None:
        self.log_probs, self.token_ids = draft_log_probs(self.draft_logits, BUDGET, vocab_size=VOCAB)

    def build_and_walk(self) -> None:
        build_tree(self.log_probs, self.token_ids, self.roots, self.committed, self.tree)
        walk_tree(self.target_logits.argmax(-1).view(BS, BUDGET + 1), self.tree, self.greedy)
        walk_logits(self.target_logits, self.tree, self.sampling, self.sampled)
        logits = self.target_logits.clone()
        rows = VerifyRows(self.tree.token_ids, self.tree.positions, self.tree.mask)
        penalize(logits, rows, self.penalties, self.counts.take(self.slots))
        walk_tree(logits.argmax(-1).view(BS, BUDGET + 1), self.tree, self.penalised)
        self.counts.add(self.slots, self.penalised.out_tokens, self.penalised.accept_lens)

    def restart_counts(self) -> None:
        self.counts.restart(self.slots, [[1, 1, 2], [], [5]], self.roots)


def captured(step: Step) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step.draft()
        step.build_and_walk()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.draft()
        step.build_and_walk()
    return graph


def test_replays_equal_the_cpu() -> None:
    gpu, cpu = Step("cuda"), Step("cpu")
    graph = captured(gpu)
    for step in (gpu, cpu):
        step.restart_counts()
    accepted = changed = 0
    for seed in range(20):
        gpu.load(seed)
        cpu.load(seed)
        graph.replay()
        cpu.draft()
        assert torch.equal(gpu.token_ids.cpu(), cpu.token_ids), seed
        torch.testing.assert_close(gpu.log_probs.cpu(), cpu.log_probs, atol=1e-5, rtol=1e-5)
        cpu.log_probs = gpu.log_probs.cpu()
        cpu.build_and_walk()
        for name in ("positions", "parents", "depths", "num_nodes", "mask", "token_ids"):
            assert torch.equal(getattr(gpu.tree, name).cpu(), getattr(cpu.tree, name)), (seed, name)
        for name in ("accept_index", "accept_lens", "out_tokens", "bonus"):
            assert torch.equal(getattr(gpu.greedy, name).cpu(), getattr(cpu.greedy, name)), (seed, name)
            assert torch.equal(getattr(gpu.penalised, name).cpu(), getattr(cpu.penalised, name)), (seed, name)
        # The third request of the mixed batch is greedy, the others draw.
        assert torch.equal(gpu.sampled.out_tokens[2].cpu(), cpu.greedy.out_tokens[2]), seed
        assert 0 <= int(gpu.sampled.out_tokens.min()) and int(gpu.sampled.out_tokens.max()) < VOCAB
        accepted += int(gpu.greedy.accept_lens.sum()) - BS
        changed += int((cpu.penalised.out_tokens != cpu.greedy.out_tokens).sum())
    assert torch.equal(gpu.counts.take(gpu.slots).cpu(), cpu.counts.take(cpu.slots))
    assert changed > 5, "penalties must change tokens for this test to say anything"
    assert accepted > 20, "drafts must be accepted for this test to say anything"


def test_replays_draw_anew() -> None:
    step = Step("cuda")
    graph = captured(step)
    step.load(0)
    texts = set()
    for _ in range(20):
        graph.replay()
        texts.add(tuple(step.sampled.out_tokens[0].tolist()))
    assert len(texts) > 1
