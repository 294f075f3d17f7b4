# SPDX-License-Identifier: Apache-2.0
"""A scheduler's bookkeeping of KV slots without a model: SGLang's own pools, allocator and radix tree, and toy contents.

The row of a token is derived from all tokens up to it, so that a row which is lost, mixed up or overwritten is seen.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.model_executor.forward_batch_info import ForwardMode

NUM_SLOTS = 320
WINDOW = 4  # rows of a verify pass
MAX_REQUESTS = 6


@dataclass(eq=False)
class ToyRequest:
    """What the tree and the defragmenter read of a request, under SGLang's names."""

    rid: str
    origin_input_ids: array[int]
    output_ids: array[int] = field(default_factory=lambda: array("q"))
    req_pool_idx: int | None = None
    prefix_indices: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    last_node: Any = None
    cache_protected_len: int = 0
    kv_committed_len: int = 0
    kv_allocated_len: int = 0
    inflight_middle_chunks: int = 0
    extra_key: str | None = None
    priority: int = 0

    def get_fill_ids(self) -> array[int]:
        return self.origin_input_ids + self.output_ids


class MLATokenToKVPool:
    """KV rows [slots, 2] in each of several layers; the name tells the defragmenter how a pool is laid out."""

    def __init__(self, num_layers: int, device: str) -> None:
        shape = NUM_SLOTS + 1, 2
        self.kv_buffer = [torch.full(shape, -1, dtype=torch.int64, device=device) for _ in range(num_layers)]

    def move_kv_cache(self, destinations: torch.Tensor, sources: torch.Tensor) -> None:
        """What is called on a GPU for pools that have no kernel of ours."""
        for layer in self.kv_buffer:
            layer[destinations] = layer[sources]


def contents(tokens: array[int]) -> list[int]:
    """The row of each token: a number that depends on all tokens up to it."""
    found, last = [], 0
    for token in tokens:
        last = hash((last, token)) % 2**40
        found.append(last)
    return found


