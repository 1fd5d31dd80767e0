"""Plain-torch stand-ins for the Triton functions on SGLang's gated-delta-net path.

Each has the contract of the function it replaces (see the table in ``hooks``): same arguments, same results, state
pools updated in place, slot -1 marks a padded row that neither reads nor writes a pool. Arithmetic is float32 whatever
the dtype of the tensors. Speculative-decoding arguments are refused: CPU mode does not offer it.

Shapes: T tokens, N sequences, H key heads, HV value heads, K and V head dimensions, W convolution width.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Tokens per chunk; SGLang checkpoints states at multiples of it, so it is part of the contract."""

PAD_SLOT = -1


# ------------------------------------------------------------------------------------------------- convolution


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: object = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | bool | None = "silu",
    pad_slot_id: int = PAD_SLOT,
    validate_data: bool = False,
    **_: object,
) -> Tensor:
    """Depthwise causal convolution of packed sequences ``x`` [D, T]; windows in ``conv_states`` [slots, D, W-1]."""
    width, channels = weight.shape[1], x.shape[0]
    out = torch.zeros_like(x)
    for i, (start, end) in enumerate(_spans(query_start_loc)):
        slot = i if cache_indices is None else int(cache_indices[i])
        if slot == pad_slot_id:
            continue
        if has_initial_state is not None and bool(has_initial_state[i]):
            window = conv_states[slot, :, 1 - width :].float()
        else:
            window = x.new_zeros(channels, width - 1, dtype=torch.float32)
        inputs = torch.cat([window, x[:, start:end].float()], dim=1)
        out[:, start:end] = _convolve(inputs[None], weight, bias, activation)[0].to(out.dtype)
        conv_states[slot] = inputs[:, -conv_states.shape[-1] :].to(conv_states.dtype)
    return out


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | bool | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    num_accept_tokens: Tensor | None = None,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
    pad_slot_id: int = PAD_SLOT,
    metadata: object = None,
    validate_data: bool = False,
) -> Tensor:
    """Decode step of the convolution: ``x`` [N, D] or [N, D, T]; windows in ``conv_state`` [slots, D, >= W-1]."""
    _refuse_speculation(cache_seqlens, num_accept_tokens, intermediate_conv_window, retrieve_parent_token)
    tokens = x.unsqueeze(-1) if x.dim() == 2 else x
    count, steps = tokens.shape[0], tokens.shape[-1]
    slots = torch.arange(count) if conv_state_indices is None else conv_state_indices[:count].long()
    real = slots != pad_slot_id
    inputs = torch.cat([conv_state[slots.clamp(min=0)].float(), tokens.float()], dim=-1)
    out = _convolve(inputs[..., -(weight.shape[1] - 1 + steps) :], weight, bias, activation).to(x.dtype)
    conv_state[slots[real]] = inputs[real][..., -conv_state.shape[-1] :].to(conv_state.dtype)
    return out.view_as(x)


def _convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | bool | None) -> Tensor:
    """[N, D, W-1+T] float32 -> [N, D, T]."""
    bias = None if bias is None else bias.float()
    out = F.conv1d(inputs, weight[:, None].float(), bias, groups=inputs.shape[1])
    return F.silu(out) if activation in ("silu", "swish", True) else out


