"""What an answer is worth against accepted answers, from 0 to 1.

``f1`` and ``normalise`` compute what LongBench (arXiv 2308.14508) computes for its English question answering, which is
what SQuAD does. ``rouge_l`` is the package rouge-score without a stemmer; LongBench used the package rouge, whose
tokens differ a little, so its ROUGE-L differs in the second digit. rouge-score sees the letters a to z and digits only.
"""

from __future__ import annotations

import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Metric = Callable[[str, str], float]

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Lower case, no ASCII punctuation, no English articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall of the normalised words, as a bag."""
    a, r = normalise(answer).split(), normalise(reference).split()
    common = (Counter(a) & Counter(r)).total()
    return 2 * common / (len(a) + len(r)) if common else 0.0


def exact(answer: str, reference: str) -> float:
    """Equal when normalised; a reference of which nothing is left, such as "The", is compared as it stands."""
    wanted = normalise(reference)
    return float(normalise(answer) == wanted if wanted else answer.strip() == reference.strip())


def contains(answer: str, reference: str) -> float:
    """The normalised reference stands in the normalised answer, whole words in a row."""
    return float(_inside(normalise(answer).split(), normalise(reference).split()))


def accuracy(answer: str, reference: str) -> float:
    """The normalised answer begins with the reference, whole words: a label, then whatever follows it."""
    a, r = normalise(answer).split(), normalise(reference).split()
    return float(bool(r) and a[: len(r)] == r)


def rouge_l(answer: str, reference: str) -> float:
    """F-measure of the longest common subsequence of words. Needs the extra ``eval``."""
    return float(_rouge().score(reference, answer)["rougeL"].fmeasure)


METRICS: Mapping[str, Metric] = {
    "f1": f1,
    "exact": exact,
    "contains": contains,
    "accuracy": accuracy,
    "rouge_l": rouge_l,
}
"""By the names that :class:`hypic.eval.items.Item` carries."""


def score(name: str, answer: str, references: Sequence[str], *, first_line: bool = False) -> float:
    """The metric of that name against the reference that fits best; 0 where there is no reference.

    Args:
        first_line: judge what stands before the first line break, blank lines in front aside.
    Raises:
        KeyError: there is no such metric.
    """
    metric = METRICS[name]
    if first_line:
        answer = answer.lstrip("\n").split("\n")[0]
    return max((metric(answer, r) for r in references), default=0.0)


def _inside(words: Sequence[str], part: Sequence[str]) -> bool:
    return bool(part) and any(words[i : i + len(part)] == part for i in range(len(words) - len(part) + 1))


@functools.cache
def _rouge() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError as e:
        raise ModuleNotFoundError(f"{e}; ROUGE-L needs more packages: pip install 'hypic[eval]'", name=e.name) from None
    return RougeScorer(["rougeL"], use_stemmer=False)
