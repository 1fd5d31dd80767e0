"""What a generated trace is made of: the schema of the files in traces/*.toml."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from hypic.traces.format import TraceError


class Lengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A lognormal length: its median, the standard deviation of its logarithm, and bounds that draws are moved into."""

    median: float
    sigma: float
    min: int
    max: int


class Arrivals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When conversations begin.

    Attributes:
        kind: "poisson", or "recorded": the times of the trace `path` (relative to the spec), one conversation each.
        qps: requests per second, later turns included; the recorded times are stretched to it (0: left as they are).
    """

    kind: Literal["poisson", "recorded"] = "poisson"
    qps: float = 1.0
    path: str | None = None


class Corpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The documents.

    Attributes:
        documents: how many there are at a time. zipf: exponent of their popularity; 0 is uniform.
        tokens: of a document.
        replaced_per_hour: share of all documents that a new one takes the place of, in an hour of the trace.
    """

    documents: int
    zipf: float
    tokens: Lengths
    replaced_per_hour: float = 0.0


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What stands around the documents.

    Attributes:
        system: tokens of the system prompt, the same in all requests of a tenant.
        header: tokens in front of everything, new in every request: a date, an id, a billing line.
        query: tokens of a question.
        budget: tokens of a prompt at most; documents of the lowest rank go first, then the oldest turns.
    """

    system: int
    query: Lengths
    budget: int
    header: int = 0


class Retrieval(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a question retrieves.

    Attributes:
        segments: documents of a first turn.
        repeated: share of first turns that retrieve what one of the last `window` did, in the same order: frequent questions.
    """

    segments: Lengths
    repeated: float = 0.0
    window: int = 1000


class Chat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Conversations.

    Attributes:
        turns: mean number of turns, geometric. gap: seconds from a turn to the next.
        added: documents that a later turn retrieves and puts behind what was said.
        replacing: share of conversations whose later turns retrieve anew instead: other documents in front of the history.
    """

    turns: float = 1.0
    gap: Lengths = Lengths(30, 0.8, 2, 600)
    added: Lengths | None = None
    replacing: float = 0.0


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A workload. `base` names another spec whose tables this one changes. `tenants` share nothing."""

    seed: int
    requests: int
    output: Lengths
    corpus: Corpus
    prompt: Prompt
    retrieval: Retrieval
    arrivals: Arrivals = Arrivals()
    chat: Chat = Chat()
    tenants: int = 1


def read_spec(path: Path) -> Spec:
    """The spec in a TOML or JSON file, upon that of its `base`. Raises TraceError."""
    try:
        spec = msgspec.convert(_tables(path, ()), Spec)
    except (msgspec.ValidationError, TypeError) as e:
        raise TraceError(f"{path}: {e}") from None
    if found := _problem(spec):
        raise TraceError(f"{path}: {found}")
    return spec


def _tables(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in seen:
        raise TraceError(f"{path}: is its own base")
    try:
        raw = path.read_bytes()
        tables: dict[str, Any] = json.loads(raw) if path.suffix == ".json" else tomllib.loads(raw.decode())
    except OSError as e:
        raise TraceError(f"{path}: {e.strerror}") from None
    except ValueError as e:
        raise TraceError(f"{path}: {e}") from None
    if recorded := tables.get("arrivals", {}).get("path"):
        tables["arrivals"]["path"] = str(path.parent / recorded)
    base = tables.pop("base", None)
    return _merged(_tables(path.parent / base, (*seen, path.resolve())), tables) if base else tables


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {k: _merged(under[k], v) for k, v in over.items() if isinstance(v, dict) and isinstance(under.get(k), dict)}
    return under | over | both


def _problem(spec: Spec) -> str | None:
    lengths = {
        "output": spec.output, "corpus.tokens": spec.corpus.tokens, "prompt.query": spec.prompt.query,
        "retrieval.segments": spec.retrieval.segments, "chat.gap": spec.chat.gap, "chat.added": spec.chat.added,
    }  # fmt: skip
    for name, value in lengths.items():
        lowest = 0 if name == "chat.added" else 1
        if value and not (lowest <= value.min <= value.max and value.median > 0 and value.sigma >= 0):
            return f"{name}: needs {lowest} <= min <= max, median > 0 and sigma >= 0"
    for name, share in {"retrieval.repeated": spec.retrieval.repeated, "chat.replacing": spec.chat.replacing}.items():
        if not 0 <= share <= 1:
            return f"{name} = {share}: a share is from 0 to 1"
    if spec.retrieval.segments.max > spec.corpus.documents:
        return f"retrieval.segments.max: {spec.retrieval.segments.max} of {spec.corpus.documents} documents"
    if min(spec.requests, spec.tenants, spec.chat.turns, spec.retrieval.window) < 1:
        return "requests, tenants, chat.turns and retrieval.window begin at 1"
    if min(spec.prompt.system, spec.prompt.header, spec.corpus.zipf, spec.corpus.replaced_per_hour) < 0:
        return "prompt.system, prompt.header, corpus.zipf and corpus.replaced_per_hour are not negative"
    if spec.arrivals.kind == "recorded" and not spec.arrivals.path:
        return "arrivals.kind = 'recorded' needs arrivals.path"
    if spec.arrivals.kind == "poisson" and not spec.arrivals.qps > 0:
        return "arrivals.qps: must be above 0"
    least = spec.prompt.system + spec.prompt.header + spec.prompt.query.max + spec.corpus.tokens.max
    if spec.prompt.budget < least:
        return f"prompt.budget: system, header, the longest query and one document already have {least} tokens"
    return None
