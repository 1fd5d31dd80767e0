"""What joining segments by (T, S) adds to the error of a GDN layer's state, beside what stock SGLang's own kernel is off by.

All segments of the workload, one behind the other, through one layer with random parameters: once by SGLang's chunk kernel over
all tokens, once compiled one by one, as the engine does it, and joined by the chain kernel. Both end states are held against
the one that float64 gives on the same inputs. Heads differ in how much they keep and in how much they write, so that T matters:
with random keys and a full write strength all would be overwritten within a segment.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from hypic.artifact.layout import ArtifactLayout, LinearShape
from hypic.artifact.store import Artifact
from hypic.bench.dummy import HORIZON, set_decays
from hypic.bench.gdn_kernels import random_gdn
from hypic.bench.result import Timing
from hypic.bench.suites import COMPOSITION
from hypic.config import artifact_dtypes
from hypic.engine.batch import CompileRow
from hypic.engine.families.base import Memory
from hypic.engine.families.gdn import GdnLayer
from hypic.engine.linear_compile import CompileStep
from hypic.engine.request import Compile
from hypic.engine.solved_chunks import kept
from hypic.kernels.chain_plans import ChainItem, ChainPlan
from hypic.kernels.gdn_inputs import l2norm_torch
from hypic.kernels.gdn_solved import SolvedChunks
from hypic.kernels.wy import CHUNK, Chunk

if TYPE_CHECKING:
    from hypic.bench.kernels import Bench

UNIT = "of |h|"
_WEAKEST = -8.0
"""Offset of the write strength's input in the head that writes least; in the last it is 0."""
_PIECE = 32 * CHUNK


def composition_errors(bench: Bench, linear: LinearShape) -> Iterator[Timing]:
    """A case for each way to the end state. Values are |h - truth| / |truth| of each head."""
    trial = Trial(bench, linear)
    truth = trial.truth()

    def case(name: str, state: Tensor) -> Timing:
        error = (state.double() - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)
        shape = {"segments": bench.work.segments, "segment_tokens": trial.length, "heads": linear.heads}
        return Timing(suite=COMPOSITION, case=name, values=error.tolist(), unit=UNIT, shape=shape)

    yield case("stock: all tokens in one run of its kernel", trial.stock())
    ways = [(bench.solved, "")] + [(False, ", T of kernels of our own")] * bench.solved
    for solved, how in ways:
        for setting in ("int8", "bfloat16", "float32"):
            types = "T in int8, S in bfloat16" if setting == "int8" else f"T and S in {setting}"
            yield case(f"joined: {types}{how}", trial.joined(setting, solved))


