"""The rotary tables of a model's full-attention layers, and the proof that its K can be relocated."""

from __future__ import annotations

import inspect
from typing import Any

import torch

RELOCATION_TOLERANCE = 1e-4
"""Largest error of a relocated K against K rotated in place, relative to the largest K, with a float32 table."""
ROUNDED_TABLE_TOLERANCE = 2e-2
"""The same with a 16-bit table, whose cos and sin are off by 0.4% to begin with."""


class CannotRelocate(ValueError):
    """The model's K depends on position in a way that no rotation undoes; the text says how."""


class Rotary:
    """One rotation shared by all full-attention layers.

    Attributes:
        dim, first_dim: dims of K that rotate, and the first of them. is_neox: half-split pairs.
        scale: factor folded into cos and sin.
    """

    def __init__(self, modules: dict[int, Any], first_dim: int = 0):
        first = next(iter(modules.values()))
        self.first_dim = first_dim
        self._modules = list(modules.values())
        self.dim, self.is_neox = int(first.rotary_dim), bool(first.is_neox_style)
        self.scale = float(getattr(first, "mscale", 1.0) or 1.0)

    def tables(self) -> torch.Tensor | list[torch.Tensor]:
        """cos_sin_cache [max_pos, rotary_dim] of the layers, as they stand now (SGLang may grow or convert them)."""
        tables = [m.cos_sin_cache for m in self._modules]
        return tables[0] if all(t is tables[0] for t in tables) else tables

    def arguments(self) -> dict[str, Any]:
        """What ``relocate_interiors`` has to know."""
        return {
            "cos_sin": self.tables(),
            "rotary_dim": self.dim,
            "first_dim": self.first_dim,
            "is_neox": self.is_neox,
            "scale": self.scale,
        }


def find_rotary(model: Any, layer_ids: tuple[int, ...], max_position: int) -> Rotary | None:
    """The rotary embedding of each full-attention layer, taken from the module that owns the layer's attention.

    Returns:
        None where no layer has one and its K is proven not to depend on positions.
    Raises:
        CannotRelocate: some layers without one, layers that disagree, a kind that is no pure rotation by position, a
            table shorter than `max_position`, or positions that reach K in another way.
    """
    owners: dict[int, Any] = {}
    for module in model.modules():
        attn = getattr(module, "attn", None) or getattr(module, "attn_mqa", None)
        layer_id = getattr(attn, "layer_id", None)
        if type(attn).__name__ == "RadixAttention" and layer_id in layer_ids:
            owners[layer_id] = module
    if missing := sorted(set(layer_ids) - set(owners)):
        raise CannotRelocate(f"no module found that owns the attention of layers {missing}")
    modules = {i: m.rotary_emb for i, m in owners.items() if getattr(m, "rotary_emb", None) is not None}
    if not modules:
        check_no_positions(model, owners)
        return None
    if missing := sorted(set(layer_ids) - set(modules)):
        raise CannotRelocate(f"no rotary embedding found on full-attention layers {missing}")
    modules = {i: modules[i] for i in layer_ids}
    kinds = {(m.rotary_dim, m.is_neox_style, getattr(m, "mscale", 1.0), type(m).__name__) for m in modules.values()}
    if len(kinds) > 1:
        raise CannotRelocate(f"full-attention layers rotate differently: {sorted(map(str, kinds))}")
    first = next(iter(modules.values()))
    require_rotation(first, max_position)
    behind = {getattr(owners[i], "kv_lora_rank", 0) for i in layer_ids}  # a latent comes before what rotates
    if len(behind) > 1:
        raise CannotRelocate(f"full-attention layers rotate from different dims on: {sorted(behind)}")
    rotary = Rotary(modules, behind.pop())
    check_relocation(first, rotary)
    check_keys(owners, rotary)
    return rotary


def require_rotation(module: Any, max_position: int) -> None:
    """Raise CannotRelocate unless a rotary module turns by an angle that is a function of the position alone."""
    name = type(module).__name__
    if any(word in name for word in ("LongRoPE", "Dynamic", "DualChunk", "Fourier")):
        raise CannotRelocate(f"{name}: its angles depend on the sequence length, not on the position alone")
    if not hasattr(module, "cos_sin_cache"):
        raise CannotRelocate(f"{name} keeps no table of cos and sin by position")
    if len(module.cos_sin_cache) < max_position:
        raise CannotRelocate(f"{name} has {len(module.cos_sin_cache)} positions, the context needs {max_position}")


@torch.no_grad()
def check_no_positions(model: Any, owners: dict[int, Any]) -> None:
    """Prove that K and V of layers without a rotary embedding are a function of the hidden states alone.

    No module of the model holds angles or embeds positions; and each attention module gives the same K and V, bit by bit,
    for the same hidden states at other positions.

    Raises:
        CannotRelocate: they do not, or the module cannot be asked.
    """
    for name, module in model.named_modules():
        kind = type(module).__name__
        if hasattr(module, "cos_sin_cache") or "Rotary" in kind or "position" in name.lower() or name.endswith("wpe"):
            raise CannotRelocate(f"{name} ({kind}) knows positions, but no full-attention layer has a rotary embedding")
    for layer_id, owner in owners.items():
        ask = latent_key_value if hasattr(owner, "attn_mqa") else _key_value
        first, moved = (ask(owner, *_probe(owner, start)) for start in (0, 1000))
        if not all(torch.equal(a, b) for a, b in zip(first, moved, strict=True)):
            raise CannotRelocate(
                f"full-attention layer {layer_id}: K or V depends on positions without a rotary embedding"
            )


class Asked(Exception):
    """Carries K and V out of an attention module, in place of attention."""


