"""The parameters of one Mamba2 layer, and the inputs of its recurrence in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from hypic.kernels.conv_runs import check_conv


class Mamba2Layer(NamedTuple):
    """A Mamba2 layer as one rank has it: D = H V + 2 G K channels laid out [x | B | C], H a multiple of G.

    Attributes:
        conv_weight: [D, W]. conv_bias: [D] or None. activation: "silu", "swish" or None.
        A: [H], negative. dt_bias: [H]. skip: [H], Mamba's D.
        heads, groups, d_v, d_k: H, G, the head dimension V and the state dimension K.
    """

    conv_weight: Tensor
    conv_bias: Tensor | None
    activation: str | None
    A: Tensor
    dt_bias: Tensor
    skip: Tensor
    heads: int
    groups: int
    d_v: int
    d_k: int

    @property
    def dim(self) -> int:
        return self.heads * self.d_v + 2 * self.groups * self.d_k

    @property
    def width(self) -> int:
        return self.conv_weight.shape[1]

    def check(self, x: Tensor, dt: Tensor, conv_pool: Tensor) -> None:
        """Raise ValueError if the shapes of the layer, the batch and the pool disagree, or channels are strided."""
        if self.heads % self.groups:
            raise ValueError(f"{self.heads} heads are no multiple of {self.groups} groups")
        if self.conv_weight.shape[0] != self.dim:
            raise ValueError(f"conv_weight {tuple(self.conv_weight.shape)}: expected {self.dim} channels")
        check_conv(self.conv_weight, self.activation, x, conv_pool)
        if dt.shape != (x.shape[0], self.heads) or dt.stride(1) != 1:
            raise ValueError(f"dt {tuple(dt.shape)} (strides {dt.stride()}) is not [{x.shape[0]}, {self.heads}]")

    def steps(self, dt: Tensor) -> tuple[Tensor, Tensor]:
        """Raw dt [n, H] -> step size softplus(dt + dt_bias) and log decay, step size times A; fp32."""
        step = F.softplus(dt.float() + self.dt_bias.float())
        return step, step * self.A.float()

    def split(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convolved [n, D] -> x [n, H, V], and B and C [n, H, K], each group repeated for its heads."""
        inner, states = self.heads * self.d_v, self.groups * self.d_k
        x, b, c = y.split([inner, states, states], -1)
        b, c = (
            t.reshape(len(y), self.groups, self.d_k).repeat_interleave(self.heads // self.groups, 1) for t in (b, c)
        )
        return x.reshape(len(y), self.heads, self.d_v), b, c
