"""What a compile adds to SGLang's own pass in one GDN layer, kernel by kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hypic.artifact.layout import LinearShape
from hypic.bench.layer_kernels import compile_plans
from hypic.bench.result import Timing
from hypic.engine import solved_chunks
from hypic.kernels.gdn_chain import chain_scratch, gdn_chain
from hypic.kernels.gdn_end_states import gdn_end_states
from hypic.kernels.gdn_keys import gdn_keys
from hypic.kernels.gdn_solved import SolvedChunks, SolvedPlan, gdn_transition_solved
from hypic.kernels.gdn_transition import TransitionScratch, gdn_transition
from hypic.kernels.wy import CHUNK

if TYPE_CHECKING:
    from hypic.bench.kernels import Bench


def key_heads(linear: LinearShape) -> int:
    return (linear.conv_channels - linear.heads * linear.d_v) // (2 * linear.d_k)


def solves(linear: LinearShape, server_args: Any, dtype: torch.dtype, device: str) -> bool:
    """Whether a server with these flags makes T out of what SGLang's own pass solves; tried out as at its start."""
    backend = server_args.linear_attn_prefill_backend or server_args.linear_attn_backend
    if linear.family != "gdn" or backend != "triton":
        return False
    return solved_chunks.agrees(linear, key_heads(linear), dtype, torch.device(device))


def random_gdn(bench: Bench, linear: LinearShape, tokens: int) -> tuple[dict[str, Any], tuple[Tensor, Tensor, Tensor]]:
    """Parameters as the kernels take them, and x, a, b of a batch; its heads forget in a few tokens."""
    channels, v_heads = linear.conv_channels, linear.heads
    parameters = dict(
        conv_weight=bench.randn(channels, linear.conv_width + 1),
        conv_bias=None,
        activation="silu",
        A_log=bench.randn(v_heads, dtype=torch.float32) - 1.5,
        dt_bias=bench.randn(v_heads, dtype=torch.float32),
        num_k_heads=key_heads(linear),
        num_v_heads=v_heads,
        head_k_dim=linear.d_k,
        head_v_dim=linear.d_v,
    )
    return parameters, (bench.randn(tokens, channels), bench.randn(tokens, v_heads), bench.randn(tokens, v_heads))


def gdn_compile_cases(bench: Bench, linear: LinearShape) -> Iterator[Timing]:
    """As many artifacts as one forward pass compiles; no head forgets its interior.

    Where T comes out of SGLang's pass, the kernels that make it from keys and gates are timed, too, but are no part of a compile.
    """
    n, length, shape = bench.compiled(linear)
    layer = linear.layer_ids[0]
    parameters, (x, a, b) = random_gdn(bench, linear, n * length)
    parameters["A_log"] -= 8.0
    conv = bench.randn(n, linear.conv_channels, linear.conv_width, dtype=getattr(torch, linear.conv_dtype))
    plan, seams, due = compile_plans(bench, linear, n, length)
    where: dict[str, Any] = {"arena": bench.arena(n), "t_off": bench.layout.t_offset(layer)}
    state_dtype, operator_dtype = linear.dtypes
    of_t = {**where, "operator_dtype": operator_dtype}

    def keys() -> tuple[Tensor, Tensor, Tensor]:
        return gdn_keys(x, a, b, conv_pool=conv, plan=plan, **parameters)

    yield bench.timing("compile: keys and gates, one layer", keys, **shape)
    k, g, beta = keys()
    scratch = TransitionScratch.of(plan, k, g)
    yield bench.timing(
        "compile: T, one layer", lambda: gdn_transition(k, g, beta, plan=plan, scratch=scratch, **of_t), **shape
    )
    if bench.solved:
        chunks = _random_chunks(bench, linear, n * length)
        rows = SolvedPlan.build(
            tok=[i * length for i in range(n)],
            length=[length] * n,
            skip=[min(bench.w, length)] * n,
            blob=[i * bench.stride for i in range(n)],
            first=[True] * n,
            device=bench.device,
        )
        yield bench.timing(
            "compile: T out of SGLang's pass, one layer",
            lambda: gdn_transition_solved(chunks, plan=rows, **of_t),
            **shape,
        )
    out = torch.empty(n * length, linear.heads, linear.d_v, dtype=bench.dtype, device=bench.device)
    seam_states, ends = (bench.randn(n, linear.heads, linear.d_v, linear.d_k, dtype=torch.float32) for _ in range(2))
    chain = torch.empty(chain_scratch(seams, linear.conv_channels, linear.heads), device=bench.device)
    where |= {"s_off": bench.layout.s_offset(layer), "state_dtype": state_dtype, "operator_dtype": operator_dtype}
    yield bench.timing(
        "compile: states after the seams, one layer",
        lambda: gdn_chain(
            x,
            a,
            b,
            **parameters,
            conv_pool=conv,
            ssm_pool=seam_states,
            **where,
            c_off=0,
            plan=seams,
            out=out,
            scratch=chain,
        ),
        **shape,
    )
    yield bench.timing(
        "compile: S, one layer",
        lambda: gdn_end_states(ends, seam_states, plan=due, **where),
        **shape,
        bytes=n * (bench.layout.t_layer + bench.layout.s_layer) + seam_states.nbytes + ends.nbytes,
    )


def _random_chunks(bench: Bench, linear: LinearShape, tokens: int) -> SolvedChunks:
    """Of the types and sizes that SGLang's kernels leave; log decays so small that no head forgets."""
    heads, d_k = linear.heads, linear.d_k
    g, beta = (bench.randn(tokens, heads, dtype=torch.float32) for _ in range(2))
    return SolvedChunks(
        torch.nn.functional.normalize(bench.randn(tokens, key_heads(linear), d_k), dim=-1),
        -1e-5 * g.abs(),
        beta.sigmoid().to(bench.dtype),
        d_k**-0.5 * bench.randn(tokens, heads, d_k),
        bench.randn(tokens, heads, CHUNK),
    )
