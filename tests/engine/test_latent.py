"""Latent attention: which form SGLang takes for a linked batch, what rotates, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from torch import Tensor, nn

from hypic.engine.latent import backend_problem, method_of_batch
from hypic.engine.relocation import CannotRelocate, find_rotary


def method(backend: Any) -> Any:
    """What a batch through ``backend`` gets where SGLang would take MHA."""
    with forward_context(ForwardContext(attn_backend=backend)):
        handler = method_of_batch(lambda cls, name: lambda attention, batch: AttnForwardMethod.MHA, None, "triton")
        return handler(None, None)


def test_linked_batches_attend_to_the_latent_itself() -> None:
    ordinary, linked = SimpleNamespace(), SimpleNamespace(hypic_plan=object())
    assert method(ordinary) is method(SimpleNamespace(full_attn_backend=ordinary)) is AttnForwardMethod.MHA
    assert method(linked) is method(SimpleNamespace(full_attn_backend=linked)) is AttnForwardMethod.MLA


@pytest.mark.parametrize(
    ("name", "refused"), [("triton", False), ("torch_native", False), (None, False), ("fa3", True)]
)
def test_backends_that_expand_a_prefix_are_refused(name: str | None, refused: bool) -> None:
    problem = backend_problem(SimpleNamespace(get_attention_backends=lambda: (name, "triton")))
    assert (problem is not None) == refused
    assert problem is None or ("fa3" in problem and "--attention-backend torch_native or triton" in problem)


class RadixAttention(nn.Module):
    layer_id = 0


class Rotary(nn.Module):
    rotary_dim, is_neox_style = 8, False

    def __init__(self) -> None:
        super().__init__()
        phase = torch.arange(2048).float()[:, None] * 100.0 ** (-torch.arange(4) / 4)
        self.cos_sin_cache = torch.cat([phase.cos(), phase.sin()], -1)


class Latent(nn.Module):
    """What relocation reads of SGLang's module of latent attention."""

    hidden_size, kv_lora_rank, q_lora_rank = 16, 12, None

    def __init__(self, rotary_emb: nn.Module | None = None) -> None:
        super().__init__()
        self.kv_a_proj, self.attn_mqa, self.rotary_emb = nn.Linear(16, 12 + 8), RadixAttention(), rotary_emb

    def forward_normal_prepare(self, positions: Tensor, hidden: Tensor, batch: Any, allocator: Any) -> None:
        kv_a, k_pe = self.kv_a_proj(hidden).split([12, 8], -1)
        self._set_mla_kv_buffer(hidden, kv_a, self.place(k_pe, positions), batch)

    def place(self, k_pe: Tensor, positions: Tensor) -> Tensor:
        return k_pe

    def _set_mla_kv_buffer(self, latent: Tensor, kv_a: Tensor, k_pe: Tensor, batch: Any) -> None:
        raise AssertionError("stored something")


class Rotates(Latent):
    def place(self, k_pe: Tensor, positions: Tensor) -> Tensor:
        return k_pe * (1 + 1e-3 * positions[:, None])


class LowRankQueries(Latent):
    q_lora_rank = 4  # type: ignore[assignment]


class StoresElsewhere(Latent):
    def forward_normal_prepare(self, *args: Any) -> None:
        pass


def test_a_latent_without_positions_is_copied() -> None:
    layer = Latent()
    assert find_rotary(nn.ModuleList([layer]), (0,), 1024) is None
    assert "_set_mla_kv_buffer" not in vars(layer), "left as it was"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Rotates, "K or V depends on positions"),
        (LowRankQueries, "cannot be asked"),
        (StoresElsewhere, "does not store"),
    ],
)
def test_a_latent_that_is_not_proven_is_refused(make: Callable[[], Latent], says: str) -> None:
    with pytest.raises(CannotRelocate, match=says):
        find_rotary(nn.ModuleList([make()]), (0,), 1024)


def test_what_stands_behind_the_latent_rotates() -> None:
    rotary = find_rotary(nn.ModuleList([Latent(Rotary())]), (0,), 1024)
    assert rotary is not None
    how = rotary.arguments()
    assert (how["first_dim"], how["rotary_dim"], how["is_neox"]) == (12, 8, False)
