"""Runs on the reference, from items to report and gates, cut off and taken up again; and the command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from hypic.check import tiny_models
from hypic.cli import app
from hypic.eval import gates, report
from hypic.eval.by_reference import ByReference
from hypic.eval.gates import BUILT_IN, Gate, GateError, judge
from hypic.eval.items import Item, Piece
from hypic.eval.methods import FULL, METHODS, choose
from hypic.eval.prompt import Codec
from hypic.eval.reference import Model
from hypic.eval.run import FILE, RunError, read, run
from hypic.eval.tasks import Task, tasks_of

MODEL = "qwen35"
WANTED = ["prefix", "hypic w=0", "hypic w=8", "kv-zeroed"]


def tokens(n: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(20, 900, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec(tiny_models.build(MODEL))


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(tiny_models.build(MODEL))


@pytest.fixture(scope="module")
def tasks(codec: Codec) -> list[Task]:
    """Two questions about each of two sets of documents."""
    items = []
    for s in range(2):
        documents = [Piece(tokens(60, 10 * s + d), True) for d in range(2)]
        for q in range(2):
            ask = Piece(tokens(5, 100 + 10 * s + q))
            items.append(
                Item(
                    id=f"{s}-{q}",
                    dataset="tiny",
                    pieces=(Piece(tokens(4, 99)), *documents, ask),
                    closed_book=(ask,),
                    answers=("x",),
                    metric="exact",
                    max_new_tokens=3,
                )
            )
    return tasks_of(items, codec)


def start(tasks: Sequence[Task], out: Path, model: Model, codec: Codec, names: list[str], **settings: Any) -> Any:
    runner = ByReference(model, codec, probes=1)
    return run(tasks, choose(names, hybrid=True), runner, out, model="m", settings=settings)


def plain(results: Any) -> list[Any]:
    """Without what differs from run to run."""
    found = [msgspec.structs.replace(o, seconds=0.0) for o in results.outcomes]
    return sorted((*found, *results.probes), key=lambda o: (type(o).__name__, o.item, o.method))


def test_a_run_says_what_the_reference_says(tasks: list[Task], tmp_path: Path, model: Model, codec: Codec) -> None:
    results = start(tasks, tmp_path, model, codec, WANTED)
    found = {(o.item, o.method): o for o in results.outcomes}
    assert found.keys() == {(t.item.id, m) for t in tasks for m in (*WANTED, "full", "closed_book")}
    for (item, name), o in found.items():
        assert o.tokens == (5 if name == "closed_book" else 4 + 120 + 5) and len(o.ids) <= 3
        forced = 0 if name in ("full", "closed_book") else len(found[item, "full"].ids)
        assert len(o.kl) == len(o.agrees) == forced
    assert [found[i, "prefix"].reused for i in ("0-0", "0-1", "1-0", "1-1")] == [0, 124, 4, 124]
    assert found["0-0", "hypic w=8"].reused == 104 and found["0-0", "hypic w=0"].reused == 120
    task, ref = tasks[1], ByReference(model, codec).reference
    truth = ref.answer(FULL, task.prompt, max_new=3)
    p = truth.logprobs
    q = ref.answer(METHODS["hypic w=8"], task.prompt, max_new=3, forced=truth.ids).logprobs
    assert found["0-1", "hypic w=8"].kl == pytest.approx((p.exp() * (p - q)).sum(-1).tolist(), abs=1e-5)
    assert {(p.item, p.method) for p in results.probes} == {("0-0", m) for m in WANTED if m != "prefix"}
    assert plain(read(tmp_path / FILE)) == plain(results)


def test_a_run_that_was_cut_off_goes_on(tasks: list[Task], tmp_path: Path, model: Model, codec: Codec) -> None:
    whole = start(tasks, tmp_path / "whole", model, codec, WANTED)
    lines = (tmp_path / "whole" / FILE).read_bytes().splitlines(keepends=True)
    cut = tmp_path / "cut"
    cut.mkdir()
    for kept in (0, 1, 8, len(lines) - 1):
        (cut / FILE).write_bytes(b"".join(lines[:kept]) + lines[kept][: len(lines[kept]) // 2])
        again = start(tasks, cut, model, codec, WANTED)
        assert plain(again) == plain(whole)
        assert len((cut / FILE).read_bytes().splitlines()) == len(lines)
    before = (cut / FILE).read_bytes()
    fewer = start(tasks, cut, model, codec, ["hypic w=8"])
    assert (cut / FILE).read_bytes() == before
    assert {o.method for o in fewer.outcomes} == {"full", "closed_book", "hypic w=8"}


def test_results_of_another_run_are_refused(tasks: list[Task], tmp_path: Path, model: Model, codec: Codec) -> None:
    start(tasks[:1], tmp_path, model, codec, [])
    with pytest.raises(RunError, match="data differ"):
        start(tasks[:2], tmp_path, model, codec, [])
    with pytest.raises(RunError, match="settings differ"):
        start(tasks[:1], tmp_path, model, codec, [], min_segment=3)
    with pytest.raises(RunError, match="two items have the id '0-0'"):
        start([tasks[0], tasks[0]], tmp_path, model, codec, [])
    with (tmp_path / FILE).open("a") as file:
        file.write("{}x\n")
    with pytest.raises(RunError, match=r"line 4.*delete the file"):
        start(tasks[:1], tmp_path, model, codec, [])


# --- gates ------------------------------------------------------------------------------------------------------------


def test_gates_read_the_table(tasks: list[Task], tmp_path: Path, model: Model, codec: Codec) -> None:
    results = start(tasks, tmp_path, model, codec, WANTED)
    summary = report.write(results.outcomes, [t.item for t in tasks], tmp_path, {}, results.probes)
    kl = summary.row("tiny", "hypic w=8").kl
    assert kl is not None and kl.value > 1e-4

    def verdict(**gate: Any) -> gates.Verdict:
        return judge([Gate(name="g", **gate)], summary)[0]

    found = verdict(method="hypic w=8", measure="kl", at_most=kl.value + 1e-6)
    assert found.met and found.value == pytest.approx(kl.value)
    assert not verdict(method="hypic w=8", measure="kl", at_most=kl.value - 1e-6).met
    assert not verdict(method="hypic w=8", measure="kl", at_least=kl.value + 1e-6).met
    more = verdict(method="kv-zeroed", minus="hypic w=8", measure="kl", at_least=-9)
    assert more.value == pytest.approx(summary.row("tiny", "kv-zeroed").kl.value - kl.value)  # type: ignore[union-attr]
    for odd, why in (
        (dict(method="additive"), "no row for 'additive'"),
        (dict(method="full", kind="upd"), "on tiny upd"),
        (dict(method="full", measure="kl"), "no kl of 'full'"),
        (dict(method="full", data="other"), "on other"),
    ):
        with pytest.raises(GateError, match=why):
            verdict(at_least=0, **odd)


def test_gates_that_the_table_will_not_have_are_found_before_the_run(tasks: list[Task], model: Model) -> None:
    items, methods = [t.item for t in tasks], choose(WANTED, hybrid=model.hybrid)
    kinds = [msgspec.structs.replace(i, kind=("recall", "upd")[n % 2]) for n, i in enumerate(items)]
    sets = [msgspec.structs.replace(i, dataset=f"set {n % 2}") for n, i in enumerate(items)]
    near: dict[str, Any] = dict(name="g", method="hypic w=8", at_least=0)
    for asked, fields in (
        (items, dict(measure="kl")),
        (items, dict(data="tiny", minus="full")),
        (kinds, dict(kind="upd")),
        (sets, dict(data="set 1")),
    ):
        gates.check([Gate(**near | fields)], asked, methods)
    for asked, fields, why in (
        (items, dict(kind="upd"), "gate 'g': no kind 'upd' among these items of tiny; there are none"),
        (kinds, dict(kind="strad"), "there are recall, upd"),
        (items, dict(data="other"), "no data set 'other'; there are tiny"),
        (sets, {}, "must name its data set: there are set 0, set 1"),
        (items, dict(method="additive"), "'additive' does not run here; there are full"),
        (items, dict(measure="kl", minus="full"), "no kl of 'full'"),
        (items, dict(measure="agreement", method="closed_book"), "no agreement of 'closed_book'"),
    ):
        with pytest.raises(GateError, match=why):
            gates.check([Gate(**near | fields)], asked, methods)


def test_files_of_gates(tmp_path: Path) -> None:
    path = tmp_path / "gates.toml"
    path.write_text('[[gates]]\nname = "near"\nmethod = "hypic w=8"\nminus = "full"\nat_least = -2\nat_most = 2\n')
    assert gates.load(str(path)) == (Gate(name="near", method="hypic w=8", minus="full", at_least=-2, at_most=2),)
    assert gates.methods_of(gates.load(str(path))) == ["hypic w=8", "full"]
    for text, why in (
        ('[[gates]]\nname = "n"\nmethod = "full"\n', "neither at_least nor at_most"),
        ('[[gates]]\nname = "n"\nmethod = "ful"\nat_least = 1\n', "gate 'n': no method 'ful'"),
        ('[[gates]]\nname = "n"\nmethod = "full"\natleast = 1\n', "atleast"),
        ("[[gates", "gates.toml"),
    ):
        path.write_text(text)
        with pytest.raises(GateError, match=why):
            gates.load(str(path))
    with pytest.raises(GateError, match=r"No such file.*almanac"):
        gates.load(str(tmp_path / "none.toml"))
    assert gates.load("almanac") == BUILT_IN["almanac"]


# --- the command --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def almanac_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model behind the almanac's tokenizer: it has never learnt a fact."""
    from transformers import AutoConfig, Qwen3_5ForConditionalGeneration

    tokenizer = Path(__file__).parents[2] / "models" / "almanac"
    folder = tmp_path_factory.mktemp("almanac")
    config = AutoConfig.from_pretrained(tiny_models.build(MODEL))
    config.text_config.vocab_size = 6144
    torch.manual_seed(0)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text((tokenizer / name).read_text())
    return folder


