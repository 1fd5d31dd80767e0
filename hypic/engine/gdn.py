"""Gated delta networks: the linear layers of a batch follow the run plan.

Seams and short runs go through one chain kernel, which joins artifacts as it passes them; long runs, ordinary rows and
compiling rows go through SGLang's own kernels. Both read and write the request's own state slot, so they compose in any
order. Compiling rows also yield their artifact's part, see gdn_compile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hypic.engine.batch import Stage, linear_stages
from hypic.engine.gdn_compile import CompileStep, on_device
from hypic.kernels.gdn_chain import ChainPlan, gdn_chain

if TYPE_CHECKING:
    from hypic.engine.forward import ForwardPlan, LinkRuntime


def gdn_parameters(layer: Any) -> dict[str, Any]:
    """The parameters of a RadixLinearAttention module as our kernels take them."""
    return dict(
        conv_weight=layer.conv_weights,
        conv_bias=layer.bias,
        activation=layer.activation,
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        num_k_heads=layer.num_k_heads,
        num_v_heads=layer.num_v_heads,
        head_k_dim=layer.head_k_dim,
        head_v_dim=layer.head_v_dim,
    )


class _Step:
    """A Stage on the device.

    Attributes:
        chain: plan of the seam chains, or None.
        native, metadata, tokens: view of the batch for SGLang's kernel, its metadata, and which tokens it takes (None: all).
        checkpoints: (source, target) state slots to copy, or None.
    """

    def __init__(self, backend: Any, fb: Any, stage: Stage, slots: torch.Tensor, conv_width: int):
        device = slots.device
        self.chain: ChainPlan | None = None
        self.native: Any = None
        self.metadata: Any = None
        self.tokens: torch.Tensor | None = None
        self.checkpoints: tuple[torch.Tensor, torch.Tensor] | None = None
        if stage.chains:
            rows = torch.tensor([c.row for c in stage.chains], device=device)
            self.chain = ChainPlan.build(
                rows=[c.items for c in stage.chains],
                slot=slots[rows],
                fresh=[c.fresh for c in stage.chains],
                conv_width=conv_width,
                device=device,
            )
        if stage.natives:
            self._plan_native(backend, fb, stage, device)
        kept = [(c.row, c.slot) for c in stage.checkpoints]
        if kept:
            source, target = torch.tensor(kept, device=device).t()
            self.checkpoints = slots[source], backend._translate_mamba_indices(target)

    def _plan_native(self, backend: Any, fb: Any, stage: Stage, device: torch.device) -> None:
        from hypic.engine.attention import view_rows

        natives = stage.natives
        self.native = view_rows(fb, [n.row for n in natives], [n.start for n in natives], [n.length for n in natives])
        if self.native.extend_num_tokens != fb.extend_num_tokens:
            where = [torch.arange(n.token, n.token + n.length) for n in natives]
            self.tokens = torch.cat(where).to(device, non_blocking=True)
        backend.native_metadata(self.native)
        self.metadata = backend.forward_metadata


class LinkedGdn:
    """Mixin in front of SGLang's GDNAttnBackend."""

    hypic_plan: ForwardPlan
    hypic_runtime: LinkRuntime
    forward_metadata: Any

    def native_metadata(self, view: Any) -> None:
        super().init_forward_metadata(view)  # type: ignore[misc]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        plan, linear = self.hypic_plan, self.hypic_runtime.layout.linear
        assert linear is not None
        pool = self.req_to_token_pool  # type: ignore[attr-defined]
        virtual = pool.get_mamba_indices(forward_batch.req_pool_indices)
        slots = self._translate_mamba_indices(virtual).to(torch.int64)  # type: ignore[attr-defined]
        stages = linear_stages(plan.batch, plan.prefix_lens, plan.extend_lens, linear.conv_width)
        self._steps = [_Step(self, forward_batch, stage, slots, linear.conv_width + 1) for stage in stages]
        self._compile: CompileStep | None = None
        if rows := sorted(plan.batch.compiles):
            compiles, tokens = [plan.batch.compiles[r] for r in rows], [int(plan.tokens[r]) for r in rows]
            self._compile = CompileStep(compiles, tokens, slots[on_device(rows, slots.device)], linear)

    def forward_extend(self, layer: Any, forward_batch: Any, mixed_qkv: Any, a: Any, b: Any, **kwargs: Any) -> Any:
        runtime, layer_id = self.hypic_runtime, layer.layer_id
        layout, arena = runtime.layout, runtime.arena.buffer
        cache = self.req_to_token_pool.mamba2_layer_cache(layer_id)  # type: ignore[attr-defined]
        conv, state = cache.conv[0], cache.temporal
        params = gdn_parameters(layer)
        assert layout.linear is not None
        states: dict[str, Any] = dict(
            t_off=layout.t_offset(layer_id),
            s_off=layout.s_offset(layer_id),
            state_dtype=getattr(torch, layout.linear.state_dtype),
        )
        out = mixed_qkv.new_empty(1, mixed_qkv.shape[0], layer.num_v_heads, layer.head_v_dim)
        if self._compile is not None:
            self._compile.before(
                mixed_qkv, a, b, params=params, conv=conv, state=state, arena=arena, states=states, out=out[0]
            )
        for step in self._steps:
            if step.chain is not None:
                gdn_chain(
                    mixed_qkv, a, b, **params, conv_pool=conv, ssm_pool=state, arena=arena, **states,
                    c_off=layout.conv_offset(layer_id), plan=step.chain, out=out[0],
                )  # fmt: skip
            if step.native is not None:
                self.forward_metadata = step.metadata
                if step.tokens is None:
                    out = self._native(layer, step.native, mixed_qkv, a, b, **kwargs)
                else:
                    t = step.tokens
                    part = self._native(layer, step.native, mixed_qkv[t], a[t], b[t], **kwargs)
                    out.index_copy_(1, t, part.view(1, -1, *out.shape[2:]).to(out.dtype))
            if step.checkpoints is not None:
                source, target = step.checkpoints
                conv[target], state[target] = conv[source], state[source]
        if self._compile is not None:
            at = layout.conv_offset(layer_id)
            self._compile.after(conv=conv, state=state, arena=arena, states=states, c_off=at)
        return out

    def _native(self, layer: Any, view: Any, mixed_qkv: Any, a: Any, b: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward_extend(  # type: ignore[misc]
            layer=layer, forward_batch=view, mixed_qkv=mixed_qkv, a=a, b=b, **kwargs
        )
