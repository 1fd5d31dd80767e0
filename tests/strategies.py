"""Hypothesis strategies shared by the tests."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from hypic.check.layouts import Layout, document_pool, random_layout


def layouts(
    vocab: int, *, max_tokens: int = 600, pool: Sequence[tuple[int, ...]] | None = None
) -> st.SearchStrategy[Layout]:
    """Prompts by :func:`hypic.check.layouts.random_layout`; shrinks towards fewer segments and shorter gaps."""
    documents = document_pool(random.Random(0), vocab) if pool is None else pool
    return st.randoms(use_true_random=False).map(
        lambda rng: random_layout(rng, vocab, max_tokens=max_tokens, pool=documents)
    )
