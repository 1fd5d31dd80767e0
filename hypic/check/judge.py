"""How exact a check has to be, by the type the model is served in, and what it is compared with.

In float32 two ways to the same answer agree to EXACT, and the checks are taken literally. In 16-bit types every way
is off by rounding; then the oracle, in float32, is the truth, and hypic may be off by twice what stock SGLang is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hypic.check.oracle import Oracle, OracleError, OracleResult
from hypic.check.result import Tally
from hypic.check.session import Answer, Prompt, Session, distance
from hypic.method import dummy_token

EXACT = 1e-4
"""Bound on logprobs in float32."""
FACTOR = 2.0
"""How many times stock SGLang's own error hypic's may be in 16-bit types (docs/SEMANTICS.md)."""

_NOISE_PROMPTS = 6
_ORACLE_SHARE = 0.5
"""Share of the free memory that the oracle's float32 weights may take."""


class _Watched(NamedTuple):
    ids: list[int]
    logprobs: torch.Tensor


class Judge:
    """One model's measure.

    Args:
        name: how results call the model.
        model: its path or name.
        seed: of the prompts that measure stock SGLang's noise.
    """

    def __init__(self, name: str, model: str, seed: int) -> None:
        self.name, self.seed = name, seed
        self._model = model
        self._noise: float | None = None

    @cached_property
    def _loaded(self) -> tuple[Oracle | None, str]:
        return _load_oracle(self._model)

    @property
    def oracle(self) -> Oracle | None:
        """Loaded on first use: an engine that runs has brought a named model's files here."""
        return self._loaded[0]

    @property
    def no_oracle(self) -> str:
        """Why there is no oracle."""
        return self._loaded[1]

    def tally(self, check: str, session: Session, *, pairs: bool = False) -> Tally:
        """An empty tally for ``check``.

        Args:
            pairs: the check compares two answers of hypic with each other. Each may be off by FACTOR times stock's error.
        """
        if exact(session):
            return Tally(check, self.name, self.seed, EXACT)
        tally = Tally(check, self.name, self.seed, None, 2 * FACTOR if pairs else FACTOR)
        if pairs:
            tally.baseline(self.noise(session))
        return tally

    def against_full(
        self, tally: Tally, session: Session, linked: Answer, stock: Answer, ids: Sequence[int], what: str
    ) -> None:
        """Measure a linked answer that must equal full recompute (P1, P2); ``stock`` is the engine's own."""
        if exact(session):
            tally.error(distance(linked, stock), what)
        elif self.oracle is None:
            tally.baseline(self.noise(session))
            tally.error(distance(linked, stock) / FACTOR, what)
        else:
            tally.baseline(distance(stock, self.full(session, ids, stock.ids)))
            tally.error(distance(linked, self.full(session, ids, linked.ids)), what)

    def full(self, session: Session, ids: Sequence[int], forced: Sequence[int]) -> _Watched:
        """Full recompute of the oracle over the watched ids of ``session``."""
        assert self.oracle is not None
        return _watch(session, self.oracle.full(ids, n_new=len(forced), forced=forced))

    def link(
        self, session: Session, prompt: Prompt, forced: Sequence[int]
    ) -> tuple[_Watched, tuple[tuple[int, int], ...]]:
        """The oracle's linked answer, and the segments that it linked."""
        assert self.oracle is not None
        method = session.method(prompt.method)
        dummies = [dummy_token(self.oracle.text_config)] * method.dummies
        result = self.oracle.link(
            prompt.ids, prompt.segments, w=method.seam_window, n_new=len(forced), forced=forced, dummies=dummies
        )
        return _watch(session, result), result.linked

    def noise(self, session: Session) -> float:
        """What stock SGLang is off by in a 16-bit type: by the oracle, or else between two cuts of the same prefill."""
        if self._noise is None:
            rng = random.Random(self.seed)
            self._noise = 0.0
            for i in range(_NOISE_PROMPTS):
                ids = [rng.randrange(3, session.vocab_size) for _ in range(60 + 40 * i)]
                cold = session.ask(Prompt(ids, tenant=f"noise {i}"))
                if self.oracle is not None:
                    other: Any = self.full(session, ids, cold.ids)
                else:
                    session.ask(Prompt(ids[: len(ids) // 2], tenant=f"noise {i} again"))
                    other = session.ask(Prompt(ids, tenant=f"noise {i} again"))
                self._noise = max(self._noise, distance(cold, other))
        return self._noise


def exact(session: Session) -> bool:
    """Whether the session serves in float32."""
    return session.dtype == "float32"


def _watch(session: Session, result: OracleResult) -> _Watched:
    return _Watched(result.ids, result.logprobs[:, torch.tensor(session.watched)])


def _load_oracle(model: str) -> tuple[Oracle | None, str]:
    """The oracle of a model, or why it has none."""
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(model, local_files_only=True))
        except Exception as e:
            return None, f"the model's files are not on this machine: {e}"
    need, free = _float32_bytes(folder), _free_memory()
    if need > _ORACLE_SHARE * free:
        return None, f"in float32 the model takes {need / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free"
    try:
        return Oracle(folder), ""
    except (OracleError, OSError, ValueError, RuntimeError) as e:
        return None, str(e)


def _float32_bytes(folder: Path) -> int:
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            total += sum(4 * math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    return total


def _free_memory() -> int:
    import psutil

    return int(psutil.virtual_memory().available)
