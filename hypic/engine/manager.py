"""The scheduler's side of compile and link: which artifacts a request needs, who compiles them, when it may run.

One LinkManager a scheduler. All decisions depend on the request stream and logical clocks alone, so TP ranks agree.
"""

from __future__ import annotations

import itertools
import logging
import time
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hypic.artifact.layout import ArtifactLayout, Header, encode_header, token_bytes
from hypic.artifact.store import Artifact, ArtifactStore, Request
from hypic.config import HypicConfig
from hypic.engine import keys
from hypic.engine.arrival import plan
from hypic.engine.metrics import EngineMetrics
from hypic.engine.named import NamedSegments
from hypic.engine.reporting import settle_report
from hypic.engine.request import Compile, Link, LinkState, Segment, compile_of, link_of
from hypic.method import Method, dummy_token, parse_methods
from hypic.plan import mark_interiors
from hypic.report import ELSEWHERE
from hypic.segment import INTERNAL_RID_PREFIX

if TYPE_CHECKING:
    from hypic.engine.cluster.sharing import Sharing

logger = logging.getLogger(__name__)


class LinkManager:
    """Artifacts and their users on one scheduler.

    Args:
        scheduler: SGLang's Scheduler.
        config: the plugin's settings.
        store: artifacts of this rank.
        layout: blob layout of the loaded model.
        identity: what all keys have in common.
        spawn: makes a compile request (a SGLang Req) for (tokens, rid, parent request or None, adapter).
        off: why PIC is off (self-check failed), or None.
    """

    def __init__(
        self,
        scheduler: Any,
        config: HypicConfig,
        store: ArtifactStore,
        layout: ArtifactLayout,
        identity: keys.KeyIdentity,
        spawn: Callable[[array, str, Any, str], Any],
        metrics: EngineMetrics,
        off: str | None = None,
    ):
        self.scheduler = scheduler
        self.config, self.store, self.layout, self.identity, self.off = config, store, layout, identity, off
        self.metrics = metrics
        self.methods = parse_methods(config.methods, config.seam_window)
        """By name."""
        self.default = next(iter(self.methods.values()))
        self._dummy = dummy_token(scheduler.model_config.hf_text_config)
        self._spawn = spawn
        self._launched = scheduler.server_args.model_path
        """The checkpoint; SGLang writes that of an update in its place."""
        self._adapters: dict[str, str] = {}
        """What other workers call an adapter, by SGLang's id; also of those that were unloaded, since registered segments may be
        under them."""
        self._loaded: dict[str, str] = {}
        """The other way round, of those that are loaded."""
        self.named = NamedSegments(self)
        self.sharing: Sharing | None = None
        """Our part in a cluster; None where this server serves alone."""
        self._waiting: dict[int, Any] = {}
        """Linked requests that sit in the waiting queue, by id(req)."""
        self._inflight: dict[bytes, Any] = {}
        """Compile requests by artifact key."""
        self._memory_queue: list[Any] = []
        """Requests that wait for arena space; only the first may take it, so a large one is not starved."""
        self._serial = itertools.count()
        self._pass_ended = 0.0

    # ------------------------------------------------------------------ arrival

    def enqueue(self, add: Callable[..., None], req: Any, **kwargs: Any) -> None:
        """Queue a request; a linked one brings its compile requests along, in front of it."""
        link = plan(self, req)
        if link is not None and link.compile_only:
            self.named.learn(link.spans.name, link.spans.salt, req.lora_id or "", req.origin_input_ids, link.method)
            if not link.linked:
                self._conclude(req)
                return
        if link is None or not link.linked:
            add(self.scheduler, req, **kwargs)
            return
        link.state, link.layout, link.joined = LinkState.NEW, None, False
        add(self.scheduler, req, **kwargs)
        if req not in self.scheduler.waiting_queue:
            return
        self._waiting[id(req)] = req
        self.resolve(req)

    # ------------------------------------------------------------------ artifacts for a request

    def resolve(self, req: Any) -> None:
        """Lock what is there, reserve and compile what is missing: all of it, or wait."""
        link = link_of(req)
        assert link is not None
        hit = self._radix_hit(req, link)
        need = [s for s in link.linked if s.end > hit]
        if self._shrink(need, req):  # before anything is evicted in vain
            self.resolve(req)
            return
        found: dict[bytes, Artifact | None] = {s.key: self.store.find(s.key, s.tokens) for s in need}
        for s in need:
            if (artifact := found[s.key]) is not None:
                self._hold(s, artifact, req)
        missing = {s.key: s for s in reversed(need) if found[s.key] is None}
        queued_before = bool(missing and self._memory_queue and self._memory_queue[0] is not req)
        made = None if queued_before else self.store.reserve(self._space(missing[k], req) for k in reversed(missing))
        if made is None:
            alone = self.store.locked() == len(link.artifacts)
            self._start_over(link)
            if queued_before or not alone:
                link.state = LinkState.WAITING
                if req not in self._memory_queue:
                    self._memory_queue.append(req)
                return
            # Nobody to wait for: what is there leaves holes too small for what is missing. Begin with an empty arena; if
            # nothing is left but what is pinned, do without a segment.
            if not self.store.invalidate(lambda a: not a.locks and not self.store.pinned(a)):
                self._decline(next(s for s in reversed(need) if found[s.key] is None), req, "arena_full")
            self.resolve(req)
            return
        if req in self._memory_queue:
            self._memory_queue.remove(req)
        for artifact in made:
            self.start_compile(artifact, req)
            for s in need:
                if s.key == artifact.key:
                    self._hold(s, artifact, req, compiled=True)
        for s in link.linked:
            if s.end <= hit and s.outcome is None:
                s.outcome = "hit_radix"
        link.state = LinkState.HELD
        self._poll_held(link)

    def _hold(self, s: Segment, artifact: Artifact, req: Any, compiled: bool = False) -> None:
        if s.artifact is not None:
            return
        self.store.lock(artifact)
        s.artifact = artifact
        if s.outcome is None or s.outcome == "hit_radix":
            link = link_of(req)
            assert link is not None
            ours = bool(artifact.made_for) and artifact.made_for == link.spans.request
            if ours and artifact.source:
                s.outcome = "received" if artifact.cold else "hit_remote"
            elif compiled or ours:
                s.outcome = "compiled"
            else:
                s.outcome = "hit_device" if artifact.ready else "waited"

    def _space(self, s: Segment, req: Any) -> Request:
        link = link_of(req)
        assert link is not None
        return self.space(s.key, s.tokens, req.lora_id or "", link.method.name)

    def space(self, key: bytes, tokens: array, adapter: str, method: str = "") -> Request:
        """What the artifact of `tokens` takes in the arena."""
        w = self.methods[method or self.default.name].seam_window
        payload = self.layout.payload_bytes(max(len(tokens) - w, 0))
        return Request(key, tokens, adapter, len(self.header(tokens, adapter, method)), payload, method)

    def key(self, tenant: str, adapter: str, tokens: array, method: Method) -> bytes:
        """Store key of a segment."""
        name = self._adapters.get(adapter, adapter)
        return keys.artifact_key(self.shared_identity, tenant, name, tokens, method.tag(self.default))

    @property
    def shared_identity(self) -> bytes:
        """What the keys of all artifacts have in common, here and in all workers of one cluster."""
        return self.identity.of(self.default, self._dummy).digest

    def learn_adapter(self, adapter: str, name: str, path: str) -> None:
        """It was loaded. One that others cannot name keeps SGLang's id, which they do not know."""
        if shared := keys.adapter_name(name, path):
            self._adapters[adapter], self._loaded[shared] = shared, adapter

    def adapter_called(self, name: str) -> str | None:
        """SGLang's id of the adapter that workers call so ("" for the base model); None if it is not loaded here."""
        return self._loaded.get(name) if name else ""

    def method_of(self, artifact: Artifact) -> Method:
        return self.methods[artifact.method or self.default.name]

    def header_of(self, artifact: Artifact) -> bytes:
        return self.header(artifact.tokens, artifact.adapter, artifact.method)

    def reserve_for(self, wanted: list[tuple[bytes, array, str, str]]) -> list[Artifact] | None:
        """Places for artifacts (key, tokens, adapter, method) that other workers want or send: for all or for none, and for none
        while a client's request waits for memory."""
        if self._memory_queue:
            return None
        return self.store.reserve(self.space(*w) for w in wanted)

    def header(self, tokens: array, adapter: str, method: str = "") -> bytes:
        """Header bytes of the artifact of `tokens`."""
        ident = self.identity.of(self.methods[method or self.default.name], self._dummy)
        return encode_header(
            Header(
                fingerprint=f"{ident.fingerprint}+{ident.weights}",
                method=ident.method,
                seam_window=ident.seam_window,
                adapter=self._adapters.get(adapter, adapter),
                tp_rank=ident.tp_rank,
                tp_size=ident.tp_size,
                linear=self.layout.linear,
                full=self.layout.full,
                tokens=token_bytes(tokens),
            )
        )

    def _shrink(self, need: list[Segment], req: Any) -> bool:
        """If the arena, less what is pinned there, cannot hold the request, let what does not fit be plain. True if
        something changed."""
        sizes = {s.key: self._space(s, req).nbytes for s in need}
        total, too_much = self.store.pinned_bytes(apart_from=sizes), set()
        for key, size in sizes.items():
            if total + size > self.store.capacity:
                too_much.add(key)
            else:
                total += size
        for s in need:
            if s.key in too_much:
                self._decline(s, req, "arena_full")
        return bool(too_much)

    @staticmethod
    def _decline(s: Segment, req: Any, reason: str) -> None:
        link = link_of(req)
        if link is not None and link.reported:
            s.lose(reason, len(req.output_ids))
        else:
            s.make_plain("declined", reason)

    def _radix_hit(self, req: Any, link: Link) -> int:
        """Tokens of the prompt that the radix tree holds under the link's key (a probe: nothing is locked or copied)."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        ids = array("q", mark_interiors(req.origin_input_ids, link.interiors()).tobytes())
        limit = len(ids) - 1
        if req.return_logprob and req.logprob_start_len >= 0:  # SGLang's own match goes no further
            limit = min(limit, req.logprob_start_len)
        key = RadixKey(token_ids=ids, extra_key=req.extra_key, limit=limit)
        return len(self.scheduler.tree_cache.match_prefix(MatchPrefixParams(key=key)).device_indices)

    # ------------------------------------------------------------------ compile requests

    def start_compile(self, artifact: Artifact, parent: Any | None) -> None:
        """Queue the compile of a reserved artifact: in front of the request that needs it, or at the end."""
        rid = f"{INTERNAL_RID_PREFIX}{artifact.key.hex()[:16]}-{next(self._serial)}"
        method = self.method_of(artifact)
        req = self._spawn(array("q", [self._dummy] * method.dummies) + artifact.tokens, rid, parent, artifact.adapter)
        req.hypic = Compile(artifact, method.seam_window, method.dummies, started=time.perf_counter())
        self._inflight[artifact.key] = req
        req.time_stats.set_wait_queue_entry_time()
        queue = self.scheduler.waiting_queue
        queue.insert(next((i for i, r in enumerate(queue) if r is parent), len(queue)), req)

    def on_batch_result(self, batch: Any) -> None:
        """After a forward's result is processed: finished compiles become artifacts, finished prefills let go of theirs."""
        self._clock(batch)
        for req in batch.reqs:
            state = getattr(req, "hypic", None)
            if isinstance(state, Compile) and req.finished() and self._inflight.get(state.artifact.key) is req:
                if state.complete:
                    del self._inflight[state.artifact.key]
                    self.store.commit(state.artifact)
                    self.metrics.compiled(len(state.artifact.tokens), time.perf_counter() - state.started)
                    if self.sharing is not None:
                        self.sharing.compiled(state.artifact, state)
                else:
                    self._fail(req)
            elif (
                isinstance(state, Link)
                and state.state is LinkState.ADMITTED
                and (req.finished() or state.joined or state.layout is None)
            ):
                self.finish(req)

    def _clock(self, batch: Any) -> None:
        """Time of the pass, for its compiling rows. Passes overlap: one begins when the one before it has ended."""
        now, measured = time.perf_counter(), False
        for req in batch.reqs:
            state = compile_of(req)
            if state is not None and state.passes:
                tokens, in_all, planned = state.passes.popleft()
                seconds = now - max(planned, self._pass_ended)
                state.seconds += seconds * tokens / in_all
                if self.sharing is not None and not measured and seconds > 0:
                    self.sharing.measured(in_all, seconds)
                    measured = True
        self._pass_ended = now

    def before_output(self, req: Any, link: Link) -> None:
        """Observe what a linked request's first token took: SGLang has it and sends it next, so no device is waited for."""
        if req.output_ids and not link.timed:
            link.timed = True
            if link.linked:
                self.metrics.linked(link.released - link.arrived, time.perf_counter() - link.released)

    def _fail(self, compile_req: Any) -> None:
        """A compile ended without an artifact: its segment is plain for the requests that wait for it."""
        state = compile_of(compile_req)
        assert state is not None
        artifact = state.artifact
        self._inflight.pop(artifact.key, None)
        for req in self._waiting.values():
            link = link_of(req)
            assert link is not None
            for s in link.segments:
                if s.artifact is artifact:
                    s.artifact = None
                    self.store.unlock(artifact)
                    self._decline(s, req, "compile_failed")
        if self.sharing is not None:
            self.sharing.failed(artifact)
        self.store.discard(artifact)
        self.metrics.fallback("compile_failed")

    def abandon(self, key: bytes) -> bool:
        """Drop a compile that has not begun and that nobody here waits for. False if there is none such."""
        req = self._inflight.get(key)
        state = compile_of(req)
        if state is None or state.artifact.locks > 1 or req not in (queue := self.scheduler.waiting_queue):
            return False
        queue.remove(req)
        self._fail(req)
        return True

    def waiting_for(self, artifact: Artifact) -> Any | None:
        """A linked request in the waiting queue that holds the artifact, or None."""
        for req in self._waiting.values():
            link = link_of(req)
            if link is not None and artifact in link.artifacts:
                return req
        return None

    def compile_instead(self, artifact: Artifact) -> bool:
        """The artifact will not come from elsewhere: compile it, if a request here waits for it. False if none does."""
        parent = self.waiting_for(artifact)
        if parent is None:
            return False
        artifact.source = ""
        for req in self._waiting.values():
            link = link_of(req)
            for s in link.segments if link is not None else ():
                if s.artifact is artifact and s.outcome in ELSEWHERE:
                    s.outcome = "compiled"
        self.start_compile(artifact, parent)
        return True

    def load(self) -> tuple[int, int]:
        """Requests that run, and tokens in the waiting queue."""
        queue = self.scheduler.waiting_queue
        return len(self.scheduler.running_batch.reqs), sum(len(r.origin_input_ids) for r in queue)

    @property
    def vocab_size(self) -> int:
        return int(self.scheduler.model_config.vocab_size)

    # ------------------------------------------------------------------ admission

    def poll(self, req: Any) -> bool:
        """Whether a linked request in the waiting queue may be admitted now."""
        link = link_of(req)
        assert link is not None
        if any(a.stale for a in link.artifacts):
            self._start_over(link)
        if link.state in (LinkState.NEW, LinkState.WAITING):
            self.resolve(req)
        elif link.state is LinkState.HELD:
            self._poll_held(link)
        return link.state is LinkState.READY

    @staticmethod
    def _poll_held(link: Link) -> None:
        if all(a.ready for a in link.artifacts):
            link.state = LinkState.READY
            link.released = time.perf_counter()

    def admitted(self, req: Any) -> None:
        """The request is in the next batch."""
        link = link_of(req)
        assert link is not None
        link.state = LinkState.ADMITTED
        self._waiting.pop(id(req), None)

    def finish(self, req: Any) -> None:
        """The request needs its artifacts no more (prefill done, aborted or retracted)."""
        link = link_of(req)
        assert link is not None
        self._waiting.pop(id(req), None)
        self._drop_locks(link)
        link.state, link.reserved = LinkState.DONE, None

    def _conclude(self, req: Any) -> None:
        """End a request that asked for a compile and nothing else: its report is the answer, no token is computed."""
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH

        if req in (queue := self.scheduler.waiting_queue):
            queue.remove(req)
        settle_report(req)
        self.finish(req)
        req.finished_reason = FINISH_LENGTH(length=0)
        self.scheduler.output_streamer.stream_output([req], False)

    def _start_over(self, link: Link) -> None:
        """Back to NEW: what was found may be gone by the next try, so its outcome is open again (until reported)."""
        self._drop_locks(link)
        link.state = LinkState.NEW
        if not link.reported:
            for s in link.linked:
                s.outcome = None

    def _drop_locks(self, link: Link) -> None:
        for s in link.segments:
            if s.artifact is not None:
                self.store.unlock(s.artifact)
                s.artifact = None

    def sweep(self) -> None:
        """Notice what left the queues without a word: aborted links let go, aborted compiles fail. Every scheduling step."""
        if self._waiting:
            queued = {id(r) for r in self.scheduler.waiting_queue}
            for key in [k for k in self._waiting if k not in queued]:
                req = self._waiting[key]
                if req in self._memory_queue:
                    self._memory_queue.remove(req)
                self.finish(req)
            for req in [r for r in self._waiting.values() if (link := link_of(r)) is not None and link.compile_only]:
                if self.poll(req):
                    self._conclude(req)
        if self._inflight:
            alive = {id(r) for r in _in_flight(self.scheduler)}
            for req in [r for r in self._inflight.values() if id(r) not in alive]:
                self._fail(req)
        if self.sharing is not None:
            self.sharing.sweep()
        self.metrics.gauges(self.store, self.held)

    # ------------------------------------------------------------------ invalidation

    def flush(self) -> None:
        """`/flush_cache`: drop all artifacts. Metrics say so before the client is answered."""
        self.store.invalidate()
        self.metrics.gauges(self.store, self.held)

    def new_weights(self, path: str = "") -> None:
        """`update_weights*`, maybe from a checkpoint: drop all artifacts, and never find an older one again."""
        source = keys.checkpoint(path) if path else ""
        self.identity = self.identity.next_weights(source, bool(path) and keys.covers(path, self._launched))
        self.store.invalidate()
        for req in self._waiting.values():
            link = link_of(req)
            assert link is not None
            for s in link.segments:
                s.key = self.key(link.spans.salt, req.lora_id or "", s.tokens, link.method)
        self.named.new_weights()
        if self.sharing is not None:
            self.sharing.new_weights()

    def drop_adapter(self, adapter: str) -> None:
        """Adapter unloaded: drop what was compiled under it."""
        self.store.invalidate(lambda a: a.adapter == adapter)
        self.named.drop_adapter(adapter)
        self._loaded.pop(self._adapters.get(adapter, ""), None)

    @property
    def held(self) -> int:
        """Linked requests in the waiting queue, those that only wait for their turn included."""
        return len(self._waiting)

    def compile_requests(self) -> list[Any]:
        """Compile requests in flight."""
        return list(self._inflight.values())

    def in_flight(self) -> list[Any]:
        """Every request that SGLang still knows; some stand here more than once."""
        return _in_flight(self.scheduler)

    @property
    def compiling(self) -> int:
        return len(self._inflight)


def _in_flight(scheduler: Any) -> list[Any]:
    """The requests SGLang still knows: queued, chunked, running, or in a result that is still to be processed."""
    reqs = list(scheduler.waiting_queue)
    batches = [scheduler.running_batch, scheduler.last_batch, *(b for b, _ in getattr(scheduler, "result_queue", ()))]
    for batch in batches:
        if batch is not None:
            reqs += batch.reqs
    if scheduler.chunked_req is not None:
        reqs.append(scheduler.chunked_req)
    return reqs
