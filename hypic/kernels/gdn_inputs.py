"""From the projected batch to the inputs of the gated delta rule: causal conv, SiLU, l2norm, gates.

The convolution of a run looks back over the last W-1 inputs of its *stream*: the window its row starts with, then runs
and the own inputs of artifacts in natural order. Where each of them stands is the same for every layer, so a plan holds
it as window codes and all tokens of a batch are convolved in parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hypic.kernels._common import Impl, IntVector, pick_impl, to_device

L2_EPS = 1e-6

ZERO, TOKEN, POOL, ARTIFACT = range(4)


def window_code(kind: int, value: int = 0) -> int:
    """Where one input of a conv window stands, as one integer.

    ``value`` is the token of the flattened batch (TOKEN), the column of the row's pool window (POOL), or
    ``blob_offset * (W-1) + column`` (ARTIFACT).
    """
    return value << 2 | kind


class GdnLayer(NamedTuple):
    """The parameters of one GDN layer that its inputs need, D = 2 HK K + HV V channels laid out [q | k | v].

    Attributes:
        conv_weight: [D, W]. conv_bias: [D] or None. activation: "silu", "swish" or None.
        A_log, dt_bias: [HV].
    """

    conv_weight: Tensor
    conv_bias: Tensor | None
    activation: str | None
    A_log: Tensor
    dt_bias: Tensor
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int

    @property
    def dim(self) -> int:
        return 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim

    @property
    def width(self) -> int:
        return self.conv_weight.shape[1]

    def check(self, x: Tensor, conv_pool: Tensor) -> None:
        """Raise ValueError if the shapes of the layer, the batch and the pool disagree."""
        if self.activation not in (None, "silu", "swish"):
            raise ValueError(f"activation {self.activation!r}: only silu, swish and None are known")
        if self.num_v_heads % self.num_k_heads:
            raise ValueError(f"{self.num_v_heads} value heads are no multiple of {self.num_k_heads} key heads")
        want = (self.dim, self.width - 1)
        if x.shape[1] != self.dim or self.conv_weight.shape[0] != self.dim or tuple(conv_pool.shape[1:]) != want:
            raise ValueError(
                f"x {tuple(x.shape)}, conv_weight {tuple(self.conv_weight.shape)}, conv_pool {tuple(conv_pool.shape)}: "
                f"expected {self.dim} channels and a window of {self.width - 1}"
            )


# ---------------------------------------------------------------- torch reference


def conv_torch(layer: GdnLayer, taps: Sequence[Tensor]) -> Tensor:
    """Causal convolution and activation. taps: for each of the W inputs under the kernel, oldest first, [n, D] fp32."""
    weight = layer.conv_weight.float()
    y = taps[0] * weight[:, 0]
    for j in range(1, layer.width):
        y = y + taps[j] * weight[:, j]
    if layer.conv_bias is not None:
        y = y + layer.conv_bias.float()
    return F.silu(y) if layer.activation else y


def _l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def split_heads_torch(layer: GdnLayer, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[n, D] -> q [n, HK, K] normalised and scaled by K**-0.5, k [n, HK, K] normalised, v [n, HV, V]."""
    key_dim = layer.num_k_heads * layer.head_k_dim
    q, k, v = y.split([key_dim, key_dim, layer.num_v_heads * layer.head_v_dim], -1)
    heads = (y.shape[0], layer.num_k_heads, layer.head_k_dim)
    v = v.reshape(y.shape[0], layer.num_v_heads, layer.head_v_dim)
    return _l2norm(q.reshape(heads)) * layer.head_k_dim**-0.5, _l2norm(k.reshape(heads)), v


