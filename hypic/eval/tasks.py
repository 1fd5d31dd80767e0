"""Items as prompts, grouped by the documents they share, and what compares two answers to one prompt."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from hypic.eval.items import Item, Outcome, Probe
from hypic.eval.methods import CLOSED_BOOK, FULL, PREFIX, Method
from hypic.eval.prompt import Codec, Prompt, PromptError

Done = frozenset[tuple[str, str]]
"""(item, method) that need no more work."""


class Task(NamedTuple):
    """An item as the model is asked."""

    item: Item
    prompt: Prompt
    closed_book: Prompt


class Runner(Protocol):
    """Runs methods on tasks: the reference, or the served engine."""

    name: str
    kl_over: str

    def outcomes(self, tasks: Sequence[Task], methods: Sequence[Method], done: Done) -> Iterator[Outcome | Probe]:
        """What is not ``done``, as it comes."""


def tasks_of(items: Sequence[Item], codec: Codec, *, min_segment: int = 0) -> list[Task]:
    """Raises PromptError naming the item."""
    tasks = []
    for item in items:
        try:
            made = (codec.prompt(p, min_segment=min_segment) for p in (item.pieces, item.closed_book))
            tasks.append(Task(item, *made))
        except PromptError as e:
            raise PromptError(f"item {item.id} of {item.dataset}: {e}") from None
    return tasks


def by_documents(tasks: Sequence[Task]) -> Iterator[list[Task]]:
    """Neighbours whose prompts are the same up to the end of their last document."""
    for _, group in itertools.groupby(tasks, lambda t: (t.prompt.ids[: t.prompt.head], t.prompt.segments)):
        yield list(group)


class NotFinite(ArithmeticError):
    """The model gave NaN; the text says where."""


def kl_and_agreement(full: Tensor, other: Tensor) -> tuple[tuple[float, ...], tuple[bool, ...]]:
    """Per row of log-probabilities [n, vocab]: KL from ``full`` to ``other`` in nats, and whether both peak at one token."""
    kl = torch.where(full > -torch.inf, full.exp() * (full - other), 0.0).sum(-1).clamp_min(0)
    return tuple(kl.tolist()), tuple((full.argmax(-1) == other.argmax(-1)).tolist())


class PrefixCache:
    """What an exact prefix cache of unlimited size would reuse: the longest prefix that some earlier prompt has too."""

    def __init__(self) -> None:
        self._seen: dict[int, list[np.ndarray]] = {}

    def reused(self, prompt: Prompt) -> int:
        """Tokens of the prompt that are reused, the last one never; remembers the prompt."""
        ids = np.array(prompt.ids)
        earlier = self._seen.setdefault(prompt.ids[0], [])
        longest = max((_common(ids, other) for other in earlier), default=0)
        if longest < len(ids):
            earlier.append(ids)
        return min(longest, len(ids) - 1)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def outcome(
    task: Task,
    method: Method,
    text: str,
    ids: Sequence[int],
    reused: int,
    seconds: float,
    compared: tuple[tuple[float, ...], tuple[bool, ...]] = ((), ()),
) -> Outcome:
    """As JSON lines keep it. ``compared`` is what :func:`kl_and_agreement` says."""
    kl, agrees = compared
    asked = task.closed_book if method == CLOSED_BOOK else task.prompt
    return Outcome(
        item=task.item.id,
        method=method.name,
        text=text,
        ids=tuple(ids),
        tokens=len(asked.ids),
        reused=reused,
        kl=tuple(round(x, 7) for x in kl),
        agrees=agrees,
        seconds=round(seconds, 4),
    )


def as_prefix(task: Task, full: Outcome, reused: int) -> Outcome:
    """The prefix cache's outcome: what full recompute says."""
    n = len(full.ids)
    same = ((0.0,) * n, (True,) * n)
    return outcome(task, PREFIX, full.text, full.ids, reused, full.seconds, same)


def linked(methods: Sequence[Method]) -> list[Method]:
    """Those that are neither :data:`FULL` nor made of it, nor without documents."""
    return [m for m in methods if m not in (FULL, PREFIX, CLOSED_BOOK)]
