"""Debian packages: write the synopsis of one from its description, which stands among others.

Descriptions come from apt's English description lists and stay in the cache.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hypic.eval.data import fetch
from hypic.eval.data.common import Loaded, Wanted, enough, question, sets
from hypic.eval.data.errors import DataError
from hypic.eval.items import Item

_LENGTH = range(300, 2001)
_HOLLOW = re.compile(
    r"transitional|dummy|meta-?package|debug(ging)? symbols|documentation|development (files|headers)", re.I
)
_TASK = "Below are descriptions of Debian packages. Answer the question about them in one line."


class Package(NamedTuple):
    name: str
    synopsis: str
    description: str


def load(wanted: Wanted) -> Loaded:
    """Options: ``documents`` in a prompt (8), ``questions`` about the same documents (2), ``path``: a Translation-en list."""
    wanted.only("documents", "questions", "path")
    size = wanted.number("documents", 8, 1, 256)
    asked = min(size, wanted.number("questions", 2, 1, 256))
    path = wanted.path()
    paths = [path] if path else fetch.descriptions(wanted.cache)
    pool = distinct(p for one in paths for p in packages(one))
    wanted.require(size, pool, f"{len(pool)} descriptions of a fitting length in {paths[0]}")
    rng, notes, items = wanted.rng(), Counter[str](), list[Item]()
    for number, chosen in enumerate(sets(pool, size, rng)):
        if enough(wanted, items):
            break
        for package in rng.sample(chosen, asked):
            if not enough(wanted, items):
                items.append(
                    question(
                        wanted,
                        [f"Package: {p.name}\n{p.description}\n\n" for p in chosen],
                        _TASK,
                        f"What is the package {package.name}, in at most ten words?",
                        [package.synopsis],
                        notes,
                        id=f"debian/{wanted.seed}-{number}-{package.name}",
                        lead="",
                        metric="rouge_l",
                        max_new_tokens=32,
                        first_line=True,
                    )
                )
    source = ", ".join(f"{p.name} sha256 {fetch.sha256(p)}" for p in paths)
    return Loaded(wanted, items, source=source, licence="of the packages that are described", notes=notes)


def packages(path: Path) -> Iterator[Package]:
    """Every package of a list, in order. Raises DataError for a list without any."""
    name, text, found = "", list[str](), 0
    for line in [*fetch.read_list(path).splitlines(), ""]:
        if line.startswith("Package: "):
            name = line.removeprefix("Package: ").strip()
        elif line.startswith("Description-en: "):
            text = [line.removeprefix("Description-en: ").strip()]
        elif text and line.startswith(" "):
            text.append("" if line.strip() == "." else line[1:])
        elif not line:
            if name and text:
                found += 1
                yield Package(name, text[0], "\n".join(text[1:]).strip())
            name, text = "", []
    if not found:
        raise DataError(f"{path}: no Package with a Description-en in it: give path=FILE, a Translation-en of Debian")


def distinct(found: Iterator[Package]) -> list[Package]:
    """Packages with a real description, one of each family (those that begin alike)."""
    out: dict[str, Package] = {}
    for p in found:
        if len(p.description) in _LENGTH and len(p.synopsis.split()) >= 4 and not _HOLLOW.search(p.synopsis):
            out.setdefault(p.description[:80], p)
    return list(out.values())
