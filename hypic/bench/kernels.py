"""hypic's own kernels at a model's shape, on random tensors and without an engine.

    python -m hypic.bench.kernels PLAN CONFIG FLAGS       prints EngineRuns, like hypic.bench.child

Cases say what they cover: one layer, or all layers in one launch. Where a kernel is bound by memory, ``shape["bytes"]`` is
what it must move at least once, to be held against the "copy" case of the same run.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor

from hypic.artifact.arena import align
from hypic.artifact.layout import ArtifactLayout, LinearShape
from hypic.bench.composition_error import composition_errors
from hypic.bench.gdn_kernels import gdn_compile_cases, random_gdn, solves
from hypic.bench.layer_kernels import chain_case, compile_cases
from hypic.bench.result import EngineRun, Timing
from hypic.bench.suites import Plan
from hypic.config import HypicConfig
from hypic.kernels.gdn_chain import ChainItem, ChainPlan, chain_scratch, gdn_chain
from hypic.kernels.operators import write_operator
from hypic.kernels.relocate import InteriorPlan, capture_interiors, relocate_interiors
from hypic.kernels.seam_attention import SeamPlan, seam_attention
from hypic.kernels.seam_plan import SeamShape

COMPILE_TOKENS = 8192
"""Of one forward pass, unless SGLang's flags say otherwise: its chunk on a GPU."""
_COPY_BYTES = 1 << 30
_FLUSH_BYTES = 256 << 20
_SLEEP_CYCLES = 4_000_000  # about 2 ms


