"""How an artifact lies in its blob: a self-describing header, then the payload that kernels read.

    header    magic, format version, length, msgpack fields (what the artifact is a function of, and its tokens)
    T         [linear layer][head][d_k][d_k]              transition operators, in the state type or in int8 with scales in
                                                          front (kernels/operators.py); where they are one decay per
                                                          head: its logarithm, [linear layer][head] in fp32
    S         [linear layer][head][d_v][d_k]              zero-start end-states, SGLang's [value, key] layout, likewise
    conv      [linear layer][channel][K-1]                conv window at the segment's end, in the order of SGLang's pool,
                                                          which has it as [K-1][channel] where `columns_first` says so
    KV        per full-attention layer: K [n][head][d], V [n][head][d] of the n interior tokens, K after RoPE at local
              positions; of multi-head latent attention one row [n][latent | shared part of K] in the place of both

Every part starts on the arena's granule. T, S and conv lie at fixed offsets from the payload; KV depends on n alone.
"""

from __future__ import annotations

import math
import struct
from array import array
from typing import Literal

import msgspec
import torch

from hypic.artifact.arena import align
from hypic.kernels.operators import operator_bytes, read_operator

FORMAT_VERSION = 4
MAGIC = b"hypicart"
_PREFIX = struct.Struct("<8sII")


Operator = Literal["dense", "log_decay"]
"""What T is: a matrix [d_k, d_k] per head (DeltaNet, GDN, KDA), or the logarithm of one decay per head (Mamba2)."""


