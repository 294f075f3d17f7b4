# SPDX-License-Identifier: Apache-2.0
"""Masks of a grammar on draft trees, against a fresh matcher that is led along each node's path alone."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from serving.server import ModelPair
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from sglang.srt.platforms.reference import hooks
from sglang.srt.speculative.ddtree_grammar import TreeGrammar
from sglang.srt.speculative.ddtree_tree import TreeBuffers
from sglang.srt.speculative.ddtree_walk import SamplingRows, WalkBuffers, walk_logits

VOCAB, EOS, MAX_DEPTH = 1024, 2, 7
TAG_CONTENT = {"type": "json_schema", "json_schema": {"enum": [1, 20]}}
GRAMMARS = {
    "json": ("json", '{"type":"object","properties":{"n":{"type":"integer"},"s":{"enum":["a","bc"]}},"required":["n"]}'),
    "regex": ("regex", r"(def|class) [a-z_]{1,9}(\(\))?:"),
    "ebnf": ("ebnf", 'root ::= item ("," item)*\nitem ::= "self." [a-z]+ | [0-9]{1,2}'),
    "tag": (
        "structural_tag",
        json.dumps({"type": "structural_tag", "format": {"type": "tag", "begin": "<t>", "content": TAG_CONTENT, "end": "</t>"}}),
    ),
}  # fmt: skip
THINK_END = [91, 330]
Path = list[int]


@pytest.fixture(scope="module")
def backend(demo_pair: ModelPair) -> XGrammarGrammarBackend:
    if not torch.cuda.is_available():
        hooks.install()
    return XGrammarGrammarBackend(AutoTokenizer.from_pretrained(demo_pair.target), VOCAB, [EOS])


def legal_tokens(grammar: Any) -> set[int]:
    """Tokens that the matcher allows next, read bit by bit."""
    mask = torch.full((1, VOCAB // 32), -1, dtype=torch.int32)
    grammar.fill_vocab_mask(mask, 0)
    words = [word & 0xFFFFFFFF for word in mask[0].tolist()]
    return {token for token in range(VOCAB) if words[token // 32] >> (token % 32) & 1}


def legal_after(fresh: Any, path: Sequence[int]) -> set[int] | None:
    """Tokens legal after `path`, or None when the path is illegal or the grammar ends on it."""
    for token in path:
        if token not in legal_tokens(fresh):
            return None
        fresh.accept_token(token)
        if fresh.is_terminated():
            return None
    return legal_tokens(fresh)


def make_trees(paths: list[list[Path]]) -> TreeBuffers:
    """Trees that hold the given paths, one list a request, as parents written by hand."""
    width = 1 + max(len({tuple(path[:end]) for path in tree for end in range(1, len(path) + 1)}) for tree in paths)
    trees = TreeBuffers.allocate(len(paths), width - 1, MAX_DEPTH, "cpu")
    for request, tree in enumerate(paths):
        rows: dict[tuple[int, ...], int] = {(): 0}
        prefixes = sorted({tuple(path[:end]) for path in tree for end in range(1, len(path) + 1)}, key=len)
        for row, prefix in enumerate(prefixes, start=1):
            rows[prefix] = row
            parent = rows[prefix[:-1]]
            trees.token_ids[request, row], trees.parents[request, row] = prefix[-1], parent
            trees.depths[request, row] = len(prefix)
            trees.mask[request, row] |= trees.mask[request, parent]
    return trees


def mask_logits(trees: TreeBuffers, grammars: list[Any], logits: torch.Tensor, barrier: Any = None) -> None:
    batch = SimpleNamespace(
        reqs=[SimpleNamespace(grammar=grammar) for grammar in grammars],
        sampling_info=SimpleNamespace(vocab_size=VOCAB, grammar_mask="of the prefill"),
    )
    TreeGrammar.stage(trees, len(grammars)).mask_logits(logits, batch, barrier)
    assert batch.sampling_info.grammar_mask is None


def path_of(trees: TreeBuffers, request: int, row: int) -> Path:
    path: Path = []
    while row > 0:
        path.insert(0, int(trees.token_ids[request, row]))
        row = int(trees.parents[request, row])
    return path


def random_paths(draw: random.Random, fresh: Any, prefix: Path) -> list[Path]:
    """Paths that are legal for a while and then leave the grammar, or end it."""
    paths = []
    for _ in range(draw.randint(1, 5)):
        path: Path = []
        for _ in range(draw.randint(1, MAX_DEPTH)):
            legal = legal_after(fresh.copy(), prefix + path)
            path.append(draw.choice(sorted(legal)) if legal and draw.random() < 0.85 else draw.randrange(VOCAB))
        paths.append(path)
    return paths


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("seed", range(6))
def test_each_node_has_the_mask_of_its_path(name: str, seed: int, backend: XGrammarGrammarBackend) -> None:
    """BUG-034: random trees behind random prefixes; the middle request of the batch has no grammar."""
    draw = random.Random(seed)
    fresh = backend._init_value_dispatch(GRAMMARS[name], False)
    prefixes, grammars, paths = [], [], []
    for request in range(3):
        prefix: Path = []
        for _ in range(draw.randint(0, 3)):
            legal = legal_after(fresh.copy(), prefix) or {EOS}
            prefix += [draw.choice(sorted(legal - {EOS}))] if legal - {EOS} else []
        grammar = fresh.copy()
        for token in prefix:
            grammar.accept_token(token)
        prefixes.append(prefix)
        grammars.append(None if request == 1 else grammar)
        paths.append(random_paths(draw, fresh, prefix))
    trees = make_trees(paths)
    logits = torch.zeros(3 * trees.width, VOCAB)
    mask_logits(trees, grammars, logits)
    for request, grammar in enumerate(grammars):
        rows = logits.view(3, trees.width, VOCAB)[request]
        if grammar is None:
            assert bool((rows == 0).all())
            continue
        assert grammar.accepted_tokens == prefixes[request]
        assert legal_tokens(grammar) == legal_after(fresh.copy(), prefixes[request])
        for row in range(len({tuple(p[:end]) for p in paths[request] for end in range(1, len(p) + 1)}) + 1):
            legal = legal_after(fresh.copy(), prefixes[request] + path_of(trees, request, row))
            if legal is not None:
                assert set(torch.nonzero(rows[row] == 0).flatten().tolist()) == legal
                assert bool((rows[row][rows[row] != 0] == -torch.inf).all())


@pytest.mark.parametrize("seed", range(6))
def test_no_walk_leaves_the_grammar(seed: int, backend: XGrammarGrammarBackend) -> None:
    """BUG-034, BUG-035: the target prefers the illegal branches of the tree, at every node."""
    draw = random.Random(seed)
    fresh = backend._init_value_dispatch(GRAMMARS["ebnf"], False)
    paths = random_paths(draw, fresh, []) + [[draw.randrange(VOCAB) for _ in range(MAX_DEPTH)] for _ in range(3)]
    trees = make_trees([paths])
    logits = torch.rand(trees.width, VOCAB, generator=torch.Generator().manual_seed(seed))
    for row in range(1, trees.width):
        logits[int(trees.parents[0, row]), int(trees.token_ids[0, row])] += 5.0
    mask_logits(trees, [fresh.copy()], logits)
    walk = WalkBuffers.allocate(1, MAX_DEPTH, "cpu")
    walk_logits(logits, trees, greedy_rows(1), walk)
    run = walk.out_tokens[0, : int(walk.accept_lens[0])].tolist()
    grammar = fresh.copy()
    for token in run:
        if grammar.is_terminated():
            break
        assert token in legal_tokens(grammar)
        grammar.accept_token(token)


def greedy_rows(batch_size: int) -> SamplingRows:
    return SamplingRows(
        temperatures=torch.ones(batch_size, 1),
        top_ks=torch.ones(batch_size, dtype=torch.int32),
        top_ps=torch.ones(batch_size),
        min_ps=torch.zeros(batch_size),
        seeds=None,
        all_greedy=True,
        any_greedy=True,
        need_top_k=False,
        need_top_p=False,
        need_min_p=False,
    )


def test_the_barrier_comes_first(backend: XGrammarGrammarBackend) -> None:
    """Tokens of the step before are accepted before the tree is walked."""
    grammar = backend._init_value_dispatch(GRAMMARS["regex"], False)
    first = min(legal_tokens(grammar))
    trees = make_trees([[[5]]])
    logits = torch.zeros(trees.width, VOCAB)
    mask_logits(trees, [grammar], logits, barrier=lambda: grammar.accept_token(first))
    expected = legal_after(backend._init_value_dispatch(GRAMMARS["regex"], False), [first])
    assert set(torch.nonzero(logits[0] == 0).flatten().tolist()) == expected


@pytest.mark.parametrize("smaller", ["cut", "prefix"])
def test_smaller_trees_are_masked_too(smaller: str, backend: XGrammarGrammarBackend) -> None:
    """A tree that has been cut, or copied from a larger one, carries no links of its own."""
    fresh = backend._init_value_dispatch(GRAMMARS["regex"], False)
    path: Path = []
    for _ in range(4):
        path.append(min((legal_after(fresh.copy(), path) or {EOS}) - {EOS}))
    trees = make_trees([[path], [path]])
    kept = 2
    if smaller == "cut":
        trees.cut(torch.tensor([kept, kept]))
    else:
        trees, larger = TreeBuffers.allocate(2, kept, MAX_DEPTH, "cpu"), trees
        trees.copy_prefix_from(larger, 2)
    logits = torch.zeros(2 * trees.width, VOCAB)
    mask_logits(trees, [None, fresh.copy()], logits)
    rows = logits.view(2, trees.width, VOCAB)[1]
    for row in range(trees.width):
        allowed = set(torch.nonzero(rows[row] == 0).flatten().tolist())
        assert allowed == (legal_after(fresh.copy(), path[:row]) if row <= kept else set(range(VOCAB)))


@pytest.mark.parametrize("offset", range(MAX_DEPTH - 1))
def test_grammar_begins_where_reasoning_ends(offset: int, backend: XGrammarGrammarBackend) -> None:
    """BUG-038: the end of reasoning at every offset of a run, on two branches; after it the grammar holds."""
    inner = backend._init_value_dispatch(GRAMMARS["json"], False)
    start = legal_tokens(inner)
    legal, illegal = min(start - {EOS}), min(set(range(4, VOCAB)) - start)
    thought = [500 + step for step in range(offset)]
    ends = [[*thought, *THINK_END, legal], [*thought, *THINK_END, illegal], [*thought, 7, *THINK_END[:1]]]
    trees = make_trees([ends])
    grammar = ReasonerGrammarObject(inner.copy(), THINK_END)
    grammar.maybe_init_reasoning(True)
    logits = torch.zeros(trees.width, VOCAB)
    mask_logits(trees, [grammar], logits)
    for row in range(trees.width):
        path = path_of(trees, 0, row)
        allowed = set(torch.nonzero(logits[row] == 0).flatten().tolist())
        if path[-3:] == [*THINK_END, legal]:
            assert allowed == legal_after(inner.copy(), [legal])
        elif path[-3:] != [*THINK_END, illegal]:  # behind an illegal token nothing is promised: nothing leads there
            assert allowed == (start if path[-2:] == THINK_END else set(range(VOCAB)))
    assert (grammar.tokens_in_think, grammar.tokens_after_end, grammar.grammar.accepted_tokens) == (0, -1, [])
