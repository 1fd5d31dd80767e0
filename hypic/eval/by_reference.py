"""Runs methods on the reference: one group of questions about the same documents after the other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from hypic.eval.items import Outcome, Probe
from hypic.eval.methods import CLOSED_BOOK, FULL, PREFIX, Method
from hypic.eval.prompt import Codec
from hypic.eval.reference import Answer, Model, Reference
from hypic.eval.reference.probing import probe
from hypic.eval.tasks import (
    Done,
    NotFinite,
    PrefixCache,
    Task,
    as_prefix,
    by_documents,
    kl_and_agreement,
    linked,
    outcome,
)


class ByReference:
    """A :class:`hypic.eval.tasks.Runner`.

    Args:
        probes: of so many groups the first item is looked at from inside.
    """

    name = "reference"
    kl_over = "the whole vocabulary"

    def __init__(self, model: Model, codec: Codec, *, probes: int = 0) -> None:
        self.reference = Reference(model, ends=codec.ends, text=codec.text)
        self._probes = probes

    def outcomes(self, tasks: Sequence[Task], methods: Sequence[Method], done: Done) -> Iterator[Outcome | Probe]:
        prefixes = PrefixCache()
        for number, group in enumerate(by_documents(tasks)):
            reused = {t.item.id: prefixes.reused(t.prompt) for t in group}
            todo = [(t, m) for m in methods for t in group if (t.item.id, m.name) not in done]
            if todo:
                yield from self._group(group, todo, reused, done)
            first = group[0]
            if number < self._probes and first.prompt.segments:
                missing = [m for m in linked(methods) if (f"probe {first.item.id}", m.name) not in done]
                if missing:
                    yield from probe(self.reference, first.item.id, first.prompt, missing)

    def _group(
        self, group: Sequence[Task], todo: Sequence[tuple[Task, Method]], reused: dict[str, int], done: Done
    ) -> Iterator[Outcome]:
        wanted = {t.item.id for t, m in todo if m != CLOSED_BOOK}
        full = {}
        for task in group:
            if task.item.id in wanted:
                full[task.item.id] = self._answer(task, FULL)
        for task, method in todo:
            key = task.item.id
            if method == FULL:
                answer, seconds = full[key]
                yield outcome(task, FULL, answer.text, answer.ids, 0, seconds)
            elif method == PREFIX:
                answer, seconds = full[key]
                yield as_prefix(task, outcome(task, FULL, answer.text, answer.ids, 0, seconds), reused[key])
            elif method == CLOSED_BOOK:
                answer, seconds = self._answer(task, method)
                yield outcome(task, method, answer.text, answer.ids, 0, seconds)
            else:
                truth = full[key][0]
                answer, seconds = self._answer(task, method, truth.ids)
                compared = kl_and_agreement(truth.logprobs, answer.logprobs)
                yield outcome(task, method, answer.text, answer.ids, answer.reused, seconds, compared)

    def _answer(self, task: Task, method: Method, forced: Sequence[int] | None = None) -> tuple[Answer, float]:
        began = time.perf_counter()
        limits: dict[str, Any] = dict(max_new=task.item.max_new_tokens, stop=task.item.stop)
        if method == CLOSED_BOOK:
            answer = self.reference.answer(FULL, task.closed_book, **limits)
        else:
            answer = self.reference.answer(method, task.prompt, **limits, forced=forced)
        if answer.logprobs.isnan().any():
            raise NotFinite(
                f"{task.item.id}, {method.name}: the model's log-probabilities are NaN; are its weights damaged?"
            )
        return answer, time.perf_counter() - began
