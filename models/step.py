"""A training step as a CUDA graph: at this size the time of a step is the time to launch its thousands of kernels.

Every level has its shape, so its graph: after a few steps by launches one step is captured, then replayed on new inputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .stream import TEXT_SHARE, Batch
from .task import LEVELS

_EAGER = 3  # steps before the capture: they create the optimizer's state and choose algorithms


class Inputs(NamedTuple):
    """A batch on the device, in a size that depends on its level alone: ``kind`` and ``text_known`` are 0 where padded.

    ids [n, tokens], answer_at, answer, kind [A], text_at, text [X] int64; restarts [n, tokens], text_known [X] float32.
    """

    ids: Tensor
    restarts: Tensor
    answer_at: Tensor
    answer: Tensor
    kind: Tensor
    text_at: Tensor
    text: Tensor
    text_known: Tensor

    @classmethod
    def of(cls, made: Batch, device: torch.device) -> Inputs:
        n, tokens = made.ids.shape
        answers, texts = 2 * n * LEVELS[made.level].questions, n * tokens // TEXT_SHARE
        known = np.ones(len(made.text), dtype=np.float32)
        arrays = [made.ids, made.restarts.astype(np.float32)]
        arrays += [_padded(x, answers) for x in (made.answer_at, made.answer, made.kind)]
        arrays += [_padded(x, texts) for x in (made.text_at, made.text, known)]
        tensors = [torch.from_numpy(x) for x in arrays]
        tensors = [t if t.is_floating_point() else t.long() for t in tensors]
        if device.type == "cuda":
            tensors = [t.pin_memory().to(device, non_blocking=True) for t in tensors]
        return cls(*tensors)


def _padded(x: np.ndarray, size: int) -> np.ndarray:
    if len(x) > size:
        raise ValueError(f"{len(x)} entries for {size} places")
    return np.concatenate([x, np.zeros(size - len(x), dtype=x.dtype)])


class Graphs:
    """A graph per level of ``trainer.run``, in one pool of memory: they never run at the same time."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._pool: Any = None
        self._eager: dict[int, int] = {}
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Inputs]] = {}

    def run(self, made: Batch, sums: Tensor) -> None:
        inputs = Inputs.of(made, sums.device)
        if made.level not in self._captured:
            done = self._eager[made.level] = self._eager.get(made.level, 0) + 1
            if done <= _EAGER:
                self._trainer.run(inputs, sums)
                return
            self._capture(made.level, inputs, sums)
        graph, static = self._captured[made.level]
        for to, new in zip(static, inputs, strict=True):
            to.copy_(new)
        graph.replay()

    def _capture(self, level: int, inputs: Inputs, sums: Tensor) -> None:
        static = Inputs(*(t.clone() for t in inputs))
        self._trainer.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._trainer.run(static, sums)
        self._pool = graph.pool()
        self._captured[level] = graph, static
