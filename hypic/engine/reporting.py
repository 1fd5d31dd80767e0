"""What the client is told of its spans, and the counters that go with it."""

from __future__ import annotations

import sys
from typing import Any

from hypic.engine.request import Link, Segment, link_of
from hypic.report import ELSEWHERE, HITS, Report, SpanReport


class _Reports(list[tuple[int, str]]):
    """Reports of a request, each with the number of output tokens in front of it. The last that goes out counts.

    SGLang sends the slice that belongs to the output tokens of each chunk; the first chunk may hold no token
    (`max_new_tokens` 0).
    """

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, slice):
            return super().__getitem__(key)
        start, stop, _ = key.indices(sys.maxsize)
        return [text for at, text in self if start <= at < stop or at == start == 0]


def settle_report(req: Any) -> None:
    """At the first prefill of a request with a plan: count its outcomes and attach the report if it was asked for.

    At a later one, after a retraction: amend the report where segments could not be linked again.
    """
    link = link_of(req)
    if link is None:
        return
    if link.report is not None:
        _amend(req, link, link.report)
        return
    link.radix_hit = link.layout.hit if link.layout is not None else len(req.prefix_indices)
    report = link.report = build_report(link, len(req.origin_input_ids))
    if link.manager is not None:
        metrics = link.manager.metrics
        for span in report.spans:
            if span.outcome is not None:
                metrics.segment(span.outcome, span.reason)
        for s in () if link.compile_only else link.linked:
            if s.outcome in (*HITS, "hit_radix"):
                link.manager.named.hit(s.key)
        if link.linked and not link.compile_only:
            metrics.tokens(report.reused_radix, report.reused_artifacts, report.recomputed)
    if link.spans.report:
        req.customized_info = {**(req.customized_info or {}), "hypic": _Reports([(0, report.to_json())])}


def _amend(req: Any, link: Link, report: Report) -> None:
    told = {s.start: s for s in report.spans if s.kind == "segment"}
    lost = [s for s in link.segments if s.until is not None and told[s.start].until is None]
    for s in lost:
        told[s.start].until, told[s.start].reason = s.until, s.reason
        if link.manager is not None:
            link.manager.metrics.fallback("retracted")
    if lost and link.spans.report:
        req.customized_info["hypic"].append((len(req.output_ids), report.to_json()))


def build_report(link: Link, prompt_tokens: int) -> Report:
    """Every span of the prompt in natural order, then declined segments whose place is unknown."""
    hit, w = link.radix_hit, link.seam_window
    marked: list[Segment | tuple[int, int, str]] = list(link.segments)
    marked += [(d.start, d.end, d.reason) for d in link.spans.declined if d.start >= 0]
    marked.sort(key=lambda m: m.start if isinstance(m, Segment) else m[0])
    spans: list[SpanReport] = []
    at = 0

    def plain(start: int, end: int) -> None:
        if start < end:
            reused = max(min(hit, end) - start, 0)
            spans.append(
                SpanReport(
                    kind="plain", start=start, tokens=end - start, reused=reused, recomputed=end - start - reused
                )
            )

    for m in marked:
        start, end = (m.start, m.end) if isinstance(m, Segment) else m[:2]
        if start < at:
            continue
        plain(at, start)
        at, n = end, end - start
        radix = max(min(hit, end) - start, 0)
        if isinstance(m, Segment):
            span = SpanReport(kind="segment", id=m.id, start=start, tokens=n, outcome=m.outcome, reason=m.reason)
            if m.outcome in ELSEWHERE and m.artifact is not None:
                span.worker = m.artifact.source
            interior = 0 if m.plain or end <= hit else max(n - w, 0)
            span.reused = radix + (interior if m.outcome in HITS else 0)
            span.recomputed = n - radix - interior
        else:
            span = SpanReport(
                kind="segment",
                start=start,
                tokens=n,
                outcome="declined",
                reason=m[2],
                reused=radix,
                recomputed=n - radix,
            )
        spans.append(span)
    plain(at, prompt_tokens)
    spans += [
        SpanReport(kind="segment", start=-1, tokens=0, outcome="declined", reason=d.reason)
        for d in link.spans.declined
        if d.start < 0
    ]
    linked = [s for s in link.segments if not s.plain and s.end > hit]
    bought = {s.key: s.length for s in linked if s.outcome == "compiled"}
    return Report(
        spans=spans,
        prompt_tokens=prompt_tokens,
        reused_radix=min(hit, prompt_tokens),
        reused_artifacts=sum(max(s.length - w, 0) for s in linked if s.outcome in HITS),
        recomputed=sum(s.recomputed for s in spans),
        compiled=sum(bought.values()),
        seam_window=w,
        method=link.method.name if link.linked else "native",
    )
