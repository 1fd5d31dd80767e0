"""Between two processes: what arrives is what was sent, whichever way it went. On a GPU also from arena to arena."""

from __future__ import annotations

import argparse

import pytest
import torch

from hypic.router.transport import measure as module
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
    """`measure` compares what arrived."""
    found = measure(argparse.Namespace(mib=4, reps=1, chunk=1 << 20, window=4, device=device, also=ALSO))
    assert found.keys() == {"window", "ipc", "tcp+curve", *ALSO}
    assert not [told["failed"] for told in found.values() if "failed" in told]
    assert all(way["gb_per_s"]["median"] > 0 for way in found.values())


def test_a_way_that_fails_is_told_and_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise OSError("no socket")

    monkeypatch.setattr(module, "make_keys", lost)
    found = measure(argparse.Namespace(mib=1, reps=1, chunk=1 << 20, window=4, device="cpu", also=[]))
    assert found["tcp+curve"] == {"failed": "OSError: no socket"}
    assert found["window"]["gb_per_s"]["median"] > 0
