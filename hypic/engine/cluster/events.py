"""What the exchange tells the scheduler. The scheduler of rank 0 takes events in with the requests of its clients, so that
all ranks see them between the same two requests."""

from __future__ import annotations

from dataclasses import dataclass

from hypic.router import messages as m


@dataclass(frozen=True)
class ClusterEvent:
    """Base of all events: the type under which SGLang's dispatcher knows them."""


@dataclass(frozen=True)
class Told(ClusterEvent):
    """The router says so."""

    message: m.Compile | m.Expect | m.Reroute | m.Cancel


@dataclass(frozen=True)
class Fetched(ClusterEvent):
    """A fetch is over; nothing writes into its place any more.

    Attributes:
        ok: the blob is there, whole.
        reason: why not.
        seconds: from its first chunk to its last.
    """

    key: bytes
    ok: bool
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Asked(ClusterEvent):
    """Another worker wants this artifact, which is not on offer."""

    key: bytes


@dataclass(frozen=True)
class Returned(ClusterEvent):
    """The artifact is on offer no more, and nothing refers to its memory."""

    key: bytes
