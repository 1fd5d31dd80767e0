"""What is promised of `hypic serve` on two idle cores, measured so that other load on the machine does not count."""

from __future__ import annotations

from tests.server.serving import Server

READY_SECONDS = 30
"""The test allows twice as much: virtual cores that share theirs with others count up to half as much again."""


def test_ready_within_half_a_minute(server: Server) -> None:
    """The launching process imports, then the scheduler imports and loads while the detokenizer does so beside it."""
    (launcher,) = (t for name, t in server.cpu_seconds.items() if name.startswith("python") and t > 1)
    (scheduler,) = (t for name, t in server.cpu_seconds.items() if name.startswith("sglang::sched"))
    assert 1 < launcher + scheduler < 2 * READY_SECONDS
