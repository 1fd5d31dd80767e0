"""Training batches made by worker processes ahead of time, in an order that does not depend on their speed."""

from __future__ import annotations

import multiprocessing as mp
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .task import END, LEVELS, PADDING, STRAD, TEXT, UPD, World, batch

TEXT_SHARE = 8
"""One in so many text tokens is trained on."""


class Batch(NamedTuple):
    """``ids`` [n, tokens] int32; flat places whose *next* token is trained on, with those tokens: answers with their
    kinds (task.RECALL, UPD, STRAD, END), then text. ``restarts`` [n, tokens] is True where linear states begin anew."""

    level: int
    ids: np.ndarray
    restarts: np.ndarray
    answer_at: np.ndarray
    answer: np.ndarray
    kind: np.ndarray
    text_at: np.ndarray
    text: np.ndarray


def draw(world: World, level: int, n: int, seed: Any, *, restarts: float = 0.0, **how: Any) -> Batch:
    """``n`` sequences drawn from ``seed``.

    In a share of ``restarts`` of them the linear layers' states begin anew at every document and behind the last, as they do
    between the documents that one packs into a training sequence. What attention cannot know there (upd, strad) is not asked.
    """
    ids, marks, samples = batch(world, LEVELS[level], n, seed, **how)
    rng = np.random.default_rng(zlib.crc32(repr(seed).encode()))
    restart = np.zeros(ids.shape, dtype=bool)
    for row in np.flatnonzero(rng.random(n) < restarts):
        documents = samples[row].documents
        restart[row, [start for start, _ in documents] + [documents[-1][1]]] = True
        marks[row, (marks[row] == UPD) | (marks[row] == STRAD)] = PADDING
    flat, flat_marks = ids.ravel(), marks.ravel()
    nexts = np.arange(len(flat) - 1)
    nexts = nexts[(nexts + 1) % ids.shape[1] != 0]
    kind = flat_marks[nexts + 1]
    answer_at = nexts[(kind > TEXT) & (kind <= END)]
    text_at = nexts[kind == TEXT]
    text_at = np.sort(rng.choice(text_at, len(text_at) // TEXT_SHARE, replace=False))
    return Batch(
        level, ids, restart, answer_at, flat[answer_at + 1], flat_marks[answer_at + 1], text_at, flat[text_at + 1]
    )


def _work(directory: Path, restarts: float, requests: Any, results: Any) -> None:
    world = World(directory)
    while (request := requests.get()) is not None:
        index, level, n, seed = request
        results.put((index, draw(world, level, n, seed, restarts=restarts)))


class Stream:
    """Batches 0, 1, 2, ...; ``plan(index)`` says level, size and seed of one when its making begins.

    Workers are forked at once: create it before the device is first used.
    """

    def __init__(
        self, directory: Path, plan: Callable[[int], tuple[int, int, Any]], workers: int, restarts: float = 0.0
    ) -> None:
        context = mp.get_context("fork")
        self._requests, self._results = context.Queue(), context.Queue()
        self._workers = [
            context.Process(target=_work, args=(directory, restarts, self._requests, self._results), daemon=True)
            for _ in range(workers)
        ]
        for worker in self._workers:
            worker.start()
        self._plan, self._asked, self._taken = plan, 0, 0
        self._ready: dict[int, Batch] = {}
        self._ahead = 2 * workers

    def next(self) -> Batch:
        while self._asked < self._taken + self._ahead:
            self._requests.put((self._asked, *self._plan(self._asked)))
            self._asked += 1
        while self._taken not in self._ready:
            index, made = self._results.get(timeout=120)
            self._ready[index] = made
        self._taken += 1
        return self._ready.pop(self._taken - 1)

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
