"""Runs methods on the real engine: stock SGLang for full recompute and its prefix cache, hypic for each seam window.

Engines run one after the other, each in a process of its own (:mod:`hypic.eval.served_child`), since SGLang loads plugins
once per process and the seam window is a setting of the server. Prompts go in as token ids, greedy. KL is over the whole
vocabulary where that is small; otherwise over full recompute's most likely tokens and one bucket for all others, which never
exceeds the true KL.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from hypic.config import STOCK, HypicConfig
from hypic.eval.items import Outcome, Probe
from hypic.eval.methods import CLOSED_BOOK, FULL, PREFIX, Method
from hypic.eval.prompt import Codec, Prompt, cut
from hypic.eval.tasks import Done, Task, as_prefix, kl_and_agreement, linked, outcome
from hypic.method import LEGOLINK_0, SEAM
from hypic.processes import end

WHOLE_VOCABULARY = 8192
"""Tokens up to which KL is over all of them."""
TOP = 128
"""Most likely tokens of full recompute that KL is over in larger vocabularies."""
RESULT = "hypic-eval-answer "
"""What the line with a reply begins with; SGLang prints too."""


class ServedError(RuntimeError):
    """The engine ended, or serves a prompt otherwise than its method says; the text says why."""


class Ask(msgspec.Struct, kw_only=True):
    """A request to the child's engine.

    Attributes:
        forced: this continuation's distributions are wanted; () for those of the answer.
        rows: a file with the tokens that are looked at ("ids" [n, k]) for a forced continuation; "" for the most likely.
        scored: distributions are wanted at all.
    """

    ids: tuple[int, ...]
    segments: tuple[tuple[int, int], ...]
    max_new: int
    stop: tuple[str, ...]
    forced: tuple[int, ...] = ()
    rows: str = ""
    scored: bool = True


class Job(msgspec.Struct, kw_only=True):
    """All requests to one engine."""

    model: str
    flags: dict[str, Any]
    hypic: bool
    asks: list[Ask]
    folder: str
    whole: int = WHOLE_VOCABULARY
    top: int = TOP


class Reply(msgspec.Struct, kw_only=True):
    """An answer.

    Attributes:
        ids: its tokens. cached: as SGLang reports it. interior: tokens of segments that came from artifacts.
        plain: segments that did not, with the reason.
        rows: a file with "ids" [n, k], "logprobs" [n, k], and "best" [n], the most likely token.
    """

    number: int
    ids: tuple[int, ...]
    cached: int
    interior: int
    plain: list[str]
    rows: str
    seconds: float


class Served:
    """A :class:`hypic.eval.tasks.Runner`.

    Args:
        flags: fields of SGLang's ServerArgs. config: hypic's settings; the seam window is each method's own.
        env: further variables of the engines' processes. say: gets what engines print.
        whole, top: see :data:`WHOLE_VOCABULARY` and :data:`TOP`.
    """

    name = "served"

    def __init__(
        self,
        model: str,
        codec: Codec,
        *,
        flags: Mapping[str, Any],
        config: HypicConfig,
        env: Mapping[str, str],
        say: Callable[[str], None] = lambda _: None,
        whole: int = WHOLE_VOCABULARY,
        top: int = TOP,
    ) -> None:
        self._model, self._codec, self._flags, self._config = model, codec, dict(flags), config
        self._env, self._say, self._whole, self._top = dict(env), say, whole, top
        self.kl_over = (
            f"the whole vocabulary up to {whole} tokens; in larger ones full recompute's {top} most likely tokens and one "
            "bucket for all others"
        )

    def outcomes(self, tasks: Sequence[Task], methods: Sequence[Method], done: Done) -> Iterator[Outcome | Probe]:
        todo = [(t, m) for t in tasks for m in methods if (t.item.id, m.name) not in done]
        if not todo:
            return
        with tempfile.TemporaryDirectory(prefix="hypic-eval-") as folder:
            full: dict[str, tuple[Reply, Task]] = {}
            yield from self._stock(todo, full, Path(folder))
            for method in linked(methods):
                mine = [t for t, m in todo if m == method]
                if mine:
                    yield from self._linked(method, mine, full, Path(folder))

    def _stock(
        self, todo: Sequence[tuple[Task, Method]], full: dict[str, tuple[Reply, Task]], folder: Path
    ) -> Iterator[Outcome]:
        """Full recompute of every item that is asked about with documents, the prefix cache's count beside it."""
        wanted = {(t.item.id, m.name) for t, m in todo}
        asked = {t.item.id: t for t, m in todo if m != CLOSED_BOOK}
        closed = [t for t, m in todo if m == CLOSED_BOOK]
        asks = [self._ask(t, t.prompt, segments=False) for t in asked.values()]
        asks += [self._ask(t, t.closed_book, segments=False, scored=False) for t in closed]
        order = [(t, FULL) for t in asked.values()] + [(t, CLOSED_BOOK) for t in closed]
        for reply in self._engine("stock", asks, self._env | STOCK, folder, hypic=False):
            task, method = order[reply.number]
            found = outcome(task, method, self._text(task, reply), reply.ids, 0, reply.seconds)
            if method == FULL:
                full[task.item.id] = (reply, task)
            if (task.item.id, method.name) in wanted:
                yield found
            if method == FULL and (task.item.id, PREFIX.name) in wanted:
                yield as_prefix(task, found, reply.cached)

    def _linked(
        self, method: Method, tasks: Sequence[Task], full: Mapping[str, tuple[Reply, Task]], folder: Path
    ) -> Iterator[Outcome]:
        config = msgspec.structs.replace(self._config, enabled=True, min_segment=0)
        how = {"methods": LEGOLINK_0} if method.dummies else {"methods": SEAM, "seam_window": method.w}
        config = msgspec.structs.replace(config, **how)
        asks = []
        for task in tasks:
            truth = full[task.item.id][0]
            asks.append(self._ask(task, task.prompt, forced=truth.ids, rows=truth.rows))
        for reply in self._engine(method.name, asks, self._env | config.to_env(), folder, hypic=True):
            task = tasks[reply.number]
            if reply.plain:
                raise ServedError(
                    f"{method.name}: the engine computed {len(reply.plain)} documents of item {task.item.id} in place "
                    f"({', '.join(sorted(set(reply.plain)))}), so this is not the method; docs/OPERATIONS.md has the remedies"
                )
            compared = compare(full[task.item.id][0].rows, reply.rows)
            yield outcome(task, method, self._text(task, reply), reply.ids, reply.interior, reply.seconds, compared)

    def _ask(self, task: Task, prompt: Prompt, *, segments: bool = True, **more: Any) -> Ask:
        return Ask(
            ids=prompt.ids,
            segments=prompt.segments if segments else (),
            max_new=task.item.max_new_tokens,
            stop=task.item.stop,
            **more,
        )

    def _text(self, task: Task, reply: Reply) -> str:
        ids = reply.ids[:-1] if reply.ids and reply.ids[-1] in self._codec.ends else reply.ids
        return cut(self._codec.text(ids), task.item.stop)[0]

    def _engine(
        self, name: str, asks: list[Ask], env: Mapping[str, str], folder: Path, *, hypic: bool
    ) -> Iterator[Reply]:
        """Replies in the order of ``asks``. Raises ServedError if the process ends early."""
        own = Path(tempfile.mkdtemp(dir=folder))
        job = Job(
            model=self._model,
            flags=self._flags,
            hypic=hypic,
            asks=asks,
            folder=str(own),
            whole=self._whole,
            top=self._top,
        )
        (own / "job.json").write_bytes(msgspec.json.encode(job))
        command = [sys.executable, "-m", "hypic.eval.served_child", str(own / "job.json")]
        self._say(f"{name}: starting an engine for {len(asks)} prompts")
        count = 0
        child = subprocess.Popen(
            command, env=dict(os.environ) | dict(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith(RESULT):
                    count += 1
                    yield msgspec.json.decode(line[len(RESULT) :], type=Reply)
                else:
                    self._say(line.rstrip())
            code = child.wait()
        finally:
            if child.poll() is None:  # whoever wanted the replies has left; nobody reads what the child still writes
                assert child.stdout is not None
                child.stdout.close()
                end([child])
        if count < len(asks):
            raise ServedError(
                f"the engine for {name!r} ended with exit code {code} after {count} of {len(asks)} answers; its log is above "
                f"({shlex.join(command[:3])})"
            )


def compare(full: str, other: str) -> tuple[tuple[float, ...], tuple[bool, ...]]:
    """KL and agreement of two files of rows that look at the same tokens."""
    a, b = (torch.load(path, weights_only=True) for path in (full, other))
    p, q = a["logprobs"], b["logprobs"]
    if not a["whole"]:
        p, q = with_rest(p), with_rest(q)
    kl, _ = kl_and_agreement(p, q)
    return kl, tuple((a["best"] == b["best"]).tolist())


def with_rest(rows: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [n, k] and that of all other tokens together [n, k + 1]."""
    inside = rows.double().exp().sum(-1, keepdim=True).clamp(max=1 - 1e-9)
    return torch.cat([rows.double(), torch.log1p(-inside)], dim=-1)
