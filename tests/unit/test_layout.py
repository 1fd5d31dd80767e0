"""Artifact blobs: parts that do not overlap, and headers that refuse what is not theirs (CASES 21)."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hypic.artifact.arena import ALIGN
from hypic.artifact.layout import (
    ArtifactLayout,
    FullShape,
    Header,
    HeaderError,
    LinearShape,
    decode_header,
    encode_header,
    require_header,
    token_bytes,
)
from hypic.kernels.operators import write_operator

LINEAR = LinearShape((0, 1, 2, 4), heads=3, d_k=8, d_v=6, conv_channels=66, conv_width=3, conv_dtype="bfloat16")
FULL = FullShape((3, 5), heads=2, d_k=16, d_v=12, dtype="float16")
HEADER = Header(
    fingerprint="aa+0",
    method="seam",
    seam_window=8,
    adapter="",
    tp_rank=0,
    tp_size=2,
    linear=LINEAR,
    full=FULL,
    tokens=token_bytes(array("q", range(70))),
)


def changed(shape: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(shape, **fields)


OTHERS: dict[str, dict[str, Any]] = {
    "model": {"fingerprint": "bb+0"},
    "weights": {"fingerprint": "aa+1"},
    "method": {"method": "dummy"},
    "seam window": {"seam_window": 16},
    "adapter": {"adapter": "lora"},
    "rank": {"tp_rank": 1},
    "TP size": {"tp_size": 1},
    "KV dtype": {"full": changed(FULL, dtype="bfloat16")},
    "conv dtype": {"linear": changed(LINEAR, conv_dtype="float32")},
    "heads": {"linear": changed(LINEAR, heads=6)},
    "T's type": {"linear": LINEAR.with_operators_in("int8")},
    "d_k and d_v": {"linear": changed(LINEAR, d_k=6, d_v=8)},
    "layers": {"full": changed(FULL, layer_ids=(3,))},
    "no linear layers": {"linear": None},
    "tokens": {"tokens": token_bytes(array("q", range(1, 71)))},
}


def test_a_header_is_read_back_and_accepted() -> None:
    raw = encode_header(HEADER)
    assert len(raw) % ALIGN == 0
    assert decode_header(raw + b"payload") == HEADER
    require_header(raw, HEADER)


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_an_artifact_of_something_else_is_refused_by_name(other: dict[str, Any]) -> None:
    (name,) = other
    with pytest.raises(HeaderError, match=f"artifact of another {name}") as error:
        require_header(encode_header(changed(HEADER, **other)), HEADER)
    if name != "tokens":
        assert repr(other[name]) in str(error.value) and repr(getattr(HEADER, name)) in str(error.value)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "shorter than a header"),
        (encode_header(HEADER)[:15], "shorter than a header"),
        (encode_header(HEADER)[:40], "damaged"),
        (bytes(ALIGN), "not an artifact"),
        (b"hypicart\1\0\0\0" + encode_header(HEADER)[12:], "format 1, this engine reads 4"),
    ],
    ids=["nothing", "less than a prefix", "truncated", "zeros", "another version"],
)
def test_foreign_truncated_and_newer_blobs(raw: bytes, says: str) -> None:
    with pytest.raises(HeaderError, match=says):
        decode_header(raw)


@given(st.data())
@settings(max_examples=300)
def test_no_damage_to_a_header_goes_unnoticed(data: st.DataObject) -> None:
    raw = bytearray(encode_header(HEADER))
    used = len(bytes(raw).rstrip(b"\0"))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, used - 1))
        raw[at] ^= data.draw(st.integers(1, 255))
    if bytes(raw) != encode_header(HEADER):
        with pytest.raises(HeaderError):
            require_header(bytes(raw), HEADER)


@pytest.mark.parametrize(("linear", "full"), [(LINEAR, FULL), (LINEAR, None), (None, FULL)])
@pytest.mark.parametrize("n", [0, 1, 57])
def test_parts_are_disjoint_and_lie_within_the_payload(linear: Any, full: Any, n: int) -> None:
    layout = ArtifactLayout(linear, full)
    payload = torch.zeros(layout.payload_bytes(n), dtype=torch.uint8)
    parts = layout.parts(payload, n)
    expected = {}
    if linear is not None:
        expected |= {"T": (4, 3, 8, 8), "S": (4, 3, 6, 8), "conv": (4, 66, 3)}
    if full is not None and n:
        expected |= {"K": (2, n, 2, 16), "V": (2, n, 2, 12)}
    assert {name: tuple(part.shape) for name, part in parts.items()} == expected
    for i, part in enumerate(parts.values()):
        part.fill_(i + 1)
    for i, part in enumerate(parts.values()):
        assert (part == i + 1).all(), "another part was written over this one"
    if linear is not None:
        for layer, i in zip(linear.layer_ids, range(4), strict=True):
            for name, offset in (("T", layout.t_offset), ("S", layout.s_offset), ("conv", layout.conv_offset)):
                assert parts[name][i].data_ptr() == payload.data_ptr() + offset(layer)
        assert all(o % ALIGN == 0 for o in (layout.t_offset(0), layout.s_offset(0), layout.conv_offset(0)))
    assert layout.kv_offset % ALIGN == 0 == layout.payload_bytes(n) % ALIGN


def test_T_in_int8_is_read_out_in_fp32_and_touches_no_other_part() -> None:
    layout = ArtifactLayout(LINEAR.with_operators_in("int8"), FULL)
    payload = torch.zeros(layout.payload_bytes(5), dtype=torch.uint8)
    for part in layout.parts(payload, 5).values():
        part.fill_(7.0)
    values = torch.randn(4, 3, 8, 8)
    for layer, t in zip(LINEAR.layer_ids, values, strict=True):
        assert layout.t_offset(layer) % 16 == 0
        write_operator(t, payload, layout.t_offset(layer), torch.int8)
    parts = layout.parts(payload, 5)
    assert parts["T"].dtype == torch.float32 and (parts["T"] - values).abs().max() < values.abs().max() / 250
    assert all((part == 7.0).all() for name, part in parts.items() if name != "T")
    assert layout.payload_bytes(5) < ArtifactLayout(LINEAR, FULL).payload_bytes(5)


def test_only_matrices_have_a_type_of_their_own() -> None:
    assert changed(LINEAR, operator="log_decay").with_operators_in("int8").operator_dtype == ""
    assert LINEAR.with_operators_in("float32") == LINEAR
    assert LINEAR.with_operators_in("int8").dtypes == (torch.float32, torch.int8)
