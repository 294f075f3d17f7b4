# SPDX-License-Identifier: Apache-2.0
"""Attention of the reference platform against an oracle that looks at one query row and one head at a time."""

import math
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.platforms.reference.attention import ReferenceAttnBackend

# The layouts of a tree mask, named as SGLang names them.
TreeMaskMode = IntEnum("TreeMaskMode", ["FULL_MASK", "QLEN_ONLY", "QLEN_ONLY_BITPACKING"], start=0)


@dataclass
class Shape:
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    latent: bool = False  # values are the first part of the keys


MLA = Shape(heads=8, kv_heads=1, key_dim=576, value_dim=512, latent=True)
SMALL_MLA = Shape(heads=3, kv_heads=1, key_dim=12, value_dim=8, latent=True)
GQA = Shape(heads=6, kv_heads=2, key_dim=8, value_dim=8)
MHA = Shape(heads=2, kv_heads=2, key_dim=8, value_dim=4)


class Pool:
    """A KV pool whose unused slots hold NaN, except slot 0."""

    def __init__(self, shape: Shape, num_slots: int):
        self.keys = torch.full((num_slots, shape.kv_heads, shape.key_dim), torch.nan)
        self.keys[0] = 1e3
        if shape.latent:
            self.values = self.keys[..., : shape.value_dim]
        else:
            self.values = torch.full((num_slots, shape.kv_heads, shape.value_dim), torch.nan)
            self.values[0] = 1e3

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys, self.values

    def set_kv_buffer(self, layer: object, write: object, key: torch.Tensor, value: torch.Tensor) -> None:
        slots = write.loc
        self.keys[slots] = key
        if self.values.data_ptr() != self.keys.data_ptr():
            self.values[slots] = value


@dataclass
class Batch:
    """Random requests: prefixes in a poisoned pool and new rows as arguments."""

    shape: Shape
    prefix_lens: list[int]
    new_lens: list[int]
    page_size: int = 1
    seed: int = 0
    slots: list[torch.Tensor] = field(default_factory=list)  # per request: slots of prefix and new rows

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        totals = [p + n for p, n in zip(self.prefix_lens, self.new_lens, strict=True)]
        pages = [-(-total // self.page_size) for total in totals]
        order = torch.randperm(sum(pages) + 2, generator=generator) + 1  # page 0 holds slot 0
        self.pool = Pool(self.shape, (len(order) + 1) * self.page_size)
        self.table = torch.full((len(totals) + 3, max(totals) + 5), int(order[-1]) * self.page_size, dtype=torch.int32)
        self.request_rows = torch.randperm(len(self.table), generator=generator)[: len(totals)]
        for row, total, own in zip(self.request_rows, totals, order[: sum(pages)].split(pages), strict=True):
            slots = (own[:, None] * self.page_size + torch.arange(self.page_size)).flatten()[:total]
            self.table[row, :total] = slots.to(torch.int32)
            self.slots.append(slots)
        used = torch.cat([slots[:p] for slots, p in zip(self.slots, self.prefix_lens, strict=True)])
        num_new, shape = sum(self.new_lens), self.shape
        self.pool.keys[used] = torch.randn(len(used), shape.kv_heads, shape.key_dim, generator=generator)
        self.new_keys = torch.randn(num_new, shape.kv_heads, shape.key_dim, generator=generator)
        if shape.latent:
            self.new_values = self.new_keys[..., : shape.value_dim]
        else:
            self.pool.values[used] = torch.randn(len(used), shape.kv_heads, shape.value_dim, generator=generator)
            self.new_values = torch.randn(num_new, shape.kv_heads, shape.value_dim, generator=generator)
        self.query = torch.randn(num_new, shape.heads * shape.key_dim, generator=generator)

    def run(
        self, mode: ForwardMode, layer: SimpleNamespace, spec_info: object = None, save: bool = True
    ) -> torch.Tensor:
        backend = ReferenceAttnBackend(
            SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=self.table), token_to_kv_pool=self.pool)
        )
        prefix, new = torch.tensor(self.prefix_lens), torch.tensor(self.new_lens)
        forward_batch = SimpleNamespace(
            forward_mode=mode,
            seq_lens=prefix + 1 if mode.is_decode() else prefix,
            req_pool_indices=self.request_rows,
            extend_prefix_lens=prefix,
            extend_seq_lens=new,
            out_cache_loc=torch.cat([slots[p:] for slots, p in zip(self.slots, self.prefix_lens, strict=True)]),
            spec_info=spec_info,
        )
        backend.init_forward_metadata(forward_batch)
        return backend.forward(self.query, self.new_keys, self.new_values, layer, forward_batch, save_kv_cache=save)

    def expect(self, layer: SimpleNamespace, visible: list[torch.Tensor]) -> torch.Tensor:
        """Oracle in float64; ``visible`` holds a bool matrix [new, prefix + new] per request."""
        shape, first, rows = self.shape, 0, []
        for slots, prefix, new, sees in zip(self.slots, self.prefix_lens, self.new_lens, visible, strict=True):
            own = slice(first, first + new)
            keys = torch.cat([self.pool.keys[slots[:prefix]], self.new_keys[own]]).double()
            values = torch.cat([self.pool.values[slots[:prefix]], self.new_values[own]]).double()
            for row in range(new):
                query = self.query[first + row].view(shape.heads, shape.key_dim).double()
                for head in range(shape.heads):
                    kv_head = head // (shape.heads // shape.kv_heads)
                    scores = keys[sees[row], kv_head] @ query[head] * layer.scaling
                    if layer.logit_cap > 0:
                        scores = torch.tanh(scores / layer.logit_cap) * layer.logit_cap
                    rows.append(torch.softmax(scores, 0) @ values[sees[row], kv_head])
            first += new
        return torch.stack(rows).view(first, -1).float()