def gates_torch(layer: GdnLayer, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Projections a, b [n, HV] -> log decay g = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b), fp32."""
    g = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias.float())
    return g, b.float().sigmoid()


# ---------------------------------------------------------------- whole subsequences


@dataclass(frozen=True, kw_only=True)
class InputsPlan:
    """Whole subsequences of a batch, built once per batch by :meth:`build`; all int64 on the device.

    Attributes:
        item_tok: [N] first token of each subsequence in the flattened batch, its skipped tokens included.
        item_row: [N] 0..N-1. slot: [N] pool slot that holds the window before the subsequence.
        item_win: [N, W-1] window codes of that window.
        run_tok: [M] token of the batch behind each output row. run_item: [M] its subsequence.
        total: M, the sum of (length - skip).
    """

    item_tok: Tensor
    item_row: Tensor
    slot: Tensor
    item_win: Tensor
    run_tok: Tensor
    run_item: Tensor
    total: int

    @classmethod
    def build(
        cls,
        *,
        seq_tok: Sequence[int],
        seq_len: Sequence[int],
        seq_slot: IntVector,
        seq_fresh: Sequence[bool],
        seq_skip: Sequence[int] | None = None,
        conv_width: int,
        device: torch.device | str,
    ) -> InputsPlan:
        """Plan subsequences of ``seq_len`` tokens that start at token ``seq_tok`` of the batch.

        Args:
            seq_slot: pool slots; may be a device tensor.
            seq_fresh: True: a zero window precedes the subsequence, whatever the slot holds.
            seq_skip: leading tokens (the seam) that feed the convolution but give no output. Default 0.
            conv_width: W.
        Raises: ValueError if a skip exceeds its length.
        """
        n = len(seq_tok)
        skip = np.asarray(seq_skip if seq_skip is not None else [0] * n, np.int64)
        counts = np.asarray(seq_len, np.int64) - skip
        if (counts < 0).any():
            raise ValueError(f"seq_skip {skip.tolist()} exceeds seq_len {list(seq_len)}")
        columns = range(conv_width - 1)
        windows = [[window_code(ZERO) if fresh else window_code(POOL, c) for c in columns] for fresh in seq_fresh]
        run_item, run_tok = flatten_runs(np.asarray(seq_tok, np.int64) + skip, counts)
        on_device = to_device(
            {
                "item_tok": seq_tok,
                "item_row": np.arange(n),
                "slot": seq_slot,
                "item_win": np.asarray(windows, np.int64).reshape(n, conv_width - 1),
                "run_tok": run_tok,
                "run_item": run_item,
            },
            device,
        )
        return cls(**on_device, total=len(run_tok))


def flatten_runs(first: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Runs of ``counts`` tokens from ``first`` -> (run, token of the batch) of every token, run by run."""
    run = np.repeat(np.arange(len(counts)), counts)
    return run, np.repeat(first - (counts.cumsum() - counts), counts) + np.arange(len(run))


def gdn_inputs(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    activation: str | None,
    A_log: Tensor,
    dt_bias: Tensor,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    conv_pool: Tensor,
    plan: InputsPlan,
    impl: Impl | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values and gates of whole subsequences, their output rows concatenated (M = ``plan.total``).

    Args:
        x: [T, D] projections before the convolution. a, b: [T, HV].
        conv_pool: [slots, D, W-1]; call this *before* the native kernel replaces the windows.
    Returns: fp32 k [M, HK, K] l2-normalised, v [M, HV, V], g [M, HV] (log decay), beta [M, HV].
    Raises: ValueError if shapes disagree.
    """
    layer = GdnLayer(
        conv_weight, conv_bias, activation, A_log, dt_bias, num_k_heads, num_v_heads, head_k_dim, head_v_dim
    )
    layer.check(x, conv_pool)
    if pick_impl(impl, x) == "triton":
        raise NotImplementedError("gdn_inputs: the Triton kernel is not there yet")
    return _gdn_inputs_torch(layer, x, a, b, conv_pool, plan)


def _gdn_inputs_torch(
    layer: GdnLayer, x: Tensor, a: Tensor, b: Tensor, conv_pool: Tensor, plan: InputsPlan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    back = layer.width - 1
    fresh = plan.item_win[:, 0] == window_code(ZERO)
    windows = conv_pool[plan.slot].float().masked_fill(fresh[:, None, None], 0.0)
    local = plan.run_tok - plan.item_tok[plan.run_item]
    taps = []
    for j in range(layer.width):
        in_run = (local - back + j >= 0)[:, None]
        from_run = x[(plan.run_tok - back + j).clamp(min=0)].float()
        from_window = windows[plan.run_item, :, (local + j).clamp(max=back - 1)]
        taps.append(torch.where(in_run, from_run, from_window))
    _, k, v = split_heads_torch(layer, conv_torch(layer, taps))
    g, beta = gates_torch(layer, a[plan.run_tok], b[plan.run_tok])
    return k, v, g, beta