class ToyServer:
    """Requests on real pools. `running` are in the decode batch; `chunked` is between two chunks, out of the batch."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.rows = ReqToTokenPool(MAX_REQUESTS + 1, 200, device, enable_memory_saver=False)
        self.pools = (MLATokenToKVPool(2, device), MLATokenToKVPool(1, device))
        self.allocator = TokenToKVPoolAllocator(NUM_SLOTS, torch.int64, device, self.pools[0], need_sort=False)
        self.tree = RadixCache(
            CacheInitParams(
                disable=False, req_to_token_pool=self.rows, token_to_kv_pool_allocator=self.allocator, page_size=1
            )
        )
        self.running: list[ToyRequest] = []
        self.chunked: ToyRequest | None = None
        self.num_admitted = 0

    @property
    def table(self) -> torch.Tensor:
        return self.rows.req_to_token

    @property
    def requests(self) -> list[ToyRequest]:
        return self.running + ([self.chunked] if self.chunked is not None else [])

    def runner(self, pool: MLATokenToKVPool) -> Any:
        """The part of a model runner that the defragmenter is made from."""
        return SimpleNamespace(
            token_to_kv_pool=pool, req_to_token_pool=self.rows, token_to_kv_pool_allocator=self.allocator
        )

    def batch(self) -> Any:
        return SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            reqs=self.running,
            tree_cache=self.tree,
            req_pool_indices=torch.tensor([req.req_pool_idx for req in self.running], device=self.device),
        )

    def alloc(self, number: int) -> torch.Tensor | None:
        if self.allocator.available_size() < number:
            self.tree.evict(EvictParams(num_tokens=number - self.allocator.available_size()))
        return self.allocator.alloc(number)

    def admit(self, prompt: list[int], chunked: bool = False) -> ToyRequest | None:
        """Prefill a request; None when there is no room for it."""
        if len(self.requests) >= MAX_REQUESTS or (chunked and self.chunked is not None):
            return None
        req = ToyRequest(f"request-{self.num_admitted}", array("q", prompt))
        match = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(req.origin_input_ids[:-1])))
        prefix = len(match.device_indices)
        self.tree.inc_lock_ref(match.last_device_node)
        slots = self.alloc(len(prompt) - prefix)
        if slots is None:
            self.tree.dec_lock_ref(match.last_device_node)
            return None
        self.num_admitted += 1
        req.prefix_indices, req.last_node, req.cache_protected_len = (
            match.device_indices,
            match.last_device_node,
            prefix,
        )
        self.rows.alloc([req])
        self.table[req.req_pool_idx, : len(prompt)] = torch.cat([match.device_indices, slots]).to(torch.int32)
        req.kv_committed_len = req.kv_allocated_len = len(prompt)
        self._compute(req, prefix)
        if chunked:
            self.chunked = req
            self.insert(req)
        else:
            self.running.append(req)
        return req

    def insert(self, req: ToyRequest) -> None:
        """What follows a prefill: the tree takes over the prompt's slots."""
        if req.cache_protected_len < len(req.origin_input_ids) and not req.output_ids:
            self.tree.cache_unfinished_req(req, chunked=req is self.chunked)

    def decode(self, req: ToyRequest, tokens: list[int]) -> None:
        """A step: reserve two windows, then commit up to one."""
        reserved = max(req.kv_allocated_len, req.kv_committed_len + 2 * WINDOW)
        slots = self.alloc(reserved - req.kv_allocated_len)
        if slots is None or reserved > self.table.shape[1]:
            self.finish(req, insert=False)
            return
        self.table[req.req_pool_idx, req.kv_allocated_len : reserved] = slots.to(torch.int32)
        first, req.kv_allocated_len = req.kv_committed_len, reserved
        req.output_ids.extend(tokens)
        req.kv_committed_len += len(tokens)
        self._compute(req, first)

    def finish(self, req: ToyRequest, insert: bool) -> None:
        """End, abort or (without insert) retract a request."""
        committed = req.kv_committed_len
        self.tree.cache_finished_req(req, is_insert=insert, kv_len_to_handle=committed)
        self.allocator.free(self.table[req.req_pool_idx, committed : req.kv_allocated_len])
        self.rows.free(req)
        if req is self.chunked:
            self.chunked = None
        else:
            self.running.remove(req)

    def check(self) -> None:
        """Every slot has one owner, and every row is what its text says."""
        owned = torch.cat([self.allocator.free_pages, self.allocator.release_pages]).tolist()
        owned += self._check_tree()
        for req in self.requests:
            row = self.table[req.req_pool_idx].tolist()
            owned += row[req.cache_protected_len : req.kv_allocated_len]
            self._check_text(req.get_fill_ids(), row[: req.kv_committed_len])
            assert req.prefix_indices.tolist() == row[: len(req.prefix_indices)]
        assert sorted(owned) == list(range(1, NUM_SLOTS + 1))

    def _check_tree(self) -> list[int]:
        owned, waiting = [], [(child, array("q"), []) for child in self.tree.root_node.children.values()]
        while waiting:
            node, tokens, slots = waiting.pop()
            tokens, slots = tokens + node.key.raw_token_ids(), slots + node.value.tolist()
            owned += node.value.tolist()
            self._check_text(tokens, slots)
            waiting += [(child, tokens, slots) for child in node.children.values()]
        return owned

    def _check_text(self, tokens: array[int], slots: list[int]) -> None:
        expected = contents(tokens[: len(slots)])
        for number, layer in enumerate(self._layers()):
            assert layer[slots].tolist() == [[row, number] for row in expected]

    def _compute(self, req: ToyRequest, first: int) -> None:
        rows = torch.tensor(contents(req.get_fill_ids())[first : req.kv_committed_len], device=self.device)
        slots = self.table[req.req_pool_idx, first : req.kv_committed_len].to(torch.int64)
        for number, layer in enumerate(self._layers()):
            layer[slots, 0], layer[slots, 1] = rows, number

    def _layers(self) -> list[torch.Tensor]:
        return [layer for pool in self.pools for layer in pool.kv_buffer]


def fragmented_server(num_requests: int = 2, device: str = "cpu") -> ToyServer:
    """Requests with a common prefix of 24 tokens whose answers are cut into runs of a few slots."""
    server = ToyServer(device)
    for number in range(num_requests):
        server.admit([*[1] * 24, 7 + number])
    for req in server.running:
        server.insert(req)
    for turn in range(20):
        for req in server.running:
            server.decode(req, [4 + turn % 3] * 2)
    server.check()
    return server
