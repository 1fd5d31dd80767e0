"""The linear part of compile and link for any family, through its layer as the engine calls it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from hypic.artifact.layout import LinearShape
from hypic.bench.result import Timing
from hypic.engine.families import family
from hypic.engine.families.base import Memory
from hypic.kernels.chain_plans import ChainItem, ChainPlan
from hypic.kernels.compile_plans import NO_STATE, EndStatesPlan, TransitionPlan

if TYPE_CHECKING:
    from hypic.bench.kernels import Bench


def compile_cases(bench: Bench, linear: LinearShape) -> Iterator[Timing]:
    """T, states after the seams, and S of the segments that one forward pass compiles."""
    n, length, shape = bench.compiled(linear)
    layer = family(linear.family).random_layer(linear, bench.randn)
    inputs, at = layer.random_inputs(n * length, bench.randn), _memory(bench, linear, n)
    transition, seams, due = compile_plans(bench, linear, n, length)
    yield bench.timing("compile: T, one layer", lambda: layer.transition(inputs, at, transition), **shape)
    out = torch.empty(n * length, linear.heads, linear.d_v, dtype=bench.dtype, device=bench.device)
    yield bench.timing(
        "compile: states after the seams, one layer", lambda: layer.chain(inputs, at, seams, out), **shape
    )
    states = torch.randn_like(at.state)
    yield bench.timing(
        "compile: S, one layer",
        lambda: layer.end_states(states, at, due),
        **shape,
        bytes=n * (bench.layout.t_layer + bench.layout.s_layer) + states.nbytes + at.state.nbytes,
    )


def compile_plans(
    bench: Bench, linear: LinearShape, n: int, length: int
) -> tuple[TransitionPlan, ChainPlan, EndStatesPlan]:
    """Of a forward pass that compiles ``n`` whole segments of ``length`` tokens, the i-th in slot i and the i-th blob."""
    seam, slots = min(bench.w, length), list(range(n))
    starts, blobs = [i * length for i in slots], [i * bench.stride for i in slots]
    transition = TransitionPlan.build(
        seq_tok=starts,
        seq_len=[length] * n,
        seq_skip=[seam] * n,
        seq_slot=slots,
        seq_fresh=[True] * n,
        blob=blobs,
        first=[True] * n,
        device=bench.device,
    )
    seams = ChainPlan.build(
        rows=[[ChainItem(start, seam)] for start in starts],
        slot=slots,
        fresh=[True] * n,
        conv_width=linear.conv_width + 1,
        device=bench.device,
    )
    due = EndStatesPlan.build(
        slot=slots, seam=slots if seam else [NO_STATE] * n, ends=[True] * n, blob=blobs, device=bench.device
    )
    return transition, seams, due


def chain_case(bench: Bench, linear: LinearShape, items: list[ChainItem], tokens: int) -> Timing:
    """One row of runs and artifacts, a warm link's."""
    segments = bench.work.segments
    layer = family(linear.family).random_layer(linear, bench.randn)
    inputs, at = layer.random_inputs(tokens, bench.randn), _memory(bench, linear, segments)
    plan = ChainPlan.build(rows=[items], slot=[0], fresh=[True], conv_width=linear.conv_width + 1, device=bench.device)
    out = torch.empty(tokens, linear.heads, linear.d_v, dtype=bench.dtype, device=bench.device)
    return bench.timing(
        "link: chain, one layer",
        lambda: layer.chain(inputs, at, plan, out),
        segments=segments,
        tokens=tokens,
        layers=len(linear.layer_ids),
        bytes=segments * (bench.layout.t_layer + bench.layout.s_layer),
    )


def _memory(bench: Bench, linear: LinearShape, segments: int) -> Memory:
    """Pools of a slot for each segment, and an arena of as many blobs."""
    layer = linear.layer_ids[0]
    state_dtype, operator_dtype = linear.dtypes
    conv = bench.randn(segments, *linear.window, dtype=getattr(torch, linear.conv_dtype))
    return Memory(
        conv=conv if linear.conv_width else None,
        state=bench.randn(segments, linear.heads, linear.d_v, linear.d_k, dtype=torch.float32),
        arena=bench.arena(segments),
        t_off=bench.layout.t_offset(layer),
        s_off=bench.layout.s_offset(layer),
        c_off=bench.layout.conv_offset(layer),
        state_dtype=state_dtype,
        operator_dtype=operator_dtype,
    )
