"""Runs an evaluation: outcomes go to a file line by line as they come, so that a run that was cut off can go on."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hypic.bench.provenance import machine, versions
from hypic.eval.items import Item, Outcome, Probe
from hypic.eval.methods import Method
from hypic.eval.tasks import Runner, Task

FILE = "outcomes.jsonl"


class RunError(RuntimeError):
    """A run that cannot start or go on; the text says why and what helps."""


class Header(msgspec.Struct, kw_only=True):
    """What a file of outcomes is about: its first line.

    Attributes:
        model, engine, settings: what was asked, by whom ("reference" or "served"), and how (dtype, min_segment, ...).
        data: a digest of all items. seeds: of the data.
        kl_over: what KL is a sum over.
        command, versions, machine: how to make it again.
        weights: digest of the names, sizes and times of the model's files.
    """

    model: str
    engine: str
    settings: dict[str, Any]
    data: str
    seeds: list[int]
    kl_over: str
    command: list[str]
    versions: dict[str, str]
    machine: dict[str, str]
    weights: str = ""

    def same_run(self, other: Header) -> bool:
        names = ("model", "weights", "engine", "settings", "data", "versions")
        return all(getattr(self, n) == getattr(other, n) for n in names)


class Line(msgspec.Struct, omit_defaults=True):
    """One line of the file: one of the three."""

    header: Header | None = None
    outcome: Outcome | None = None
    probe: Probe | None = None


class Results(msgspec.Struct):
    """All of a run."""

    header: Header
    outcomes: list[Outcome]
    probes: list[Probe]


def run(
    tasks: Sequence[Task],
    methods: Sequence[Method],
    runner: Runner,
    out: Path,
    *,
    model: str,
    settings: dict[str, Any],
    seeds: Sequence[int] = (),
    say: Callable[[str], None] = lambda _: None,
) -> Results:
    """Everything that ``out`` does not hold yet is computed and added to it.

    Args:
        tasks: in an order in which neighbours share documents.
        model: its name in the header. settings: what else results depend on.
        say: gets lines of progress.
    Raises:
        RunError: ``out`` holds results of another run, or a file that cannot be read; two items have one id.
    """
    items = [t.item for t in tasks]
    if len({i.id for i in items}) < len(items):
        twice = next(i.id for n, i in enumerate(items) if i.id in {j.id for j in items[:n]})
        raise RunError(f"two items have the id {twice!r}: outcomes could not be told apart")
    header = Header(
        model=model,
        engine=runner.name,
        settings=settings,
        data=digest(items),
        seeds=list(seeds),
        kl_over=runner.kl_over,
        command=["hypic", *sys.argv[1:]],
        versions=versions(),
        machine=machine(),
        weights=_weights(Path(model)),
    )
    path = out / FILE
    out.mkdir(parents=True, exist_ok=True)
    results = _resume(path, header) or Results(header, [], [])
    done = frozenset(
        {(o.item, o.method) for o in results.outcomes} | {(f"probe {p.item}", p.method) for p in results.probes}
    )
    total = len(tasks) * len(methods)
    with path.open("ab") as file:
        if not path.stat().st_size:
            _append(file, Line(header=header))
        elif done:
            say(f"{path}: {len(results.outcomes)} outcomes are there already")
        for found in runner.outcomes(tasks, methods, done):
            if isinstance(found, Probe):
                results.probes.append(found)
                _append(file, Line(probe=found))
            else:
                results.outcomes.append(found)
                _append(file, Line(outcome=found))
                if len(results.outcomes) % max(1, total // 20) == 0:
                    say(f"{len(results.outcomes)} of {total} answers")
    return wanted(results, tasks, methods)


def _weights(model: Path) -> str:
    """Retrained or damaged weights under the same name are another model."""
    files = sorted(p for p in (model.iterdir() if model.is_dir() else [model]) if p.is_file())
    about = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return hashlib.sha256(repr(about).encode()).hexdigest()[:16]


def wanted(results: Results, tasks: Sequence[Task], methods: Sequence[Method]) -> Results:
    """Without what an earlier run with more methods left."""
    names = {m.name for m in methods}
    ids = {t.item.id for t in tasks}
    return Results(
        results.header,
        [o for o in results.outcomes if o.method in names and o.item in ids],
        [p for p in results.probes if p.method in names],
    )


def read(path: Path) -> Results:
    """A file of outcomes; a last line that was cut off is left out. Raises RunError."""
    header, outcomes, probes = None, [], []
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as e:
        raise RunError(f"{path}: {e}") from None
    for number, text in enumerate(lines, 1):
        if number == len(lines) and not text.endswith(b"\n"):
            break
        try:
            line = msgspec.json.decode(text, type=Line)
        except msgspec.MsgspecError as e:
            raise RunError(f"{path}, line {number}: {e}; delete the file to start anew") from None
        header = line.header or header
        outcomes += [line.outcome] if line.outcome else []
        probes += [line.probe] if line.probe else []
    if header is None:
        raise RunError(f"{path} has no header: it is no file of outcomes; choose another folder")
    return Results(header, outcomes, probes)


def digest(items: Sequence[Item]) -> str:
    return hashlib.sha256(msgspec.json.encode(list(items))).hexdigest()[:16]


def _resume(path: Path, header: Header) -> Results | None:
    if not path.exists() or not path.stat().st_size:
        return None
    whole = path.read_bytes()
    if not whole.endswith(b"\n"):
        path.write_bytes(whole[: whole.rfind(b"\n") + 1])
        if not path.stat().st_size:
            return None
    results = read(path)
    if not results.header.same_run(header):
        names = ("model", "engine", "settings", "data", "versions")
        other = [n for n in names if getattr(results.header, n) != getattr(header, n)]
        raise RunError(f"{path} holds outcomes of another run ({', '.join(other)} differ): choose another folder")
    return results


def _append(file: Any, line: Line) -> None:
    file.write(msgspec.json.encode(line) + b"\n")
    file.flush()
