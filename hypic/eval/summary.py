"""Outcomes as rows of a table: scores with intervals, nearness to full recompute, what was reused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from hypic.eval import metrics, stats
from hypic.eval.items import Item, Outcome, Probe
from hypic.eval.methods import CLOSED_BOOK, FULL, METHODS
from hypic.eval.stats import Estimate


class Row(msgspec.Struct, kw_only=True):
    """One method on one kind of one data set.

    Attributes:
        kind: "" for all kinds of the data set together.
        metric: the official one of the data set; ``score`` is by it.
        n: questions answered; ``sets`` of documents they are about, over which intervals are drawn.
        missing: questions that other methods answered and this one did not; differences are over what both answered.
        score, difference, exact, contains: points of 100. ``difference`` is to full recompute, question by question.
        kl, agreement: means over the tokens of full recompute's answers, in nats and as a share; None where nothing was
            forced (full recompute itself, closed book).
        forced: such tokens.
        reused: share of all prompt tokens that were not computed.
        tokens: of a prompt, on average. seconds: to an answer, on average; no benchmark.
    """

    dataset: str
    kind: str
    method: str
    metric: str
    n: int
    sets: int
    missing: int
    score: Estimate
    difference: Estimate | None
    exact: Estimate
    contains: Estimate
    kl: Estimate | None
    agreement: Estimate | None
    forced: int
    reused: float
    tokens: float
    seconds: float


class Curve(msgspec.Struct, kw_only=True):
    """Means over probes. ``n`` of them stand behind each value; nan never occurs: places that no probe has are left out."""

    n: list[int]
    mean: list[float]


class Deviation(msgspec.Struct, kw_only=True):
    """How far one method is from full recompute inside the model, mean over probed items.

    Attributes:
        n: probed items.
        layers: what each layer mixes with.
        hidden, kept: per layer (:class:`hypic.eval.items.Probe`).
        distance: by place in the document.
    """

    n: int
    layers: list[str]
    hidden: list[float]
    kept: list[float]
    distance: Curve


class Summary(msgspec.Struct, kw_only=True):
    """Everything in eval.json.

    Attributes:
        meta: versions, machine, model, seeds, data: whatever the run says of itself.
        rows: by data set, kind and method, in the order in which they came.
        deviations: by method; empty where nothing was probed.
    """

    meta: dict[str, Any]
    rows: list[Row]
    deviations: dict[str, Deviation]

    def row(self, dataset: str, method: str, kind: str = "") -> Row:
        """Raises KeyError."""
        for r in self.rows:
            if (r.dataset, r.kind, r.method) == (dataset, kind, method):
                return r
        raise KeyError(f"no row for {method!r} on {dataset} {kind}".rstrip())


def summarise(
    outcomes: Iterable[Outcome], items: Iterable[Item], meta: Mapping[str, Any], probes: Iterable[Probe] = ()
) -> Summary:
    """All rows.

    Raises:
        ValueError: an item appears twice, an outcome belongs to no item, or a method answered an item twice.
    """
    known: dict[str, Item] = {}
    for item in items:
        if item.id in known:
            raise ValueError(f"two items are called {item.id!r}")
        known[item.id] = item
    found: dict[str, dict[str, Outcome]] = {}
    for o in outcomes:
        if o.item not in known:
            raise ValueError(f"method {o.method!r} answered {o.item!r}, which is no item")
        if o.item in found.setdefault(o.method, {}):
            raise ValueError(f"method {o.method!r} answered {o.item!r} twice")
        found[o.method][o.item] = o
    order = {name: i for i, name in enumerate(METHODS)}
    methods = sorted(found, key=lambda m: order.get(m, len(order)))  # stable: unlisted ones as they came, at the end
    rows = []
    for dataset, kind, group in groups(known.values()):
        answered = {i.id for i in group if any(i.id in found[m] for m in methods)}
        for method in methods:
            mine = [i for i in group if i.id in found[method]]
            if mine:
                full = found.get(FULL.name, {})
                missing = len(answered) - len(mine)
                rows.append(_row(method, mine, found[method], full, dataset=dataset, kind=kind, missing=missing))
    return Summary(meta=dict(meta), rows=rows, deviations=deviations(probes))


def document_set(item: Item) -> Hashable:
    """What questions about the same documents share; an item without documents is a set of its own."""
    return tuple(p.content for p in item.pieces if p.segment) or item.id


def deviations(probes: Iterable[Probe]) -> dict[str, Deviation]:
    """Means of probes by method, in the order of reports. Raises ValueError if their layers differ."""
    by_method: dict[str, list[Probe]] = defaultdict(list)
    for probe in probes:
        by_method[probe.method].append(probe)
    out = {}
    for method in sorted(by_method, key=lambda m: list(METHODS).index(m) if m in METHODS else len(METHODS)):
        mine = by_method[method]
        if len({p.layers for p in mine}) > 1 or any(not len(p.hidden) == len(p.layers) == len(p.kept) for p in mine):
            raise ValueError(f"probes of {method!r} have different layers")
        places = range(max(len(p.distance) for p in mine))
        at = [[p.distance[i] for p in mine if i < len(p.distance)] for i in places]
        out[method] = Deviation(
            n=len(mine),
            layers=list(mine[0].layers),
            hidden=[_mean([p.hidden[i] for p in mine]) for i in range(len(mine[0].layers))],
            kept=[_mean([p.kept[i] for p in mine]) for i in range(len(mine[0].layers))],
            distance=Curve(n=[len(v) for v in at], mean=[_mean(v) for v in at]),
        )
    return out


def groups(items: Iterable[Item]) -> Iterable[tuple[str, str, list[Item]]]:
    """Data set, kind, items: all kinds together first if there are several."""
    by: dict[str, dict[str, list[Item]]] = {}
    for item in items:
        by.setdefault(item.dataset, {}).setdefault(item.kind, []).append(item)
    for dataset, kinds in by.items():
        yield dataset, "", [i for group in kinds.values() for i in group]
        if len(kinds) > 1:
            for kind, group in kinds.items():
                if kind:
                    yield dataset, kind, group


def _row(
    method: str, items: Sequence[Item], outcomes: Mapping[str, Outcome], full: Mapping[str, Outcome], **place: Any
) -> Row:
    own = [outcomes[i.id] for i in items]
    sets = [document_set(i) for i in items]

    def points(values: Iterable[float]) -> Estimate:
        return stats.mean([100 * v for v in values], sets)

    score = {i.id: judge(i, o.text) for i, o in zip(items, own, strict=True)}
    difference = None
    paired = [i for i in items if i.id in full]
    if method not in (FULL.name, CLOSED_BOOK.name) and paired:
        gaps = [100 * (score[i.id] - judge(i, full[i.id].text)) for i in paired]
        difference = stats.mean(gaps, [document_set(i) for i in paired])
    tokens = sum(o.tokens for o in own)
    metrics_used = sorted({i.metric for i in items})
    return Row(
        **place,
        method=method,
        metric=", ".join(metrics_used),
        n=len(items),
        sets=len(set(sets)),
        score=points(score.values()),
        difference=difference,
        exact=points(judge(i, o.text, "exact") for i, o in zip(items, own, strict=True)),
        contains=points(judge(i, o.text, "contains") for i, o in zip(items, own, strict=True)),
        kl=_forced(own, sets, lambda o: o.kl),
        agreement=_forced(own, sets, lambda o: o.agrees),
        forced=sum(len(o.kl) for o in own),
        reused=sum(o.reused for o in own) / tokens if tokens else 0.0,
        tokens=tokens / len(own),
        seconds=_mean([o.seconds for o in own]),
    )


def judge(item: Item, text: str, metric: str = "") -> float:
    """What an answer to ``item`` is worth by the item's metric, or another."""
    return metrics.score(metric or item.metric, text, item.answers, first_line=item.first_line)


def _forced(
    outcomes: Sequence[Outcome], sets: Sequence[Hashable], values: Callable[[Outcome], Sequence[float]]
) -> Estimate | None:
    """Mean over all forced tokens."""
    some = [(values(o), s) for o, s in zip(outcomes, sets, strict=True) if values(o)]
    if not some:
        return None
    return stats.mean([_mean(v) for v, _ in some], [s for _, s in some], [len(v) for v, _ in some])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