def make_layer(shape: Shape, attn_type: AttentionType = AttentionType.DECODER, **changes: object) -> SimpleNamespace:
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=shape.heads,
        qk_head_dim=shape.key_dim,
        v_head_dim=shape.value_dim,
        scaling=1 / math.sqrt(shape.key_dim),
        logit_cap=0.0,
        sliding_window_size=-1,
        attn_type=attn_type,
        is_cross_attention=False,
        k_scale=None,
        xai_temperature_len=-1,
    )
    return SimpleNamespace(**{**vars(layer), **changes})


def causal_rows(prefix: int, new: int, window: int = -1) -> torch.Tensor:
    """Row t sees columns up to prefix + t, at most ``window`` columns back when that is not negative."""
    sees = torch.zeros(new, prefix + new, dtype=torch.bool)
    for row in range(new):
        first = 0 if window < 0 else max(0, prefix + row - window)
        sees[row, first : prefix + row + 1] = True
    return sees


def tree_tile(parents: list[int]) -> torch.Tensor:
    """[T, T]: row t sees itself and its ancestors; ``parents[t]`` is the parent of row t + 1."""
    tile = torch.eye(len(parents) + 1, dtype=torch.bool)
    for node, parent in enumerate(parents, start=1):
        tile[node] |= tile[parent]
    return tile


def verify_input(num_rows: int, mask: torch.Tensor | None, mode: TreeMaskMode | None) -> SimpleNamespace:
    spec_info = SimpleNamespace(draft_token_num=num_rows, custom_mask=mask)
    if mode is not None:
        spec_info.tree_mask_mode = mode
    return spec_info


SHAPES = st.sampled_from([SMALL_MLA, GQA, MHA])
PREFIXES = st.lists(st.integers(0, 80) | st.sampled_from([63, 64, 65, 200]), min_size=1, max_size=5)
PAGES = st.sampled_from([1, 16])
SEEDS = st.integers(0, 2**16)


def trees(num_rows: int) -> st.SearchStrategy[list[int]]:
    return st.tuples(*(st.integers(0, node) for node in range(num_rows - 1))).map(list)


