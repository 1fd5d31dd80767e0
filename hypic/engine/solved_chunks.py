"""What SGLang's gated delta rule solves chunk by chunk in its own pass, kept for the T of the interiors in that pass.

Only its Triton kernels for prefill are known (SGLang's default on Hopper); with others, and for KDA, T is made by kernels of
our own from the layer's inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hypic.artifact.layout import LinearShape
from hypic.kernels.gdn_solved import SolvedChunks, SolvedPlan, gdn_transition_solved
from hypic.kernels.gdn_transition import TransitionPlan, gdn_transition

TARGET = "sglang.kernels.ops.attention.fla.chunk.chunk_gated_delta_rule_fwd_intra"
TOLERANCE = 5e-2
"""Bound on what two ways to T with operands in bf16 may differ by, relative to T (Frobenius norms)."""

logger = logging.getLogger(__name__)
_kept: list[SolvedChunks] | None = None


@contextmanager
def kept(wanted: bool = True) -> Iterator[list[SolvedChunks]]:
    """Collects what SGLang solves inside of the block, a pass of one layer each, if it is wanted."""
    global _kept
    found: list[SolvedChunks] = []
    _kept = found if wanted else None
    try:
        yield found
    finally:
        _kept = None


def keep(result: Any, *args: Any, **kwargs: Any) -> None:
    """After chunk_gated_delta_rule_fwd_intra."""
    if _kept is not None:
        _kept.append(chunks_of_pass(result, *args, **kwargs))


def chunks_of_pass(
    result: tuple[Tensor, Tensor, Tensor], k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *_: Any, **__: Any
) -> SolvedChunks:
    """Of arguments and result (w, u, (I + L)^-1) of SGLang's function: all [1, T, ...], rows one behind the other."""
    w, _u, inverse = result
    return SolvedChunks(*(x[0] for x in (k, g, beta, w, inverse)))


def usable(backend: Any) -> bool:
    """Whether this backend's prefill goes through the hooked function."""
    kernel = getattr(getattr(backend, "kernel_dispatcher", None), "extend_kernel", None)
    return type(kernel).__name__ == "TritonGDNKernel"


@torch.no_grad()
def agrees(shape: LinearShape, k_heads: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Start-up proof: T out of a pass of SGLang's kernels is the T that our own kernels make of the same keys and gates."""
    from sglang.kernels.ops.attention.fla.chunk import chunk_gated_delta_rule

    n, seam, size = 150, 8, shape.heads * shape.d_k * shape.d_k * 4
    rng = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=rng).to(device)

    g, beta = -random(n, shape.heads).abs() / n, random(n, shape.heads).sigmoid() * min(1.0, shape.d_k / n)
    q, keys = (random(1, n, k_heads, shape.d_k).to(dtype) for _ in range(2))
    v, state = random(1, n, shape.heads, shape.d_v).to(dtype), random(1, shape.heads, shape.d_v, shape.d_k)
    slots, ends = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0], [0, n]))
    with kept() as found:
        chunk_gated_delta_rule(
            q, keys, v, g[None], beta[None], initial_state=state, initial_state_indices=slots, cu_seqlens=ends,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
    if len(found) != 1:
        logger.warning("hypic: SGLang's gated delta rule solves its chunks elsewhere; T is made by kernels of our own")
        return False
    arena = torch.zeros(2 * size, dtype=torch.uint8, device=device)
    plan = SolvedPlan.build(tok=[0], length=[n], skip=[seam], blob=[0], first=[True], device=device)
    gdn_transition_solved(found[0], arena=arena, t_off=0, plan=plan)
    ours = TransitionPlan.build(
        seq_tok=[0],
        seq_len=[n],
        seq_skip=[seam],
        seq_slot=[0],
        seq_fresh=[True],
        blob=[size],
        first=[True],
        device=device,
    )
    rest = (x[seam:].contiguous() for x in (found[0].k, g, beta))
    gdn_transition(*rest, arena=arena, t_off=0, plan=ours)
    t, expected = arena.view(torch.float32).view(2, -1)
    error = float((t - expected).norm() / expected.norm())
    if not error <= TOLERANCE:
        logger.warning("hypic: T out of SGLang's pass is off by %.1e; T is made by kernels of our own", error)
        return False
    return True
