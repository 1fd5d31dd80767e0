"""The chunked gated delta rule equals the token recurrence, and so do its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hypic.algebra.naive import gated_delta_net
from models.gdn import gated_delta_rule


def inputs(tokens: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(tokens)
    b, h, dk, dv = 2, 3, 16, 24

    def unit(*shape: int) -> Tensor:
        return torch.nn.functional.normalize(torch.randn(*shape, generator=g), dim=-1)

    q, k, v = unit(b, tokens, h, dk), unit(b, tokens, h, dk), torch.randn(b, tokens, h, dv, generator=g)
    decay, beta = -torch.rand(b, tokens, h, generator=g), torch.rand(b, tokens, h, generator=g)
    return [x.requires_grad_() for x in (q, k, v, decay, beta, torch.randn(b, h, dk, dv, generator=g))]


def token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    outs, ends = [], []
    for i in range(len(q)):
        rows = []
        h = state[i].mT.double()
        for t in range(q.shape[1]):
            one = [x[i, t : t + 1].double() for x in (q * q.shape[-1] ** -0.5, k, v, g, beta)]
            h = h * one[3].exp()[0, :, None, None]
            wrong = one[4][0, :, None] * (one[2][0] - (h @ one[1][0, :, :, None])[..., 0])
            h = h + wrong[:, :, None] * one[1][0, :, None, :]
            rows.append((h @ one[0][0, :, :, None])[..., 0])
        outs.append(torch.stack(rows))
        ends.append(h.mT)
    return torch.stack(outs), torch.stack(ends)


@pytest.mark.parametrize("tokens", [1, 64, 130])
def test_outputs_state_and_gradients(tokens: int) -> None:
    ours, theirs = inputs(tokens), inputs(tokens)
    o, h = gated_delta_rule(*ours)
    (o.sin().sum() + h.cos().sum()).backward()
    o_ref, h_ref = token_by_token(*theirs)
    (o_ref.sin().sum() + h_ref.cos().sum()).backward()
    torch.testing.assert_close(o.double(), o_ref, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(h.double(), h_ref, atol=1e-5, rtol=1e-5)
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad, b.grad, atol=5e-5, rtol=1e-4)


def test_the_recurrence_above_is_that_of_the_algebra() -> None:
    q, k, v, g, beta, state = (x.detach().double() for x in inputs(20))
    o, h = token_by_token(q, k, v, g, beta, state)
    naive, end = gated_delta_net(q[0] * 16**-0.5, k[0], v[0], g[0], beta[0], state[0].mT)
    torch.testing.assert_close(o[0], naive, atol=1e-10, rtol=0)
    torch.testing.assert_close(h[0], end.mT, atol=1e-10, rtol=0)
