"""The oracle's Mamba-2 mixer, written from the recurrence (Dao and Gu, arXiv 2405.21060), one token at a time.

Letters as in oracle_mixers; H heads in G groups, head size V, state size N.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class SsmTokens(NamedTuple):
    """What the recurrence needs of each token, float32.

    Attributes:
        raw: inputs of the causal convolution [n, C]. b: [n, H, N]. x: [n, H, V]. dt: step sizes [n, H], > 0.
    """

    raw: Tensor
    b: Tensor
    x: Tensor
    dt: Tensor


class SsmState(NamedTuple):
    """h [H, V, N] and the conv window [W-1, C], oldest input first; float32."""

    h: Tensor
    window: Tensor


class Mamba2:
    """Nemotron-H's and Falcon-H1's mixer: projections, norm and parameters are the module's, the mixing is done here."""

    def __init__(self, module: Any) -> None:
        self._m = module
        self._taps: Tensor = module.conv1d.weight[:, 0].T  # [W, C]; the last tap weighs the token itself
        self._a = -module.A_log.float().exp()

    def start(self) -> SsmState:
        m, (w, c) = self._m, self._taps.shape
        return SsmState(torch.zeros(m.num_heads, m.head_dim, m.ssm_state_size), torch.zeros(w - 1, c))

    def run(self, y: Tensor, state: SsmState) -> tuple[Tensor, SsmState, SsmTokens]:
        m, n = self._m, len(y)
        gate, raw, dt = self._project(y).split([m.intermediate_size, m.conv_dim, m.num_heads], dim=-1)
        inputs = torch.cat([state.window, raw])
        mixed = sum(inputs[j : j + n] * tap for j, tap in enumerate(self._taps))
        mixed = F.silu(mixed if m.conv1d.bias is None else mixed + m.conv1d.bias)
        states = m.n_groups * m.ssm_state_size
        x, b, c = mixed.split([m.intermediate_size, states, states], dim=-1)
        record = SsmTokens(raw, self._heads(b), x.view(n, m.num_heads, -1), F.softplus(dt + m.dt_bias))
        h, out = self._scan(state.h, record, self._heads(c))
        out = (out + m.D[:, None] * record.x).view(1, n, -1)
        normed = m.norm(out, gate[None]) if getattr(m, "mamba_rms_norm", True) else out * F.silu(gate)
        return m.out_proj(normed.reshape(n, -1)), SsmState(h, self._window(state, raw)), record

    def replay(self, state: SsmState, record: SsmTokens) -> SsmState:
        h, _ = self._scan(state.h, record, record.b)
        return SsmState(h, self._window(state, record.raw))

    def _project(self, y: Tensor) -> Tensor:
        """Falcon-H1 scales the mixer's input and every part of its projection."""
        m = self._m
        projected: Tensor = m.in_proj(y * getattr(m, "ssm_in_multiplier", 1.0))
        return projected * m.mup_vector[0] if hasattr(m, "mup_vector") else projected

    def _heads(self, x: Tensor) -> Tensor:
        """[n, G N] -> [n, H, N]: each group serves H / G heads."""
        m = self._m
        return x.view(len(x), m.n_groups, -1).repeat_interleave(m.num_heads // m.n_groups, dim=1)

    def _scan(self, h: Tensor, t: SsmTokens, c: Tensor) -> tuple[Tensor, Tensor]:
        """h <- e^(dt A) h + dt x b^T, then read o = h c. Returns the state after the tokens and outputs [n, H, V]."""
        outputs = []
        for b, x, dt, c_i in zip(t.b, t.x, t.dt, c, strict=True):
            h = (dt * self._a).exp()[:, None, None] * h + dt[:, None, None] * x[:, :, None] * b[:, None, :]
            outputs.append((h @ c_i[:, :, None])[..., 0])
        return h, torch.stack(outputs) if outputs else torch.empty(0, *h.shape[:2])

    def _window(self, state: SsmState, raw: Tensor) -> Tensor:
        inputs = torch.cat([state.window, raw])
        return inputs[len(inputs) - len(state.window) :]
