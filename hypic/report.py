"""The report of one request: which span was reused, compiled or declined, and why.

The scheduler fills it in, it crosses the processes as a JSON string, and the HTTP process puts it under
``meta_info["hypic"]`` of ``/generate`` and ``sglext.hypic`` of the OpenAI endpoints. Only requests that asked get it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Outcome = Literal["hit_device", "hit_remote", "hit_radix", "compiled", "received", "waited", "too_short", "declined"]
"""What became of a segment.

hit_device: its artifact was in device memory. hit_remote: it was in another worker's, and was sent. hit_radix: the radix
tree held it (an earlier turn). compiled: it was compiled for this request. received: another worker compiled it for this
request. waited: another request was already compiling it. too_short: below the minimum, so it was computed like plain
text. declined: see ``reason``.
"""
HITS: tuple[Outcome, ...] = ("hit_device", "hit_remote")
"""Its artifact was there before the request."""
ELSEWHERE: tuple[Outcome, ...] = ("hit_remote", "received")
"""Its artifact came from another worker for this request."""
BOUGHT: tuple[Outcome, ...] = ("compiled", "received", "waited")
"""It was computed on the request's behalf, here or elsewhere."""


class SpanReport(msgspec.Struct, kw_only=True, omit_defaults=False):
    """One span of the prompt, in natural order.

    Attributes:
        kind: "segment" for what the client marked, "plain" for the rest.
        id: name of a segment's content (:func:`hypic.segment.span_id`), null for a plain span or where it is unknown.
        start: first token in the prompt; -1 for a declined segment whose place is unknown.
        tokens: length in tokens; 0 for a declined segment whose place is unknown.
        outcome: see :data:`Outcome`; null for a plain span.
        reason: why a segment was declined; null otherwise.
        reused: tokens of this span that were not computed for this request (radix hit or artifact).
        recomputed: tokens of this span that were computed when the request was linked.
        worker: the other worker that its artifact came from; null if none.
        until: where the request was retracted and its segment could not be linked again: how many tokens of the answer were
            computed with its artifact; the rest saw plain text, for `reason`. Null otherwise.
    """

    kind: Literal["segment", "plain"]
    id: str | None = None
    start: int
    tokens: int
    outcome: Outcome | None = None
    reason: str | None = None
    reused: int = 0
    recomputed: int = 0
    worker: str | None = None
    until: int | None = None


class Report(msgspec.Struct, kw_only=True, omit_defaults=False):
    """The report of one prompt (one per choice where n > 1).

    Attributes:
        spans: every span of the prompt in natural order, then declined segments whose place is unknown.
        prompt_tokens: tokens of the prompt.
        reused_radix: tokens found by SGLang's own prefix cache.
        reused_artifacts: interior tokens taken from artifacts that were there before this request, here or elsewhere.
        recomputed: tokens computed when the request was linked.
        compiled: tokens of segments that this request had compiled; what it waited for counts where it was ordered.
        seam_window: w of its method.
        method: the caching method, "native" where nothing was linked.
    """

    spans: list[SpanReport]
    prompt_tokens: int
    reused_radix: int = 0
    reused_artifacts: int = 0
    recomputed: int = 0
    compiled: int = 0
    seam_window: int
    method: str

    def to_json(self) -> str:
        """The string that goes into ``customized_info``."""
        return msgspec.json.encode(self).decode()


def from_json(text: str | bytes) -> Report:
    """Raises msgspec.ValidationError or msgspec.DecodeError, both with the path of what is wrong."""
    return msgspec.json.decode(text, type=Report)
