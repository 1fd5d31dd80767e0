"""What answers are worth, held against values worked out by hand; means and their intervals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hypic.eval.metrics import METRICS, normalise, score
from hypic.eval.stats import Estimate, mean

TEXT = st.text(max_size=40)
VOCABULARY = ("the", "a", "red", "Red", "fox,", "fox.", "jumps", "1994", "é", "ñandú")
WORDS = st.lists(st.sampled_from(VOCABULARY), max_size=8).map(" ".join)


@pytest.mark.parametrize(
    ("metric", "answer", "references", "worth"),
    [
        # bags {red, fox, jumps} and {fox, red}: 2 common, precision 2/3, recall 1
        ("f1", "The red fox jumps!", ["A fox, red"], 0.8),
        # one of two "to" is common: 2 common words of 3 and 2
        ("f1", "to to be", ["to be"], 2 * 2 / 5),
        ("f1", "blue", ["red"], 0.0),
        ("f1", "", ["red"], 0.0),
        ("f1", "the", ["a"], 0.0),  # nothing is left of either
        ("f1", "yes", ["no", "yes indeed", "maybe"], 2 / 3),  # the best reference counts
        ("exact", "The  Eiffel-Tower.", ["eiffeltower"], 1.0),
        ("exact", "Eiffel Tower", ["eiffeltower"], 0.0),
        ("exact", "", ["The"], 0.0),
        ("exact", "The", ["The"], 1.0),
        ("exact", "ÉCOLE", ["école"], 1.0),
        ("contains", "It was in 1994, I think.", ["1994"], 1.0),
        ("contains", "It was in 19945.", ["1994"], 0.0),
        ("contains", "New York Times", ["York New"], 0.0),
        ("contains", "anything", [""], 0.0),
        ("accuracy", "Amber. The colour", ["amber"], 1.0),
        ("accuracy", "It is amber", ["amber"], 0.0),
        ("accuracy", "ambers", ["amber"], 0.0),
        ("accuracy", "", [""], 0.0),
        # longest common subsequence "the fox ran" of 4 and 5 words: precision 3/4, recall 3/5
        ("rouge_l", "the fox ran home", ["the red fox then ran"], 2 * 3 / 9),
        # one of two words stands in order; no stemmer, so "cats" is not "cat"
        ("rouge_l", "cats home", ["home cat"], 0.5),
        ("rouge_l", "cats", ["cat"], 0.0),
        ("rouge_l", "", ["a summary"], 0.0),
        ("rouge_l", "摘要", ["摘要"], 0.0),  # rouge-score sees a to z and digits only
    ],
)
def test_by_hand(metric: str, answer: str, references: list[str], worth: float) -> None:
    assert score(metric, answer, references) == pytest.approx(worth)


@pytest.mark.parametrize("metric", METRICS)
def test_no_reference_is_worth_nothing(metric: str) -> None:
    assert score(metric, "anything", []) == 0


def test_first_line_skips_blank_lines_in_front_as_longbench_does() -> None:
    assert score("f1", "\n\nParis\nQuestion: more", ["Paris"], first_line=True) == 1
    assert score("f1", "\n\nParis\nQuestion: more", ["Paris"]) == pytest.approx(0.5)
    assert score("f1", "", ["Paris"], first_line=True) == 0


def test_unknown_metric() -> None:
    with pytest.raises(KeyError, match="bleu"):
        score("bleu", "a", ["b"])


@pytest.mark.parametrize("metric", METRICS)
@given(answer=TEXT | WORDS, references=st.lists(TEXT | WORDS, max_size=3))
def test_scores_lie_between_0_and_1_and_more_references_never_hurt(
    metric: str, answer: str, references: list[str]
) -> None:
    worth = score(metric, answer, references)
    assert 0 <= worth <= 1
    assert score(metric, answer, [*references, "red fox"]) >= worth


@given(answer=WORDS, reference=WORDS)
def test_metrics_agree_where_they_must(answer: str, reference: str) -> None:
    f1, exact, contains, accuracy = (score(m, answer, [reference]) for m in ("f1", "exact", "contains", "accuracy"))
    assert f1 == pytest.approx(score("f1", reference, [answer]))  # symmetric
    if normalise(reference):
        assert f1 >= exact and contains >= accuracy >= exact
    assert normalise(normalise(answer)) == normalise(answer)


def test_mean_weights_and_interval() -> None:
    estimate = mean([1, 0, 1, 1], ["a", "b", "c", "d"], [1, 1, 1, 3])
    assert estimate.value == pytest.approx(5 / 6)
    assert estimate.low is not None and estimate.high is not None
    assert 0 <= estimate.low < 5 / 6 < estimate.high == 1


def test_interval_of_a_known_spread() -> None:
    """400 fair coins: the standard error is 0.025, so the interval is 0.5 +- 0.049."""
    values = [0, 1] * 200
    estimate = mean(values, list(range(400)))
    assert estimate.low == pytest.approx(0.451, abs=0.006)
    assert estimate.high == pytest.approx(0.549, abs=0.006)


def test_questions_about_the_same_documents_count_once() -> None:
    """Ten sets whose ten questions are all right or all wrong know as little as ten questions."""
    values = [i % 2 for i in range(10) for _ in range(10)]
    together = mean(values, [i for i in range(10) for _ in range(10)])
    alone = mean([i % 2 for i in range(10)], list(range(10)))
    assert (together.low, together.high) == (pytest.approx(alone.low), pytest.approx(alone.high))
    apart = mean(values, list(range(100)))
    assert apart.high - apart.low < 0.5 * (together.high - together.low)  # type: ignore[operator]


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        estimate = mean(rng.normal(3, 1, 60), list(range(60)))
        hits += estimate.low <= 3 <= estimate.high  # type: ignore[operator]
    assert 180 <= hits <= 198  # 95% of 200 is 190


def test_one_group_has_no_interval() -> None:
    assert mean([0, 1], ["same", "same"]) == Estimate(0.5)


@pytest.mark.parametrize(("values", "groups", "weights"), [([], [], None), ([1.0], [], None), ([1.0], ["a"], [0.0])])
def test_nothing_to_average(values: list[float], groups: list[str], weights: list[float] | None) -> None:
    with pytest.raises(ValueError):
        mean(values, groups, weights)


@given(
    st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 3), st.floats(0.1, 9)), min_size=1, max_size=12),
)
def test_interval_holds_the_mean_and_is_reproducible(rows: list[tuple[float, int, float]]) -> None:
    values, groups, weights = map(list, zip(*rows, strict=True))
    estimate = mean(values, groups, weights)  # type: ignore[arg-type]
    assert estimate == mean(values, groups, weights)  # type: ignore[arg-type]
    assert estimate.value == pytest.approx(np.average(values, weights=weights))
    if len(set(groups)) > 1:
        assert estimate.low is not None and estimate.high is not None
        assert min(values) - 1e-9 <= estimate.low <= estimate.value <= estimate.high <= max(values) + 1e-9
