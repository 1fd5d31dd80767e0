"""What is promised of `hypic serve` on two idle cores, measured so that other load on the machine does not count."""

from __future__ import annotations

from tests.server.serving import Server

READY_SECONDS = 30


def test_ready_within_half_a_minute(server: Server) -> None:
    """The launcher and the fork server import beside each other, then the scheduler loads the model."""
    launcher, fork_server, scheduler = server.cpu_seconds
    assert min(server.cpu_seconds) > 0.5, "all three were found"
    assert max(launcher, fork_server) + scheduler < READY_SECONDS, server.cpu_seconds
