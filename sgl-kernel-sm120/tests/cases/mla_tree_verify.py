# SPDX-License-Identifier: Apache-2.0
"""Named problems of mla_tree_verify, shared by tests and the benchmark."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A problem. prefixes: prefix length per request; see tests/problem.py for the values of the other fields."""

    name: str
    prefixes: tuple[int, ...]
    heads: int
    tokens: int
    mask: str = "full"  # full | compact | bool | none
    tree: str = "random"  # random | chain | alone | permuted | partial
    slots: str = "random"  # random | repeated | last
    q_scale: float = 1.0
    layout: str = "dense"  # dense | strided
    int64_indptr: bool = False
    splits: int | None = None

    def __str__(self) -> str:
        return self.name


def _production() -> list[Case]:
    cases = []
    for heads in (8, 16, 64):
        for tokens in (9, 16, 33, 65):
            for prefix in (1024, 4096, 65536):
                cases.append(Case(f"h{heads}-t{tokens}-{prefix}", (prefix,), heads, tokens))
    cases += [Case(f"h{heads}-t9-200k", (200_000,), heads, 9) for heads in (8, 16, 64)]
    cases += [
        Case(f"h8-t9-b{batch}-{prefix}", (prefix,) * batch, 8, 9) for batch in (4, 16) for prefix in (1024, 16384)
    ]
    cases.append(Case("h8-t9-ragged", (5000, 21, 65536, 0, 1, 777, 16384, 40), 8, 9))
    cases.append(Case("h16-t33-ragged", (3, 4096, 129), 16, 33, mask="compact"))
    cases += [Case(f"h16-t9-b4-{prefix}", (prefix,) * 4, 16, 9) for prefix in (1024, 16384)]
    cases.append(Case("h16-t9-b4-ragged", (5000, 21, 0, 777), 16, 9, mask="compact"))
    return cases


def _edges() -> list[Case]:
    lengths = (0, 1, 7, 8, 15, 16, 17, 21, 22, 23, 24, 31, 32, 33, 63, 64, 65, 1000)
    cases = [Case(f"h8-t9-len{length}", (length,), 8, 9) for length in lengths]
    cases.append(Case("h8-t9-all-lengths", lengths, 8, 9, mask="compact"))
    cases += [Case(f"h1-t{tokens}", (100,), 1, tokens) for tokens in (1, 2, 31, 32, 33, 64, 65)]
    cases += [Case(f"h{heads}-t5", (333,), heads, 5) for heads in (1, 3, 7, 31, 127, 128)]
    cases.append(Case("h128-t65", (513,), 128, 65))
    cases.append(Case("h2-t3-b128", tuple(7 * i for i in range(128)), 2, 3))
    cases += [Case(f"splits{splits}-21", (21,), 8, 9, splits=splits) for splits in (1, 2, 7, 64, 188)]
    cases += [Case(f"splits{splits}-4099", (4099,), 8, 9, splits=splits) for splits in (1, 2, 7, 64, 188)]
    # Splits of whole steps: the last split starts with the first tree token, or one key beside it.
    cases += [Case(f"split-edge-{length}", (length,), 8, 9, splits=4) for length in (119, 120, 127, 128, 129)]
    return cases


def _hostile() -> list[Case]:
    return [
        Case("one-slot-repeated", (3000,), 8, 9, slots="repeated"),
        Case("all-in-the-last-slots", (2000,), 8, 9, slots="last"),
        Case("each-token-alone", (50,), 8, 16, tree="alone"),
        Case("alone-without-prefix", (0, 0), 8, 33, tree="alone"),
        Case("permuted-tree", (700,), 8, 33, tree="permuted"),
        Case("rows-and-keys-that-see-nothing", (0, 40), 8, 17, tree="partial"),
        Case("nothing-seen-in-64-rows", (70,), 16, 16, tree="partial", mask="compact", splits=1),
        Case("peaked", (4096,), 8, 9, q_scale=4.0),
        Case("peaked-in-64-rows", (4096,), 16, 16, q_scale=8.0),
        Case("peaked-short", (21, 0, 17), 16, 16, q_scale=8.0),
        Case("very-peaked", (4096,), 8, 9, q_scale=40.0),
        Case("strided", (300, 20), 8, 9, layout="strided"),
        Case("strided-one-split", (300, 20), 8, 9, layout="strided", splits=1),
        Case("int64-indptr", (300, 20), 8, 9, int64_indptr=True),
        Case("bool-mask", (300, 20), 8, 9, mask="bool"),
        Case("no-mask", (300, 0, 1), 8, 65, mask="none", tree="chain"),
        Case("no-mask-splits", (3000,), 8, 33, mask="none", tree="chain", splits=188),
        Case("compact-chain", (1000,), 8, 33, mask="compact", tree="chain"),
    ]


CASES = _production() + _edges() + _hostile()
# Small enough for a CPU.
SMALL_CASES = [c for c in CASES if sum(c.prefixes) * c.heads * c.tokens <= 800_000]

# The benchmark's grid: requests, heads, tree tokens.
BENCH_SHAPES = [(batch, heads, tokens) for batch in (1, 4, 16) for heads in (8, 16, 64) for tokens in (9, 16, 33)]
BENCH_CONTEXTS = (1024, 4096, 16384, 65536, 200_000)
