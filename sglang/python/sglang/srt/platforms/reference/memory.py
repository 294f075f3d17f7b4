# SPDX-License-Identifier: Apache-2.0
"""KV pools and slot allocators with the constructor arguments that SGLang passes to an out-of-tree platform."""

from typing import Any

import torch

from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

# Integer tensors: lengths [bs] and pool slots.
Ints = torch.Tensor


class ReferenceMHATokenToKVPool(MHATokenToKVPool):
    """Keys and values of ordinary attention, each ``[slots, kv_heads, head_dim]`` per layer."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # By indexing: the other way to move rows is a device kernel.
        self.use_native_move_kv_cache = True


class ReferenceMLATokenToKVPool(MLATokenToKVPool):
    """Latent rows of MLA, ``[slots, 1, kv_lora_rank + qk_rope_head_dim]`` per layer."""

    def __init__(self, *args: Any, index_head_dim: int | None = None, **kwargs: Any):
        if index_head_dim is not None:
            raise ValueError(
                f"reference platform: MLA pool without a sparse index expected, got index_head_dim={index_head_dim}; "
                "serve this model on a GPU"
            )
        super().__init__(*args, **kwargs)


class ReferenceSlotAllocator(TokenToKVPoolAllocator):
    """The allocator for page size 1, which the caller names although it is implied."""

    def __init__(self, size: int, *, page_size: int, **kwargs: Any):
        if page_size != 1:
            raise ValueError(f"reference platform: page size 1 expected for the slot allocator, got {page_size}")
        super().__init__(size, **kwargs)


class ReferencePagedAllocator(PagedTokenToKVPoolAllocator):
    """The paged allocator with its two device kernels written as index arithmetic."""

    free_pages: torch.Tensor

    def alloc_extend(
        self,
        prefix_lens: Ints,
        prefix_lens_cpu: Ints,
        seq_lens: Ints,
        seq_lens_cpu: Ints,
        last_loc: Ints,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> Ints | None:
        """Return ``extend_num_tokens`` int64 slots, request by request, or None when there are too few pages.

        ``last_loc`` [bs] is the slot before each request's first new token; the page that holds it is filled first.
        """
        prefix, total = prefix_lens.to(torch.int64), seq_lens.to(torch.int64)
        page = self.page_size
        first_new_page = (prefix + page - 1) // page
        new_pages = (total + page - 1) // page - first_new_page
        needed = int(new_pages.sum())
        if self.need_sort and needed > len(self.free_pages):
            self.merge_and_sort_free()
        if needed > len(self.free_pages):
            return None
        extend = total - prefix
        request = torch.repeat_interleave(torch.arange(len(extend)), extend)
        step = torch.arange(int(extend.sum())) - (torch.cumsum(extend, 0) - extend)[request]
        position = prefix[request] + step
        ordinal = position // page - first_new_page[request]
        pages_before = torch.cumsum(new_pages, 0) - new_pages
        in_new_page = ordinal >= 0
        taken = self.free_pages[:needed]
        slots = last_loc.to(torch.int64)[request] + 1 + step
        fresh = taken[(pages_before[request] + ordinal)[in_new_page]] * page + position[in_new_page] % page
        slots[in_new_page] = fresh
        self.free_pages = self.free_pages[needed:]
        return slots

    def alloc_decode(self, seq_lens: Ints, seq_lens_cpu: Ints, last_loc: Ints) -> Ints | None:
        """Return one int64 slot per request ([bs]), or None when there are too few pages."""
        return self.alloc_extend(
            seq_lens - 1, seq_lens_cpu - 1, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens=len(seq_lens)
        )
