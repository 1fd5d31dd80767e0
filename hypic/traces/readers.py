"""Readers of public traces. All give TraceRequests with times in ms from the first request, one at a time.

Mooncake's ``hash_ids`` are chained: a block's id stands for all tokens up to its end, so a document that returns behind another
prefix has new ids. Such a trace says what a prefix cache can save and nothing about position-independent caching. Azure's and
BurstGPT's have lengths only: every prompt is new, and they serve for arrivals and sizes.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from hypic.traces.format import Checker, Span, TraceError, TraceRequest, read_lines, read_native

MOONCAKE_BLOCK = 512
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURST = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")


class TraceWarning(UserWarning):
    """A trace does not say all that a replay could use, or lines were left out."""


class _MooncakeLine(msgspec.Struct):
    """Unknown fields pass: converters add some."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_mooncake(path: Path) -> Iterator[TraceRequest]:
    """Mooncake's JSONL; each block of 512 tokens becomes a segment, which comes back only behind the same prefix."""
    warnings.warn(
        f"{path}: Mooncake's hash_ids are hashes of whole prefixes, so position-independent caching can find no more than a "
        "prefix cache does; blocks become segments of 512 tokens",
        TraceWarning,
        stacklevel=2,
    )
    decoder, checker, origin = msgspec.json.Decoder(_MooncakeLine), Checker(), None
    for where, line in read_lines(path, lambda raw: _of_mooncake(decoder.decode(raw))):
        origin = line.timestamp if origin is None else origin
        yield checker.check(msgspec.structs.replace(line, timestamp=line.timestamp - origin), where)


def _of_mooncake(line: _MooncakeLine) -> TraceRequest:
    whole, rest = divmod(line.input_length, MOONCAKE_BLOCK)
    ids = line.hash_ids
    if len(ids) not in (whole, whole + bool(rest)):
        raise ValueError(f"{len(ids)} hash_ids for {line.input_length} tokens in blocks of {MOONCAKE_BLOCK}")
    spans = [Span(f"block-{h}", MOONCAKE_BLOCK) for h in ids[:whole]]
    if len(ids) > whole:
        spans.append(Span(f"block-{ids[-1]}-{rest}", rest))
    return TraceRequest(line.timestamp, line.input_length, line.output_length, ids, spans)


def read_azure(path: Path) -> Iterator[TraceRequest]:
    """Azure's LLM inference traces of 2023 and 2024: TIMESTAMP, ContextTokens, GeneratedTokens."""

    def parse(row: dict[str, str]) -> TraceRequest:
        at = datetime.fromisoformat(row["TIMESTAMP"])  # takes 100 ns ticks, keeps microseconds
        at = at if at.tzinfo else at.replace(tzinfo=UTC)
        return TraceRequest(at.timestamp() * 1e3, int(row["ContextTokens"]), int(row["GeneratedTokens"]))

    return _read_csv(path, AZURE, parse)


def read_burstgpt(path: Path) -> Iterator[TraceRequest]:
    """BurstGPT: seconds, tokens of prompt and answer. Requests that failed (no answer tokens) are left out, and counted."""

    def parse(row: dict[str, str]) -> TraceRequest | None:
        meta = {"model": row["Model"], "log_type": row["Log Type"]}
        request, response = int(row["Request tokens"]), int(row["Response tokens"])
        if not response:
            return None
        return TraceRequest(float(row["Timestamp"]) * 1e3, request, response, meta=meta)

    return _read_csv(path, BURST, parse)


def _read_csv(
    path: Path, columns: tuple[str, ...], parse: Callable[[dict[str, str]], TraceRequest | None]
) -> Iterator[TraceRequest]:
    checker, origin, left_out = Checker(), None, 0
    try:
        with path.open(newline="") as file:
            rows = csv.DictReader(file, strict=True)
            if missing := [c for c in columns if c not in (rows.fieldnames or ())]:
                raise TraceError(f"{path}:1: no column {missing[0]!r}; there are {', '.join(rows.fieldnames or ())}")
            for row in rows:
                where = f"{path}:{rows.line_num}"
                try:
                    request = parse(row)
                except (TypeError, ValueError) as e:
                    raise TraceError(f"{where}: {e}") from None
                if request is None:
                    left_out += 1
                    continue
                origin = request.timestamp if origin is None else origin
                if request.timestamp < origin:
                    raise TraceError(f"{where}: a time before that of the first request: sort the file by time")
                yield checker.check(msgspec.structs.replace(request, timestamp=request.timestamp - origin), where)
    except OSError as e:
        raise TraceError(f"{path}: {e.strerror}") from None
    if left_out:
        warnings.warn(f"{path}: {left_out} requests without an answer were left out", TraceWarning, stacklevel=2)


READERS: dict[str, Callable[[Path], Iterator[TraceRequest]]] = {
    "hypic": read_native,
    "mooncake": read_mooncake,
    "azure": read_azure,
    "burstgpt": read_burstgpt,
}


def kind_of(path: Path) -> str:
    """Which of READERS `path` is for, by its first line. Raises TraceError."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            first = file.readline().strip()
    except OSError as e:
        raise TraceError(f"{path}: {e.strerror}") from None
    if first.startswith("{"):
        try:
            fields = msgspec.json.decode(first)
        except msgspec.DecodeError as e:
            raise TraceError(f"{path}:1: {e}") from None
        return "mooncake" if "hash_ids" in fields and "segments" not in fields else "hypic"
    columns = first.split(",")
    for name, wanted in (("azure", AZURE), ("burstgpt", BURST)):
        if set(wanted) <= set(columns):
            return name
    raise TraceError(f"{path}:1: neither JSON lines nor the columns of a known trace: {first[:80]!r}")


def read(path: Path, kind: str = "auto") -> Iterator[TraceRequest]:
    """The requests of a trace of any known kind. Raises TraceError."""
    return READERS[kind_of(path) if kind == "auto" else kind](path)
