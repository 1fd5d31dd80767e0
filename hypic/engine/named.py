"""Segments that clients named: what the scheduler knows of them while the HTTP process remembers their tokens.

Every rank has the same table, since all of them see compile requests and control messages in the same order.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from hypic.method import Method

if TYPE_CHECKING:
    from hypic.engine.manager import LinkManager


@dataclass(eq=False)
class Named:
    """A named segment. It outlives its artifact: evicted, flushed or outdated, that is compiled again at the next use."""

    tenant: str
    adapter: str
    tokens: array
    method: Method
    key: bytes
    hits: int = 0
    """How often a request joined its artifact, or a linked prefix that held it."""
    pinned: bool = False


State = Literal["ready", "compiling", "absent"]


class Look(NamedTuple):
    """What there is of a named segment.

    Attributes:
        state: of its artifact.
        nbytes: of that on this rank; 0 if it is absent.
    """

    state: State
    nbytes: int
    hits: int
    pinned: bool


UNKNOWN = Look("absent", 0, 0, False)


class PinRefused(ValueError):
    """More than may be pinned; the text says how much that is."""


class NamedSegments:
    """The table of one rank.

    Args:
        manager: whose store and keys they use.
    """

    def __init__(self, manager: LinkManager):
        self._manager = manager
        self._by_id: dict[str, Named] = {}
        self._by_key: dict[bytes, Named] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def learn(self, name: str, tenant: str, adapter: str, tokens: array, method: Method) -> None:
        """A compile request for that name has arrived."""
        key = self._manager.key(tenant, adapter, tokens, method)
        known = self._by_id.get(name)
        if known is not None and known.key == key:
            return
        if known is not None:  # its adapter was loaded anew: same name, another artifact
            self.forget([name])
        named = self._by_id[name] = self._by_key[key] = Named(tenant, adapter, tokens, method, key)
        if known is not None:
            named.hits = known.hits

    def clear(self) -> None:
        """All names are gone."""
        self.forget(list(self._by_id))

    def hit(self, key: bytes) -> None:
        if (named := self._by_key.get(key)) is not None:
            named.hits += 1

    def look(self, names: Iterable[str]) -> list[Look]:
        return [self._look(self._by_id.get(name)) for name in names]

    def _look(self, named: Named | None) -> Look:
        if named is None:
            return UNKNOWN
        artifact = self._manager.store.get(named.key)
        if artifact is None:
            return Look("absent", 0, named.hits, named.pinned)
        return Look("ready" if artifact.ready else "compiling", artifact.nbytes, named.hits, named.pinned)

    def pin(self, names: Iterable[str]) -> None:
        """Keep their artifacts, those that are still to come too: all of them or none. Unknown names are passed over.

        Raises:
            PinRefused: with what is pinned already they would take more of the arena than they may.
        """
        wanted = [n for name in names if (n := self._by_id.get(name)) is not None and not n.pinned]
        store, percent = self._manager.store, self._manager.config.pin_percent
        limit = store.capacity * percent // 100
        taken, more = (sum(map(self._size, some)) for some in (self._pinned(), wanted))
        if taken + more > limit:
            raise PinRefused(
                f"pinning {more} bytes beside the {taken} that are pinned would exceed {percent}% of the arena ({limit} "
                "bytes): unpin others, or raise --hypic-pin-percent or --hypic-memory"
            )
        for named in wanted:
            named.pinned = True
            store.pin(named.key)

    def unpin(self, names: Iterable[str]) -> None:
        for name in names:
            if (named := self._by_id.get(name)) is not None:
                named.pinned = False
                self._manager.store.unpin(named.key)

    def forget(self, names: Iterable[str], drop: bool = False) -> None:
        """The names are gone. Their artifacts stay like those of any other segment, unless they are to be dropped; one that is
        still compiled stays, since another compile of it must not begin beside that."""
        for name in names:
            if (named := self._by_id.pop(name, None)) is None:
                continue
            del self._by_key[named.key]
            self._manager.store.unpin(named.key)
            if drop:
                self._manager.store.invalidate(lambda a, key=named.key: a.key == key and a.ready)  # type: ignore[misc]

    def new_weights(self) -> None:
        """The identity has changed, and all keys with it; pins go on for the artifacts to come."""
        self._by_key = {}
        for named in self._by_id.values():
            self._manager.store.unpin(named.key)
            named.key = self._key(named)
            self._by_key[named.key] = named
            if named.pinned:
                self._manager.store.pin(named.key)

    def drop_adapter(self, adapter: str) -> None:
        """What was compiled under it never comes again, so there is nothing to keep."""
        self.unpin([name for name, named in self._by_id.items() if named.adapter == adapter and named.pinned])

    def check_integrity(self) -> None:
        """Pins are those of named segments, under the keys of today. Raises AssertionError."""
        assert {n.key for n in self._by_id.values()} == self._by_key.keys()
        assert all(self._key(n) == n.key for n in self._by_id.values())
        assert {n.key for n in self._pinned()} == self._manager.store.pins, (
            "pins without a name, or names without theirs"
        )

    def _pinned(self) -> list[Named]:
        return [n for n in self._by_id.values() if n.pinned]

    def _size(self, named: Named) -> int:
        return self._manager.space(named.key, named.tokens, named.adapter, named.method.name).nbytes

    def _key(self, named: Named) -> bytes:
        return self._manager.key(named.tenant, named.adapter, named.tokens, named.method)