@given(SHAPES, PREFIXES, PAGES, SEEDS)
@settings(max_examples=40, deadline=None)
def test_decode(shape: Shape, prefix_lens: list[int], page_size: int, seed: int) -> None:
    batch = Batch(shape, prefix_lens, [1] * len(prefix_lens), page_size, seed)
    layer = make_layer(shape)
    expected = batch.expect(layer, [causal_rows(p, 1) for p in prefix_lens])
    torch.testing.assert_close(batch.run(ForwardMode.DECODE, layer), expected, atol=2e-5, rtol=1e-4)


@given(SHAPES, PREFIXES, PAGES, SEEDS, st.sampled_from([-1, 0, 5, 70]), st.sampled_from([0.0, 1.5]), st.data())
@settings(max_examples=40, deadline=None)
def test_prefill_in_chunks(
    shape: Shape, prefix_lens: list[int], page_size: int, seed: int, window: int, cap: float, data: st.DataObject
) -> None:
    new_lens = [data.draw(st.integers(1, 20)) for _ in prefix_lens]
    batch = Batch(shape, prefix_lens, new_lens, page_size, seed)
    layer = make_layer(shape, sliding_window_size=window, logit_cap=cap)
    expected = batch.expect(layer, [causal_rows(p, n, window) for p, n in zip(prefix_lens, new_lens, strict=True)])
    torch.testing.assert_close(batch.run(ForwardMode.EXTEND, layer), expected, atol=2e-5, rtol=1e-4)


@given(SHAPES, PREFIXES, PAGES, SEEDS, st.integers(1, 9), st.booleans())
@settings(max_examples=40, deadline=None)
def test_verify_of_chains_and_drafter_blocks(
    shape: Shape, prefix_lens: list[int], page_size: int, seed: int, num_rows: int, causal: bool
) -> None:
    """Without a mask the target sees a causal chain, and a drafter's encoder layer sees its whole block."""
    batch = Batch(shape, prefix_lens, [num_rows] * len(prefix_lens), page_size, seed)
    layer = make_layer(shape, AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY)
    everything = [torch.ones(num_rows, p + num_rows, dtype=torch.bool) for p in prefix_lens]
    visible = [causal_rows(p, num_rows) for p in prefix_lens] if causal else everything
    expected = batch.expect(layer, visible)
    result = batch.run(ForwardMode.TARGET_VERIFY, layer, verify_input(num_rows, None, None))
    torch.testing.assert_close(result, expected, atol=2e-5, rtol=1e-4)


@given(SHAPES, PREFIXES, PAGES, SEEDS, st.data())
@settings(max_examples=60, deadline=None)
def test_verify_of_trees_in_both_layouts(
    shape: Shape, prefix_lens: list[int], page_size: int, seed: int, data: st.DataObject
) -> None:
    num_rows = data.draw(st.integers(1, 17))
    tiles = [tree_tile(data.draw(trees(num_rows))) for _ in prefix_lens]
    batch = Batch(shape, prefix_lens, [num_rows] * len(prefix_lens), page_size, seed)
    layer = make_layer(shape)
    visible = [
        torch.cat([torch.ones(num_rows, p, dtype=torch.bool), tile], 1)
        for p, tile in zip(prefix_lens, tiles, strict=True)
    ]
    expected = batch.expect(layer, visible)
    dtype = data.draw(st.sampled_from([torch.bool, torch.uint8]))
    compact = torch.cat([tile.flatten() for tile in tiles]).to(dtype)
    full = torch.cat([sees.flatten() for sees in visible]).to(dtype)
    for mask, mode in ((compact, TreeMaskMode.QLEN_ONLY), (full, TreeMaskMode.FULL_MASK), (full, None)):
        result = batch.run(ForwardMode.TARGET_VERIFY, layer, verify_input(num_rows, mask, mode))
        torch.testing.assert_close(result, expected, atol=2e-5, rtol=1e-4)


