"""Between two processes: what arrives is what was sent, whichever way it went. On a GPU also from arena to arena."""

from __future__ import annotations

import argparse

import pytest
import torch

from hypic.router.transport.measure import measure


def _mooncake() -> bool:
    try:
        import mooncake.engine  # noqa: F401
    except ImportError:  # also where libibverbs is missing
        return False
    return True


ALSO = ["mooncake-tcp"] if _mooncake() else []


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
def test_every_way_between_two_processes(device: str) -> None:
    """`measure` compares what arrived, and ends the process if it differs."""
    found = measure(argparse.Namespace(mib=4, reps=1, chunk=1 << 20, window=4, device=device, also=ALSO))
    assert found.keys() == {"window", "ipc", "tcp+curve", *ALSO}
    assert all(way["gb_per_s"]["median"] > 0 for way in found.values())
