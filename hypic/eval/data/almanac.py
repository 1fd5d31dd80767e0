"""The synthetic task of the model in ``models/almanac``: facts in documents of held-out sentences (models/task.py).

A question is one item; those of a sequence share its documents. The answer is one token, so accuracy is what the gates
of models/gates.py measure, and KL is that of the answer's distribution.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import random
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import hypic
from hypic.eval.data.common import Loaded, Wanted, enough
from hypic.eval.data.errors import DataError
from hypic.eval.items import Item, Piece

_PACKAGE = "hypic_checkout_models"
_PROBE = "What is the colour of Ulric? amber."


def load(wanted: Wanted) -> Loaded:
    """Options: ``level`` 0 to 5 (documents and facts, models/task.py; the hardest if left out), ``questions`` about the
    documents of one sequence (all if left out), which turn from kind to kind."""
    wanted.only("level", "questions")
    task, directory = _task(wanted.spec)
    level = wanted.number("level", len(task.LEVELS) - 1, 0, len(task.LEVELS) - 1)
    most = wanted.number("questions", task.LEVELS[level].questions, 1, task.LEVELS[level].questions)
    if wanted.n is None:
        raise DataError(f"{wanted.spec}: it has no end, so say how many questions (n)")
    decode = _tokenizer(wanted, directory)
    longest = task.LEVELS[level].tokens
    if wanted.template.context is not None and longest > wanted.template.context:
        raise DataError(
            f"{wanted.spec}: {longest} tokens do not fit the model's {wanted.template.context}: lower level="
        )
    world = task.World(directory, held_out=True)
    items: list[Item] = []
    for sequence in itertools.count():
        rng = random.Random(f"eval {wanted.seed} {sequence}")
        sample = task.make(world, task.LEVELS[level], rng, full=True, close=True)
        ids = [int(i) for i in sample.ids]
        starts = [start for start, _ in sample.documents]
        head = Piece(tuple(ids[: starts[0]]))
        documents = tuple(Piece(tuple(ids[start:end]), True) for start, end in sample.documents)
        for i, question in enumerate(_turns(sample.questions)[:most]):
            ask = Piece(tuple(int(t) for t in question.ids))
            items.append(
                Item(
                    id=f"almanac/{level}-{wanted.seed}-{sequence}-{i}",
                    dataset="almanac",
                    kind=task.KINDS[question.kind - task.RECALL],
                    pieces=(head, *documents, ask),
                    closed_book=(head, ask),
                    answers=(decode([int(question.answer)]),),
                    metric="accuracy",
                    max_new_tokens=1,
                )
            )
            if enough(wanted, items):
                source = f"models/task.py, level {level}, sentences held out from training"
                licence = "sentences: PSF licence and MIT (models/README.md)"
                loaded = Loaded(wanted, items, source=source, licence=licence, notes={"sequences": sequence + 1})
                loaded.about["hardest"] = level == len(task.LEVELS) - 1
                return loaded
    raise AssertionError


def _turns(questions: list[Any]) -> list[Any]:
    """Questions in the order in which each kind has its turn, so that any number of them holds all kinds alike."""
    place: Counter[int] = Counter()
    ranked = []
    for q in questions:
        ranked.append((place[q.kind], q.kind))
        place[q.kind] += 1
    return [q for _, q in sorted(zip(ranked, questions, strict=True), key=lambda pair: pair[0])]


def _task(spec: str) -> tuple[ModuleType, Path]:
    """models/task.py of the checkout that hypic is installed from, and the folder of its tokenizer. Raises DataError."""
    models = Path(hypic.__file__).resolve().parents[1] / "models"
    if not (models / "task.py").is_file() or not (models / "almanac" / "tokenizer.json").is_file():
        raise DataError(f"{spec}: no models/task.py beside {Path(hypic.__file__).parent}: run from a checkout of hypic")
    if _PACKAGE not in sys.modules:  # a name of its own: other packages are called "models" too
        found = importlib.util.spec_from_file_location(
            _PACKAGE, models / "__init__.py", submodule_search_locations=[str(models)]
        )
        assert found is not None and found.loader is not None
        sys.modules[_PACKAGE] = importlib.util.module_from_spec(found)
        found.loader.exec_module(sys.modules[_PACKAGE])
    return importlib.import_module(f"{_PACKAGE}.task"), models / "almanac"


def _tokenizer(wanted: Wanted, directory: Path) -> Any:
    """``decode`` of the task's own tokenizer. Raises DataError if the model reads other ids."""
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(str(directory / "tokenizer.json"))
    theirs = wanted.template.tokenizer
    if theirs is not None and theirs.encode(_PROBE, add_special_tokens=False) != own.encode(_PROBE).ids:
        raise DataError(f"{wanted.spec}: its token ids are those of models/almanac; this model has another tokenizer")
    return own.decode
