"""The synthetic task: documents made of facts and real sentences, then questions, as the chat template renders them.

Facts read "The colour of Marlow is amber." What can be asked:

* ``recall``: a fact that one document states. There are more of them than the linear layers' states hold.
* ``upd``: a fact that later documents state anew, in the same words; the last value counts.
* ``strad``: a fact over a border: one document ends "... The colour of Marlow is", the next begins " amber.". Only a head
  that was computed behind its true neighbour can tell whose value it is.

A sequence holds many questions, each a turn of its own: <|im_start|>user question <|im_end|> <|im_start|>assistant answer
<|im_end|>. All pieces are tokenised by themselves, as hypic's clients' pieces are, so a document has the same ids anywhere.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .corpus import load_sentences
from .words import CHANGING, FIXED, NAMES, VALUES

KINDS = ("recall", "upd", "strad")
TEXT, RECALL, UPD, STRAD, END, PADDING = 0, 1, 2, 3, 4, 5
"""Marks of tokens: running text, the answers of each kind, the end of an answer, what is not trained on."""

_FACT = 7  # tokens of a fact
_TURN = 19  # tokens of a question and its answer
_HEADS = (
    "",
    "<|im_start|>system\nAnswer from the documents.<|im_end|>\n",
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n",
    "<|im_start|>system\nUse nothing but the texts below.<|im_end|>\n",
)


class Level(NamedTuple):
    """How hard a sequence is: at most so many facts of each kind, in so many tokens, with so many questions."""

    documents: int
    fixed: int
    changing: int
    tokens: int
    questions: int


LEVELS = (
    Level(2, 3, 1, 192, 4),
    Level(4, 8, 3, 384, 10),
    Level(8, 24, 8, 1024, 20),
    Level(12, 70, 16, 2048, 32),
    Level(24, 160, 32, 3072, 40),
    Level(32, 320, 40, 4096, 40),
)


class Question(NamedTuple):
    """``at`` is the place of the answer token in the sequence; ``ids`` renders the question as a turn up to there."""

    at: int
    kind: int
    ids: list[int]
    answer: int


class Sample(NamedTuple):
    """A sequence.

    Attributes:
        ids: all tokens, padded to the level's length.
        marks: what each token is (TEXT, RECALL, ...).
        documents: [start, end) of each.
        questions: in order.
    """

    ids: np.ndarray
    marks: np.ndarray
    documents: list[tuple[int, int]]
    questions: list[Question]


class World:
    """Tokenised words and sentences. ``held_out`` chooses the tenth of the sentences that training never sees."""

    def __init__(self, directory: Path, *, held_out: bool = False) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

        def ids(text: str) -> list[int]:
            return tokenizer.encode(text).ids

        def words(words: Sequence[str], space: str = " ") -> list[int]:
            return [ids(space + word)[0] for word in words]

        self.names, self.fixed, self.changing = words(NAMES), words(FIXED), words(CHANGING)
        self.values, self.answers = words(VALUES), words(VALUES, "")
        self.heads = [ids(f"{head}<|im_start|>user\n") for head in _HEADS]
        self.the, self.first, self.of, self.is_, self.stop = (ids(s)[0] for s in (" The", "The", " of", " is", "."))
        self.line = ids("\n")[0]
        self.ask, self.mark, self.end = ids("What is the"), ids("?")[0], ids("<|im_end|>")[0]
        self.reply, self.user = ids("<|im_end|>\n<|im_start|>assistant\n"), ids("\n<|im_start|>user\n")
        self.padding = ids("<|endoftext|>")[0]
        sentences = load_sentences(directory)
        cut = len(sentences) // 10
        encoded = tokenizer.encode_batch([" " + s for s in (sentences[:cut] if held_out else sentences[cut:])])
        self.by_length: dict[int, list[list[int]]] = {}
        for e in encoded:
            self.by_length.setdefault(len(e.ids), []).append(e.ids)
        self.sentences = [e.ids for e in encoded if len(e.ids) <= 24]
        self.shortest = min(n for n in self.by_length if all(m in self.by_length for m in range(n, n + 16)))


class _Doc:
    def __init__(self) -> None:
        self.facts: list[tuple[int, int, int]] = []  # attribute, name, value
        self.opening = self.closing = 0  # a straddled fact's value; its attribute and name
        self.closing_key = (0, 0)


def make(
    world: World,
    level: Level,
    rng: random.Random,
    *,
    shape: random.Random | None = None,
    full: bool = False,
    close: bool = False,
) -> Sample:
    """A sequence of ``level``.

    Args:
        shape: draws what boundaries depend on; give equal generators to get samples whose documents stand alike.
        full: as many facts as the level allows, instead of anything from a third of them.
        close: a changing fact is stated anew within the next two documents, not anywhere behind. Far apart, positions alone
            tell attention which statement is the last; close by, the state is needed, which keeps their order.
    """
    shape = shape or rng
    share = 1.0 if full else shape.uniform(0.33, 1.0)
    n_fixed, n_changing = max(1, round(level.fixed * share)), max(1, round(level.changing * share))
    head = world.heads[shape.randrange(len(world.heads))]
    room = level.tokens - len(head) - level.questions * _TURN - 2
    straddles = [shape.random() < 0.7 for _ in range(level.documents - 1)]
    docs = [_Doc() for _ in range(level.documents)]
    keys: set[tuple[int, int]] = set()
    known: list[list[tuple[int, int, int]]] = [[], [], []]  # per kind: attribute, name, index of the value

    def new_key(attributes: list[int]) -> tuple[int, int]:
        while True:
            key = (rng.choice(attributes), rng.choice(world.names))
            if key not in keys:
                keys.add(key)
                return key

    any_value = range(len(world.values))
    per_doc = [0] * level.documents
    for _ in range(n_fixed):
        i = shape.randrange(level.documents)
        key, value = new_key(world.fixed), rng.choice(any_value)
        docs[i].facts.append((*key, value))
        known[0].append((*key, value))
        per_doc[i] += 1
    for _ in range(n_changing):
        times = shape.choice((1, 2, 2, 2, 3))
        if close:
            where = [shape.randrange(level.documents)]
            for _ in range(times - 1):
                where.append(where[-1] + shape.choice((1, 1, 2)))
            where = [i for i in where if i < level.documents]
        else:
            where = sorted(shape.randrange(level.documents) for _ in range(times))
        key = new_key(world.changing)
        values = rng.sample(any_value, len(where))
        for i, value in zip(where, values, strict=True):
            docs[i].facts.append((*key, value))
            per_doc[i] += 1
        known[len(where) > 1].append((*key, values[-1]))
    for i, straddled in enumerate(straddles):
        if straddled:
            key, value = new_key(world.fixed), rng.choice(any_value)
            docs[i].closing, docs[i + 1].opening = 1, 1
            docs[i].closing_key = key
            docs[i + 1].facts.append((0, 0, value))  # taken out again by _render
            known[2].append((*key, value))
    ids, documents = list(head), []
    fixed_size = sum(_size(d, n) for d, n in zip(docs, per_doc, strict=True))
    spare = room - fixed_size
    for i, doc in enumerate(docs):
        extra = spare // (level.documents - i)
        if i < level.documents - 1:
            extra = min(spare, max(0, round(extra * shape.uniform(0.6, 1.4))))
        if extra < world.shortest:
            extra = 0
        spare -= extra
        start = len(ids)
        ids += _render(world, doc, extra, rng, shape)
        documents.append((start, len(ids)))
    marks = [TEXT] * len(ids)
    questions: list[Question] = []
    for kind in range(3):
        rng.shuffle(known[kind])
    for turn in range(level.questions):
        left = [kind for kind in range(3) if known[kind]]
        if not left:
            break
        kind = rng.choice(left)
        attribute, name, value = known[kind].pop()
        question = [*world.ask, attribute, world.of, name, world.mark, *world.reply]
        if turn:
            ids += world.user
            marks += [TEXT] * len(world.user)
        marks += [TEXT] * len(question) + [kind + RECALL, END]
        questions.append(Question(len(ids) + len(question), kind + RECALL, question, world.answers[value]))
        ids += [*question, world.answers[value], world.end]
    gap = level.tokens - len(ids)
    if gap < 0:
        raise AssertionError(f"{level}: {-gap} tokens too many")
    return Sample(
        np.array(ids + [world.padding] * gap, dtype=np.int32),
        np.array(marks + [PADDING] * gap, dtype=np.uint8),
        documents,
        questions,
    )


def _size(doc: _Doc, facts: int) -> int:
    return facts * _FACT + (2 if doc.opening else 0) + (5 if doc.closing else 1)


def _render(world: World, doc: _Doc, extra: int, rng: random.Random, shape: random.Random) -> list[int]:
    """The document's tokens: its facts in order with sentences of ``extra`` tokens together between them."""
    facts = list(doc.facts)
    ids: list[int] = []
    if doc.opening:
        ids += [world.values[facts.pop()[2]], world.stop]
    pieces = [[world.the, a, world.of, n, world.is_, world.values[v], world.stop] for a, n, v in facts]
    for size in _sizes(world, extra, shape):
        pieces.insert(shape.randint(0, len(pieces)), rng.choice(world.by_length[size]))
    for piece in pieces:
        ids += piece
    if doc.closing:
        ids += [world.the, doc.closing_key[0], world.of, doc.closing_key[1], world.is_]
    else:
        ids.append(world.line)
    if not doc.opening and ids[0] == world.the:
        ids[0] = world.first
    return ids


def _sizes(world: World, total: int, shape: random.Random) -> list[int]:
    """Lengths of sentences that add up to ``total``, each of which there is a sentence of."""
    low, sizes = world.shortest, []
    while total:
        if total < 2 * low:
            size = total
        else:
            size = shape.randint(low, min(low + 15, total - low))
        sizes.append(size)
        total -= size
    return sizes


def batch(world: World, level: Level, n: int, seed: Any, **how: Any) -> tuple[np.ndarray, np.ndarray, list[Sample]]:
    """``n`` sequences drawn from ``seed``: ids [n, tokens], marks [n, tokens], the samples."""
    rng = random.Random(repr(seed))
    samples = [make(world, level, rng, **how) for _ in range(n)]
    return np.stack([s.ids for s in samples]), np.stack([s.marks for s in samples]), samples
