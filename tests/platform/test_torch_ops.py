"""The torch stand-ins against token-by-token recurrences."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hypic.platform_cpu import torch_ops as ops

H, HV, K, V, SLOTS = 2, 4, 32, 16, 6
LENGTHS = (1, 7, 63, 64, 65, 500)


def delta_rule_inputs(tokens: int, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        "q": torch.randn(1, tokens, H, K),
        "k": torch.randn(1, tokens, H, K),
        "v": torch.randn(1, tokens, HV, V),
        "g": -torch.rand(1, tokens, HV) * torch.tensor([0.001, 0.05, 0.5, 8.0]),
        "beta": torch.rand(1, tokens, HV),
    }


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """One sequence, one token after the other, in float64; the states before each token and after the last."""
    q, k, v, g, beta, state = (t.double() for t in (q, k, v, g, beta, state))
    q, k = (F.normalize(t, dim=-1, eps=1e-6).repeat_interleave(HV // H, dim=1) for t in (q, k))
    out, states = [], [state]
    for t in range(q.shape[0]):
        state = state * g[t].exp()[:, None, None]
        u = beta[t, :, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
        state = state + u[:, :, None] * k[t][:, None, :]
        out.append(torch.einsum("hvk,hk->hv", state, q[t]) * K**-0.5)
        states.append(state)
    return torch.stack(out), states


@pytest.fixture(autouse=True)
def hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CPU mode's hook table has it."""
    from sglang.kernels.ops.attention.fla import chunk

    monkeypatch.setattr(chunk, "chunk_gated_delta_rule_fwd_intra", ops.solve_chunks)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lengths", [(n,) for n in LENGTHS] + [(65, 1, 63, 130)], ids=str)
@pytest.mark.usefixtures("nan_empty")
def test_chunked_delta_rule_equals_recurrence(lengths: tuple[int, ...]) -> None:
    x = delta_rule_inputs(sum(lengths))
    pool = torch.randn(SLOTS, HV, V, K)
    slots = torch.tensor([4, 1, 0, 5][: len(lengths)], dtype=torch.int32)
    bounds = torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
    before = pool.clone()

    o, _, starts = ops.chunk_gated_delta_rule(
        **x, initial_state=pool, initial_state_indices=slots, cu_seqlens=bounds, use_qk_l2norm_in_kernel=True
    )

    chunk_starts = []
    for slot, a, b in zip(slots.tolist(), bounds.tolist(), bounds.tolist()[1:], strict=False):
        expected, states = recurrence(*(t[0, a:b] for t in x.values()), before[slot])
        close(o[0, a:b], expected)
        close(pool[slot], states[-1])
        chunk_starts += states[:-1][:: ops.CHUNK]
    close(starts[0], torch.stack(chunk_starts))
    untouched = [s for s in range(SLOTS) if s not in slots.tolist()]
    assert torch.equal(pool[untouched], before[untouched])


def test_padded_rows_touch_no_state() -> None:
    x = delta_rule_inputs(9)
    pool = torch.randn(SLOTS, HV, V, K)
    before = pool.clone()
    bounds = torch.tensor([0, 4, 4, 9])
    ops.chunk_gated_delta_rule(
        **x, initial_state=pool, initial_state_indices=torch.tensor([-1, 2, 3]), cu_seqlens=bounds
    )
    assert torch.equal(pool[:3], before[:3]) and not torch.equal(pool[3], before[3])


@pytest.mark.usefixtures("nan_empty")
def test_decode_step_continues_a_prefill() -> None:
    """One packed decode token is one more token of the recurrence; a row with slot -1 gives zeros."""
    torch.manual_seed(1)
    mixed = torch.randn(3, 2 * H * K + HV * V)
    a, b, A_log, dt_bias = torch.randn(3, HV), torch.randn(3, HV), torch.randn(HV), torch.randn(HV)
    pool = torch.randn(SLOTS, HV, V, K)
    before, slots = pool.clone(), torch.tensor([2, -1, 0], dtype=torch.int32)
    out = torch.empty(3, 1, HV, V)
    ops.fused_recurrent_gated_delta_rule_packed_decode(
        mixed, a, b, A_log, dt_bias, K**-0.5, pool, out, slots, use_qk_l2norm_in_kernel=True
    )

    g = -A_log.exp() * F.softplus(a + dt_bias)
    q, k, v = mixed.split([H * K, H * K, HV * V], dim=-1)
    for row in (0, 2):
        inputs = q[row].view(1, H, K), k[row].view(1, H, K), v[row].view(1, HV, V), g[row, None], b[row, None].sigmoid()
        expected, states = recurrence(*inputs, before[slots[row]])
        close(out[row], expected)
        close(pool[slots[row]], states[-1])
    assert not out[1].any()
    assert torch.equal(pool[[1, 3, 4, 5]], before[[1, 3, 4, 5]])


