"""SGLang's KV allocators, with the two Triton kernels of the paged one written in torch."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from torch import Tensor


def make_allocator(size: int, page_size: int, **kwargs: Any) -> Any:
    """The allocator that SGLang itself would take for this page size."""
    if page_size == 1:
        return TokenToKVPoolAllocator(size, **kwargs)
    return CpuPagedAllocator(size, page_size=page_size, **kwargs)


class CpuPagedAllocator(PagedTokenToKVPoolAllocator):
    """Pages for requests that grow from ``prefix_lens`` to ``seq_lens`` tokens (int64 [N], ``last_loc`` likewise).

    A request first fills the page that holds its last token, then takes new pages from the head of the free list.
    """

    free_pages: Tensor  # int64 page numbers

    def alloc_extend(
        self,
        prefix_lens: Tensor,
        prefix_lens_cpu: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor,
        last_loc: Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> Tensor | None:
        """Slots of the new tokens [extend_num_tokens] in request order, or None if pages are short (nothing taken)."""
        return self._grow(prefix_lens, seq_lens, last_loc)

    def alloc_decode(self, seq_lens: Tensor, seq_lens_cpu: Tensor, last_loc: Tensor) -> Tensor | None:
        """The slot of one new token per request [N], or None if pages are short."""
        return self._grow(seq_lens - 1, seq_lens, last_loc)

    def _grow(self, prefix_lens: Tensor, seq_lens: Tensor, last_loc: Tensor) -> Tensor | None:
        page = self.page_size
        pages_held = (prefix_lens + page - 1) // page
        new_pages = (seq_lens + page - 1) // page - pages_held
        needed = int(new_pages.sum())
        if self.need_sort and needed > len(self.free_pages):
            self.merge_and_sort_free()
        if needed > len(self.free_pages):
            return None

        lens = seq_lens - prefix_lens
        owner = torch.repeat_interleave(torch.arange(len(lens)), lens)
        position = torch.arange(len(owner)) - (lens.cumsum(0) - lens - prefix_lens)[owner]
        page_of = position // page - pages_held[owner]  # < 0 in the page already held
        free_index = (page_of + (new_pages.cumsum(0) - new_pages)[owner]).clamp(min=0)
        if needed:
            fresh = self.free_pages[free_index.clamp(max=needed - 1)] * page + position % page
        else:
            fresh = position
        held = last_loc[owner] + 1 + position - prefix_lens[owner]
        self.free_pages = self.free_pages[needed:]
        return torch.where(page_of < 0, held, fresh)
