"""The scheduler's side of a cluster: compiles ordered by the router, artifacts received and lent out.

One Sharing beside the LinkManager; all of it runs on the scheduler's thread, between batches.
"""

from __future__ import annotations

import logging
import time
from array import array
from typing import TYPE_CHECKING

import numpy as np

from hypic.artifact.store import Artifact
from hypic.engine.cluster.events import Asked, ClusterEvent, Expired, Fetched, Idle, Returned, Told
from hypic.engine.cluster.exchange import Exchange, Place
from hypic.engine.cluster.membership import Load
from hypic.engine.request import Compile
from hypic.router import messages as m
from hypic.router.rate import Rate
from hypic.router.transport import Peer

if TYPE_CHECKING:
    from hypic.engine.manager import LinkManager

logger = logging.getLogger(__name__)

_LOAD_EVERY = 0.1
"""Seconds between looks at the queue for the heartbeat."""


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
        self._orders: dict[bytes, dict[int, str]] = {}
        """Compiles that the router wants: flight number -> request."""
        self._imports: dict[bytes, _Import] = {}
        self._lent: dict[bytes, Artifact] = {}
        """On offer, each with one lock,"""
        self._leaving: set[bytes] = set()
        """and those that are being taken back."""
        self._speed = Rate()
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
        elif isinstance(event, Idle):
            self._take_back(event.key, "gone")
        elif isinstance(event, Returned):
            self._leaving.discard(event.key)
            self.manager.store.unlock(self._lent.pop(event.key))
        elif isinstance(event, Expired) and event.key in self._orders:
            self.manager.abandon(event.key)

    def sweep(self) -> None:
        """Every scheduling step: the figures of the next heartbeat."""
        now = time.monotonic()
        if now - self._looked >= _LOAD_EVERY:
            self._looked = now
            store, running, queued = self.manager.store, *self.manager.load()
            self.exchange.show(Load(queued, running, store.capacity - store.used_bytes, self._speed.rate))

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
        if (reason := self._wrong(told, tokens)) is not None:
            self._answer(told.key, {told.flight: told.request}, False, reason)
            return
        store, manager = self.manager.store, self.manager
        artifact = store.find(told.key, tokens)
        if artifact is not None and artifact.ready:
            self._answer(told.key, {told.flight: told.request}, True, nbytes=artifact.nbytes)
            return
        self._orders.setdefault(told.key, {})[told.flight] = told.request
        self.exchange.order(told.key)
        if artifact is not None:  # under way, for someone here or on its way to us
            return
        made = manager.reserve_for([self._space(told, tokens)])
        if made is None:
            self._failed(told.key, "arena full")
            return
        made[0].made_for = told.request
        manager.start_compile(made[0], None)

    def compiled(self, artifact: Artifact, state: Compile) -> None:
        """A compile request is done and its artifact is ready."""
        flights = self._orders.pop(artifact.key, None)
        if flights is not None:
            self._lend(artifact.key)
            self._answer(artifact.key, flights, True, nbytes=artifact.nbytes, seconds=state.seconds)

    def failed(self, artifact: Artifact) -> None:
        """A compile request has ended without an artifact."""
        self._failed(artifact.key, "compile failed")

    def measured(self, tokens: int, seconds: float) -> None:
        """A forward pass with compiling rows had that many tokens."""
        self._speed.add(tokens, seconds)

    def _failed(self, key: bytes, reason: str) -> None:
        flights = self._orders.pop(key, None)
        if flights is not None:
            self.manager.metrics.shared("order", reason)
            self.exchange.refuse(key, reason)
            self._answer(key, flights, False, reason)

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
            if self._wrong(w, tokens) is not None or w.source == self.exchange.member.worker:
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
        made = manager.reserve_for([self._space(*x) for x in wanted.values()]) if wanted else []
        for artifact in here:
            store.unlock(artifact)
        if made is None:
            for _ in wanted:
                manager.metrics.shared("in", "arena_full")
            refused += wanted
        for artifact in made or ():
            w, _ = wanted[artifact.key]
            artifact.source, artifact.made_for, artifact.cold = w.source, told.request, w.cold
            coming = self._imports[artifact.key] = _Import(artifact, time.monotonic() + told.deadline)
            coming.requests.add(told.request)
            awaited.append(artifact.key)
            self.exchange.fetch(self._place(artifact), Peer(w.address, w.public_key), told.deadline)
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
        self.exchange.refetch(self._place(artifact), peer, left, "no source")

    def _fetched(self, event: Fetched) -> None:
        """The place is ours again: with an artifact, or for a compile of our own, if anybody waits for it."""
        coming = self._imports.pop(event.key, None)
        if coming is None:
            return
        artifact, store = coming.artifact, self.manager.store
        ok, reason = event.ok, event.reason
        if artifact.stale:
            ok, reason = False, "invalidated"
        self.manager.metrics.shared("in", "ok" if ok else reason, artifact.nbytes if ok else 0)
        for request in sorted(coming.requests):
            self.exchange.say(
                m.Arrived(request=request, key=event.key, ok=ok, seconds=event.seconds, reason=reason[:512])
            )
        if ok:
            store.commit(artifact)
            if (flights := self._orders.pop(event.key, None)) is not None:  # ordered while it was on its way
                self._lend(event.key)
                self._answer(event.key, flights, True, nbytes=artifact.nbytes)
            return
        artifact.source = ""
        if artifact.stale:
            store.unlock(artifact)
            self._failed(event.key, reason)
        elif not self.manager.compile_instead(artifact):
            if event.key in self._orders:
                self.manager.start_compile(artifact, None)
            else:
                store.discard(artifact)

    def _place(self, artifact: Artifact) -> Place:
        return Place(artifact.key, artifact.offset, artifact.nbytes, self.manager.header_of(artifact))

    # ------------------------------------------------------------------ lend

    def _lend(self, key: bytes) -> None:
        artifact = self.manager.store.get(key)
        if key in self._lent:
            return
        if artifact is None or not artifact.ready:
            if key not in self._orders:
                self.exchange.refuse(key, "gone")
            return
        self.manager.metrics.shared("out", "ok")
        self._lent[key] = artifact
        self.manager.store.lock(artifact)
        self.exchange.offer(key, artifact.offset, artifact.nbytes)

    def _ready(self, artifact: Artifact) -> None:
        self.exchange.stored(artifact.key, artifact.nbytes)

    def _gone(self, artifact: Artifact) -> None:
        self.exchange.gone(artifact.key)
        if self._lent.get(artifact.key) is artifact:
            self._take_back(artifact.key, "invalidated")

    def _take_back(self, key: bytes, reason: str) -> None:
        if key in self._lent and key not in self._leaving:
            self._leaving.add(key)
            self.exchange.withdraw(key, reason)

    # ------------------------------------------------------------------ both

    def _cancel(self, request: str) -> None:
        """Nobody waits for this request any more: what is done for it alone, and has not begun, is dropped."""
        for key, flights in list(self._orders.items()):
            if request in flights.values():
                self._orders[key] = left = {f: r for f, r in flights.items() if r != request}
                if not left:
                    self.manager.abandon(key)
        for coming in self._imports.values():
            if request in coming.requests:
                coming.requests.discard(request)
                if not coming.requests and self.manager.waiting_for(coming.artifact) is None:
                    self.exchange.refetch(self._place(coming.artifact), None, 0.0, "cancelled")

    def new_weights(self) -> None:
        """The identity has changed."""
        self.exchange.rename(self.manager.shared_identity)

    def _space(self, told: m.Compile | m.Wanted, tokens: array[int]) -> tuple[bytes, array[int], str, str]:
        """For :meth:`LinkManager.reserve_for`."""
        return told.key, tokens, self.manager.adapter_called(told.adapter) or "", told.method

    def _wrong(self, told: m.Compile | m.Wanted, tokens: array[int]) -> str | None:
        """Why a segment cannot be what the router says it is, or None."""
        manager = self.manager
        if (adapter := manager.adapter_called(told.adapter)) is None:
            return "the adapter is not loaded here, or from other files"
        if (method := manager.methods.get(told.method or manager.default.name)) is None:
            return f"no method {told.method!r} here"
        if manager.key(told.tenant, adapter, tokens, method) != told.key:
            return "key and tokens do not agree"
        ids = np.frombuffer(tokens, dtype=np.int64)
        if ids.min() < 0 or ids.max() >= self.manager.vocab_size:
            return "token ids out of range"
        return None
