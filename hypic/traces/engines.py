"""Names of what a trace is replayed on, and servers behind them: a cluster, or independent prefix caches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, NamedTuple

from hypic.bench.child import SETTINGS
from hypic.commands.serve import wants_cpu
from hypic.router.launch.running import running
from hypic.router.launch.stock import stock_servers
from hypic.router.launch.supervisor import get_json
from hypic.traces.placement import PLACEMENTS
from hypic.traces.targets import GenerateTarget, SpreadTarget

ALONE = ("hypic", "prefix", "none")
"""One engine, in the process that asks it."""
SEVERAL = {"cluster": ("lpt", "round_robin"), "prefix": tuple(PLACEMENTS)}
"""Several on this machine, asked over HTTP, and their policies, the default first."""


class Engine(NamedTuple):
    """What a name stands for; `servers` is 0 for an engine in the process that asks it."""

    kind: str
    servers: int = 0
    policy: str = ""

    @property
    def hypic(self) -> bool:
        return self.kind in ("hypic", "cluster")


class Servers(NamedTuple):
    """Running servers as one target, and what they were started with."""

    target: AbstractAsyncContextManager[Any]
    settings: dict[str, Any]
    seconds: float


def read_engine(name: str) -> Engine:
    """``hypic``, ``cluster:8``, ``prefix:8:round_robin``. Raises ValueError."""
    kind, colon, rest = name.partition(":")
    if not colon and kind in ALONE:
        return Engine(kind)
    number, _, policy = rest.partition(":")
    policies = SEVERAL.get(kind)
    if not policies or not number.isdigit() or not 1 <= int(number) <= 64 or policy not in ("", *policies):
        several = (f"{kind}:N[:{'|'.join(known)}]" for kind, known in SEVERAL.items())
        raise ValueError(f"known are {', '.join((*ALONE, *several))}")
    return Engine(kind, int(number), policy or policies[0])


@contextmanager
def servers(
    engine: Engine, argv: Sequence[str], environ: dict[str, str], stagger: bool, start_seconds: float
) -> Iterator[Servers]:
    """Start what `engine` names. Raises LaunchError."""
    began = time.perf_counter()
    if engine.kind == "cluster":
        with running(argv, engine.servers, engine.policy, stagger, start_seconds) as url:
            yield Servers(cluster_target(url), settings(url, engine), time.perf_counter() - began)
        return
    cpu = wants_cpu(argv, environ)
    with stock_servers(argv, engine.servers, cpu=cpu, stagger=stagger, start_seconds=start_seconds) as urls:
        found = settings(urls[0], engine)
        yield Servers(prefix_target(urls, engine.policy, found), found, time.perf_counter() - began)


def cluster_target(url: str) -> GenerateTarget:
    return GenerateTarget(url, hypic=True)


def prefix_target(urls: Sequence[str], policy: str, found: dict[str, Any]) -> SpreadTarget:
    """`found`: settings of one of the servers."""
    place = PLACEMENTS[policy](len(urls), found.get("cache_tokens") or 1 << 62)
    return SpreadTarget([GenerateTarget(url, hypic=False) for url in urls], place)


def settings(url: str, engine: Engine) -> dict[str, Any]:
    """What SGLang made of its flags, where it matters to the figures, and how many tokens one server's cache holds."""
    info = get_json(f"{url}/server_info", timeout=30) or {}
    state = (info.get("internal_states") or [{}])[0]
    tokens = (state.get("memory_usage") or {}).get("token_capacity")
    own = {"servers": engine.servers, "policy": engine.policy, "cache_tokens": tokens}
    return {name: info[name] for name in SETTINGS if name in info} | own