# ---------------------------------------------------------------------------------------- gated delta rule


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, None, Tensor]:
    """The gated delta rule over packed sequences, as chunk-wise matrix products.

    With S [V, K] the state, a = exp(g):  S_t = a_t S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,  o_t = S_t q_t.

    Inside a chunk, with G the running sum of g, S_t = e^{G_t} S_0 + sum_{i<=t} e^{G_t-G_i} u_i k_i^T, where the
    pseudo-values u solve a unit lower triangular system that does not involve S_0 on its left-hand side. So all chunks
    are solved at once, by the function that SGLang's own kernels call for it; only S_0 is passed from chunk to chunk.

    Args:
        q, k: [1, T, H, K].  v: [1, T, HV, V].  g (log decay), beta: [1, T, HV].
        initial_state: [slots, HV, V, K], updated in place.  initial_state_indices: [N], -1 for none.
        cu_seqlens: [N+1].

    Returns:
        o [1, T, HV, V]; None; the states at the start of every chunk of every sequence, [1, chunks, HV, V, K].
    """
    from sglang.kernels.ops.attention.fla import chunk  # where hooks put solve_chunks, and the plugin listens to it

    assert not head_first and q.shape[0] == 1, "packed [1, T, heads, dim] input expected"
    assert initial_state is not None
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    heads, pack = v.shape[2], _ChunkPacking.of(cu_seqlens, v.shape[1])
    if initial_state_indices is None:
        slots = list(range(len(pack.ranges)))
    else:
        slots = initial_state_indices.tolist()

    q, k = (_l2norm(t) if use_qk_l2norm_in_kernel else t.float() for t in (q[0], k[0]))
    total = pack.split(g[0].float()).cumsum(1)  # [chunks, C, HV]; padded tokens have g = k = u = 0 and change nothing
    w, u, _ = chunk.chunk_gated_delta_rule_fwd_intra(
        k=k[None], v=v.float(), g=pack.join(total)[None], beta=beta.float(), cu_seqlens=cu_seqlens
    )
    q, k, w, u = (
        pack.split(t).transpose(1, 2) for t in (_expand_heads(q * scale, heads), _expand_heads(k, heads), w[0], u[0])
    )
    total = total.transpose(1, 2)  # and the others [chunks, HV, C, dim]

    scores = (q @ k.mT) * _decay(total).tril()
    q_state = total.exp().unsqueeze(-1) * q
    k_end = (total[..., -1:] - total).exp().unsqueeze(-1) * k
    end_decay = total[..., -1].exp()[..., None, None]

    out = torch.empty_like(u)
    starts = initial_state.new_empty((pack.chunks, *initial_state.shape[1:]), dtype=torch.float32)
    for slot, chunk_range in zip(slots, pack.ranges, strict=True):
        state = initial_state[slot].float() if slot >= 0 else torch.zeros_like(initial_state[0], dtype=torch.float32)
        for c in chunk_range:
            starts[c] = state
            written = u[c] - w[c] @ state.mT
            out[c] = q_state[c] @ state.mT + scores[c] @ written
            state = end_decay[c] * state + written.mT @ k_end[c]
        if slot >= 0 and len(chunk_range):
            initial_state[slot] = state.to(initial_state.dtype)
    o = pack.join(out.transpose(1, 2)).to(v.dtype)
    return o[None], None, starts[None].to(v.dtype)


