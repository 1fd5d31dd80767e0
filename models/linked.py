"""What an answer is under each way of reusing documents, in plain torch, for many prompts at once on any device.

The meaning is that of ``hypic/check/oracle.py``, which goes token by token and one prompt at a time: documents are run in
isolation and leave records (K before RoPE and V; conv inputs, k, v, g and beta). Here a prompt is computed in one forward
pass in which, at every layer, the records of interior tokens are replaced by those. So nothing of hypic's engine is used:
no transition operators and no relocation of K. ``tests/models`` holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .gdn import gated_delta_rule
from .network import KV, Delta, Network, attend, attention_inputs, delta_conv, delta_out, delta_raw, mlp, norm

STATES = ("compose", "additive", "decay", "last", "zero")
"""How a linear layer's state h steps over an interior whose decay is d and whose state from zero is S: as the tokens
themselves make it (which is h T + S), h + S, d h + S, S, or 0."""

Bounds = Sequence[tuple[int, int]]


def _records(net: Network, ids: Tensor) -> list[KV | Delta]:
    """Run ids [B, T] from nothing and keep every layer's record."""
    records: list[KV | Delta] = []
    x, angles = net.hf.model.embed_tokens(ids), net.angles(ids.shape[1])
    for layer in net.layers:
        y = norm(x, layer.input_layernorm)
        if hasattr(layer, "self_attn"):
            q, gate, kv = attention_inputs(layer.self_attn, y)
            records.append(kv)
            x = x + attend(layer.self_attn, q, gate, kv, angles)
        else:
            m = layer.linear_attn
            raw, z, g, beta = delta_raw(m, y)
            q, k, v = delta_conv(m, raw)
            records.append(Delta(raw, k, v, g, beta))
            x = x + delta_out(m, gated_delta_rule(q, k, v, g, beta)[0], z)
        x = x + mlp(layer, x)
    return records


@torch.no_grad()
def compile_documents(net: Network, ids: Tensor, documents: Bounds) -> list[list[Any]]:
    """Records of each document of ids [B, T], run by itself; ``documents`` holds for all rows."""
    return [_records(net, ids[:, start:end]) for start, end in documents]


@torch.no_grad()
def linked_hidden(
    net: Network,
    ids: Tensor,
    documents: Bounds,
    *,
    w: int | float = 8,
    state: str = "compose",
    kv: bool = True,
    compiled: list[list[Any]] | None = None,
) -> Tensor:
    """Hidden states after the final norm [B, T, d] of prompts whose documents are linked; those of interiors mean nothing.

    Args:
        documents: [start, end) of each, in natural order, the same for all rows; none may end the prompt.
        w: the seam window; ``float("inf")`` recomputes everything.
        state: one of STATES.
        kv: False hides all documents from what attends to them from outside.
        compiled: what :func:`compile_documents` returned.
    """
    if state not in STATES:
        raise ValueError(f"state {state!r}: there are {STATES}")
    documents = [(a, b) for a, b in documents]
    interiors = [(a + int(w), b) if b - a > w else (b, b) for a, b in documents]
    if compiled is None:
        compiled = compile_documents(net, ids, documents)
    mask = None if kv else _outside_mask(ids.shape[1], documents, ids.device)
    x, angles = net.hf.model.embed_tokens(ids), net.angles(ids.shape[1])

    def replaced(own: Any, layer: int) -> Any:
        fields = [t.clone() for t in own]
        for (start, _), (first, end), record in zip(documents, interiors, compiled, strict=True):
            for field, other in zip(fields, record[layer], strict=True):
                field[:, first:end] = other[:, first - start : end - start]
        return type(own)(*fields)

    for i, layer in enumerate(net.layers):
        y = norm(x, layer.input_layernorm)
        if hasattr(layer, "self_attn"):
            q, gate, own = attention_inputs(layer.self_attn, y)
            x = x + attend(layer.self_attn, q, gate, replaced(own, i), angles, mask)
        else:
            m = layer.linear_attn
            raw, z, g, beta = delta_raw(m, y)
            for (start, _), (first, end), record in zip(documents, interiors, compiled, strict=True):
                raw[:, first:end] = record[i].raw[:, first - start : end - start]
            q, k, v = delta_conv(m, raw)
            tokens = replaced(Delta(raw, k, v, g, beta), i)
            x = x + delta_out(m, _recurrence(q, tokens, interiors, documents, state), z)
        x = x + mlp(layer, x)
    return norm(x, net.hf.model.norm)


def _recurrence(q: Tensor, t: Delta, interiors: Bounds, documents: Bounds, state: str) -> Tensor:
    """Outputs of all tokens [B, T, H, V], with the state stepping over interiors as ``state`` says."""
    if state == "compose":
        return gated_delta_rule(q, t.k, t.v, t.g, t.beta)[0]
    out = torch.zeros_like(t.v, dtype=torch.float32)
    h: Tensor | None = None
    done = 0

    def run(start: int, end: int, h: Tensor | None) -> tuple[Tensor, Tensor]:
        part = slice(start, end)
        return gated_delta_rule(q[:, part], t.k[:, part], t.v[:, part], t.g[:, part], t.beta[:, part], h)

    for (first, end), _ in zip(interiors, documents, strict=True):
        if first > done:
            out[:, done:first], h = run(done, first, h)
        if first < end:
            fresh = run(first, end, None)[1]
            decay = t.g[:, first:end].float().sum(1).exp()[..., None, None]
            kept = 0.0 if h is None or state == "last" else h if state == "additive" else h * decay
            h = torch.zeros_like(fresh) if state == "zero" else kept + fresh
        done = end
    out[:, done:], _ = run(done, q.shape[1], h)
    return out


def _outside_mask(tokens: int, documents: Bounds, device: Any) -> Tensor:
    """[T, T] causal, True where seen: tokens of a document are seen from that document alone."""
    owner = torch.zeros(tokens, dtype=torch.long, device=device)
    for i, (start, end) in enumerate(documents):
        owner[start:end] = i + 1
    seen = (owner[None] == 0) | (owner[None] == owner[:, None])
    return seen & torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
