"""The torch page allocator against SGLang's reference of its own kernel."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

PAGE, PAGES = 4, 40


def make_allocator() -> object:
    from hypic.platform_cpu.allocator import make_allocator

    return make_allocator(PAGE * PAGES, PAGE, dtype=torch.float32, device="cpu", kvcache=None, need_sort=False)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=4))
def test_extend_equals_sglang(requests: list[tuple[int, int]]) -> None:
    """Requests with a prefix that ends anywhere in a page, growing by any length."""
    from sglang.srt.mem_cache.allocator import alloc_extend_naive

    allocator = make_allocator()
    prefix = torch.tensor([p for p, _ in requests])
    total = prefix + torch.tensor([n for _, n in requests])
    last = torch.full_like(prefix, -1)
    for i, p in enumerate(prefix.tolist()):
        if p:
            last[i] = allocator.alloc(-(-p // PAGE) * PAGE)[p - 1]
    tokens = int((total - prefix).sum())
    expected = torch.empty(tokens, dtype=torch.int64)
    alloc_extend_naive(prefix, total, last, allocator.free_pages, expected, PAGE, "cpu")
    free_before = set(allocator.free_pages.tolist())

    got = allocator.alloc_extend(prefix, prefix, total, total, last, tokens)

    assert torch.equal(got, expected)
    assert set(allocator.free_pages.tolist()) == free_before - {
        page for page in (got // PAGE).tolist() if page in free_before
    }


def test_decode_fills_a_page_then_takes_a_new_one() -> None:
    allocator = make_allocator()
    slots = allocator.alloc(PAGE)[:3]
    for length in range(4, 7):
        lens = torch.tensor([length])
        slots = torch.cat([slots, allocator.alloc_decode(lens, lens, slots[-1:])])
    assert (slots[:4] // PAGE).unique().numel() == 1
    assert (slots[4:] // PAGE).unique().numel() == 1 and slots[4] % PAGE == 0


def test_short_of_pages_takes_nothing() -> None:
    allocator = make_allocator()
    zero, lens = torch.tensor([0]), torch.tensor([PAGE * PAGES + 1])
    assert allocator.alloc_extend(zero, zero, lens, lens, zero - 1, int(lens)) is None
    assert len(allocator.free_pages) == PAGES