def command(*args: str) -> Any:
    return CliRunner().invoke(app, ["eval", *args])


def test_the_command_writes_a_report_and_fails_if_a_gate_is_missed(almanac_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "gates.toml"
    gate = '[[gates]]\nname = "near"\nmethod = "hypic w=8"\nmeasure = "kl"\nat_most = {}\n'
    path.write_text(gate.format(50))
    line = [str(almanac_model), "--data", "almanac:level=0", "--n", "5", "--seeds", "0,1", "--methods", "additive"]
    line += ["--out", str(tmp_path / "out"), "--gates", str(path), "--json"]
    done = command(*line)
    assert done.exit_code == 0, done.output
    table = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert {r["method"] for r in table["rows"]} == {"full", "closed_book", "additive", "hypic w=8"}
    assert table["meta"]["seeds"] == [0, 1] and [d["seed"] for d in table["meta"]["data"]] == [0, 1]
    assert max(r["n"] for r in table["rows"]) == 10 and "additive" in table["deviations"]
    assert table["meta"]["kl_over"] == "the whole vocabulary" and "torch" in table["meta"]["versions"]
    path.write_text(gate.format(-1))
    missed = command(*line)
    assert missed.exit_code == 1 and "1 of 1 gates missed" in missed.output
    verdict = json.loads((tmp_path / "out" / "gates.json").read_text())[0]
    assert verdict["met"] is False and verdict["value"] >= 0
    path.write_text(gate.format(50) + 'kind = "words"\n')
    nothing_new = command(*line)
    assert nothing_new.exit_code == 2 and "no kind 'words'" in " ".join(nothing_new.output.replace("│", " ").split())
    assert "outcomes are there already" not in nothing_new.output, "the run did not begin"


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--methods", "legolink-8"], "full attention alone"),
        (["--methods", "magic"], "no method 'magic'"),
        (["--data", "poems"], "no data set 'poems'"),
        (["--seeds", "one"], "--seeds 'one'"),
        (["--gates", "none.toml"], "none.toml: No such file"),
        (["--gates", "almanac"], "those of the hardest level; leave level= out of almanac:level=0"),
        (["--dtype", "int8"], "--dtype int8"),
        (["--served", "--methods", "additive"], "not served by the engine"),
        (["--page-size", "16"], "need --served"),
    ],
)
def test_what_cannot_be_done_is_said(almanac_model: Path, tmp_path: Path, more: list[str], why: str) -> None:
    line = [str(almanac_model), "--data", "almanac:level=0", "--n", "1", "--out", str(tmp_path)]
    done = command(*line, *more)
    assert done.exit_code == 2, done.output
    assert why in " ".join(done.output.replace("│", " ").split())


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    done = command(str(tmp_path), "--data", "almanac", "--out", str(tmp_path))
    assert done.exit_code == 2 and "config.json" in done.output