@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
def test_convolution_in_pieces_equals_the_whole(length: int) -> None:
    """Prefill in two parts and then decode steps: the window carries over, also through parts shorter than itself."""
    torch.manual_seed(length)
    width, channels = 4, 5
    x = torch.randn(channels, length + 8)
    weight, bias = torch.randn(channels, width), torch.randn(channels)
    expected = F.silu(F.conv1d(F.pad(x, (width - 1, 0))[None], weight[:, None], bias, groups=channels)[0])

    windows = torch.full((3, channels, width - 1), float("nan"))
    slot = torch.tensor([1], dtype=torch.int32)
    parts = []
    for start, end, resumed in ((0, length, False), (length, length + 5, True)):
        bounds = torch.tensor([0, end - start])
        parts.append(
            ops.causal_conv1d_fn(
                x[:, start:end], weight, bias, windows, bounds, None, slot, torch.tensor([resumed]), "silu"
            )
        )
    for t in range(length + 5, length + 8):
        step = ops.causal_conv1d_update(x[:, t][None], windows, weight, bias, "silu", conv_state_indices=slot)
        parts.append(step.T)
    close(torch.cat(parts, dim=1), expected)
    assert windows[[0, 2]].isnan().all()


def test_projection_splits_are_permutations() -> None:
    group, tokens = HV // H, 3
    per_head = torch.arange(tokens * H * (2 * K + 2 * group * V)).float().view(tokens, H, -1)
    ba = torch.arange(tokens * 2 * HV).float().view(tokens, H, -1)
    qkv, z, b, a = ops.fused_qkvzba_split_reshape_cat(per_head.flatten(1), ba.flatten(1), H, HV, K, V)
    assert torch.equal(qkv[:, :K], per_head[:, 0, :K])
    assert torch.equal(qkv[:, H * K : H * K + K], per_head[:, 0, K : 2 * K])
    assert torch.equal(z[:, group], per_head[:, 1, -group * V :][:, :V])
    assert torch.equal(b[:, group], ba[:, 1, 0]) and torch.equal(a[:, 0], ba[:, 0, group])

    flat = torch.cat([qkv, z.flatten(1)], dim=1)
    again = ops.fused_qkvzba_split_reshape_cat_contiguous(flat, torch.cat([b, a], dim=1), H, HV, K, V)
    for left, right in zip(again, (qkv, z, b, a), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("gate_first", [False, True])
def test_gated_norms(gate_first: bool) -> None:
    torch.manual_seed(0)
    x, z, weight = torch.randn(3, 8), torch.randn(3, 8), torch.rand(8)
    normed = x * F.silu(z) if gate_first else x
    expected = F.rms_norm(normed, (8,), weight, eps=1e-6) * (1 if gate_first else F.silu(z))
    close(
        ops.norm_gated(x=x, weight=weight, bias=None, z=z, norm_before_gate=not gate_first, is_rms_norm=True), expected
    )
    if not gate_first:
        close(ops.rms_norm_gated(x, z, weight, None), expected)


def test_state_snapshots_copy_only_masked_rows() -> None:
    conv, ssm = torch.randn(2, SLOTS, 3), torch.randn(2, SLOTS, 4)
    before = conv.clone(), ssm.clone()
    mask = torch.tensor([True, False, True])
    ops.track_mamba_states_all_layers(
        conv, ssm, torch.tensor([0, 1, -1]), mask, torch.tensor([3, 4, 5]), 3, check_freed_slots=True
    )
    for pool, old in zip((conv, ssm), before, strict=True):
        assert torch.equal(pool[:, 3], old[:, 0])
        rest = [0, 1, 2, 4, 5]
        assert torch.equal(pool[:, rest], old[:, rest])
