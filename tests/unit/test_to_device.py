"""Vectors of plans on the device: values, shapes, and where each begins."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from hypic.kernels._common import to_device


@given(st.lists(st.lists(st.integers(-(2**40), 2**40), max_size=9), max_size=6))
def test_each_vector_is_what_was_given_and_begins_where_triton_reads_wide(lists: list[list[int]]) -> None:
    """Where it begins must not hang on how long the others are: Triton would compile kernels anew for each combination."""
    sent = to_device({str(n): values for n, values in enumerate(lists)}, "cpu")
    assert [sent[str(n)].tolist() for n in range(len(lists))] == lists
    assert all(vector.storage_offset() * vector.element_size() % 16 == 0 for vector in sent.values())


def test_tables_keep_their_shape() -> None:
    sent = to_device({"one": [1], "table": np.arange(6).reshape(2, 3), "there": torch.tensor([7])}, "cpu")
    assert sent["table"].tolist() == [[0, 1, 2], [3, 4, 5]] and sent["there"].tolist() == [7]