def test_full_layout_can_hide_the_prefix() -> None:
    batch, layer = Batch(GQA, [3, 9], [2, 2]), make_layer(GQA)
    visible = [causal_rows(3, 2), causal_rows(9, 2)]
    visible[0][:, 1] = False
    visible[1][1, :9] = False
    mask = torch.cat([sees.flatten() for sees in visible])
    result = batch.run(ForwardMode.TARGET_VERIFY, layer, verify_input(2, mask, TreeMaskMode.FULL_MASK))
    torch.testing.assert_close(result, batch.expect(layer, visible), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("page_size", [1, 16])
def test_production_shape_of_mla(page_size: int) -> None:
    tile = tree_tile([0, 0, 1, 1, 2, 3])
    batch, layer = Batch(MLA, [0, 130, 37], [7] * 3, page_size), make_layer(MLA)
    visible = [torch.cat([torch.ones(7, p, dtype=torch.bool), tile], 1) for p in batch.prefix_lens]
    mask = tile.flatten().repeat(3)
    result = batch.run(ForwardMode.TARGET_VERIFY, layer, verify_input(7, mask, TreeMaskMode.QLEN_ONLY))
    expected = batch.expect(layer, visible)
    torch.testing.assert_close(result, expected, atol=2e-5, rtol=1e-4)
    chain = batch.expect(layer, [causal_rows(p, 7) for p in batch.prefix_lens])
    assert (result - chain).abs().max() > 0.1, "this tree must not look like a chain"


def test_rows_that_are_not_saved_come_from_the_arguments() -> None:
    """A prefill of MLA computes ordinary attention on expanded keys, which the pool never holds."""
    batch, layer = Batch(MHA, [0, 0], [5, 3]), make_layer(MHA)
    expected = batch.expect(layer, [causal_rows(0, 5), causal_rows(0, 3)])
    torch.testing.assert_close(batch.run(ForwardMode.EXTEND, layer, save=False), expected, atol=2e-5, rtol=1e-4)
    assert batch.pool.keys[1:].isnan().all()


def test_long_queries_are_cut_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.platforms.reference.attention.MAX_SCORE_ELEMENTS", 1000)
    batch, layer = Batch(GQA, [33], [40]), make_layer(GQA)
    expected = batch.expect(layer, [causal_rows(33, 40)])
    torch.testing.assert_close(batch.run(ForwardMode.EXTEND, layer), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("mode", "numel", "message"),
    [
        (TreeMaskMode.QLEN_ONLY, 19, "18 elements expected for the compact .* got 19"),
        (TreeMaskMode.FULL_MASK, 18, "54 elements expected for the full .* got 18"),
        (None, 18, "54 elements expected for the full .* got 18"),
        (TreeMaskMode.QLEN_ONLY_BITPACKING, 18, "FULL_MASK or QLEN_ONLY expected, got QLEN_ONLY_BITPACKING"),
    ],
)
def test_mask_that_does_not_fit_is_refused(mode: TreeMaskMode | None, numel: int, message: str) -> None:
    batch = Batch(GQA, [5, 7], [3, 3])
    with pytest.raises(ValueError, match=message):
        mask = torch.ones(numel, dtype=torch.bool)
        batch.run(ForwardMode.TARGET_VERIFY, make_layer(GQA), verify_input(3, mask, mode))


def test_what_it_does_not_compute_is_refused() -> None:
    batch = Batch(GQA, [5], [3])
    tree = verify_input(3, torch.ones(9, dtype=torch.bool), TreeMaskMode.QLEN_ONLY)
    with pytest.raises(ValueError, match="full attention, got a sliding window"):
        batch.run(ForwardMode.TARGET_VERIFY, make_layer(GQA, sliding_window_size=2), tree)
    with pytest.raises(ValueError, match="without KV scales"):
        batch.run(ForwardMode.EXTEND, make_layer(GQA, k_scale=torch.tensor(2.0)))
