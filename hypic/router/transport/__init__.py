"""How a blob gets from one worker's arena into another's: one small interface, one module for each way.

The receiver drives. It asks a peer for a blob by key, into a buffer of its own, and hands out credit chunk by chunk; the
sender keeps no state of a transfer, so chunks that are lost, late, twice or out of order cost time and nothing else. A
blob that is still being made may be asked for already: it leaves the moment it is offered.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class TransferError(RuntimeError):
    """A blob did not arrive. ``reason`` is a word for counters: "gone", "timeout", "closed", "size", "window"."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Peer(msgspec.Struct, frozen=True):
    """Where a worker serves its blobs, and (over TCP) the public key that it must prove to have."""

    address: str
    public_key: bytes = b""


class Receipt(msgspec.Struct, frozen=True):
    """A blob that has arrived whole.

    Attributes:
        nbytes: its length.
        waited: seconds from the call to the first chunk (the blob may still have been in the making).
        seconds: from the first chunk to the last.
        again: chunks that were asked for more than once.
    """

    nbytes: int
    waited: float
    seconds: float
    again: int


class Stats(msgspec.Struct):
    """Totals of one transport, both directions."""

    sent_bytes: int = 0
    sent_chunks: int = 0
    received_bytes: int = 0
    received_chunks: int = 0
    receive_seconds: float = 0.0
    """Sum of Receipt.seconds: received_bytes / receive_seconds is the rate of one transfer."""
    asked_again: int = 0
    duplicates: int = 0
    corrupt: int = 0
    turned_away: int = 0
    """Requests for chunks beyond what one peer, or all peers, may have open."""

    @property
    def gb_per_s(self) -> float:
        return self.received_bytes / self.receive_seconds / 1e9 if self.receive_seconds else 0.0


class Transport(Protocol):
    """One way to move blobs. Not thread-safe: all calls come from the event loop that it was started in."""

    stats: Stats

    async def start(self) -> str:
        """Begin to serve; the address for peers."""

    def expect(self, key: bytes) -> None:
        """The blob of `key` is being made here: peers that ask for it wait until `offer` or `withdraw`."""

    def offer(self, key: bytes, blob: memoryview) -> None:
        """Serve `blob`. It must neither move nor change until `withdraw` has returned."""

    async def withdraw(self, key: bytes, reason: str = "gone") -> None:
        """Serve it no more. Returns once nothing refers to its memory; peers that wait are told the reason."""

    async def fetch(self, peer: Peer, key: bytes, into: memoryview, timeout: float) -> Receipt:
        """Fill `into`, exactly, with the peer's blob.

        Once this has returned or raised, also on cancellation, `into` is not written any more; unless it returned, what
        it holds is undefined.

        Raises:
            TransferError: the peer has no such blob, or one of another length, or it was not complete in time.
        """

    async def close(self) -> None:
        """End all transfers; nothing refers to any blob or buffer afterwards."""
