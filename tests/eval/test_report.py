"""Outcomes as rows, JSON, Markdown and pictures."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from hypic.eval import report
from hypic.eval.items import Item, Outcome, Piece, Probe
from hypic.eval.stats import Estimate
from hypic.eval.summary import Summary, summarise


def item(name: str, kind: str = "", documents: str = "d", answer: str = "amber") -> Item:
    return Item(
        id=name,
        dataset="set",
        kind=kind,
        pieces=(Piece("head"), Piece(documents, True), Piece("ask")),
        closed_book=(Piece("ask"),),
        answers=(answer,),
        metric="f1",
        max_new_tokens=4,
    )


def outcome(name: str, method: str, text: str, **more: object) -> Outcome:
    return Outcome(item=name, method=method, text=text, ids=(1,), **{"tokens": 100, "reused": 0} | more)  # type: ignore[arg-type]


ITEMS = [item("1", "upd", "x"), item("2", "upd", "x"), item("3", "strad", "y"), item("4", "strad", "y")]
FULL = [outcome(i.id, "full", "amber") for i in ITEMS]
CLOSED = [outcome(i.id, "closed_book", t, tokens=10) for i, t in zip(ITEMS, ("amber", "", "", ""), strict=True)]
HYPIC = [
    outcome("1", "hypic w=8", "amber", reused=80, kl=(0.1, 0.3), agrees=(True, True)),
    outcome("2", "hypic w=8", "amber gold", reused=80, kl=(0.2,), agrees=(True,)),
    outcome("3", "hypic w=8", "gold", reused=40, kl=(1.0,), agrees=(False,)),
    outcome("4", "hypic w=8", "amber", reused=40, kl=(0.0,), agrees=(True,)),
]


@pytest.fixture(scope="module")
def summary() -> Summary:
    return summarise([*HYPIC, *CLOSED, *FULL], ITEMS, {"seed": 7})


def test_row_by_hand(summary: Summary) -> None:
    row = summary.row("set", "hypic w=8")
    assert (row.n, row.sets, row.missing, row.metric, row.tokens) == (4, 2, 0, "f1", 100)
    # F1 of "amber gold" against "amber" is 2/3
    assert row.score.value == pytest.approx(100 * (1 + 2 / 3 + 0 + 1) / 4)
    assert row.exact.value == 50
    assert row.contains.value == 75
    assert row.difference is not None and row.difference.value == pytest.approx(row.score.value - 100)
    assert row.reused == pytest.approx(0.6)
    # over tokens, not over questions: 0.1 + 0.3 + 0.2 + 1.0 + 0.0 of five
    assert row.kl is not None and row.kl.value == pytest.approx(1.6 / 5)
    assert row.agreement is not None and row.agreement.value == pytest.approx(4 / 5)
    assert row.forced == 5


def test_intervals_are_drawn_over_sets_of_documents(summary: Summary) -> None:
    """Two sets, of scores 83.3 and 50: a draw sees one of them alone half of the time."""
    score = summary.row("set", "hypic w=8").score
    assert (score.low, score.high) == (pytest.approx(50), pytest.approx(100 * 5 / 6))
    one_set = summary.row("set", "hypic w=8", "upd").score
    assert one_set == Estimate(pytest.approx(100 * 5 / 6))


def test_kinds_have_rows_of_their_own_behind_the_whole(summary: Summary) -> None:
    assert list(dict.fromkeys(r.kind for r in summary.rows)) == ["", "upd", "strad"]
    assert summary.row("set", "closed_book", "upd").score.value == 50
    assert summary.row("set", "closed_book", "strad").score.value == 0
    with pytest.raises(KeyError, match="decay"):
        summary.row("set", "decay-only")


def test_methods_stand_in_the_order_of_the_table_and_are_compared_with_full(summary: Summary) -> None:
    rows = [r for r in summary.rows if r.kind == ""]
    assert [r.method for r in rows] == ["full", "closed_book", "hypic w=8"]
    assert [r.difference is None for r in rows] == [True, True, False]
    assert rows[0].kl is None and rows[0].agreement is None and rows[0].forced == 0


def test_a_method_that_lacks_answers_is_compared_over_those_it_has() -> None:
    found = summarise([*FULL, *HYPIC[:2]], ITEMS, {})
    row = found.row("set", "hypic w=8")
    assert (row.n, row.missing) == (2, 2)
    assert row.difference is not None and row.difference.value == pytest.approx(100 * (5 / 6 - 1))
    assert "hypic w=8 (n = 2)" in report.markdown(found)


def test_without_full_there_is_no_difference() -> None:
    assert summarise(HYPIC, ITEMS, {}).row("set", "hypic w=8").difference is None


@pytest.mark.parametrize(
    ("outcomes", "items", "says"),
    [
        ([], [ITEMS[0], ITEMS[0]], "two items are called '1'"),
        ([outcome("9", "full", "")], ITEMS, "answered '9', which is no item"),
        ([FULL[0], FULL[0]], ITEMS, "answered '1' twice"),
    ],
)
def test_contradictions(outcomes: list[Outcome], items: list[Item], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        summarise(outcomes, items, {})


def probe(name: str, method: str, *distance: float, hidden: tuple[float, float] = (0.1, 0.2)) -> Probe:
    return Probe(
        item=name, method=method, layers=("linear", "attention"), hidden=hidden, kept=(0.3, 0.4), distance=distance
    )


def test_probes_are_averaged_place_by_place() -> None:
    probes = [
        probe("1", "hypic w=8", 0.0, 0.4, 0.2),
        probe("2", "hypic w=8", 0.2, 0.6, hidden=(0.3, 0.6)),
        probe("1", "additive", 0.5),
    ]
    found = summarise([], [], {}, probes).deviations
    assert list(found) == ["additive", "hypic w=8"]
    d = found["hypic w=8"]
    assert d.n == 2 and d.layers == ["linear", "attention"]
    assert d.hidden == pytest.approx([0.2, 0.4])
    assert d.distance.n == [2, 2, 1]
    assert d.distance.mean == pytest.approx([0.1, 0.5, 0.2])


def test_probes_of_different_models_do_not_mix() -> None:
    other = msgspec.structs.replace(probe("2", "additive", 0.1), layers=("linear", "linear"))
    short = msgspec.structs.replace(probe("2", "additive", 0.1), kept=(0.3,))
    for odd in (other, short):
        with pytest.raises(ValueError, match="layers"):
            summarise([], [], {}, [probe("1", "additive", 0.1), odd])


def test_what_is_written(tmp_path: Path) -> None:
    probes = [probe("1", m, 0.3, 0.0) for m in ("hypic w=8", "hypic w=0", "additive")]
    sweep = [msgspec.structs.replace(o, method="hypic w=0", reused=90, text="gold") for o in HYPIC]
    summary = report.write([*FULL, *CLOSED, *HYPIC, *sweep], ITEMS, tmp_path / "out", {"model": "m", "seed": 7}, probes)
    assert msgspec.json.decode((tmp_path / "out" / "eval.json").read_bytes(), type=Summary) == summary
    text = (tmp_path / "out" / "eval.md").read_text()
    assert "- model: m\n- seed: 7\n" in text
    assert "n = 4 questions about 2 sets of documents." in text
    (line,) = (
        x for x in text.split("## set strad")[0].split("## set upd")[0].splitlines() if x.startswith("| hypic w=8")
    )
    cells = [c.strip() for c in line.strip("|").split("|")]
    assert cells == [
        "hypic w=8",
        "66.7 [50.0, 83.3]",
        "-33.3 [-50.0, -16.7]",
        "25.0",
        "50.0",
        "75.0",
        "0.3200",
        "80.0%",
        "40.0%",
    ]
    for name in ("pareto", "seam", "layers"):
        assert f"![{name}]({name}.png)" in text
        assert (tmp_path / "out" / f"{name}.png").read_bytes()[1:4] == b"PNG"


def test_no_probes_no_picture_of_them(tmp_path: Path) -> None:
    report.write(FULL, ITEMS, tmp_path, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["eval.json", "eval.md", "pareto.png"]