class Trial:
    """One layer, and the inputs of all segments. Everything runs on the bench's device."""

    def __init__(self, bench: Bench, linear: LinearShape) -> None:
        self.linear, self.device, self.segments = linear, bench.device, bench.work.segments
        self.length = bench.work.segment_tokens
        self.seam = min(bench.w, self.length)
        self.parameters, (x, a, b) = random_gdn(bench, linear, self.segments * self.length)
        set_decays(self.parameters["A_log"], self.parameters["dt_bias"], HORIZON)
        write = torch.linspace(_WEAKEST, 0.0, linear.heads, device=self.device).to(b.dtype)
        self.inputs = x, 0.5 * a, b + write[torch.randperm(linear.heads, generator=bench.rng, device=self.device)]

    def truth(self) -> Tensor:
        """The state after all tokens in float64, [H, V, K]: no rounding between the inputs and it."""
        linear, (_, a, b) = self.linear, self.inputs
        h = torch.zeros(linear.heads, linear.d_v, linear.d_k, dtype=torch.float64, device=self.device)
        rate = -self.parameters["A_log"].double().exp()
        for start in range(0, len(a), _PIECE):
            part = slice(start, min(start + _PIECE, len(a)))
            _, k, v = self._qkv(part.start, part.stop, torch.float64)
            k = l2norm_torch(k).repeat_interleave(linear.heads // k.shape[1], 1)
            g, beta = (
                rate * F.softplus(a[part].double() + self.parameters["dt_bias"].double()),
                b[part].double().sigmoid(),
            )
            for pieces in zip(*(t.split(CHUNK) for t in (k, v, g, beta)), strict=True):
                k_c, v_c, g_c, beta_c = (t.transpose(0, 1) for t in pieces)
                h, _ = Chunk.of(k_c, g_c, beta_c).advance(h, v_c)
        return h

    def stock(self) -> Tensor:
        """SGLang's kernel over all tokens."""
        return self._native(0, len(self.inputs[0]), False)[0]

    def joined(self, setting: str, solved: bool) -> Tensor:
        """Every segment compiled by itself, then seams and artifacts in one chain; ``setting``: as --hypic-state-dtype has it."""
        of_s, of_t = artifact_dtypes(setting, "bfloat16")
        shape = msgspec.structs.replace(self.linear, layer_ids=(0,), state_dtype=of_s).with_operators_in(of_t)
        state_dtype, operator_dtype = shape.dtypes
        one, layer = ArtifactLayout(shape, None), GdnLayer(self.parameters)
        size = one.payload_bytes(0)
        conv = torch.zeros(2, *shape.window, dtype=getattr(torch, shape.conv_dtype), device=self.device)
        at = Memory(
            conv=conv,
            state=torch.zeros(2, shape.heads, shape.d_v, shape.d_k, device=self.device),
            arena=torch.zeros(self.segments * size, dtype=torch.uint8, device=self.device),
            t_off=one.t_offset(0),
            s_off=one.s_offset(0),
            c_off=one.conv_offset(0),
            state_dtype=state_dtype,
            operator_dtype=operator_dtype,
        )
        x = self.inputs[0]
        out = torch.empty(len(x), shape.heads, shape.d_v, dtype=x.dtype, device=self.device)
        slot = torch.zeros(1, dtype=torch.int64, device=self.device)
        for i in range(self.segments):
            begin, end = i * self.length, (i + 1) * self.length
            artifact = Artifact(b"", array("q", range(self.length)), "", i * size, size, i * size)
            row = CompileRow(Compile(artifact, self.seam), pool_row=0, begin=0, end=self.length)
            step = CompileStep([row], [0], slot, shape, [0] if solved else None)
            step.before(layer, tuple(t[begin:end] for t in self.inputs), at, out)
            at.state[0], chunks = self._native(begin, end, solved)
            at.conv[0] = self._window(end)  # type: ignore[index]
            step.after(layer, at, chunks)
        own = min(shape.conv_width, self.length - self.seam)
        items = [ChainItem(i * self.length, self.seam, i * size, own) for i in range(self.segments)]
        plan = ChainPlan.build(
            rows=[items], slot=[1], fresh=[True], conv_width=shape.conv_width + 1, device=self.device
        )
        layer.chain(self.inputs, at, plan, out)
        return at.state[1]

    def _native(self, begin: int, end: int, solved: bool) -> tuple[Tensor, SolvedChunks | None]:
        """End state of a prefill of these tokens alone, by the kernels that SGLang calls for it, and what they solved."""
        from sglang.kernels.ops.attention.fla.chunk import chunk_gated_delta_rule
        from sglang.kernels.ops.attention.fla.fused_gdn_gating import fused_gdn_gating

        x, a, b = (t[begin:end].contiguous() for t in self.inputs)
        g, beta = fused_gdn_gating(self.parameters["A_log"], a, b, self.parameters["dt_bias"])
        q, k, v = (t.to(x.dtype).contiguous()[None] for t in self._qkv(begin, end, torch.float32, alone=True))
        state = torch.zeros(1, *(getattr(self.linear, n) for n in ("heads", "d_v", "d_k")), device=self.device)
        slots, ends = (torch.tensor(t, dtype=torch.int32, device=self.device) for t in ([0], [0, end - begin]))
        with kept(solved) as found:
            chunk_gated_delta_rule(
                q=q, k=k, v=v, g=g, beta=beta, initial_state=state, initial_state_indices=slots, cu_seqlens=ends,
                head_first=False, use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
        return state[0], found[0] if solved else None

    def _qkv(self, begin: int, end: int, dtype: torch.dtype, alone: bool = False) -> list[Tensor]:
        """q, k [n, HK, K] and v [n, HV, V] of tokens [begin, end) behind the convolution; ``alone``: nothing before them."""
        linear, back = self.linear, self.linear.conv_width
        first = begin if alone else max(begin - back, 0)
        x = F.pad(self.inputs[0][first:end].to(dtype), (0, 0, back - (begin - first), 0))
        taps = self.parameters["conv_weight"].to(dtype)
        y = F.silu(sum(taps[:, j] * x[j : j + end - begin] for j in range(back + 1)))
        keys = self.parameters["num_k_heads"] * linear.d_k
        q, k, v = y.split([keys, keys, linear.heads * linear.d_v], 1)
        return [q.unflatten(1, (-1, linear.d_k)), k.unflatten(1, (-1, linear.d_k)), v.unflatten(1, (-1, linear.d_v))]

    def _window(self, end: int) -> Any:
        """The last inputs of the convolution before a token, as the pool holds them."""
        window = self.inputs[0][end - self.linear.conv_width : end]
        return window if self.linear.columns_first else window.T
