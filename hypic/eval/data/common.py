"""What loaders share: what is asked of them, and what they return."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hypic.eval.data.errors import DataError
from hypic.eval.data.template import Template
from hypic.eval.items import Item, Piece

T = TypeVar("T")


class Wanted(NamedTuple):
    """A request for items: :func:`hypic.eval.data.load` with its options taken apart."""

    spec: str
    template: Template
    n: int | None
    seed: int
    cache: Path
    options: Mapping[str, str]

    def only(self, *known: str) -> None:
        """Raises DataError for an option that is not among ``known``."""
        if odd := set(self.options) - set(known):
            raise DataError(f"{self.spec}: no option {sorted(odd)[0]!r}; there are {', '.join(known)}")

    def number(self, name: str, default: int, low: int, high: int) -> int:
        """The option of that name. Raises DataError."""
        text = self.options.get(name, str(default))
        if not text.isdecimal() or not low <= int(text) <= high:
            raise DataError(f"{self.spec}: {name} should be a number from {low} to {high}, not {text!r}")
        return int(text)

    def path(self) -> Path | None:
        """The option ``path``, which must exist. Raises DataError."""
        if "path" not in self.options:
            return None
        path = Path(self.options["path"]).expanduser()
        if not path.exists():
            raise DataError(f"{self.spec}: {path} does not exist")
        return path

    def require(self, size: int, pool: Sequence[Any], what: str) -> None:
        """Raises DataError if a prompt's documents cannot be had; ``what`` says where there are how many of."""
        if size > len(pool):
            least = "give a larger one with path=" if not pool else f"write documents={len(pool)} or fewer"
            raise DataError(f"{self.spec}: {size} documents, but {what}: {least}")

    def rng(self) -> random.Random:
        return random.Random(f"{self.spec.partition(':')[0]} {self.seed}")


class Loaded:
    """Items, and what the report says of the data set they are from.

    Attributes:
        items: in order.
        about: JSON values: "name", "source" (what was read, with its version or digest), "licence", "n", "seed", and
            "notes": counts of what was left out or cut.
    """

    def __init__(self, wanted: Wanted, items: Sequence[Item], *, source: str, licence: str, notes: Mapping[str, Any]):
        if not items:
            raise DataError(f"{wanted.spec}: no item in {source}")
        self.items = list(items)
        self.about: dict[str, Any] = dict(
            name=wanted.spec,
            source=source,
            licence=licence,
            n=len(self.items),
            seed=wanted.seed,
            notes={k: v for k, v in notes.items() if v},
        )

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


def sets(pool: Sequence[T], size: int, rng: random.Random) -> Iterator[list[T]]:
    """The pool in random order as lists of ``size``, nothing twice; what is left over is left out."""
    drawn = rng.sample(list(pool), len(pool))
    for i in range(0, len(drawn) - size + 1, size):
        yield drawn[i : i + size]


def enough(wanted: Wanted, items: Sequence[Any]) -> bool:
    return wanted.n is not None and len(items) >= wanted.n


def question(
    wanted: Wanted,
    documents: Sequence[str],
    task: str,
    text: str,
    answers: Sequence[str],
    notes: Counter[str],
    *,
    id: str,  # noqa: A002  (the field of Item)
    lead: str,
    metric: str,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    first_line: bool = False,
) -> Item:
    """An item "task, documents, question" and, without documents, its closed book; answers begin with ``lead``."""
    ask = f"Question: {text}"
    pieces = [Piece(f"{task}\n\n"), *(Piece(d, True) for d in documents), Piece(ask)]
    return Item(
        id=id,
        dataset=id.partition("/")[0],
        pieces=wanted.template.write(pieces, max_new_tokens, notes, lead=lead),
        closed_book=wanted.template.write([Piece(f"{task}\n\n{ask}")], max_new_tokens, lead=lead),
        answers=tuple(answers),
        metric=metric,
        max_new_tokens=max_new_tokens,
        stop=("\nQuestion:", *stop),
        first_line=first_line,
    )
