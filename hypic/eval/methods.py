"""The table of methods: ways to answer a prompt whose documents were seen before, and what each one is.

Sources: HYPIC (arXiv 2607.01299), EPIC (arXiv 2410.15332), CacheBlend (arXiv 2405.16444), LinearKV (arXiv 2608.11231).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Literal

import msgspec

from hypic.method import DUMMIES, LEGOLINK_0

State = Literal["compose", "additive", "decay", "last", "zero"]
"""What a linear layer's state h becomes over an interior with transition T, total decay d and zero-start end-state S:
h T + S, h + S, d h + S, S, or 0."""

HYPIC, EPIC, BLEND, LINEARKV = "HYPIC", "EPIC", "CacheBlend", "LinearKV"


class MethodError(ValueError):
    """A method that does not exist or does not fit the model; the text says what does."""


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table.

    Attributes:
        name: as on the command line and in outcomes.
        about: what it does, in one line.
        source: the paper that proposes it or compares with it.
        models: what it is defined for: "any", "hybrid" (with linear layers) or "attention" (without).
        served: the engine can run it; all others, and these too, run on the reference.
        link: documents' interiors come from isolated runs; false where everything is computed.
        w: the seam window, in tokens, or as a share of each document if it is a float.
        relocate: interior K turns to its place in the prompt; otherwise it stays at its place in the document.
        state: how linear layers' states step over interiors.
        kv: false hides the documents' K and V from all that stands outside them.
        dummies: documents are compiled behind so many dummy tokens, which are dropped.
        blend: share of the interior tokens that is recomputed from the second layer on (CacheBlend); 0 for none.
    """

    name: str
    about: str
    source: str = HYPIC
    models: Literal["any", "hybrid", "attention"] = "any"
    served: bool = False
    link: bool = True
    w: int | float = 8
    relocate: bool = True
    state: State = "compose"
    kv: bool = True
    dummies: int = 0
    blend: float = 0.0

    def window(self, length: int) -> int:
        """The seam window of a document of so many tokens."""
        return math.ceil(self.w * length) if isinstance(self.w, float) else self.w

    def fits(self, hybrid: bool) -> bool:
        return self.models == "any" or (self.models == "hybrid") == hybrid


WINDOWS = (0, 1, 2, 4, 8, 16, 32)
SHARES = (0.05, 0.15)
BLENDS = (0.15, 0.05, 0.01)

FULL = Method(name="full", about="full recompute: every token under everything before it", served=True, link=False, w=0)
PREFIX = Method(
    name="prefix",
    about="exact prefix cache: full recompute's answer; tokens are reused up to the first one that differs from every "
    "earlier prompt",
    served=True,
    link=False,
    w=0,
)
CLOSED_BOOK = Method(
    name="closed_book", about="the question without documents, full recompute", served=True, link=False, w=0
)


def _linked(w: int | float) -> Method:
    much = f"w = {w}" if isinstance(w, int) else f"w = {w:.0%} of the document"
    name = f"hypic w={w}" if isinstance(w, int) else f"hypic w={w:.0%}"
    about = f"state steps by T and S, K relocated, {much} recomputed"
    return Method(name=name, about=about, models="hybrid", served=isinstance(w, int) and w > 0, w=w)


def _lego(k: int) -> Method:
    about = f"K relocated, the first {k} tokens of each document recomputed"
    return Method(name=f"legolink-{k}", about=about, source=EPIC, models="attention", served=True, w=k)


def _blend(share: float) -> Method:
    about = (
        f"first layer in full; behind it only the {share:.0%} of the documents' tokens whose K and V deviate most at the "
        "second layer"
    )
    return Method(name=f"cacheblend-{share:.0%}", about=about, source=BLEND, models="attention", w=0, blend=share)


_TABLE = (
    FULL,
    PREFIX,
    CLOSED_BOOK,
    Method(
        name="naive",
        about="caches laid end to end as they are: nothing recomputed, K at its place in the document, the last document's "
        "state overwrites all before it",
        w=0,
        relocate=False,
        state="last",
    ),
    Method(
        name="concat",
        about="concatenate without relocation: nothing recomputed, K at its place in the document, states step by T and S",
        models="hybrid",
        w=0,
        relocate=False,
    ),
    Method(
        name="no-relocation",
        about="T, S without relocation: w = 8 recomputed at their true places, interior K at its place in the document",
        relocate=False,
    ),
    Method(name="additive", about="h + S instead of h T + S; w = 8", models="hybrid", state="additive"),
    Method(name="decay-only", about="d h + S with the interior's total decay d; w = 8", models="hybrid", state="decay"),
    *map(_linked, WINDOWS),
    *map(_linked, SHARES),
    Method(
        name="last-segment",
        about="K and V of all documents, the state of the last one alone; w = 8",
        source=LINEARKV,
        models="hybrid",
        state="last",
    ),
    Method(
        name=LEGOLINK_0,
        about=f"compiled behind {DUMMIES} dummy tokens, relocated by what the dummies leave, nothing recomputed",
        source=EPIC,
        models="attention",
        served=True,
        w=0,
        dummies=DUMMIES,
    ),
    *(_lego(k) for k in WINDOWS if k),
    *map(_blend, BLENDS),
    Method(name="state-zeroed", about="ablation: hypic w=8, states are 0 behind every document", models="hybrid", state="zero"),
    Method(name="kv-zeroed", about="ablation: w = 8, documents' K and V are hidden from all outside them", kv=False),
)  # fmt: skip

METHODS: dict[str, Method] = {m.name: m for m in _TABLE}
"""By name, in the order of reports."""

ALWAYS = (FULL.name, CLOSED_BOOK.name)
"""What every report needs: the answers to compare with, and what can be guessed without reading."""


def method(name: str) -> Method:
    """The method of that name; seam windows and shares that the table does not list are fine. Raises MethodError."""
    if found := METHODS.get(name):
        return found
    if m := re.fullmatch(r"hypic w=(\d+)(%?)", name):
        return _linked(int(m[1]) / 100 if m[2] else int(m[1]))
    if (m := re.fullmatch(r"legolink-(\d+)", name)) and int(m[1]):
        return _lego(int(m[1]))
    if (m := re.fullmatch(r"cacheblend-(\d+)%", name)) and 0 < int(m[1]) <= 100:
        return _blend(int(m[1]) / 100)
    raise MethodError(f"no method {name!r}: there are {', '.join(METHODS)}")


def choose(names: Iterable[str] | None, *, hybrid: bool, served: bool = False) -> list[Method]:
    """The methods of those names, or all that fit the model, in order, :data:`ALWAYS` among them.

    Args:
        names: None for all that fit.
        hybrid: the model has linear layers.
        served: only what the engine runs.
    Raises:
        MethodError: a name that is unknown, or a method that the model or the engine cannot run.
    """
    if names is None:
        return [m for m in METHODS.values() if m.fits(hybrid) and (m.served or not served)]
    wanted = [method(n) for n in dict.fromkeys([*ALWAYS, *names])]
    for m in wanted:
        if not m.fits(hybrid):
            need, has = ("linear layers", "none") if m.models == "hybrid" else ("full attention alone", "linear layers")
            raise MethodError(f"method {m.name!r} is for models with {need}; this one has {has}")
        if served and not m.served:
            raise MethodError(f"method {m.name!r} is not served by the engine: leave it out, or use --reference")
    return wanted