def _probe(owner: Any, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A few fixed hidden states for an attention module, and the positions start, start + 1, ..."""
    weight = next(owner.parameters())
    if (width := getattr(owner, "hidden_size", None)) is None:
        raise CannotRelocate(
            f"{type(owner).__name__} without a rotary embedding says no hidden_size: cannot prove its K"
        )
    hidden = torch.randn(8, width, generator=torch.Generator().manual_seed(0))
    return hidden.to(weight.device, weight.dtype), torch.arange(start, start + 8, device=weight.device)


def _key_value(owner: Any, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V that an attention module makes of hidden states at positions."""

    class Ask(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            raise Asked(k, v)

    parameters = inspect.signature(owner.forward).parameters
    known = {"hidden_states": hidden, "positions": positions, "forward_batch": None}
    needed = {
        n for n, p in parameters.items() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    if unknown := sorted(needed - known.keys()):
        raise CannotRelocate(f"{type(owner).__name__} without a rotary embedding takes {unknown}: cannot prove its K")
    attn, owner.attn = owner.attn, Ask()
    try:
        owner(**{name: value for name, value in known.items() if name in parameters})
    except Asked as found:
        return found.args
    finally:
        owner.attn = attn
    raise CannotRelocate(f"{type(owner).__name__} without a rotary embedding does not pass its K to RadixAttention")


def latent_key_value(owner: Any, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent and shared part of K that SGLang's module of latent attention would store for hidden states at positions."""
    from types import SimpleNamespace

    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    def ask(latent: torch.Tensor, kv_a: torch.Tensor, k_pe: torch.Tensor, forward_batch: Any) -> None:
        raise Asked(kv_a, k_pe)

    kind = type(owner).__name__
    if getattr(owner, "q_lora_rank", None) is not None or not hasattr(owner, "_set_mla_kv_buffer"):
        raise CannotRelocate(f"{kind} without a rotary embedding: latent attention that cannot be asked for its K")
    owner._set_mla_kv_buffer = ask
    try:
        with forward_context(ForwardContext(attn_backend=SimpleNamespace())):
            owner.forward_normal_prepare(positions, hidden, None, None)
    except Asked as found:
        return found.args
    finally:
        del owner._set_mla_kv_buffer
    raise CannotRelocate(f"{kind} without a rotary embedding does not store its latent by _set_mla_kv_buffer")


@torch.no_grad()
def check_relocation(module: Any, rotary: Rotary) -> float:
    """Rotate K at p + shift directly, and at p followed by one more rotation by shift. Returns the relative error.

    Raises:
        CannotRelocate: they disagree.
    """
    from hypic.kernels.relocate import rotate

    table = module.cos_sin_cache.float()
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(16, 1, rotary.dim, generator=generator).to(table.device)
    positions = torch.arange(16, device=table.device)
    longest = len(table) - 17
    worst = 0.0
    for shift in sorted({1, min(63, longest), min(1000, longest), longest}):
        if shift < 1:
            continue
        direct = _table_rotate(k, table, positions + shift, rotary)
        local = _table_rotate(k, table, positions, rotary)
        moved = rotate(local, 0, shift, table, rotary.dim, rotary.is_neox, rotary.scale)
        worst = max(worst, float((direct - moved).abs().max() / direct.abs().max()))
    bound = RELOCATION_TOLERANCE if module.cos_sin_cache.dtype == torch.float32 else ROUNDED_TABLE_TOLERANCE
    if not worst <= bound:
        kind = type(module).__name__
        raise CannotRelocate(f"{kind}: a relocated K is off by {worst:.1e} (bound {bound:.0e})")
    return worst


@torch.no_grad()
def check_keys(owners: dict[int, Any], rotary: Rotary) -> None:
    """Prove that attention modules turn the K that they store by their table: some have one and do not use it in every layer.

    Asks each module for K and V of the same hidden states at two places. Modules that want more than a batch can give here,
    and latent attention, are taken at their word.

    Raises:
        CannotRelocate: K moved is not the K that the layer makes there, or V is another.
    """
    from hypic.kernels.relocate import rotate

    for layer_id, owner in owners.items():
        table = owner.rotary_emb.cos_sin_cache
        shift = min(1000, len(table) - 16)
        if hasattr(owner, "attn_mqa") or shift < 1:
            continue
        try:
            (k, v), (k_there, v_there) = (_key_value(owner, *_probe(owner, start)) for start in (0, shift))
            k, k_there = (x.reshape(len(x), -1, owner.attn.head_dim) for x in (k, k_there))
        except Exception:  # whatever a module without a batch stumbles over: it cannot be asked
            continue
        moved = rotate(k, 0, shift, table.float(), rotary.dim, rotary.is_neox, rotary.scale, rotary.first_dim)
        exact = {k.dtype, table.dtype} == {torch.float32}
        bound = RELOCATION_TOLERANCE if exact else ROUNDED_TABLE_TOLERANCE
        for part, here, there in (("K", moved, k_there), ("V", v, v_there)):
            error = float((here.float() - there.float()).abs().max() / there.float().abs().max())
            if not error <= bound:
                raise CannotRelocate(
                    f"full-attention layer {layer_id} does not use its rotary embedding as others do: {part} "
                    f"relocated is off by {error:.1e} (bound {bound:.0e})"
                )


def _table_rotate(k: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """K [n, 1, rotary_dim] as the model's table rotates it at `positions` (the factor in the table included)."""
    cos, sin = (t[:, None] for t in table[positions].chunk(2, -1))
    if rotary.is_neox:
        x1, x2 = k.chunk(2, -1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)
    x1, x2 = k[..., ::2], k[..., 1::2]
    return torch.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).flatten(-2)
