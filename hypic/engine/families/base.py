"""What a family of linear layers has to say; the rest of the engine knows nothing more about it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hypic.artifact.layout import LinearShape, Operator
from hypic.kernels._common import Impl
from hypic.kernels._triton import Precision
from hypic.kernels.chain_plans import ChainPlan
from hypic.kernels.compile_plans import EndStatesPlan, TransitionPlan
from hypic.kernels.decay_end_states import decay_end_states
from hypic.kernels.gdn_solved import SolvedChunks, SolvedPlan

Inputs = tuple[Tensor, ...]
"""What a layer computes from: projections of the batch's tokens, each with the tokens as its first dimension."""


@dataclass(frozen=True)
class Memory:
    """Where the states of one layer stand.

    Attributes:
        conv: pool of convolution windows [slots, ...], None where the family has none. state: pool [slots, H, V, K].
        arena: uint8. t_off, s_off, c_off: byte offsets inside a blob of the layer's T, S and conv window.
        state_dtype: of S. operator_dtype: of a dense T (hypic.kernels.operators), None: as S.
        precision: of products in Triton kernels.
    """

    conv: Tensor | None
    state: Tensor
    arena: Tensor
    t_off: int
    s_off: int
    c_off: int
    state_dtype: torch.dtype
    precision: Precision = "tf32"
    operator_dtype: torch.dtype | None = None


class LinearLayer(ABC):
    """One layer of a family, bound to its parameters: the operations that link and compile are made of.

    Attributes:
        device: where the parameters are.
        positions: how many positions the layer's inputs know (they carry RoPE), 0 where they know none.
    """

    device: torch.device
    positions: int = 0

    @abstractmethod
    def chain(self, inputs: Inputs, at: Memory, plan: ChainPlan, out: Tensor) -> None:
        """Run rows of runs and artifacts from and to their slots; outputs of run tokens into out [T, H, V]."""

    @abstractmethod
    def transition(self, inputs: Inputs, at: Memory, plan: TransitionPlan) -> None:
        """Write T of compiling interiors into their blobs; called before anything moves the slots on."""

    def transition_solved(self, chunks: SolvedChunks, at: Memory, plan: SolvedPlan) -> None:
        """The same out of what the native kernel solved in its pass; called after it, by families that know how."""
        raise NotImplementedError

    @abstractmethod
    def end_states(self, seam_states: Tensor, at: Memory, plan: EndStatesPlan) -> None:
        """Write S = h_end - h_w T: h_end from the slots, h_w from the scratch pool [rows, H, V, K] fp32 or the blob."""

    @abstractmethod
    def random_inputs(self, n: int, random: Callable[..., Tensor]) -> Inputs:
        """Inputs of n tokens for the start-up proof, as ``random(*size)``, a standard normal, makes them."""

    def at_positions(self, inputs: Inputs, positions: Tensor) -> Inputs:
        """Such inputs as the model makes them of tokens at those positions."""
        return inputs


class DecayLayer(LinearLayer):
    """One whose T is one decay per head. ``_impl``: of the kernels, None: by device."""

    _impl: Impl | None

    def end_states(self, seam_states: Tensor, at: Memory, plan: EndStatesPlan) -> None:
        decay_end_states(
            at.state, seam_states, arena=at.arena, t_off=at.t_off, s_off=at.s_off, plan=plan,
            state_dtype=at.state_dtype, impl=self._impl,
        )  # fmt: skip


class Family(ABC):
    """A kind of linear layers.

    Attributes:
        name: in headers; title: for people. backend: dotted name of SGLang's backend class.
        operator: what T is, see artifact.layout.
        mixin: class put in front of that backend for batches with linked or compiling rows, see engine.linear.
    """

    name: str
    title: str
    backend: str
    operator: Operator
    mixin: type

    def owns_backend(self, backend: Any) -> bool:
        """Whether it is exactly our backend; a subclass may compute something else."""
        kind = type(backend)
        return f"{kind.__module__}.{kind.__qualname__}" == self.backend

    @abstractmethod
    def config(self, model_config: Any) -> Any | None:
        """The config that holds ``mamba2_cache_params`` and ``full_attention_layer_ids``, if the model is of this family."""

    @abstractmethod
    def layers(self, model: Any) -> dict[int, LinearLayer]:
        """The linear layers of a loaded model, by layer id."""

    def random_layer(self, shape: LinearShape, randn: Callable[..., Tensor]) -> LinearLayer:
        """A layer of this shape with random parameters, for benchmarks; ``randn(*size, dtype=...)``."""
        raise NotImplementedError(f"{self.title}: no layer with random parameters to time")

    def check_model(self, model: Any, max_position: int) -> None:  # noqa: B027 (most families have nothing to add)
        """Raise CannotRelocate where the loaded model is not what the family's kernels compute."""

    def keeps_solved_chunks(self, model_runner: Any, shape: LinearShape, proof: bool) -> bool:
        """Whether T comes out of what SGLang's own pass solves, see engine.solved_chunks. ``proof``: try it first."""
        return False

    def shape(
        self,
        layer_ids: tuple[int, ...],
        conv: Sequence[tuple[int, ...]],
        state: tuple[int, ...],
        conv_dtype: str,
        state_dtype: str,
    ) -> LinearShape:
        """Of a layer's conv states and state on one rank, as SGLang's pools have them, without the slots.

        Raises: ValueError where the pools are not what the family's kernels read.
        """
        if len(conv) != 1:
            raise ValueError(f"{len(conv)} conv states per layer; {self.title} has one")
        ((channels, width),) = conv
        heads, d_v, d_k = state
        return LinearShape(
            family=self.name,
            operator=self.operator,
            layer_ids=layer_ids,
            heads=heads,
            d_k=d_k,
            d_v=d_v,
            conv_channels=channels,
            conv_width=width,
            conv_dtype=conv_dtype,
            state_dtype=state_dtype,
        )
