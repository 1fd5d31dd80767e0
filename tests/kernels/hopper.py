"""Compile the Triton kernels for an H100/H200 as the operations would launch them, on a machine without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hypic.artifact.layout import LinearShape
from hypic.engine import composition
from hypic.engine.families.base import Memory
from hypic.engine.families.gdn import GdnLayer
from hypic.engine.families.lightning import RotatedLayer
from hypic.engine.families.mamba2 import MixerLayer
from hypic.kernels import (
    conv_runs,
    decay_end_states,
    gdn_chain,
    gdn_end_states,
    gdn_inputs,
    gdn_keys,
    gdn_solve,
    gdn_solved,
    gdn_transition,
    lightning_chain,
    mamba2_chain,
    mamba2_decay,
    relocate,
    seam_attention,
)
from hypic.kernels.lightning_chain import KeyRotation, LightningLayer
from hypic.kernels.mamba2_layer import Mamba2Layer
from hypic.kernels.seam_plan import SeamPlan, SeamShape

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}
KERNELS = {
    gdn_inputs: ["_inputs_kernel"],
    gdn_chain: ["_chain_kernel"],
    gdn_keys: ["_keys_kernel"],
    gdn_solve: ["_solve_kernel", "_solve_channels_kernel"],
    gdn_transition: ["_forget_kernel", "_advance_kernel"],
    gdn_solved: ["_solved_kernel"],
    gdn_end_states: ["_end_states_kernel"],
    conv_runs: ["_convolve_kernel"],
    mamba2_chain: ["_chain_kernel"],
    lightning_chain: ["_lightning_chain_kernel"],
    mamba2_decay: ["_log_decay_kernel"],
    decay_end_states: ["_decay_end_states_kernel"],
    relocate: ["_move_kernel"],
    seam_attention: ["_seam_kernel", "_merge_kernel"],
}


@dataclass(frozen=True)
class Report:
    shared_bytes: int
    registers: int
    spill_bytes: int
    ptx_bytes: int
    """How long it takes to compile: about 10 s for a megabyte."""


class Recorder:
    """Stands in for a kernel: what is launched on it is compiled instead, once for each signature."""

    def __init__(self, kernel: Any, reports: list[tuple[str, Report]]) -> None:
        self.kernel, self.reports, self.seen = kernel, reports, set()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.compile

    def compile(self, *args: Any, num_warps: int, num_stages: int = 3, **constants: Any) -> None:
        signature: dict[str, str] = {}
        attributes = {}
        for i, (name, arg) in enumerate(zip(self.kernel.arg_names, args, strict=False)):
            if isinstance(arg, torch.Tensor):
                signature[name] = TYPES[arg.dtype]
            else:
                signature[name] = "fp32" if isinstance(arg, float) else "i32"
            if isinstance(arg, torch.Tensor) or (isinstance(arg, int) and arg % 16 == 0):
                attributes[i,] = [["tt.divisibility", 16]]
        signature |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(
            self.kernel, signature, {(self.kernel.arg_names.index(k),): v for k, v in constants.items()}, attributes
        )
        if source.hash() in self.seen:
            return
        self.seen.add(source.hash())
        options = {"num_warps": num_warps, "num_stages": num_stages}
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        self.reports.append((self.kernel.__name__, _report(built)))


def _report(built: Any) -> Report:
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(built.asm["ptx"])
        ptx.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", ptx.name, "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", log))
    return Report(built.metadata.shared, registers, max(spills), len(built.asm["ptx"]))


@contextmanager
def recorded() -> Iterator[list[tuple[str, Report]]]:
    reports: list[tuple[str, Report]] = []
    with ExitStack() as stack:
        for module, names in KERNELS.items():
            if hasattr(module, "require_triton"):
                stack.enter_context(mock.patch.object(module, "require_triton"))
            if hasattr(module, "pick_impl"):
                stack.enter_context(mock.patch.object(module, "pick_impl", return_value="triton"))
            for name in names:
                stack.enter_context(mock.patch.object(module, name, Recorder(getattr(module, name), reports)))
        yield reports


def compile_all(
    hk: int,
    hv: int,
    dk: int,
    dv: int,
    kv_heads: int = 0,
    kv_dim: int = 0,
    state_dtype: torch.dtype = torch.float32,
    operator_dtype: torch.dtype | None = None,
    channel_gates: bool = False,
) -> list[tuple[str, Report]]:
    """Every operation in bf16 at one shape, those of attention if it has KV heads. Returns (kernel, report) per launch."""
    n, width, dim = 64, 4, 2 * hk * dk + hv * dv
    bf16 = {"dtype": torch.bfloat16}
    arena = torch.empty(1 << 20, dtype=torch.uint8)
    layer = {
        "conv_weight": torch.empty(dim, width, **bf16),
        "conv_bias": None,
        "activation": "silu",
        "A_log": torch.empty(hv),
        "dt_bias": torch.empty((hv, dk) if channel_gates else hv),
        "num_k_heads": hk,
        "num_v_heads": hv,
        "head_k_dim": dk,
        "head_v_dim": dv,
        "conv_pool": torch.empty(2, dim, width - 1, **bf16),
    }
    x, a, b = torch.empty(n, dim, **bf16), torch.empty(n, hv, **bf16), torch.empty(n, hv, **bf16)
    if channel_gates:
        layer["conv_pool"] = torch.empty(2, width - 1, dim, **bf16).mT
        a, b = torch.empty(n, hv * dk, **bf16), torch.empty(n, hv)
    offsets = {"arena": arena, "t_off": 256, "s_off": 512, "state_dtype": state_dtype, "operator_dtype": operator_dtype}
    pools = [torch.empty(8, kv_heads, kv_dim, **bf16) for _ in range(2)]
    with recorded() as reports:
        chain = gdn_chain.ChainPlan.build(
            rows=[[gdn_chain.ChainItem(0, 8, 0, 3)]], slot=[1], fresh=[True], conv_width=width, device="cpu"
        )
        gdn_chain.gdn_chain(
            x, a, b, **layer, **offsets, c_off=1024, ssm_pool=torch.empty(2, hv, dv, dk), plan=chain,
            out=torch.empty(n, hv, dv, **bf16), impl="triton",
        )  # fmt: skip
        transition = gdn_transition.TransitionPlan.build(
            seq_tok=[0], seq_len=[n], seq_skip=[8], seq_slot=[0], seq_fresh=[True], blob=[0], first=[True], device="cpu"
        )
        for inputs in (x, x.float()):  # a 16-bit model, and one in fp32
            k, g, beta = gdn_keys.gdn_keys(inputs, a, b, **layer, plan=transition, impl="triton")
            gdn_transition.gdn_transition(
                k,
                g,
                beta,
                arena=arena,
                t_off=256,
                operator_dtype=operator_dtype or state_dtype,
                plan=transition,
                impl="triton",
            )
        if not channel_gates:
            chunks = [torch.empty(n, hk, dk, **bf16), torch.empty(n, hv), torch.empty(n, hv)]
            chunks += [torch.empty(n, hv, dk, **bf16), torch.empty(n, hv, 64, **bf16)]
            solved = gdn_solved.SolvedPlan.build(tok=[0], length=[n], skip=[8], blob=[0], first=[True], device="cpu")
            gdn_solved.gdn_transition_solved(
                gdn_solved.SolvedChunks(*chunks),
                arena=arena,
                t_off=256,
                operator_dtype=operator_dtype or state_dtype,
                plan=solved,
                impl="triton",
            )
        end_states = gdn_end_states.EndStatesPlan.build(slot=[0], seam=[0], ends=[True], blob=[0], device="cpu")
        gdn_end_states.gdn_end_states(*[torch.empty(2, hv, dv, dk)] * 2, **offsets, plan=end_states, impl="triton")
        if not kv_heads:
            return reports
        interiors = relocate.InteriorPlan.build(blob_kv=[0], count=[3], slots=[1, 2, 3], shift=[3], device="cpu")
        rotary = {"cos_sin": torch.empty(64, kv_dim // 4), "rotary_dim": kv_dim // 4, "is_neox": True}
        relocate.relocate_interiors(arena, interiors, pools, pools, **rotary, impl="triton")
        relocate.capture_interiors(arena, interiors, pools, pools, impl="triton")
        seams = SeamPlan.build(
            rows=[0], tokens=[[0]], positions=[[1023]], device="cpu",
            shape=SeamShape(8 * kv_heads, kv_heads, kv_dim, kv_dim, torch.bfloat16),
        )  # fmt: skip
        heads = torch.empty(n, 8 * kv_heads, kv_dim, **bf16)
        seam_attention.seam_attention(
            heads, *pools, torch.empty(1, 1024, dtype=torch.int32), plan=seams, scale=0.1, out=heads, impl="triton"
        )
    return reports


def compile_start_up_proof(hk: int, hv: int, dk: int, dv: int) -> list[tuple[str, Report]]:
    """What a server of a model in bf16 compiles before it serves, to prove composition on its weights."""
    width, dim = 4, 2 * hk * dk + hv * dv
    layer = SimpleNamespace(
        conv_weights=torch.zeros(dim, width, dtype=torch.bfloat16),
        bias=None,
        activation="silu",
        A_log=torch.zeros(hv),
        dt_bias=torch.zeros(hv, dtype=torch.bfloat16),
        num_k_heads=hk,
        num_v_heads=hv,
        head_k_dim=dk,
        head_v_dim=dv,
    )
    with recorded() as reports:
        composition._layer_error(
            GdnLayer.of(layer), LinearShape((0,), hv, dk, dv, dim, width - 1, "bfloat16", "bfloat16"), start=8
        )
    return reports


def compile_mamba2(
    h: int, g: int, dv: int, dk: int, state_dtype: torch.dtype = torch.float32
) -> list[tuple[str, Report]]:
    """Every operation of a Mamba2 layer in bf16 at one shape."""
    n, width, dim = 64, 4, h * dv + 2 * g * dk
    bf16 = {"dtype": torch.bfloat16}
    layer = MixerLayer(
        Mamba2Layer(
            conv_weight=torch.empty(dim, width, **bf16),
            conv_bias=torch.empty(dim, **bf16),
            activation="silu",
            A=torch.empty(h),
            dt_bias=torch.empty(h, **bf16),
            skip=torch.empty(h, **bf16),
            heads=h,
            groups=g,
            d_v=dv,
            d_k=dk,
        )
    )
    at = Memory(
        torch.empty(2, dim, width - 1, **bf16), torch.empty(2, h, dv, dk), torch.empty(1 << 20, dtype=torch.uint8),
        256, 512, 1024, state_dtype,
    )  # fmt: skip
    inputs = (torch.empty(n, h * dv + dim + h, **bf16),)
    with recorded() as reports:
        chain = gdn_chain.ChainPlan.build(
            rows=[[gdn_chain.ChainItem(0, 8, 0, 3)]], slot=[1], fresh=[True], conv_width=width, device="cpu"
        )
        layer.chain(inputs, at, chain, torch.empty(n, h, dv, **bf16))
        transition = gdn_transition.TransitionPlan.build(
            seq_tok=[0], seq_len=[n], seq_skip=[8], seq_slot=[0], seq_fresh=[True], blob=[0], first=[True], device="cpu"
        )
        layer.transition(inputs, at, transition)
        end_states = gdn_end_states.EndStatesPlan.build(slot=[0], seam=[0], ends=[True], blob=[0], device="cpu")
        layer.end_states(torch.empty(2, h, dv, dk), at, end_states)
    return reports


def compile_lightning(
    h: int, d: int, rotary: int, state_dtype: torch.dtype = torch.float32
) -> list[tuple[str, Report]]:
    """Every kernel of a Lightning layer at one shape; q, k and v are fp32 in any model."""
    rotation = KeyRotation(torch.empty(64, rotary), rotary, 1.0) if rotary else None
    layer = RotatedLayer(LightningLayer(torch.empty(h), d**-0.5, rotation), d)
    at = Memory(
        None, torch.empty(2, h, d, d), torch.empty(1 << 20, dtype=torch.uint8), 256, 1024, 0, state_dtype
    )  # fmt: skip
    x = torch.empty(16, h, d)
    with recorded() as reports:
        chain = gdn_chain.ChainPlan.build(
            rows=[[gdn_chain.ChainItem(0, 8, 0, 0, 5)]], slot=[1], fresh=[True], conv_width=1, device="cpu"
        )
        layer.chain((x, x, x), at, chain, torch.empty_like(x))
        end_states = gdn_end_states.EndStatesPlan.build(slot=[0], seam=[0], ends=[True], blob=[0], device="cpu")
        layer.end_states(torch.empty(2, h, d, d), at, end_states)
    return reports
