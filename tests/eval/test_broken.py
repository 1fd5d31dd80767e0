"""Damaged models, stale results and gates that say nothing are refused, not reported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hypic.check import tiny_models
from hypic.eval.by_reference import ByReference
from hypic.eval.gates import GateError
from hypic.eval.gates import load as load_gates
from hypic.eval.items import Item, Piece
from hypic.eval.methods import FULL
from hypic.eval.prompt import Codec
from hypic.eval.reference import Model, ModelError
from hypic.eval.run import _weights
from hypic.eval.tasks import NotFinite, tasks_of


def test_other_weights_under_the_same_name_are_another_run(tmp_path: Path) -> None:
    """Outcomes of a model that was retrained since must not stand for the new one."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"old")
    before = _weights(model)
    (model / "model.safetensors").write_bytes(b"new weights")
    assert before != _weights(model) == _weights(model)


def test_a_model_that_gives_nan_ends_the_run(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_models.build("llama"), tmp_path / "nan")
    weights = load_file(folder / "model.safetensors")
    name = next(n for n in weights if n.endswith("down_proj.weight"))
    weights[name][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model = Model(folder)
    item = Item(
        id="q",
        dataset="d",
        pieces=(Piece((5, 6, 7)),),
        closed_book=(Piece((5,)),),
        answers=("a",),
        metric="f1",
        max_new_tokens=2,
    )
    codec = Codec(folder)
    with pytest.raises(NotFinite, match=r"q, full: .*NaN"):
        list(ByReference(model, codec).outcomes(tasks_of([item], codec, min_segment=0), [FULL], frozenset()))
    del weights[name]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="down_proj"):
        Model(folder)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gates = []", "no gates"),
        ('[[gates]]\nname = "x"\nmethod = "full"\nat_least = 50\nat_most = 10', "at least 50"),
        ('[[gates]]\nname = "x"\nmethod = "full"\nat_least = nan', "at least nan"),
    ],
)
def test_gates_that_cannot_fail_or_hold_are_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "gates.toml"
    path.write_text(text)
    with pytest.raises(GateError, match=says):
        load_gates(str(path))
