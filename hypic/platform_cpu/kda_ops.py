"""Plain-torch stand-ins for the Triton functions of Kimi delta attention, with the contracts that torch_ops states.

Token by token, through the readable recurrence: what a linked prompt is compared with shares no chunk math with it.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from hypic.algebra import naive

from .torch_ops import CHUNK


def gate(a: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Log decay [T, H, K] of the projections ``a`` [T, H, K]; A_log has H numbers, dt_bias H K."""
    rate, pre = A_log.float().reshape(-1, 1).exp(), a.float() + dt_bias.float().view(a.shape[1:])
    return -rate * F.softplus(pre) if lower_bound is None else lower_bound * torch.sigmoid(rate * pre)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_intermediate_states: bool = False,
    **_: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Packed sequences: q, k, v [1, T, H, dim], raw gates g [1, T, H, K], beta [1, T, H] as it is.

    Returns:
        o [1, T, H, V]; if asked for, also the states at the start of every chunk of every sequence [1, chunks, H, V, K].
    """
    assert q.shape[0] == 1 and cu_seqlens is not None, "packed [1, T, heads, dim] input expected"
    assert initial_state is not None and initial_state_indices is not None
    assert A_log is not None and dt_bias is not None, "raw gates expected"
    q, k = (_unit(t[0]) if use_qk_l2norm_in_kernel else t[0].float() for t in (q, k))
    q = q * (k.shape[-1] ** -0.5 if scale is None else scale)
    v_, g_, beta_ = v[0].float(), gate(g[0], A_log, dt_bias, lower_bound), beta[0].float()
    out, starts = torch.empty_like(v_), []
    for slot, (begin, end) in zip(initial_state_indices.tolist(), pairwise(cu_seqlens.tolist()), strict=False):
        state = torch.zeros_like(initial_state[0], dtype=torch.float32)
        if slot >= 0:
            state = state + initial_state[slot]  # a copy: the pool moves on, and the first chunk's state is kept
        for at in range(begin, end, CHUNK):
            part = slice(at, min(at + CHUNK, end))
            starts.append(state)
            out[part], state = naive.kimi_delta(q[part], k[part], v_[part], g_[part], beta_[part], state)
        if slot >= 0:
            initial_state[slot] = state.to(initial_state.dtype)
    o = out[None].to(v.dtype)
    if not output_intermediate_states:
        return o
    return o, (torch.stack(starts) if starts else initial_state[:0].float())[None].to(v.dtype)


def fused_recurrent_kda_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """One token per sequence: ``mixed_qkv`` [N, 2 H K + H V] -> ``out`` [N, 1, H, V]; raw ``a`` [N, H K], ``b`` [N, H]."""
    heads, dim_v, dim_k = initial_state.shape[1:]
    q, k, v = mixed_qkv.split([heads * dim_k, heads * dim_k, heads * dim_v], -1)
    q, k = (t.unflatten(-1, (heads, dim_k)) for t in (q, k))
    q, k = (_unit(t) if use_qk_l2norm_in_kernel else t.float() for t in (q, k))
    q, v, beta = q * scale, v.unflatten(-1, (heads, dim_v)).float(), b.float().sigmoid()
    g = gate(a.unflatten(-1, (heads, dim_k)), A_log, dt_bias, lower_bound)
    out.zero_()
    for i, slot in enumerate(ssm_state_indices.tolist()):
        if slot >= 0:
            one = slice(i, i + 1)
            o, state = naive.kimi_delta(q[one], k[one], v[one], g[one], beta[one], initial_state[slot].float())
            out[i], initial_state[slot] = o.to(out.dtype), state.to(initial_state.dtype)
    return out, initial_state


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
