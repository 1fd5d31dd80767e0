"""What the plugin keeps on a request: `req.hypic` is None, a Link or a Compile. No loose attributes elsewhere.

A Link's life::

    NEW ------> WAITING (artifact memory is taken) ---.
     |             |                                  |
     |             v                                  v
     '-------> HELD (compiles pending) ---------> READY ---> ADMITTED ---> DONE
                   ^                                 |            |
                   '--- an artifact went stale ------'            '--- retracted: NEW

It holds locks on its artifacts from HELD to DONE. While NEW, WAITING or HELD it sits in SGLang's waiting queue, where
queue limits, timeouts, aborts and load reports see it; admission passes it over.
"""

from __future__ import annotations

import enum
import time
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hypic.artifact.store import Artifact
from hypic.method import Method
from hypic.plan import Interior, LinkLayout
from hypic.report import Outcome, Report
from hypic.segment import RequestSpans, span_id

if TYPE_CHECKING:
    from hypic.engine.manager import LinkManager


class LinkState(enum.Enum):
    NEW = "new"
    WAITING = "waiting"
    HELD = "held"
    READY = "ready"
    ADMITTED = "admitted"
    DONE = "done"


@dataclass(eq=False)
class Segment:
    """A span of one request that may be cached.

    Attributes:
        start, end: natural positions.
        tokens: its ids.
        key: store key.
        outcome: None until settled.
        artifact: locked by this request while not None.
        plain: computed like plain text in this request (too short, declined, or its compile failed).
        until: tokens of the answer that were computed with its artifact, if it became plain after that.
    """

    start: int
    end: int
    tokens: array
    key: bytes
    outcome: Outcome | None = None
    reason: str | None = None
    artifact: Artifact | None = None
    plain: bool = False
    until: int | None = None

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def id(self) -> str:
        return span_id(self.tokens)

    def make_plain(self, outcome: Outcome, reason: str | None = None) -> None:
        self.plain, self.outcome, self.reason = True, outcome, reason

    def lose(self, reason: str, until: int) -> None:
        """As :meth:`make_plain`, for a request that was linked before and retracted: its outcome stays what it was."""
        self.plain, self.reason, self.until = True, reason, until


@dataclass(eq=False)
class Link:
    """The plan of a request whose prompt may join artifacts."""

    spans: RequestSpans
    segments: list[Segment]
    method: Method
    manager: LinkManager | None = None
    state: LinkState = LinkState.NEW
    layout: LinkLayout | None = None
    """Presented order of the current admission; None while nothing is to be joined (then SGLang's own path runs)."""
    reserved: Any = None
    """KV slots (int64 tensor) of natural positions [layout.hit, layout.reserve_end), once admitted."""
    joined: bool = False
    """The forward pass of the last chunk was launched: the artifacts have been read, in stream order."""
    arrived: float = field(default_factory=time.perf_counter)
    released: float = 0.0
    """When its artifacts were last all there: from then on it waits for nothing but its turn."""
    timed: bool = False
    """The end of its (first) prefill was seen."""
    report: Report | None = None
    """Since the first admission: what the client is told."""
    radix_hit: int = 0
    """Tokens the radix tree held at the first admission."""

    @property
    def reported(self) -> bool:
        return self.report is not None

    @property
    def seam_window(self) -> int:
        return self.method.seam_window

    @property
    def compile_only(self) -> bool:
        """The request is for an artifact, not for an answer: it never runs, it ends when its segment is there."""
        return bool(self.spans.name)

    @property
    def linked(self) -> list[Segment]:
        """Segments that join from artifacts, in natural order."""
        return [s for s in self.segments if not s.plain]

    def interiors(self) -> list[Interior]:
        """Interiors of the segments that join; empty ones where a segment is no longer than the seam window."""
        w = self.seam_window
        return [Interior(min(s.start + w, s.end), s.end, i) for i, s in enumerate(self.segments) if not s.plain]

    @property
    def artifacts(self) -> list[Artifact]:
        return [s.artifact for s in self.segments if s.artifact is not None]


@dataclass(eq=False)
class Compile:
    """An internal request that prefills one segment in isolation and fills its artifact."""

    artifact: Artifact
    seam_window: int
    dummies: int = 0
    """Tokens in front of the segment, whose K and V are dropped."""
    complete: bool = False
    """The forward pass that captured the last token was launched."""
    started: float = 0.0
    """When it was spawned."""
    passes: deque[tuple[int, int, float]] = field(default_factory=deque)
    """Forward passes under way: tokens of it, tokens in all, when it was planned."""
    seconds: float = 0.0
    """Its share, by tokens, of the time of its forward passes."""

    @property
    def length(self) -> int:
        """Tokens of its prefill."""
        return self.dummies + len(self.artifact.tokens)

    @property
    def first(self) -> int:
        """The first of them that the artifact covers."""
        return self.dummies + self.seam_window


def link_of(req: Any) -> Link | None:
    """The request's Link, or None."""
    state = getattr(req, "hypic", None)
    return state if isinstance(state, Link) else None


def compile_of(req: Any) -> Compile | None:
    """The request's Compile, or None."""
    state = getattr(req, "hypic", None)
    return state if isinstance(state, Compile) else None