class LinearShape(msgspec.Struct, frozen=True):
    """Linear-attention layers of one rank."""

    layer_ids: tuple[int, ...]
    heads: int
    d_k: int
    d_v: int
    conv_channels: int
    conv_width: int
    """K - 1 inputs."""
    conv_dtype: str
    state_dtype: str = "float32"
    """Of S, and of a dense T that has no type of its own."""
    family: str = "gdn"
    """A module of hypic.engine.families."""
    operator: Operator = "dense"
    columns_first: bool = False
    """Whether a conv window lies as [K-1][channel]."""
    operator_dtype: str = ""
    """Of a dense T, if it is not that of S: "int8"."""

    @property
    def window(self) -> tuple[int, int]:
        """Shape of a conv window, in the order of SGLang's pool."""
        size = self.conv_channels, self.conv_width
        return size[::-1] if self.columns_first else size

    def with_operators_in(self, dtype: str) -> LinearShape:
        """The same layers with T in this type, where T is a matrix."""
        other = self.operator == "dense" and dtype != self.state_dtype
        return msgspec.structs.replace(self, operator_dtype=dtype if other else "")

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Of S, and of a dense T."""
        return getattr(torch, self.state_dtype), getattr(torch, self.operator_dtype or self.state_dtype)

    @property
    def transition_bytes(self) -> int:
        """Of the operators of a layer."""
        if self.operator == "log_decay":
            return self.heads * torch.float32.itemsize
        return operator_bytes(self.heads, self.d_k, self.dtypes[1])


class FullShape(msgspec.Struct, frozen=True):
    """Full-attention layers of one rank. Latent attention: one head of ``d_k`` = latent and shared part of K, no V."""

    layer_ids: tuple[int, ...]
    heads: int
    d_k: int
    d_v: int
    dtype: str


class Header(msgspec.Struct, frozen=True):
    """What an artifact is a function of. Two blobs with equal headers are interchangeable."""

    fingerprint: str
    method: str
    seam_window: int
    adapter: str
    tp_rank: int
    tp_size: int
    linear: LinearShape | None
    full: FullShape | None
    tokens: bytes
    """int64 little-endian token ids of the whole segment, seam included."""


class HeaderError(ValueError):
    """A blob that this engine must not use; the text says which field differs."""


def encode_header(header: Header) -> bytes:
    """Header bytes, padded to the granule."""
    body = msgspec.msgpack.encode(header)
    raw = _PREFIX.pack(MAGIC, FORMAT_VERSION, len(body)) + body
    return raw.ljust(align(len(raw)), b"\0")


def decode_header(raw: bytes) -> Header:
    """The header at the start of a blob. Raises HeaderError on a foreign, truncated or newer blob."""
    if len(raw) < _PREFIX.size:
        raise HeaderError(f"blob of {len(raw)} bytes is shorter than a header")
    magic, version, length = _PREFIX.unpack_from(raw)
    if magic != MAGIC:
        raise HeaderError(f"not an artifact: starts with {magic!r}")
    if version != FORMAT_VERSION:
        raise HeaderError(f"artifact format {version}, this engine reads {FORMAT_VERSION}")
    try:
        return msgspec.msgpack.decode(raw[_PREFIX.size : _PREFIX.size + length], type=Header)
    except msgspec.MsgspecError as e:
        raise HeaderError(f"damaged artifact header: {e}") from None


def require_header(raw: bytes, expected: Header) -> None:
    """Raise HeaderError unless the blob that starts with `raw` is the artifact that `expected` describes."""
    found = decode_header(raw)
    other = [name for name in Header.__struct_fields__ if getattr(found, name) != getattr(expected, name)]
    if other:
        values = ("", *(f"{n} {getattr(found, n)!r}, not {getattr(expected, n)!r}" for n in other if n != "tokens"))
        raise HeaderError(f"artifact of another {', '.join(other)}{'; '.join(values)}")
    if not raw.startswith(encode_header(expected)):  # decoding forgives what it does not know
        raise HeaderError("damaged artifact header: decodes, but was not written so")


def token_bytes(tokens: array) -> bytes:
    return array("q", tokens).tobytes()


def _itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


class ArtifactLayout:
    """Byte offsets of the parts of an artifact's payload, for one model, rank and dtype."""

    def __init__(self, linear: LinearShape | None, full: FullShape | None):
        self.linear, self.full = linear, full
        self.t_layer = self.s_layer = self.conv_layer = 0
        n = 0
        if linear is not None:
            n = len(linear.layer_ids)
            state = _itemsize(linear.state_dtype)
            self.t_layer = linear.transition_bytes
            self.s_layer = linear.heads * linear.d_v * linear.d_k * state
            self.conv_layer = linear.conv_channels * linear.conv_width * _itemsize(linear.conv_dtype)
        self._t = 0
        self._s = align(n * self.t_layer)
        self._conv = self._s + align(n * self.s_layer)
        self.kv_offset = self._conv + align(n * self.conv_layer)
        self.kv_token_bytes = 0
        if full is not None:
            self.kv_token_bytes = len(full.layer_ids) * full.heads * (full.d_k + full.d_v) * _itemsize(full.dtype)
        self._index = {layer: i for i, layer in enumerate(linear.layer_ids)} if linear is not None else {}

    def payload_bytes(self, interior_tokens: int) -> int:
        return self.kv_offset + align(interior_tokens * self.kv_token_bytes)

    def t_offset(self, layer_id: int) -> int:
        return self._t + self._index[layer_id] * self.t_layer

    def s_offset(self, layer_id: int) -> int:
        return self._s + self._index[layer_id] * self.s_layer

    def conv_offset(self, layer_id: int) -> int:
        return self._conv + self._index[layer_id] * self.conv_layer

    def parts(self, payload: torch.Tensor, interior_tokens: int) -> dict[str, torch.Tensor]:
        """Views of a payload (uint8, `payload_bytes(interior_tokens)` long).

        Returns:
            "T" [layer, head, d_k, d_k] (a copy in fp32 where it lies in int8) or [layer, head], "S" [layer, head, d_v, d_k],
            "conv" [layer, channel, K-1] where there are linear layers ("conv" where they convolve); "K" [layer, n, head,
            d_k], "V" [layer, n, head, d_v] where there are full-attention layers (no V of latent ones) and n > 0.
        """
        out: dict[str, torch.Tensor] = {}
        if (lin := self.linear) is not None:
            layers, heads, state = len(lin.layer_ids), lin.heads, lin.state_dtype
            regions = {
                "S": (self._s, (heads, lin.d_v, lin.d_k), state),
                "conv": (self._conv, lin.window, lin.conv_dtype),
            }
            if lin.operator == "log_decay":
                regions["T"] = self._t, (heads,), "float32"
            elif not lin.operator_dtype:
                regions["T"] = self._t, (heads, lin.d_k, lin.d_k), state
            else:
                starts = range(self._t, self._t + layers * self.t_layer, self.t_layer)
                out["T"] = torch.stack([read_operator(payload, t, heads, lin.d_k, lin.dtypes[1]) for t in starts])
            for name, (offset, part, kind) in regions.items():
                shape, dtype = (layers, *part), getattr(torch, kind)
                nbytes = math.prod(shape) * dtype.itemsize
                if not nbytes:  # no convolution
                    continue
                out[name] = payload[offset : offset + nbytes].view(dtype).view(shape)
        if (full := self.full) is not None and interior_tokens:
            dtype, layers, n = getattr(torch, full.dtype), len(full.layer_ids), interior_tokens
            kv = payload[self.kv_offset : self.kv_offset + n * self.kv_token_bytes].view(dtype).view(layers, -1)
            k, v = kv.split([n * full.heads * full.d_k, n * full.heads * full.d_v], -1)
            out["K"] = k.reshape(layers, n, full.heads, full.d_k)
            if full.d_v:
                out["V"] = v.reshape(layers, n, full.heads, full.d_v)
        return out