class Bench:
    """Tensors of one layer of the model, shared by the cases.

    Attributes:
        chunk: most tokens of a forward pass. solved: T of GDN comes out of SGLang's own pass (engine.solved_chunks).
    """

    def __init__(
        self,
        layout: ArtifactLayout,
        q_heads: int,
        dtype: torch.dtype,
        plan: Plan,
        device: str,
        chunk: int = COMPILE_TOKENS,
        solved: bool = False,
    ) -> None:
        self.layout, self.q_heads, self.dtype, self.device, self.chunk = layout, q_heads, dtype, device, chunk
        self.work, self.w, self.solved = plan.workload, plan.seam_window, solved
        self.rng = torch.Generator(device).manual_seed(plan.workload.seed)
        self.interior = max(self.work.segment_tokens - self.w, 0)
        self.stride = align(layout.payload_bytes(self.interior)) + 256
        self.flush = torch.empty(_FLUSH_BYTES if device == "cuda" else 1, dtype=torch.uint8, device=device)

    @property
    def gdn(self) -> bool:
        return self.layout.linear is not None and self.layout.linear.family == "gdn"

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, generator=self.rng, device=self.device).to(dtype or self.dtype)

    def arena(self, segments: int) -> Tensor:
        """Blobs of ``segments`` artifacts with small random T and S: one of a hundred MiB, and copies of it."""
        blob = torch.zeros(self.stride, dtype=torch.uint8, device=self.device)
        for part in self.layout.parts(blob, self.interior).values():
            part.copy_(0.02 * self.randn(*part.shape))
        if (linear := self.layout.linear) is not None and linear.operator_dtype:  # what parts gave is a copy
            for layer in linear.layer_ids:
                t = 0.02 * self.randn(linear.heads, linear.d_k, linear.d_k, dtype=torch.float32)
                write_operator(t, blob, self.layout.t_offset(layer), linear.dtypes[1])
        return blob.repeat(segments)

    def compiled(self, linear: LinearShape) -> tuple[int, int, dict[str, int]]:
        """Segments and tokens of each that one forward pass of a cold prompt compiles, and the ``shape`` of such a case."""
        work = self.work
        length = min(work.segment_tokens, self.chunk)
        n = max(1, min(work.segments, self.chunk // work.segment_tokens))
        passes = -(-work.segments // n) * -(-work.segment_tokens // length)
        return n, length, {"segments": n, "segment_tokens": length, "layers": len(linear.layer_ids), "passes": passes}

    def timing(self, case: str, run: Callable[[], Any], **shape: int) -> Timing:
        """``run`` in ms, after three that warm up, each with the cache flushed.

        On a GPU the device sleeps first, so that all launches are queued when it begins: their latency is no part of the time.
        """
        values = []
        for i in range(self.work.reps + 3):
            self.flush.zero_()
            if self.device == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                torch.cuda._sleep(_SLEEP_CYCLES)
                begin.record()
                run()
                end.record()
                torch.cuda.synchronize()
                took = begin.elapsed_time(end)
            else:
                start = time.perf_counter()
                run()
                took = 1e3 * (time.perf_counter() - start)
            values += [took] if i >= 3 else []
        return Timing(suite="kernels", case=case, values=values, shape=shape)

    def cases(self) -> Iterator[Timing]:
        yield self._copy()
        if self.layout.linear is not None:
            yield from (gdn_compile_cases if self.gdn else compile_cases)(self, self.layout.linear)
            yield from self._chain(self.layout.linear)
        if self.layout.full is not None:
            yield from self._interiors()
            if self.layout.full.d_v:  # a latent is not for hypic's kernel
                yield from self._seams()
        if self.layout.linear is not None and self.gdn:
            yield from composition_errors(self, self.layout.linear)

    def _copy(self) -> Timing:
        source = torch.zeros(_COPY_BYTES if self.device == "cuda" else 1 << 20, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return self.timing("copy, for the bandwidth", lambda: target.copy_(source), bytes=2 * source.numel())

    def _chain(self, linear: LinearShape) -> Iterator[Timing]:
        """The linear layer of a warm link: system, then seam and artifact of each segment, then the query."""
        work = self.work
        tokens = work.seams(self.w)
        seam, at = min(self.w, work.segment_tokens), work.system
        items = [ChainItem(0, work.system)] if work.system else []
        for i in range(work.segments):
            items.append(ChainItem(at, seam, i * self.stride, min(linear.conv_width, self.interior)))
            at += seam
        items.append(ChainItem(at, work.query))
        if linear.family != "gdn":
            yield chain_case(self, linear, items, tokens)
            return
        parameters, (x, a, b) = random_gdn(self, linear, tokens)
        arena, layer = self.arena(work.segments), linear.layer_ids[0]
        plan = ChainPlan.build(
            rows=[items], slot=[0], fresh=[True], conv_width=linear.conv_width + 1, device=self.device
        )
        scratch = torch.empty(chain_scratch(plan, linear.conv_channels, linear.heads), device=self.device)
        out = torch.empty(tokens, linear.heads, linear.d_v, dtype=self.dtype, device=self.device)
        conv = self.randn(1, linear.conv_channels, linear.conv_width, dtype=getattr(torch, linear.conv_dtype))
        ssm = self.randn(1, linear.heads, linear.d_v, linear.d_k, dtype=torch.float32)
        offsets: dict[str, Any] = {
            "t_off": self.layout.t_offset(layer),
            "s_off": self.layout.s_offset(layer),
            "c_off": self.layout.conv_offset(layer),
        }
        state_dtype, operator_dtype = linear.dtypes
        yield self.timing(
            "link: chain, one layer",
            lambda: gdn_chain(
                x, a, b, **parameters, conv_pool=conv, ssm_pool=ssm, arena=arena, **offsets, plan=plan, out=out,
                state_dtype=state_dtype, operator_dtype=operator_dtype, scratch=scratch,
            ),
            segments=work.segments,
            tokens=tokens,
            layers=len(linear.layer_ids),
            bytes=work.segments * (self.layout.t_layer + self.layout.s_layer),
        )  # fmt: skip

    def _interiors(self) -> Iterator[Timing]:
        """All layers' K and V of all segments, from the arena into slots and back."""
        full, work = self.layout.full, self.work
        assert full is not None
        if not self.interior:
            return
        tokens = work.segments * self.interior
        dtype = getattr(torch, full.dtype)
        k_pools = [self.randn(tokens, full.heads, full.d_k, dtype=dtype) for _ in full.layer_ids]
        v_pools = [self.randn(tokens, full.heads, full.d_v, dtype=dtype) for _ in full.layer_ids if full.d_v]
        arena = self.arena(work.segments)
        plan = InteriorPlan.build(
            blob_kv=[i * self.stride + self.layout.kv_offset for i in range(work.segments)],
            count=[self.interior] * work.segments,
            slots=torch.randperm(tokens, generator=self.rng, device=self.device),
            local=[self.w] * work.segments,
            shift=[work.system + i * work.segment_tokens for i in range(work.segments)],
            device=self.device,
        )
        rotary = full.d_k // 4 * 2
        angles = torch.arange(work.tokens, device=self.device)[:, None] * 1e4 ** -torch.linspace(
            0, 1, rotary // 2, device=self.device
        )
        table = torch.cat([angles.cos(), angles.sin()], -1)
        shape = {"tokens": tokens, "layers": len(full.layer_ids), "bytes": 2 * tokens * self.layout.kv_token_bytes}
        yield self.timing(
            "link: relocate interiors, all layers",
            lambda: relocate_interiors(
                arena, plan, k_pools, v_pools, cos_sin=table, rotary_dim=rotary, is_neox=True
            ),
            **shape,
        )  # fmt: skip
        yield self.timing(
            "compile: capture interiors, all layers", lambda: capture_interiors(arena, plan, k_pools, v_pools), **shape
        )

    def _seams(self) -> Iterator[Timing]:
        """Full attention of all computed tokens of a warm link."""
        full, work = self.layout.full, self.work
        assert full is not None
        seam = min(self.w, work.segment_tokens)
        starts = [work.system + i * work.segment_tokens for i in range(work.segments)]
        positions = [*range(work.system), *(s + j for s in starts for j in range(seam))]
        positions += range(work.tokens - work.query, work.tokens)
        dtype, n = getattr(torch, full.dtype), len(positions)
        q = self.randn(n, self.q_heads, full.d_k, dtype=dtype)
        k, v = (self.randn(work.tokens, full.heads, d, dtype=dtype) for d in (full.d_k, full.d_v))
        plan = SeamPlan.build(
            rows=[0],
            tokens=[list(range(n))],
            positions=[positions],
            shape=SeamShape(self.q_heads, full.heads, full.d_k, full.d_v, dtype),
            device=self.device,
        )
        slots = torch.randperm(work.tokens, generator=self.rng, device=self.device).int()[None]
        out = torch.empty(n, self.q_heads, full.d_v, dtype=dtype, device=self.device)
        yield self.timing(
            "link: full attention of seams, one layer",
            lambda: seam_attention(q, k, v, slots, plan=plan, scale=full.d_k**-0.5, out=out),
            tokens=n,
            layers=len(full.layer_ids),
            bytes=k.nbytes + v.nbytes,
        )


def run(plan: Plan, config: HypicConfig, argv: list[str]) -> Iterator[EngineRun]:
    """Time the kernels at the shape of the model that SGLang's flags name; yields what there is after each case."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    from hypic.doctor.model import read_layout

    began = time.perf_counter()
    load_plugins()
    parser = argparse.ArgumentParser(prog="hypic bench")
    ServerArgs.add_cli_args(parser)
    flags = parser.parse_args(argv)
    flags.enable_multimodal = False  # as in the engines that are timed
    server_args: Any = ServerArgs.from_cli_args(flags)
    model = ModelConfig.from_server_args(server_args)
    layout = read_layout(model, server_args, config.state_dtype)
    heads = model.num_attention_heads // server_args.tp_size
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chunk = server_args.chunked_prefill_size
    chunk = chunk if chunk and chunk > 0 else COMPILE_TOKENS
    solved = layout.linear is not None and solves(layout.linear, server_args, model.dtype, device)
    bench = Bench(layout, heads, model.dtype, plan, device, chunk, solved)
    settings = {
        "dtype": str(model.dtype), "state_dtype": layout.linear and layout.linear.state_dtype,
        "operator_dtype": layout.linear and (layout.linear.operator_dtype or layout.linear.state_dtype), "device": device,
        "chunk": chunk, "T": "out of SGLang's pass" if solved else "of kernels of our own",
    }  # fmt: skip
    found = EngineRun(name="kernels", flags=argv, settings=settings, start_seconds=0.0, timings=[])
    for timing in bench.cases():
        rate = f", {timing.shape['bytes'] / timing.median / 1e6:,.0f} GB/s" if "bytes" in timing.shape else ""
        found.start_seconds = time.perf_counter() - began
        value = f"{timing.median:.4f}" if timing.unit == "ms" else f"{timing.median:.2g}"
        after = f"{found.start_seconds:.0f} s after the start"
        print(f"{timing.suite} {timing.case}: {value} {timing.unit}{rate}, {after}", flush=True)
        found.timings.append(timing)
        yield found


if __name__ == "__main__":
    from hypic.bench.child import RESULT

    orders = msgspec.json.decode(sys.argv[1], type=Plan), msgspec.json.decode(sys.argv[2], type=HypicConfig)
    with torch.no_grad():
        for found in run(*orders, sys.argv[3:]):
            print(RESULT + msgspec.json.encode(found, enc_hook=str).decode(), flush=True)