def solve_chunks(
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = CHUNK,
    chunk_indices: object = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The triangular systems of all chunks: with L_ti = beta_t e^{G_t-G_i} k_t . k_i, i < t, inside of a chunk,

        W = (I + L)^-1 beta e^G K,  U = (I + L)^-1 beta V.

    Args:
        k: [1, T, H, K], normalised.  v: [1, T, HV, V].  g: G [1, T, HV], summed up inside of chunks.  beta: [1, T, HV].

    Returns:
        W [1, T, HV, K]; U [1, T, HV, V]; rows of (I + L)^-1, [1, T, HV, CHUNK].
    """
    assert g is not None and beta is not None and chunk_size == CHUNK
    pack = _ChunkPacking.of(cu_seqlens, v.shape[1])
    parts = (_expand_heads(k[0].float(), v.shape[2]), v[0].float(), g[0].float(), beta[0].float())
    k_, v_, total, weight = (pack.split(t).transpose(1, 2) for t in parts)
    weight = weight.unsqueeze(-1)
    system = (weight * (k_ @ k_.mT) * _decay(total)).tril(-1)
    eye = torch.eye(system.shape[-1]).expand_as(system)
    right = torch.cat([weight * total.exp().unsqueeze(-1) * k_, weight * v_, eye], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    w, u, inverse = solved.split([k_.shape[-1], v_.shape[-1], eye.shape[-1]], dim=-1)
    rows = F.pad(inverse, (0, CHUNK - inverse.shape[-1]))
    return tuple(pack.join(t.transpose(1, 2))[None] for t in (w, u, rows))  # type: ignore[return-value]


def _decay(total: Tensor) -> Tensor:
    """e^{G_t - G_i} for i <= t, [..., C, C]; at most 1 above the diagonal and at padded tokens, where nothing reads it."""
    return (total.unsqueeze(-1) - total.unsqueeze(-2)).clamp(max=0.0).exp()


class _ChunkPacking:
    """Packed tokens <-> [chunks, C, ...], each sequence padded with zeros to whole chunks."""

    def __init__(self, spans: list[tuple[int, int]]) -> None:
        self.size = min(CHUNK, max(end - start for start, end in spans))
        self.tokens = spans[-1][1]
        self.ranges: list[range] = []
        self.chunks = 0
        rows = []
        for start, end in spans:
            count = -(-(end - start) // self.size) if end > start else 0
            self.ranges.append(range(self.chunks, self.chunks + count))
            rows.append(torch.arange(end - start) + self.chunks * self.size)
            self.chunks += count
        self.rows = torch.cat(rows)  # where token t of the packed input stands

    @classmethod
    def of(cls, cu_seqlens: Tensor | None, tokens: int) -> _ChunkPacking:
        return cls(list(_spans(cu_seqlens)) if cu_seqlens is not None else [(0, tokens)])

    def split(self, x: Tensor) -> Tensor:
        padded = x.new_zeros(self.chunks * self.size, *x.shape[1:])
        padded[self.rows] = x[: self.tokens]
        return padded.view(self.chunks, self.size, *x.shape[1:])

    def join(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)[self.rows]


def fused_recurrent_gated_delta_rule_packed_decode(
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
) -> tuple[Tensor, Tensor]:
    """One token per sequence: ``mixed_qkv`` [N, 2 H K + HV V] -> ``out`` [N, 1, HV, V]; pool [slots, HV, V, K]."""
    count = mixed_qkv.shape[0]
    heads, dim_v, dim_k = initial_state.shape[1:]
    width = (mixed_qkv.shape[1] - heads * dim_v) // 2
    q, k, v = mixed_qkv.split([width, width, heads * dim_v], dim=-1)
    q, k = (t.reshape(count, -1, dim_k) for t in (q, k))
    q, k = (_expand_heads(_l2norm(t) if use_qk_l2norm_in_kernel else t.float(), heads) for t in (q, k))
    v = v.reshape(count, heads, dim_v).float()
    g, beta = (t[0].unsqueeze(-1) for t in fused_gdn_gating(A_log, a, b, dt_bias))  # [N, HV, 1]

    slots = ssm_state_indices.long()
    real = slots >= 0
    state = initial_state[slots.clamp(min=0)].float() * g.exp().unsqueeze(-1)
    u = (v - (state @ k.unsqueeze(-1)).squeeze(-1)) * beta
    state = state + u.unsqueeze(-1) * k.unsqueeze(-2)
    o = (state @ (q * scale).unsqueeze(-1)).squeeze(-1)
    out[:, 0] = o.masked_fill(~real[:, None, None], 0.0).to(out.dtype)
    initial_state[slots[real]] = state[real].to(initial_state.dtype)
    return out, initial_state


def fused_gdn_gating(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, beta: float = 1.0, threshold: float = 20.0
) -> tuple[Tensor, Tensor]:
    """Log decay and write strength, both float32 [1, T, HV], from the projections ``a``, ``b`` [T, HV]."""
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float(), beta, threshold)
    return g[None], b.float().sigmoid()[None]


def _l2norm(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _expand_heads(x: Tensor, heads: int) -> Tensor:
    """[T, H, K] -> [T, HV, K]: each key head serves HV / H value heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


# ---------------------------------------------------------------------------- projections, norms and gates


def fused_qkvzba_split_reshape_cat(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Qwen3-Next's projections, interleaved per key head, to (qkv [T, -1], z [T, HV, V], b [T, HV], a [T, HV])."""
    tokens, group = mixed_qkvz.shape[0], num_heads_v // num_heads_qk
    widths = [head_qk, head_qk, group * head_v, group * head_v]
    q, k, v, z = mixed_qkvz.view(tokens, num_heads_qk, -1).split(widths, dim=-1)
    b, a = mixed_ba.view(tokens, num_heads_qk, -1).split([group, group], dim=-1)
    qkv = torch.cat([t.reshape(tokens, -1) for t in (q, k, v)], dim=-1)
    return qkv, z.reshape(tokens, num_heads_v, head_v), b.reshape(tokens, -1), a.reshape(tokens, -1)


def fused_qkvzba_split_reshape_cat_contiguous(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As above for Qwen3.5, whose projections are not interleaved."""
    z_width = num_heads_v * head_v
    qkv, z = mixed_qkvz.split([mixed_qkvz.shape[1] - z_width, z_width], dim=-1)
    b, a = mixed_ba.chunk(2, dim=-1)
    z = z.reshape(-1, num_heads_v, head_v)
    return qkv.contiguous(), z, b.contiguous(), a.contiguous()


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """RMS norm of ``x`` [..., D] times the activated gate ``g`` (``fused_norm_gate``)."""
    assert residual is None and not prenorm, "residual inputs are not used by any supported model"
    return norm_gated(x=x, weight=weight, bias=bias, z=g, eps=eps, is_rms_norm=True, activation=activation)


def norm_gated(
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> Tensor:
    """Layer or RMS norm over groups of the last dimension, gated by ``z`` before or after (``layernorm_gated``)."""
    y = x.float()
    gate = None
    if z is not None:
        gate = z.float().sigmoid() if activation == "sigmoid" else F.silu(z.float())
    if gate is not None and not norm_before_gate:
        y = y * gate
    groups = y.unflatten(-1, (-1, group_size or y.shape[-1]))
    if not is_rms_norm:
        groups = groups - groups.mean(-1, keepdim=True)
    y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).view_as(y) * weight.float()
    if bias is not None:
        y = y + bias.float()
    if gate is not None and norm_before_gate:
        y = y * gate
    return y.to(x.dtype)


def fused_sigmoid_mul(attn_output: Tensor, gate: Tensor, inplace: bool = False) -> Tensor:
    """``attn_output`` [T, D] * sigmoid(``gate``), where the gate may be [T, heads, D / heads]."""
    out = (attn_output.float() * gate.reshape(attn_output.shape).float().sigmoid()).to(attn_output.dtype)
    return attn_output.copy_(out) if inplace else out


def fused_gate_sigmoid_mul_add(
    hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, final_hidden_states: Tensor
) -> None:
    """``final_hidden_states`` [T, D] += sigmoid(``hidden_states`` . ``gate_weight``) * ``shared_output``, in place."""
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid().unsqueeze(1)
    final_hidden_states.add_((gate * shared_output.float()).to(final_hidden_states.dtype))


# ------------------------------------------------------------------------------- state snapshots for the radix tree


def track_mamba_states_all_layers(
    conv_states_pool: Tensor,
    ssm_states_pool: Tensor,
    cache_indices: Tensor,
    mamba_track_mask: Tensor,
    mamba_track_indices: Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy rows ``cache_indices`` to ``mamba_track_indices`` where the mask is set; pools are [layers, slots, ...]."""
    take = mamba_track_mask[:batch_size].bool()
    source, target = cache_indices[:batch_size].long(), mamba_track_indices[:batch_size].long()
    if check_freed_slots:
        take = take & (source >= 0) & (target >= 0)
    source, target = source[take], target[take]
    for pool in (conv_states_pool, ssm_states_pool):
        pool[:, target] = pool[:, source]


def track_mamba_states_if_needed(
    conv_states: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    mamba_track_mask: Tensor,
    mamba_track_indices: Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """As above for the pools of one layer, [slots, ...]."""
    pools = conv_states[None], ssm_states[None]
    track_mamba_states_all_layers(
        *pools, cache_indices, mamba_track_mask, mamba_track_indices, batch_size, check_freed_slots
    )


# ----------------------------------------------------------------------------------------------------- helpers


def _spans(cumulative: Tensor) -> Iterator[tuple[int, int]]:
    bounds = cumulative.tolist()
    return pairwise(bounds)


def _refuse_speculation(*arguments: Tensor | None) -> None:
    if any(argument is not None for argument in arguments):
        raise NotImplementedError("CPU mode has no speculative decoding")
