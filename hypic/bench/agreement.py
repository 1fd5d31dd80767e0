"""Whether several workers answer a prompt as one does: first tokens and logprobs, on a running cluster."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hypic.bench.scatter import WORKLOADS, drain, lengths
from hypic.bench.scatter_result import Agreement, Scatter
from hypic.bench.workload import Prompts, Workload
from hypic.check.judge import EXACT, FACTOR
from hypic.check.session import Answer, Prompt, distance
from hypic.check.workers import Endpoint, model_facts
from hypic.config import HypicConfig

NEW_TOKENS = 4
ROUNDED_LOGIT = 0.05
"""What one rounding of a logit of about 10 in bfloat16 makes of a logprob: less is no difference."""


def compare(url: str, work: Workload, plan: Scatter, model: Path, config: HypicConfig) -> Agreement:
    """One prompt for each workload, and an equal one for each further length.

    In float32 the answers must agree to 1e-4. In 16-bit types one worker's own answer moves when its segments are compiled one by
    one instead of together, as products are summed in another order: twice that is the tolerance. How much another document
    would have changed says whether the comparison means anything.

    Raises:
        SessionError, Aborted: it was not answered.
    """
    vocab, dtype = model_facts(model)
    cluster = Endpoint(url, config, vocab, dtype)
    told = cluster.get("/server_info")["dtype"]
    exact = {"auto": dtype}.get(told, told) == "float32"
    prompts = Prompts(msgspec.structs.replace(work, seed=work.seed + 1), vocab)
    counts = plan.counts or (work.segments,)
    wanted = [(counts[0], name) for name in WORKLOADS] + [(count, WORKLOADS[0]) for count in counts[1:]]
    drawn = []
    for count, name in wanted:
        sizes = lengths(msgspec.structs.replace(work, segments=count), name)
        drawn.append(prompts.prompt([prompts.tokens(size) for size in sizes]))

    def ask(many: bool, tenant: str) -> list[Answer]:
        drain(url, plan, max(plan.workers) if many else 1, "lpt")
        return [_asked(cluster, ids, bounds, f"agreement {i} {tenant}") for i, (ids, bounds) in enumerate(drawn)]

    try:
        several, one = ask(True, "several"), ask(False, "one")
        ids, bounds = drawn[0]
        start, end = bounds[0]
        other = _asked(
            cluster, [*ids[:start], *prompts.tokens(end - start), *ids[end:]], bounds, "agreement, another segment"
        )
        noise = 0.0 if exact else _noise(cluster, *drawn[0], one[0])
    finally:
        drain(url, plan, max(plan.workers), "lpt")
    split = [len({s.worker for s in answer.report.spans if s.kind == "segment"}) > 1 for answer in several]
    return Agreement(
        prompts=len(drawn),
        split=sum(split),
        same_tokens=sum(a.ids == b.ids for a, b in zip(several, one, strict=True)),
        worst=max(distance(a, b) for a, b in zip(several, one, strict=True)),
        tolerance=EXACT if exact else max(FACTOR * noise, ROUNDED_LOGIT),
        signal=distance(other, one[0]),
        noise=None if exact else noise,
    )


def _asked(cluster: Endpoint, ids: list[int], bounds: list[list[int]], tenant: str) -> Answer:
    segments = [(start, end) for start, end in bounds]
    return cluster.ask(Prompt(ids, segments, new_tokens=NEW_TOKENS, tenant=tenant))


def _noise(cluster: Endpoint, ids: list[int], bounds: list[list[int]], together: Answer) -> float:
    """How far the answer of the worker that is left moves when each segment is compiled in a pass of its own."""
    tenant = "agreement, one by one"
    for start, end in bounds:
        _asked(cluster, [*ids[start:end], ids[-1]], [[0, end - start]], tenant)
    return distance(_asked(cluster, ids, bounds, tenant), together)
