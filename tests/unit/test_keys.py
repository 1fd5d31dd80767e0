"""Store keys and radix namespaces: what may be shared, and what never is (CASES 15, 16, 28, 30)."""

from __future__ import annotations

import itertools
import os
import shutil
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from hypic.engine.keys import (
    METHOD,
    KeyIdentity,
    adapter_name,
    artifact_key,
    checkpoint,
    covers,
    link_namespace,
    model_fingerprint,
)
from hypic.method import parse_methods

IDENTITY = KeyIdentity(fingerprint="f", dtype="bfloat16", tp_rank=0, tp_size=2, method=METHOD, seam_window=8)
TOKENS = array("q", range(64))

inputs = st.tuples(
    st.builds(
        KeyIdentity,
        fingerprint=st.sampled_from(["f", "g", "fg"]),
        dtype=st.sampled_from(["bfloat16", "float16"]),
        tp_rank=st.integers(0, 1),
        tp_size=st.integers(1, 2),
        method=st.sampled_from([METHOD, "dummy"]),
        seam_window=st.sampled_from([8, 16]),
        weights=st.sampled_from(["", "x"]),
    ),
    st.sampled_from(["", "a", "ab", "b", "bc"]),
    st.sampled_from(["", "a", "b", "c", "bc"]),
    st.sampled_from([(), (1,), (1, 2), (2, 1), (258,)]),
)


@given(inputs, inputs)
def test_keys_are_equal_only_where_everything_but_the_rank_is(a: Any, b: Any) -> None:
    one, two = (artifact_key(i.digest, t, d, array("q", ids)) for i, t, d, ids in (a, b))
    a, b = ((msgspec.structs.replace(x[0], tp_rank=0), *x[1:]) for x in (a, b))
    assert (one == two) == (a == b)


@pytest.mark.parametrize("field", ["fingerprint", "dtype", "tp_size", "method", "seam_window", "weights"])
def test_each_field_of_the_identity_counts(field: str) -> None:
    value = getattr(IDENTITY, field)
    other = msgspec.structs.replace(IDENTITY, **{field: value + 1 if isinstance(value, int) else value + "x"})
    assert artifact_key(other.digest, "", "", TOKENS) != artifact_key(IDENTITY.digest, "", "", TOKENS)


def test_new_weights_never_bring_back_an_old_key() -> None:
    seen, identity = set(), IDENTITY
    for _ in range(50):
        seen.add(artifact_key(identity.digest, "", "", TOKENS))
        identity = identity.next_weights()
    assert len(seen) == 50


def test_servers_with_another_past_agree_once_they_have_all_their_weights_from_the_same_files() -> None:
    once, twice = IDENTITY.next_weights("a"), IDENTITY.next_weights("b").next_weights("a")
    assert once != twice, "some of b's weights may be left"
    assert IDENTITY.next_weights("a", True) == twice.next_weights("a", True) != IDENTITY
    assert once.next_weights("a", True) != once.next_weights("c", True) != once.next_weights("c")


def test_a_checkpoint_covers_another_if_it_has_all_of_its_tensors(tmp_path: Path) -> None:
    a, b, c = (torch.zeros(1) for _ in range(3))
    found = {}
    for name, tensors in (
        ("all", {"a": a, "b": b}),
        ("part", {"a": a}),
        ("more", {"a": a, "b": b, "c": c}),
        ("none", {}),
    ):
        (folder := tmp_path / name).mkdir()
        if tensors:
            save_file(tensors, folder / "model.safetensors")
        found[name] = str(folder)
    assert [covers(found[name], found["all"]) for name in found] == [True, False, True, False]
    assert not covers(found["all"], found["none"]), "dummy weights: nobody knows what there was"
    assert len({checkpoint(path) for path in found.values()}) == 4 and checkpoint("hub/model") == "hub/model"


