"""Linear layers of a batch with linked or compiling rows follow the run plan, whatever their family.

Seams and short runs go through the family's chain kernel, which joins artifacts as it passes them; long runs, ordinary
rows and compiling rows go through SGLang's own kernels. Both read and write the request's own state slot, so they compose
in any order. Compiling rows also yield their artifact's part, see linear_compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hypic.engine.batch import Stage, linear_stages
from hypic.engine.families.base import Inputs, LinearLayer, Memory
from hypic.engine.linear_compile import CompileStep, on_device
from hypic.engine.solved_chunks import kept
from hypic.kernels.chain_plans import ChainPlan

if TYPE_CHECKING:
    from hypic.engine.forward import ForwardPlan, LinkRuntime


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


def _places(stage: Stage, rows: list[int]) -> list[int]:
    """Where the rows, all of them native in this stage, begin among the tokens of its native pass."""
    starts: dict[int, int] = {}
    at = 0
    for n in stage.natives:
        starts.setdefault(n.row, at)
        at += n.length
    return [starts[row] for row in rows]


class LinkedLinear:
    """Mixin in front of SGLang's backend of a family, which calls run_layer from where SGLang calls the backend."""

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
        self._solving: _Step | None = None
        """The step in whose native pass all compiling rows are, if T is made of what that pass solves."""
        if rows := sorted(plan.batch.compiles):
            compiles, tokens = [plan.batch.compiles[r] for r in rows], [int(plan.tokens[r]) for r in rows]
            where = slots[on_device(rows, slots.device)]
            native = None
            if self.hypic_runtime.solved:
                native, self._solving = _places(stages[0], rows), self._steps[0]
            self._compile = CompileStep(compiles, tokens, where, linear, native)

    def run_layer(
        self,
        layer_id: int,
        layer: LinearLayer,
        inputs: Inputs,
        out: Tensor,
        native: Callable[[Any, Inputs], Tensor],
    ) -> Tensor:
        """One linear layer on the whole batch.

        Args:
            inputs: of all tokens, as the family's operations take them.
            out: [T, H, V], written where tokens go through the chain.
            native: SGLang's own way through the layer for a view of the batch and the inputs of its tokens; returns
                their outputs, H V numbers each.
        Returns:
            outputs [T, H, V], in ``out`` or in the native kernel's own tensor.
        """
        at, chunks = self._memory(layer_id), None
        if self._compile is not None:
            self._compile.before(layer, inputs, at, out)
        for step in self._steps:
            if step.chain is not None:
                layer.chain(inputs, at, step.chain, out)
            if step.native is not None:
                self.forward_metadata = step.metadata
                with kept(step is self._solving) as solved:
                    if step.tokens is None:
                        out = native(step.native, inputs).view(out.shape)
                    else:
                        t = step.tokens
                        part = native(step.native, tuple(x[t] for x in inputs))
                        out.index_copy_(0, t, part.view(-1, *out.shape[1:]).to(out.dtype))
                chunks = solved[0] if solved else chunks
            if step.checkpoints is not None:
                source, target = step.checkpoints
                for pool in (at.state, at.conv):
                    if pool is not None:
                        pool[target] = pool[source]
        if self._compile is not None:
            self._compile.after(layer, at, chunks)
        return out

    def _memory(self, layer_id: int) -> Memory:
        runtime, layout = self.hypic_runtime, self.hypic_runtime.layout
        cache = self.req_to_token_pool.mamba2_layer_cache(layer_id)  # type: ignore[attr-defined]
        assert layout.linear is not None
        state_dtype, operator_dtype = layout.linear.dtypes
        return Memory(
            conv=cache.conv[0] if cache.conv else None,
            state=cache.temporal,
            arena=runtime.arena.buffer,
            t_off=layout.t_offset(layer_id),
            s_off=layout.s_offset(layer_id),
            c_off=layout.conv_offset(layer_id),
            state_dtype=state_dtype,
            operator_dtype=operator_dtype,
        )
