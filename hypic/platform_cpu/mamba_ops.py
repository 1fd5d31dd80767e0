"""Plain-torch stand-ins for the Triton functions on SGLang's Mamba2 path. Rules and letters as in ``torch_ops``.

G groups of B and C; heads H are a multiple of G.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hypic.kernels.ssd import ssd
from hypic.platform_cpu.torch_ops import PAD_SLOT, causal_conv1d_fn, causal_conv1d_update


def bind_convolutions(*args: Any, **kwargs: Any) -> None:
    """Give the module of SGLang's mixer the convolutions that it imports on GPUs alone."""
    from sglang.srt.layers.attention.mamba import mamba

    for suffix in ("", "_triton"):
        setattr(mamba, f"causal_conv1d_fn{suffix}", causal_conv1d_fn)
        setattr(mamba, f"causal_conv1d_update{suffix}", causal_conv1d_update)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor,
    z: None,
    dt_bias: Tensor,
    initial_states: Tensor | None,
    seq_idx: Tensor,
    cu_seqlens: Tensor,
    out: Tensor,
    state_dtype: torch.dtype,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """The recurrence over packed sequences, as SGLang's mixer calls it.

    Args:
        x: [1, T, H, V]. dt: [1, T, H], raw. A, D, dt_bias: [H]. B, C: [1, T, G, K].
        chunk_size: of the grid that is laid over all T tokens; states come back at its points.
        initial_states: [N, H, V, K], or None where all sequences begin. cu_seqlens: [N+1].
        out: [1, T, H, V], written.
    Returns:
        [1, ceil(T / chunk_size), H, V, K], the state before the first token of every chunk of the grid, of the sequence
        that the token before it belongs to; and [N, H, V, K], the states after the sequences. Both in state_dtype.
    """
    assert z is None and x.shape[0] == 1, "packed [1, T, heads, dim] input without a gate expected"
    heads, groups = x.shape[2], B.shape[2]
    values = x[0].float()
    b, c = (t[0].float().repeat_interleave(heads // groups, 1) for t in (B, C))
    step = F.softplus(dt[0].float() + dt_bias.float())
    log_decay = step * A.float()
    skip = D.float()[:, None] * values
    values_in = step[..., None] * values

    grid = torch.zeros(-(-x.shape[1] // chunk_size), heads, x.shape[3], B.shape[3])
    ends = []
    bounds = cu_seqlens.tolist()
    for i in range(len(bounds) - 1):
        h = torch.zeros_like(grid[0]) if initial_states is None else initial_states[i].float()
        at, end = bounds[i], bounds[i + 1]
        if at == 0:
            grid[0] = h
        while at < end:
            stop = min(end, at - at % chunk_size + chunk_size)
            t = slice(at, stop)
            o, h = ssd(c[t], b[t], values_in[t], log_decay[t], h)
            out[0, t] = (o + skip[t]).to(out.dtype)
            if stop % chunk_size == 0 and stop // chunk_size < len(grid):
                grid[stop // chunk_size] = h
            at = stop
        ends.append(h)
    return grid[None].to(state_dtype), torch.stack(ends).to(state_dtype)


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: None,
    dt_bias: Tensor,
    state_batch_indices: Tensor,
    out: Tensor,
    dt_softplus: bool = True,
    disable_state_update: bool = False,
    **_: object,
) -> None:
    """One token per sequence: x, dt [N, H, V], B and C [N, G, K] -> out [N, H, V]; pool ``state`` [slots, H, V, K].

    A [H, V, K], D and dt_bias [H, V] come expanded.
    """
    if disable_state_update or z is not None or not dt_softplus:
        raise NotImplementedError("CPU mode has no speculative decoding")
    slots = state_batch_indices.long()
    real = slots != PAD_SLOT
    heads = x.shape[1] // B.shape[1]
    b, c = (t.float().repeat_interleave(heads, 1) for t in (B, C))
    step = F.softplus(dt.float() + dt_bias.float())
    h = state[slots.clamp(min=0)].float() * (step[..., None] * A.float()).exp()
    h = h + (step * x.float())[..., None] * b[:, :, None, :]
    o = (h @ c[..., None])[..., 0] + D.float() * x.float()
    out.copy_(o.masked_fill(~real[:, None, None], 0.0).to(out.dtype))
    state[slots[real]] = h[real].to(state.dtype)


def experts(original: Any, self: Any, layer: Any, dispatch_output: Any) -> Any:
    """Around the experts of a MoE layer: Nemotron's, which square a ReLU and have no gate; all others natively.

    The native ones leave out the factor on what experts give, which the kernels for a GPU apply.
    """
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    factor = self.moe_runner_config.routed_scaling_factor or 1.0
    if layer.should_fuse_routed_scaling_factor_in_topk:
        factor = 1.0
    if self.moe_runner_config.activation != "relu2":
        done = original(self, layer, dispatch_output)
        return StandardCombineInput(hidden_states=done.hidden_states * factor) if factor != 1.0 else done

    x, (weights, ids, _) = dispatch_output.hidden_states, dispatch_output.topk_output
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        token, place = (ids == expert).nonzero(as_tuple=True)
        y = F.linear(F.linear(x[token], layer.w13_weight[expert]).relu().square(), layer.w2_weight[expert])
        out.index_add_(0, token, (weights[token, place, None] * y).to(out.dtype))
    return StandardCombineInput(hidden_states=out * factor)
