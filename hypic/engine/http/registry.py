"""What the HTTP process remembers of segments that clients named: their tokens, whose they are, and until when."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from typing import NamedTuple

from hypic.engine.http.options import BadRequest
from hypic.segment import segment_id

TOKEN_BYTES = 4 + 8
"""A token here and, until its artifact is there, in the scheduler."""
RECORD_BYTES = 1024


class UnknownSegment(BadRequest):
    """An id that names nothing, for this tenant: never registered, expired, deleted, or another tenant's."""

    status_code = 404


class RegistryFull(Exception):
    """No room for the tokens of another segment; the text says what to do."""


class Wanted(NamedTuple):
    """A segment to remember."""

    tenant: str
    adapter: str
    method: str
    tokens: array[int]
    ttl: float | None


class Record:
    """A named segment.

    Attributes:
        id: its name (:func:`hypic.segment.segment_id`).
        tenant: whose it is.
        adapter, method: what its artifact is for ("" for the base model, the server's default).
        tokens: its ids.
        ttl: seconds that it lives after it was last registered or used; None for ever.
        created: when it was first registered (Unix time).
        touched: when it was last registered or used (the registry's clock).
        reason: why no artifact could be made of it when that was last tried.
    """

    __slots__ = ("adapter", "created", "id", "method", "reason", "tenant", "tokens", "touched", "ttl")

    def __init__(self, name: str, wanted: Wanted):
        self.id = name
        self.tenant, self.adapter, self.method, self.tokens, self.ttl = wanted
        self.created, self.touched = time.time(), 0.0
        self.reason: str | None = None

    @property
    def nbytes(self) -> int:
        return RECORD_BYTES + TOKEN_BYTES * len(self.tokens)


class Registry:
    """Named segments of all tenants, bounded in bytes. Not thread-safe: it lives in the HTTP process's event loop.

    Args:
        budget: bytes.
        clock: seconds, never backwards.
    """

    def __init__(self, budget: int, clock: Callable[[], float] = time.monotonic):
        self._budget, self._clock = budget, clock
        self._used = 0
        self._records: dict[str, Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, name: str) -> bool:
        return name in self._records

    @property
    def used_bytes(self) -> int:
        return self._used

    def put(self, wanted: Iterable[Wanted]) -> list[Record]:
        """Remember segments, all or none; what is known already gets the new ttl and starts to live anew.

        Raises:
            RegistryFull: they do not fit.
        """
        named = [(segment_id(w.tenant, w.adapter, w.method, w.tokens), w) for w in wanted]
        new = {name: Record(name, w) for name, w in named if name not in self._records}
        more = sum(r.nbytes for r in new.values())
        if self._used + more > self._budget:
            raise RegistryFull(
                f"the tokens of {len(new)} new segments take {more} bytes, and {self._used} of the {self._budget} that "
                "--hypic-segment-memory allows are taken: delete segments, let them expire, or raise it"
            )
        self._records |= new
        self._used += more
        out = []
        for name, w in named:
            record = self._records[name]
            record.ttl, record.touched = w.ttl, self._clock()
            out.append(record)
        return out

    def get(self, tenant: str, name: str) -> Record:
        """The tenant's segment of that name; not a use. Raises UnknownSegment."""
        record = self._records.get(name)
        if record is None or record.tenant != tenant or self.left(record) == 0:
            raise UnknownSegment(
                f"segment {name!r}: unknown here; it was never registered with this cache_salt, has expired, or was deleted"
            )
        return record

    def use(self, tenant: str, name: str) -> array[int]:
        """The tokens of the tenant's segment, which lives anew. Raises UnknownSegment."""
        record = self.get(tenant, name)
        record.touched = self._clock()
        return record.tokens

    def of(self, tenant: str) -> list[Record]:
        """The tenant's segments, the oldest first."""
        return [r for r in self._records.values() if r.tenant == tenant and self.left(r) != 0]

    def all(self) -> list[Record]:
        """Those of all tenants."""
        return list(self._records.values())

    def left(self, record: Record) -> float | None:
        """Seconds that it will live without a use; None for ever, 0 if it has expired."""
        return None if record.ttl is None else max(record.touched + record.ttl - self._clock(), 0.0)

    def next_expiry(self) -> float | None:
        """Seconds until the next one expires, if it is not used before; None if none ever will."""
        return min((left for r in self._records.values() if (left := self.left(r)) is not None), default=None)

    def expired(self) -> list[str]:
        return [name for name, r in self._records.items() if self.left(r) == 0]

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            if (record := self._records.pop(name, None)) is not None:
                self._used -= record.nbytes
