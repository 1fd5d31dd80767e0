"""Answers under each method: link the documents, run what follows, choose tokens."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hypic.eval.methods import FULL, Method
from hypic.eval.prompt import Prompt, cut
from hypic.eval.reference.layout import Layout
from hypic.eval.reference.mixers import Linked
from hypic.eval.reference.model import Model, feed_forward

RECORD_BYTES = 2 << 30


class Answer(NamedTuple):
    """A greedy answer.

    Attributes:
        ids: its tokens, the one that ended it included.
        text: without what ended it.
        logprobs: [len(forced), vocab], or [len(ids), vocab] if nothing was forced: what each token was chosen from.
        reused: tokens of the prompt that were not computed.
    """

    ids: tuple[int, ...]
    text: str
    logprobs: Tensor
    reused: int


class Head(NamedTuple):
    """A prompt up to the end of its last document.

    Attributes:
        states: one per layer.
        tokens: of it; ``computed`` of them were computed, in the last layer.
        layers: what each layer made of it, if asked for.
    """

    states: list[Any]
    tokens: int
    computed: int
    layers: list[Linked]


class Reference:
    """Runs methods on one model, a prompt at a time.

    Args:
        ends: tokens that end an answer.
        text: tokens to text.
        record_bytes: documents' records are kept up to this much, the last used ones longest.
    """

    def __init__(
        self,
        model: Model,
        *,
        ends: frozenset[int] = frozenset(),
        text: Callable[[Sequence[int]], str] = str,
        record_bytes: int = RECORD_BYTES,
    ) -> None:
        self.model, self._ends, self._text = model, ends, text
        self._records: OrderedDict[tuple[Any, ...], list[Any]] = OrderedDict()
        self._room = record_bytes
        self._last: tuple[Any, Head] | None = None

    @torch.inference_mode()
    def answer(
        self,
        method: Method,
        prompt: Prompt,
        *,
        max_new: int,
        stop: Sequence[str] = (),
        forced: Sequence[int] | None = None,
    ) -> Answer:
        """The greedy answer; ``forced`` asks for the distributions along that continuation instead of its own."""
        head = self.head(method, prompt)
        reused = head.tokens - head.computed
        tail = list(prompt.ids[head.tokens :])
        if not forced:
            rows, states = self._extend(head.states, head.tokens, tail)
            ids, own, text = self._greedy([], rows[-1:], lambda: states, len(prompt.ids), max_new, stop)
            return Answer(ids, text, own, reused)
        rows, _ = self._extend(head.states, head.tokens, tail + list(forced[:-1]))
        rows = rows[len(tail) - 1 :]
        # As long as the most likely token is the forced one, greedy decoding would have gone the same way.
        agreed = (rows.argmax(-1).cpu() == torch.tensor(forced)).long().cumprod(0).sum().item()
        if agreed == len(forced):
            return Answer(tuple(forced), self._finished(forced, stop)[0], rows, reused)
        taken = list(forced[: int(agreed)])
        ids, _, text = self._greedy(
            taken,
            rows[len(taken) :][:1],
            lambda: self._extend(head.states, head.tokens, tail + taken)[1],
            len(prompt.ids) + len(taken),
            max_new,
            stop,
        )
        return Answer(ids, text, rows, reused)

    @torch.inference_mode()
    def head(self, method: Method, prompt: Prompt, *, trace: bool = False) -> Head:
        """The prompt up to the end of its last document; the last one is remembered, as questions share documents."""
        key = (method, prompt.ids[: prompt.head], prompt.segments, trace)
        if self._last is None or self._last[0] != key:
            self._last = None  # frees it first
            self._last = (key, self._link(method, prompt, trace))
        return self._last[1]

    @torch.inference_mode()
    def tail_outputs(self, head: Head, prompt: Prompt) -> list[Tensor]:
        """Every layer's outputs [n, d] at the tokens behind the last document."""
        outputs: list[Tensor] = []
        self._extend(head.states, head.tokens, prompt.ids[head.tokens :], outputs)
        return outputs

    def _link(self, method: Method, prompt: Prompt, trace: bool) -> Head:
        n = prompt.head
        model = self.model
        if not n:
            like = model.embed([0])
            return Head([mixer.start(like) for _, mixer in model.layers], 0, 0, [])
        layout = Layout(n, prompt.segments, method, model.device)
        records = [self._compile(prompt.ids[d.start : d.end], method.dummies) for d in layout.documents]
        x, states, layers = self._pass(layout, prompt.ids[:n], records, trace)
        return Head(states, n, 0 if layout.idle else len(x), layers)

    def _compile(self, tokens: tuple[int, ...], dummies: int) -> list[Any]:
        """Each layer's record of the tokens, run in isolation behind so many dummy tokens."""
        key = (tokens, dummies)
        if key not in self._records:
            ids = (*[self.model.dummy] * dummies, *tokens)
            found: list[Any] = []
            self._pass(Layout(len(ids), (), FULL, self.model.device), ids, [], False, found)
            self._records[key] = [type(r)(*(rows[dummies:] for rows in r)) for r in found]
            self._room -= _size(self._records[key])
            while self._room < 0 and len(self._records) > 1:
                self._room += _size(self._records.popitem(last=False)[1])
        self._records.move_to_end(key)
        return self._records[key]

    def _pass(
        self,
        layout: Layout,
        ids: Sequence[int],
        records: list[list[Any]],
        trace: bool,
        own: list[Any] | None = None,
    ) -> tuple[Tensor, list[Any], list[Linked]]:
        """All layers over ``ids``: last outputs of the computed tokens, states, what layers made of it if ``trace``.

        Args:
            records: of each of the layout's documents, each layer's.
            own: gets each layer's record of the computed tokens.
        """
        x = self.model.embed(ids)[layout.computed]
        states, layers = [], []
        for i, (layer, mixer) in enumerate(self.model.layers):
            theirs = [r[i] for r in records]
            y = layer.input_layernorm(x)
            if layout.method.blend and i == 1:
                keep = most_deviating(mixer.record(y), theirs, layout)  # type: ignore[union-attr]
                layout, x, y = layout.narrowed(keep), x[keep], y[keep]
            linked = mixer.link(y, layout, theirs)
            x = feed_forward(layer, x + linked.out)
            states.append(linked.state)
            if own is not None:
                own.append(linked.record)
            if trace:
                layers.append(linked)
        return x, states, layers

    def _extend(
        self, states: list[Any], position: int, ids: Sequence[int], outputs: list[Tensor] | None = None
    ) -> tuple[Tensor, list[Any]]:
        """Run ordinary tokens: log-probabilities behind each [n, vocab], and the states after them."""
        x, after = self.model.embed(ids), []
        for (layer, mixer), state in zip(self.model.layers, states, strict=True):
            y, state = mixer.run(layer.input_layernorm(x), state, position)
            x = feed_forward(layer, x + y)
            after.append(state)
            if outputs is not None:
                outputs.append(x)
        return self.model.logprobs(x), after

    def _greedy(
        self,
        taken: Sequence[int],
        row: Tensor,
        states: Callable[[], list[Any]],
        position: int,
        limit: int,
        stop: Sequence[str],
    ) -> tuple[tuple[int, ...], Tensor, str]:
        """Go on behind ``taken`` with a token from ``row``; ``states`` gives those before it, at ``position``, if more follow.

        Returns:
            all tokens, what the new ones were chosen from, and the text.
        """
        ids, rows = list(taken), []
        now: list[Any] | None = None
        while True:
            rows.append(row)
            ids.append(int(row.argmax()))
            text, done = self._finished(ids, stop)
            if done or len(ids) >= limit:
                return tuple(ids), torch.cat(rows), text
            row, now = self._extend(states() if now is None else now, position, ids[-1:])
            position += 1

    def _finished(self, ids: Sequence[int], stop: Sequence[str]) -> tuple[str, bool]:
        """The text of an answer so far, and whether it has come to its end."""
        ended = ids[-1] in self._ends
        text, stopped = cut(self._text(ids[:-1] if ended else ids), stop)
        return text, ended or stopped


def most_deviating(own: Any, records: list[Any], layout: Layout) -> Tensor:
    """Places in ``layout.computed`` of what CacheBlend goes on computing: all tokens outside documents, and the share of the
    documents' tokens whose K (before RoPE, so that places do not matter) and V differ most from their records."""
    inside = layout.interior[layout.computed]
    deviation = torch.zeros(len(inside), device=inside.device)
    for mine, theirs in zip(own, zip(*records, strict=True), strict=True):
        rows = mine.clone()
        for (start, first, end), record in zip(layout.documents, theirs, strict=True):
            rows[first:end] = record[first - start :]
        deviation += (mine - rows).float().square().flatten(1).sum(-1)
    chosen = math.ceil(layout.method.blend * int(inside.sum()))
    worst = deviation.masked_fill(~inside, torch.inf).topk(chosen + int((~inside).sum())).indices
    return worst.sort().values


def _size(records: list[Any]) -> int:
    return sum(rows.nbytes for record in records for rows in record)
