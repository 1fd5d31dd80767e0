"""Bounds that a table must keep: built in for the trained model, or from a TOML or JSON file.

[[gates]]
name = "w=8 within 2 points of full"
method = "hypic w=8"
minus = "full"
at_least = -2
at_most = 2
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from hypic.eval.items import Item
from hypic.eval.methods import CLOSED_BOOK, FULL, Method, MethodError, method

if TYPE_CHECKING:
    from hypic.eval.summary import Row, Summary

Measure = Literal["score", "kl", "agreement"]


class GateError(ValueError):
    """A file of gates that cannot be used, or a gate that the table says nothing of; the text names it and the remedy."""


class Gate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``at_least`` <= value <= ``at_most``, where the value is a measure of ``method``, less that of ``minus`` if given.

    Attributes:
        measure: "score" in points of 100, "kl" in nats per token, "agreement" as a share.
        data, kind: a data set and one of its kinds, "" for all kinds together; the only data set if ``data`` is "".
    """

    name: str
    method: str
    minus: str = ""
    measure: Measure = "score"
    data: str = ""
    kind: str = ""
    at_least: float | None = None
    at_most: float | None = None

    def met(self, value: float) -> bool:
        above = self.at_least is None or value >= self.at_least - 1e-9
        return above and (self.at_most is None or value <= self.at_most + 1e-9)


class Verdict(msgspec.Struct, frozen=True):
    """A gate, what the table says, and whether that will do."""

    gate: Gate
    value: float
    met: bool


class _File(msgspec.Struct, forbid_unknown_fields=True):
    gates: list[Gate]


BUILT_IN: dict[str, tuple[Gate, ...]] = {
    "almanac": (
        Gate(name="full >= 95", method="full", at_least=95),
        *(Gate(name=f"full >= 95 on {k}", method="full", kind=k, at_least=95) for k in ("recall", "upd", "strad")),
        Gate(name="w=8 within 2 points of full", method="hypic w=8", minus="full", at_least=-2, at_most=2),
        Gate(name="KL of w=8 < 0.02", method="hypic w=8", measure="kl", at_most=0.02),
        Gate(name="additive >= 25 points down on upd", method="full", minus="additive", kind="upd", at_least=25),
        Gate(name="strad <= 10 at w=0", method="hypic w=0", kind="strad", at_most=10),
        Gate(
            name="strad within 2 points of full at w=8",
            method="hypic w=8",
            minus="full",
            kind="strad",
            at_least=-2,
            at_most=2,
        ),
        Gate(name="documents' KV hidden costs >= 20 points", method="hypic w=8", minus="kv-zeroed", at_least=20),
        Gate(name="states zeroed costs >= 20 points", method="hypic w=8", minus="state-zeroed", at_least=20),
    )
}
"""Those of the model in models/almanac on its own task, at the hardest level."""


def load(name: str) -> tuple[Gate, ...]:
    """Built-in gates by name, or a file's. Raises GateError."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    path = Path(name)
    try:
        decode = msgspec.toml.decode if path.suffix == ".toml" else msgspec.json.decode
        found = decode(path.read_bytes(), type=_File).gates
    except OSError as e:
        raise GateError(f"{name}: {e.strerror}; give a .toml or .json file, or {', '.join(BUILT_IN)}") from None
    except msgspec.MsgspecError as e:
        raise GateError(f"{name}: {e}") from None
    if not found:
        raise GateError(f"{name}: there are no gates in it; leave --gates out, or write one")
    for gate in found:
        low, high = (
            (-math.inf if gate.at_least is None else gate.at_least),
            (math.inf if gate.at_most is None else gate.at_most),
        )
        if not low <= high:
            raise GateError(f"{name}: gate {gate.name!r}: no value is at least {low} and at most {high}")
        if gate.at_least is None and gate.at_most is None:
            raise GateError(f"{name}: gate {gate.name!r} has neither at_least nor at_most")
        try:
            for m in filter(None, (gate.method, gate.minus)):
                method(m)
        except MethodError as e:
            raise GateError(f"{name}: gate {gate.name!r}: {e}") from None
    return tuple(found)


def methods_of(gates: Sequence[Gate]) -> list[str]:
    """Methods that the gates read, in their order."""
    return list(dict.fromkeys(m for g in gates for m in (g.method, g.minus) if m))


def check(gates: Sequence[Gate], items: Iterable[Item], methods: Iterable[Method]) -> None:
    """Raises GateError for a gate that a table of these can say nothing of: found before the run, which may take hours."""
    from hypic.eval.summary import groups  # numpy, which the command's help does without

    known: dict[str, set[str]] = {}
    for dataset, kind, _ in groups(items):
        known.setdefault(dataset, set()).add(kind)
    names = [m.name for m in methods]
    for gate in gates:
        data = _data_set(gate, list(known))
        if data not in known:
            raise GateError(f"gate {gate.name!r}: no data set {data!r}; there are {', '.join(known)}")
        if gate.kind not in known[data]:
            kinds = ", ".join(sorted(known[data] - {""})) or "none"
            raise GateError(f"gate {gate.name!r}: no kind {gate.kind!r} among these items of {data}; there are {kinds}")
        for name in filter(None, (gate.method, gate.minus)):
            if name not in names:
                raise GateError(f"gate {gate.name!r}: {name!r} does not run here; there are {', '.join(names)}")
            if gate.measure != "score" and name in (FULL.name, CLOSED_BOOK.name):
                raise GateError(
                    f"gate {gate.name!r}: there is no {gate.measure} of {name!r}; it says how far methods are from {FULL.name!r}"
                )


def check_level(name: str, about: Iterable[Mapping[str, Any]]) -> None:
    """Raises GateError if these are built-in gates and not the items that they were set for, by what data sets say."""
    for of_one in about:
        if name in BUILT_IN and of_one.get("hardest") is False:
            raise GateError(f"{name}: its bounds are those of the hardest level; leave level= out of {of_one['name']}")


def judge(gates: Sequence[Gate], summary: Summary) -> list[Verdict]:
    """Raises GateError for a gate that the table says nothing of: an unread gate is not a met one."""
    verdicts = []
    for gate in gates:
        value = _value(gate, gate.method, summary) - (_value(gate, gate.minus, summary) if gate.minus else 0.0)
        verdicts.append(Verdict(gate, value, gate.met(value)))
    return verdicts


def _value(gate: Gate, name: str, summary: Summary) -> float:
    data = _data_set(gate, list(dict.fromkeys(r.dataset for r in summary.rows)))
    try:
        row: Row = summary.row(data, name, gate.kind)
    except KeyError as e:
        raise GateError(f"gate {gate.name!r}: {e.args[0]}; ask for more methods or items") from None
    estimate = getattr(row, gate.measure)
    if estimate is None:
        raise GateError(f"gate {gate.name!r}: there is no {gate.measure} of {name!r}")
    return float(estimate.value)


def _data_set(gate: Gate, sets: Sequence[str]) -> str:
    """The one that the gate is about, of those there are. Raises GateError if that is not clear."""
    if not gate.data and len(sets) != 1:
        raise GateError(f"gate {gate.name!r} must name its data set: there are {', '.join(sets)}")
    return gate.data or sets[0]
