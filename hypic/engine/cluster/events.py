"""What the exchange tells the scheduler.

Rank 0 takes events in with the requests of its clients, and SGLang hands both to all ranks: so every rank sees the same
events between the same two batches, and decides alike. What concerns the memory of all ranks is an event once it is true of
all of them.
"""

from __future__ import annotations

import msgspec

from hypic.router import messages as m


class ClusterEvent(msgspec.Struct, frozen=True, tag=True):
    """Base of all events."""


class Told(ClusterEvent, frozen=True, tag=True):
    """The router says so."""

    message: m.Compile | m.Expect | m.Reroute | m.Cancel


class Fetched(ClusterEvent, frozen=True, tag=True):
    """A fetch is over; nothing writes into its place any more.

    Attributes:
        ok: the artifact is there, whole, and its header is the one that was expected.
        reason: why not.
        seconds: from its first chunk to its last.
    """

    key: bytes
    ok: bool
    reason: str = ""
    seconds: float = 0.0


class Asked(ClusterEvent, frozen=True, tag=True):
    """Another worker wants this artifact, which is not on offer."""

    key: bytes


class Idle(ClusterEvent, frozen=True, tag=True):
    """Nobody has asked for what is on offer for a while."""

    key: bytes


class Returned(ClusterEvent, frozen=True, tag=True):
    """The artifact is on offer no more, and nothing refers to its memory."""

    key: bytes


class Expired(ClusterEvent, frozen=True, tag=True):
    """An order should have begun by now."""

    key: bytes


FromRank = Fetched | Asked | Returned
"""What other ranks tell rank 0."""


class Tally:
    """Makes one event of what all ranks say: a fetch is over when it is over everywhere, and good if it is good everywhere."""

    def __init__(self, ranks: int):
        self._ranks = ranks
        self._said: dict[tuple[str, bytes], list[Fetched | Returned]] = {}

    def add(self, event: FromRank) -> FromRank | None:
        """The event of all ranks, if this was the last of them that was missing."""
        if isinstance(event, Asked):
            return event
        name = type(event).__name__, event.key
        said = self._said.setdefault(name, [])
        said.append(event)
        if len(said) < self._ranks:
            return None
        del self._said[name]
        if isinstance(event, Returned):
            return event
        fetched = [e for e in said if isinstance(e, Fetched)]
        failed = next((e for e in fetched if not e.ok), None)
        return failed or Fetched(event.key, True, seconds=max(e.seconds for e in fetched))
