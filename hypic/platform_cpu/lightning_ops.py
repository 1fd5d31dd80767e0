"""Plain-torch stand-ins on SGLang's path of Lightning attention. Rules and letters as in ``torch_ops``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hypic.kernels.ssd import ssd
from hypic.platform_cpu.torch_ops import PAD_SLOT

_BLOCK = 32
"""Tokens at a time; the boundaries at which a state can be kept."""


def seg_la_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    decay_scales: Tensor,
    meta: Any,
    caches: None = None,
    cache_indices: None = None,
    track_lens: Tensor | None = None,
    track_state_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    decouple: bool = False,
) -> Tensor:
    """h <- e^-slope h + k v^T, read as softmax_scale q h, for packed sequences and their slots in the pool.

    Args:
        q, k [T, H, K], v [T, H, V]. s: pool [slots, H, K, V], updated. decay_scales: slopes [H, 1, 1].
        meta: SegLaMeta; a sequence whose ``s_scales`` is 0 begins at zero.
        track_lens, track_state_indices: after so many tokens (0: none) of a sequence its state also goes to that slot.
    Returns:
        [T, H, V] in the type of q.
    """
    if caches is not None or meta.mask is not None:
        raise NotImplementedError("CPU mode has no speculative decoding")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype)
    slopes, bounds, goes_on = decay_scales.view(-1).float(), meta.q_offsets.tolist(), (meta.s_scales > 0).tolist()
    for i, slot in enumerate(meta.s_offsets.tolist()[: len(bounds) - 1]):
        if slot == PAD_SLOT or bounds[i] == bounds[i + 1]:
            continue
        h = s[slot].float() if goes_on[i] else torch.zeros_like(s[slot], dtype=torch.float32)
        kept = int(track_lens[i]) if track_lens is not None else 0
        for at in range(bounds[i], bounds[i + 1], _BLOCK):
            t = slice(at, min(at + _BLOCK, bounds[i + 1]))
            log_decay = -slopes.expand(t.stop - at, -1)
            o, end = ssd(q[t].float() * scale, k[t].float(), v[t].float(), log_decay, h.mT)
            out[t], h = o.to(out.dtype), end.mT
            if kept and t.stop - bounds[i] == kept and track_state_indices is not None:
                s[int(track_state_indices[i])] = h.to(s.dtype)
        s[slot] = h.to(s.dtype)
    return out
