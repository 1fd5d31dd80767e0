"""The scheduler's side of a cluster: compiles ordered by the router, artifacts received and lent out.

One Sharing beside the LinkManager; all of it runs on the scheduler's thread, between batches.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from hypic.artifact.layout import HeaderError, decode_header, require_header
from hypic.artifact.store import Artifact
from hypic.engine import keys
from hypic.engine.cluster.events import Asked, ClusterEvent, Fetched, Returned, Told
from hypic.engine.cluster.exchange import Exchange, Load
from hypic.engine.request import Compile
from hypic.router import messages as m
from hypic.router.transport import Peer

if TYPE_CHECKING:
    from hypic.engine.manager import LinkManager

logger = logging.getLogger(__name__)

_LOAD_EVERY = 0.1
"""Seconds between looks at the queue for the heartbeat."""
_SPEED_WEIGHT = 0.25
"""Weight of the newest pass in the measured compile speed."""


class _Order:
    """A compile that the router wants, by one or more flights."""

    def __init__(self, deadline: float):
        self.deadline = deadline
        self.flights: dict[int, str] = {}
        """Flight number -> request."""


class _Import:
    """An artifact on its way to us, in a place that is reserved and locked for it."""

    def __init__(self, artifact: Artifact, deadline: float):
        self.artifact, self.deadline = artifact, deadline
        self.requests: set[str] = set()


class Sharing:
    """What this scheduler does for its cluster.

    Args:
        manager: whose store it is.
        exchange: started.
    """

    def __init__(self, manager: LinkManager, exchange: Exchange):
        self.manager, self.exchange = manager, exchange
        self.counts: Counter[str] = Counter()
        """Artifacts received, lent, refused, not received, by reason: for metrics and logs."""
        self._orders: dict[bytes, _Order] = {}
        self._imports: dict[bytes, _Import] = {}
        self._lent: dict[bytes, Artifact] = {}
        """On offer, each with one lock."""
        self._tokens_per_s = 0.0
        self._looked = 0.0
        store = manager.store
        store.on_ready, store.on_gone = self._ready, self._gone
        for artifact in store.ready():
            self._ready(artifact)

    # ------------------------------------------------------------------ events

    def handle(self, event: ClusterEvent) -> None:
        """An event, in the order in which all ranks see them."""
        if isinstance(event, Told):
            told = event.message
            if isinstance(told, m.Compile):
                self._compile(told)
            elif isinstance(told, m.Expect):
                self._expect(told)
            elif isinstance(told, m.Reroute):
                self._reroute(told)
            else:
                self._cancel(told.request)
        elif isinstance(event, Fetched):
            self._fetched(event)
        elif isinstance(event, Asked):
            self._lend(event.key)
        elif isinstance(event, Returned) and (artifact := self._lent.pop(event.key, None)) is not None:
            self.manager.store.unlock(artifact)

    def sweep(self) -> None:
        """Every scheduling step: deadlines, and the figures of the next heartbeat."""
        now = time.monotonic()
        for key in [k for k, o in self._orders.items() if o.deadline < now]:
            if not self.manager.abandon(key):
                self._orders[key].deadline = float("inf")
        if self._imports and not self.exchange.alive:
            for key in list(self._imports):
                self._fetched(Fetched(key, False, "the exchange has ended"))
        if now - self._looked >= _LOAD_EVERY:
            self._looked = now
            store, running, queued = self.manager.store, *self.manager.load()
            self.exchange.load = Load(queued, running, store.capacity - store.used_bytes, self._tokens_per_s)

    @property
    def busy(self) -> bool:
        """Artifacts are on their way to us."""
        return bool(self._imports)

    @property
    def lent(self) -> int:
        """Locks held for other workers."""
        return len(self._lent)

    # ------------------------------------------------------------------ compile for others

    def _compile(self, told: m.Compile) -> None:
        tokens = array("q", told.tokens)
        if (reason := self._wrong(told.key, told.tenant, told.adapter, tokens)) is not None:
            self._answer(told.key, {told.flight: told.request}, False, reason)
            return
        store, manager = self.manager.store, self.manager
        artifact = store.find(told.key, tokens)
        if artifact is not None and artifact.ready:
            self._answer(told.key, {told.flight: told.request}, True, nbytes=artifact.nbytes)
            return
        order = self._orders.setdefault(told.key, _Order(time.monotonic() + told.deadline))
        order.flights[told.flight] = told.request
        if artifact is not None:  # under way, for someone here or on its way to us
            return
        made = manager.reserve_for([(told.key, tokens, told.adapter)])
        if made is None:
            self._failed(told.key, "arena full")
            return
        made[0].made_for = told.request
        manager.start_compile(made[0], None)

    def compiled(self, artifact: Artifact, state: Compile) -> None:
        """A compile request is done and its artifact is ready."""
        order = self._orders.pop(artifact.key, None)
        if order is not None:
            self._lend(artifact.key)
            self._answer(artifact.key, order.flights, True, nbytes=artifact.nbytes, seconds=state.seconds)

    def failed(self, artifact: Artifact) -> None:
        """A compile request has ended without an artifact."""
        self._failed(artifact.key, "compile failed")

    def measured(self, tokens: int, seconds: float) -> None:
        """A forward pass with compiling rows had that many tokens."""
        rate = tokens / seconds
        weight = _SPEED_WEIGHT if self._tokens_per_s else 1.0
        self._tokens_per_s += (rate - self._tokens_per_s) * weight

    def _failed(self, key: bytes, reason: str) -> None:
        order = self._orders.pop(key, None)
        if order is not None:
            self.counts["compile_failed"] += 1
            self.exchange.withdraw(key, reason)
            self._answer(key, order.flights, False, reason)

    def _answer(
        self, key: bytes, flights: dict[int, str], ok: bool, reason: str = "", nbytes: int = 0, seconds: float = 0.0
    ) -> None:
        for flight in flights:
            self.exchange.say(
                m.Compiled(flight=flight, key=key, ok=ok, nbytes=nbytes, seconds=seconds, reason=reason[:512])
            )

    # ------------------------------------------------------------------ receive

    def _expect(self, told: m.Expect) -> None:
        """Reserve places for all that is to come, or for none, and fetch it."""
        manager, store = self.manager, self.manager.store
        held: list[bytes] = []
        awaited: list[bytes] = []
        refused: list[bytes] = []
        wanted: dict[bytes, tuple[m.Wanted, array[int]]] = {}
        here: list[Artifact] = []
        seen: set[bytes] = set()
        for w in told.segments:
            tokens = array("q", w.tokens)
            if w.key in seen:
                continue
            seen.add(w.key)
            if self._wrong(w.key, w.tenant, w.adapter, tokens) is not None or w.source == self.exchange.member.worker:
                refused.append(w.key)
            elif (artifact := store.find(w.key, tokens)) is not None:
                here.append(artifact)
                if (coming := self._imports.get(w.key)) is not None:
                    coming.requests.add(told.request)
                    awaited.append(w.key)
                else:
                    held.append(w.key)
            else:
                wanted[w.key] = w, tokens
        for artifact in here:  # so that they do not make room for the others
            store.lock(artifact)
        made = manager.reserve_for([(k, tokens, w.adapter) for k, (w, tokens) in wanted.items()]) if wanted else []
        for artifact in here:
            store.unlock(artifact)
        if made is None:
            self.counts["expect_refused"] += 1
            refused += wanted
        for artifact in made or ():
            w, _ = wanted[artifact.key]
            artifact.source, artifact.made_for, artifact.cold = w.source, told.request, w.cold
            coming = self._imports[artifact.key] = _Import(artifact, time.monotonic() + told.deadline)
            coming.requests.add(told.request)
            awaited.append(artifact.key)
            peer = Peer(w.address, w.public_key)
            self.exchange.fetch(artifact.key, peer, artifact.offset, artifact.nbytes, told.deadline)
        self.exchange.say(
            m.Expecting(request=told.request, held=tuple(held), awaited=tuple(awaited), refused=tuple(refused))
        )

    def _reroute(self, told: m.Reroute) -> None:
        coming = self._imports.get(told.key)
        if coming is None:
            return
        artifact, left = coming.artifact, max(coming.deadline - time.monotonic(), 0.01)
        peer = Peer(told.address, told.public_key) if told.address else None
        artifact.source = told.source
        self.exchange.refetch(artifact.key, peer, artifact.offset, artifact.nbytes, left, "no source")

    def _fetched(self, event: Fetched) -> None:
        """The place is ours again: with an artifact, or for a compile of our own, if anybody waits for it."""
        coming = self._imports.pop(event.key, None)
        if coming is None:
            return
        artifact, store = coming.artifact, self.manager.store
        ok, reason = event.ok, event.reason
        if artifact.stale:
            ok, reason = False, "invalidated"
        elif ok:
            try:
                self._check_header(artifact)
            except HeaderError as e:
                logger.error("hypic: artifact of worker %s: %s", artifact.source, e)
                ok, reason = False, "header"
        self.counts["received" if ok else f"not_received:{reason}"] += 1
        for request in sorted(coming.requests):
            self.exchange.say(
                m.Arrived(request=request, key=event.key, ok=ok, seconds=event.seconds, reason=reason[:512])
            )
        if ok:
            store.commit(artifact)
            return
        artifact.source = ""
        if artifact.stale:
            store.unlock(artifact)
        elif not self.manager.compile_instead(artifact):
            if event.key in self._orders:
                self.manager.start_compile(artifact, None)
            else:
                store.discard(artifact)

    def _check_header(self, artifact: Artifact) -> None:
        """Raises HeaderError unless the blob says that it is what we would have written."""
        buffer = self.manager.store.arena.buffer
        raw = bytes(buffer[artifact.offset : artifact.base].cpu().numpy())
        require_header(raw, decode_header(self.manager.header(artifact.tokens, artifact.adapter)))

    # ------------------------------------------------------------------ lend

    def _lend(self, key: bytes) -> None:
        artifact = self.manager.store.get(key)
        if key in self._lent:
            return
        if artifact is None or not artifact.ready:
            if key not in self._orders:
                self.exchange.withdraw(key, "gone")
            return
        self.counts["lent"] += 1
        self._lent[key] = artifact
        self.manager.store.lock(artifact)
        self.exchange.offer(key, artifact.offset, artifact.nbytes)

    def _ready(self, artifact: Artifact) -> None:
        self.exchange.stored(artifact.key, artifact.nbytes)

    def _gone(self, artifact: Artifact) -> None:
        self.exchange.gone(artifact.key)
        if self._lent.get(artifact.key) is artifact:
            self.exchange.withdraw(artifact.key, "invalidated")

    # ------------------------------------------------------------------ both

    def _cancel(self, request: str) -> None:
        """Nobody waits for this request any more: what is done for it alone, and has not begun, is dropped."""
        for key, order in list(self._orders.items()):
            if request in order.flights.values():
                order.flights = {f: r for f, r in order.flights.items() if r != request}
                if not order.flights:
                    self.manager.abandon(key)
        for key, coming in self._imports.items():
            if request in coming.requests:
                coming.requests.discard(request)
                if not coming.requests and self.manager.waiting_for(coming.artifact) is None:
                    a = coming.artifact
                    self.exchange.refetch(key, None, a.offset, a.nbytes, 0.0, "cancelled")

    def new_weights(self) -> None:
        """The identity has changed."""
        self.exchange.rename(self.manager.identity.digest)

    def _wrong(self, key: bytes, tenant: str, adapter: str, tokens: array[int]) -> str | None:
        """Why a segment cannot be what the router says it is, or None."""
        if adapter:  # their ids are drawn at random by each server
            return "adapters are not shared"
        if keys.artifact_key(self.manager.identity.digest, tenant, adapter, tokens) != key:
            return "key and tokens do not agree"
        ids = np.frombuffer(tokens, dtype=np.int64)
        if ids.min() < 0 or ids.max() >= self.manager.vocab_size:
            return "token ids out of range"
        return None