def test_parts_that_join_to_the_same_bytes_have_other_keys() -> None:
    keys = [
        artifact_key(IDENTITY.digest, tenant, adapter, TOKENS)
        for tenant, adapter in (("a", "bc"), ("ab", "c"), ("abc", ""))
    ]
    assert len(set(keys)) == 3


def test_methods_have_keys_of_their_own_unless_they_are_the_default_by_another_name() -> None:
    methods = parse_methods("seam,seam-16,seam-8,legolink-0", 8)
    default = methods["seam"]
    tags = {name: method.tag(default) for name, method in methods.items()}
    assert tags["seam"] == tags["seam-8"] == "" and len(set(tags.values())) == 3
    assert len({artifact_key(IDENTITY.digest, "", "", TOKENS, tag) for tag in tags.values()}) == 3


def test_an_adapter_is_called_by_its_name_and_files(tmp_path: Path) -> None:
    """Two servers with the same files agree; other files under the same name are another adapter."""
    folder, copy = tmp_path / "a", tmp_path / "copy"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"12345")
    (folder / "adapter_config.json").write_text('{"r": 4}')
    shutil.copytree(folder, copy)
    first = adapter_name("a", str(folder))
    assert first and adapter_name("a", str(copy)) == first != adapter_name("b", str(folder))
    seen = {first}
    (copy / "adapter_config.json").write_text('{"r": 8}')
    seen.add(adapter_name("a", str(copy)))
    (folder / "adapter_model.safetensors").write_bytes(b"123456")
    seen.add(adapter_name("a", str(folder)))
    assert len(seen) == 3
    assert adapter_name("a", str(tmp_path / "nowhere")) == adapter_name("a", "someone/on-a-hub") == ""


TEXTS = st.text(st.sampled_from("ab:1\x1f"), max_size=6)


@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_tenants_never_share_a_radix_namespace(salt: str, extra: str, other_salt: str, other_extra: str) -> None:
    """SGLang joins cache_salt and extra_key with nothing between: ("a", "bc") and ("ab", "c") arrive as the same string."""
    one, two = link_namespace(salt + extra, salt, 8), link_namespace(other_salt + other_extra, other_salt, 8)
    if salt != other_salt:
        assert one != two
    elif extra == other_extra:
        assert one == two


def test_a_namespace_holds_the_original_key_the_window_and_is_no_ordinary_one() -> None:
    names = [link_namespace(*n) for n in itertools.product((None, "x"), ("", "t"), (8, 16))]
    assert len(set(names)) == len(names)
    assert all(n not in ("", "x", "t", "xt") for n in names)
    assert all(n.startswith("x") for n in names[4:])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model-1.safetensors").write_bytes(b"12345")
    (tmp_path / "model.safetensors.index.json").write_text('{"a": "model-1.safetensors"}')
    (tmp_path / "README.md").write_text("words")
    return tmp_path


def fingerprint(path: Path | str, load_format: str = "auto", **config: Any) -> str:
    return model_fingerprint(str(path), SimpleNamespace(to_dict=lambda: {"layers": 2, **config}), load_format)


def test_a_fingerprint_follows_config_files_and_index(model: Path) -> None:
    seen = [fingerprint(model)]
    assert fingerprint(model) == seen[0]
    (model / "README.md").write_text("other words")
    assert fingerprint(model) == seen[0]
    seen += [fingerprint(model, layers=3), fingerprint(model, load_format="dummy")]
    weights = model / "model-1.safetensors"
    stat = weights.stat()
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    seen.append(fingerprint(model))
    weights.write_bytes(b"123456")
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    seen.append(fingerprint(model))
    weights.rename(model / "model-2.safetensors")
    seen.append(fingerprint(model))
    (model / "model.safetensors.index.json").write_text('{"a": "model-2.safetensors"}')
    seen.append(fingerprint(model))
    assert len(set(seen)) == len(seen)


def test_a_model_by_name_is_known_by_its_name() -> None:
    assert fingerprint("org/one") == fingerprint("org/one") != fingerprint("org/two")
