"""Prometheus metrics `hypic:*` of one scheduler; silent unless `--enable-metrics`."""

from __future__ import annotations

from typing import Any

from hypic.artifact.store import ArtifactStore

_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class EngineMetrics:
    """Counters by outcome and reason, seconds of compile, wait and link, and the arena's fill.

    Args:
        labels: constant labels (model name, TP rank); None switches everything off.
    """

    def __init__(self, labels: dict[str, str] | None):
        self._labels = labels
        self._evictions = 0
        if labels is None:
            return
        from prometheus_client import Counter, Gauge, Histogram

        names = list(labels)

        def counter(name: str, text: str, *extra: str) -> Any:
            return Counter(f"hypic:{name}", text, [*names, *extra])

        self._segments = counter("segments_total", "Segments by outcome", "outcome", "reason")
        self._tokens = counter("tokens_total", "Prompt tokens of linked requests by how they came to be", "kind")
        self._fallbacks = counter("fallbacks_total", "Segments or requests served natively, by reason", "reason")
        for reason in ("arena_full", "compile_failed", "malformed", "retracted"):  # shown as 0 before the first one
            self._fallbacks.labels(**labels, reason=reason)
        self._shared = counter("shared_artifacts_total", "Artifacts from, for and to other workers", "way", "outcome")
        self._shared_bytes = counter("shared_bytes_total", "Bytes of artifacts received from other workers")
        self._evicted = counter("evictions_total", "Artifacts evicted from the arena")
        self._evicted.labels(**labels)  # shown as 0 before the first one
        self._compile = Histogram("hypic:compile_seconds", "Compile, from spawn to stored", names, buckets=_SECONDS)
        self._waited = Histogram(
            "hypic:held_seconds",
            "From a linked request's arrival until its artifacts are there",
            names,
            buckets=_SECONDS,
        )
        self._link = Histogram(
            "hypic:link_seconds", "Link, from then to the result of its last prefill chunk", names, buckets=_SECONDS
        )
        self._arena = Gauge(
            "hypic:arena_bytes", "Arena bytes by state", [*names, "state"], multiprocess_mode="mostrecent"
        )
        self._pinned = Gauge(
            "hypic:pinned_bytes", "Arena bytes of pinned artifacts", names, multiprocess_mode="mostrecent"
        )
        self._artifacts = Gauge("hypic:artifacts", "Artifacts in the arena", names, multiprocess_mode="mostrecent")
        self._held = Gauge(
            "hypic:held_requests",
            "Linked requests in the waiting queue, for artifacts or for their turn",
            names,
            multiprocess_mode="mostrecent",
        )

    def compiled(self, tokens: int, seconds: float) -> None:
        if self._labels is not None:
            self._tokens.labels(**self._labels, kind="compiled").inc(tokens)
            self._compile.labels(**self._labels).observe(seconds)

    def segment(self, outcome: str, reason: str | None) -> None:
        if self._labels is not None:
            self._segments.labels(**self._labels, outcome=outcome, reason=reason or "").inc()
            if outcome == "declined":
                self.fallback(reason or "")

    def tokens(self, reused_radix: int, reused_artifacts: int, recomputed: int) -> None:
        if self._labels is not None:
            for kind, n in (("radix", reused_radix), ("artifact", reused_artifacts), ("recomputed", recomputed)):
                self._tokens.labels(**self._labels, kind=kind).inc(n)

    def linked(self, held: float, link: float) -> None:
        if self._labels is not None:
            self._waited.labels(**self._labels).observe(held)
            self._link.labels(**self._labels).observe(link)

    def shared(self, way: str, outcome: str, nbytes: int = 0) -> None:
        """An artifact of a cluster: way "in", "out" or "order"; outcome "ok" or why not."""
        if self._labels is not None:
            self._shared.labels(**self._labels, way=way, outcome=outcome.replace(" ", "_")).inc()
            self._shared_bytes.labels(**self._labels).inc(nbytes)

    def fallback(self, reason: str) -> None:
        if self._labels is not None:
            self._fallbacks.labels(**self._labels, reason=reason).inc()

    def gauges(self, store: ArtifactStore, held: int) -> None:
        if self._labels is not None:
            used = store.used_bytes
            self._arena.labels(**self._labels, state="used").set(used)
            self._arena.labels(**self._labels, state="free").set(store.capacity - used)
            self._pinned.labels(**self._labels).set(store.pinned_bytes())
            self._artifacts.labels(**self._labels).set(len(store))
            self._held.labels(**self._labels).set(held)
            if store.evictions > self._evictions:
                self._evicted.labels(**self._labels).inc(store.evictions - self._evictions)
                self._evictions = store.evictions
