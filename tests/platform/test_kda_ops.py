"""The torch stand-ins of Kimi delta attention against its definition, one token after the other, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hypic.platform_cpu import kda_ops as ops
from hypic.platform_cpu.torch_ops import CHUNK

H, K, V, SLOTS = 2, 32, 16, 6


def raw_inputs(tokens: int) -> dict[str, Tensor]:
    torch.manual_seed(tokens)
    return {
        "q": torch.randn(tokens, H, K),
        "k": torch.randn(tokens, H, K),
        "v": torch.randn(tokens, H, V),
        "g": 2 * torch.randn(tokens, H, K),
        "beta": torch.rand(tokens, H),
    }


A_LOG, DT_BIAS = torch.tensor([-3.0, 0.5]).view(1, 1, H, 1), torch.linspace(-2, 2, H * K)


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, bound: float | None
) -> tuple[Tensor, list[Tensor]]:
    """Outputs, and the states before each token and after the last."""
    q, k, v, g, beta, state = (t.double() for t in (q, k, v, g, beta, state))
    q, k = (F.normalize(t, dim=-1, eps=1e-6) for t in (q, k))
    pre, rate = g + DT_BIAS.double().view(H, K), A_LOG.double().exp().view(H, 1)
    decay = (-rate * F.softplus(pre) if bound is None else bound * torch.sigmoid(rate * pre)).exp()
    out, states = [], [state]
    for t in range(len(q)):
        state = state * decay[t][:, None, :]
        found = torch.einsum("hvk,hk->hv", state, k[t])
        state = state + torch.einsum("h,hv,hk->hvk", beta[t], v[t] - found, k[t])
        out.append(torch.einsum("hvk,hk->hv", state, q[t]) * K**-0.5)
        states.append(state)
    return torch.stack(out), states


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.usefixtures("nan_empty")
def test_prefill_equals_the_recurrence(bound: float | None) -> None:
    """Sequences around the chunk, one empty, one without a slot; states at the start of every chunk."""
    lengths, slots = (65, 1, 0, 63, 9, 130), [4, 1, 2, 0, -1, 5]
    x, pool = raw_inputs(sum(lengths)), torch.randn(SLOTS, H, V, K)
    before, bounds = pool.clone(), torch.tensor((0, *lengths)).cumsum(0)
    o, starts = ops.chunk_kda(
        **{name: t[None] for name, t in x.items()}, initial_state=pool, initial_state_indices=torch.tensor(slots),
        use_qk_l2norm_in_kernel=True, cu_seqlens=bounds, A_log=A_LOG, dt_bias=DT_BIAS, lower_bound=bound,
        output_intermediate_states=True,
    )  # fmt: skip
    chunk_starts = []
    for slot, a, n in zip(slots, bounds.tolist(), lengths, strict=False):
        if n == 0:
            continue
        start = before[slot] if slot >= 0 else torch.zeros(H, V, K)
        expected, states = recurrence(*(t[a : a + n] for t in x.values()), start, bound)
        close(o[0, a : a + n], expected)
        if slot >= 0:
            close(pool[slot], states[-1])
        chunk_starts += states[:-1][::CHUNK]
    close(starts[0], torch.stack(chunk_starts))
    assert torch.equal(pool[[2, 3]], before[[2, 3]])


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.usefixtures("nan_empty")
def test_a_decode_step_is_one_more_token(bound: float | None) -> None:
    """beta comes before its sigmoid; a row with slot -1 gives zeros and touches no state."""
    x, pool = raw_inputs(3), torch.randn(SLOTS, H, V, K)
    before, slots, out = pool.clone(), torch.tensor([2, -1, 0], dtype=torch.int32), torch.empty(3, 1, H, V)
    mixed = torch.cat([x[name].flatten(1) for name in "qkv"], -1)
    ops.fused_recurrent_kda_packed_decode(
        mixed, x["g"].flatten(1), x["beta"].logit(), A_LOG.view(H), DT_BIAS, K**-0.5, pool, out, slots,
        use_qk_l2norm_in_kernel=True, lower_bound=bound,
    )  # fmt: skip
    for row in (0, 2):
        expected, states = recurrence(*(t[row : row + 1] for t in x.values()), before[slots[row]], bound)
        close(out[row], expected)
        close(pool[slots[row]], states[-1])
    assert not out[1].any()
    assert torch.equal(pool[[1, 3, 4, 5]], before[[1, 3, 4, 5]])
