"""Prometheus metrics of the router, `hypic:router_*`, read off its state whenever they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from hypic.router.front.manager import RouterManager

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class RouterMetrics:
    """What `/metrics` of the front shows."""

    def __init__(self, manager: RouterManager):
        self._manager = manager
        self._registry = CollectorRegistry()
        self.forward = Histogram(
            "hypic:router_forward_seconds",
            "From a prompt's arrival until it may go to its worker",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.first_token = Histogram(
            "hypic:router_first_token_seconds",
            "From a prompt's arrival to the first chunk of its answer",
            buckets=(0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
            registry=self._registry,
        )
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Any]:
        """What prometheus_client calls."""
        manager, router = self._manager, self._manager.router
        hellos, cluster = router.coordinator.hellos(), router.coordinator.cluster
        yield _counter("requests", "Prompts by outcome", manager.outcomes, "outcome")
        yield _counter("placements", "Prompts by kind of placement", router.placements, "kind")
        yield _counter("segments", "Segments by how their combine worker was to come by them", router.roles, "role")
        yield _counter(
            "unshared", "Prompts whose segments no other worker compiles or sends", manager.unshared, "reason"
        )
        yield _counter("events", "Faults and repairs", router.coordinator.counts, "event")
        yield _counter("frames_dropped", "Frames of the control socket that were dropped", router.rejected, "reason")
        yield CounterMetricFamily("hypic:router_unsent", "Messages that no worker took", value=router.unsent)
        yield CounterMetricFamily("hypic:router_retries", "Prompts given to another worker", value=manager.retries)
        yield GaugeMetricFamily("hypic:router_workers", "Workers that are alive", value=len(hellos))
        yield GaugeMetricFamily("hypic:router_running", "Prompts under way", value=manager.running)
        yield GaugeMetricFamily("hypic:router_compiling", "Compiles under way", value=len(cluster.flights))
        costs = router.measured.costs
        yield GaugeMetricFamily(
            "hypic:router_transfer_bytes_per_second", "Measured rate of transfers", value=costs.transfer_gb_s * 1e9
        )
        by_worker = {
            "queued_tokens": ("Tokens of compiles that it has not finished", lambda w: w.queued_tokens),
            "worker_running": ("Prompts that it was given", lambda w: w.running),
            "tokens_per_second": ("Measured compile speed", lambda w: w.tokens_per_s),
            "artifacts": ("Artifacts that it says it holds", lambda w: cluster.directory.count(w.name)),
        }
        for name, (text, read) in by_worker.items():
            gauge = GaugeMetricFamily(f"hypic:router_{name}", text, labels=["worker"])
            for worker in cluster.workers.values():
                gauge.add_metric([worker.name], read(worker))
            yield gauge


def _counter(name: str, text: str, counts: Mapping[str, int], label: str) -> CounterMetricFamily:
    family = CounterMetricFamily(f"hypic:router_{name}", text, labels=[label])
    for key, value in sorted(counts.items()):
        family.add_metric([key], value)
    return family
