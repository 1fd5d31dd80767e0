"""What the demo's documents say, and the prompts made of them.

Each page is prose with facts in it: "The colour of Frida is comet." Most facts stand once. Some are stated anew on a later
page, and then the last statement counts; which one is the last depends on the order of the pages. Every odd page ends
within a fact ("... The drink of Homer is") and every even one begins with a value (" pony. ..."), so whose value that is
depends on the page that stands in front. The texts are those that the model in ``models/almanac`` was trained for
(``models/task.py``), down to the space or line break at their ends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from typing import Any, NamedTuple

HEAD = "Answer from the documents."
OTHER_HEAD = "Use nothing but the texts below."
ORDERS = ((0, 1, 2, 3, 4, 5, 6, 7), (4, 1, 6, 3, 0, 7, 2, 5), (2, 7, 4, 3, 6, 1, 0, 5))
"""Orders of the pages, by index; in all of them a page that ends within a fact is followed by one that begins with a value."""

_FACT = re.compile(r"The (\w+) of (\w+) is (\w+)\.")


class Question(NamedTuple):
    """What a fact says; ``kind`` is how the documents state it."""

    kind: str
    attribute: str
    name: str

    @property
    def text(self) -> str:
        return f"What is the {self.attribute} of {self.name}?"


QUESTIONS = (
    Question("stated once", "colour", "Frida"),
    Question("stated anew", "mood", "Ruth"),
    Question("over a border", "drink", "Homer"),
)


class Prompt(NamedTuple):
    """A chat prompt of documents, each of them a segment; ``before`` holds earlier turns, questions with their answers."""

    head: str
    documents: Sequence[str]
    question: Question
    before: Sequence[tuple[Question, str]] = ()

    @property
    def expected(self) -> str:
        """The right answer, which depends on the order of the documents."""
        return facts(self.documents)[self.question.attribute, self.question.name]

    def messages(self, marked: bool = True) -> list[dict[str, Any]]:
        mark = {"cache_control": {"type": "segment"}} if marked else {}
        parts: list[dict[str, Any]] = [{"type": "text", "text": text, **mark} for text in self.documents]
        asked = [question.text for question, _ in self.before] + [self.question.text]
        parts.append({"type": "text", "text": asked[0]})
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.head}, {"role": "user", "content": parts}]
        for (_, answer), text in zip(self.before, asked[1:], strict=True):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": text}]
        return messages


def load_documents() -> list[str]:
    """The texts that come with the demo, by name; to the letter, for their ends matter."""
    files = sorted((resources.files("hypic.demo") / "documents").iterdir(), key=lambda f: f.name)
    return [f.read_bytes().decode() for f in files if f.name.endswith(".txt")]


def facts(documents: Sequence[str]) -> dict[tuple[str, str], str]:
    """What a reader of ``documents`` in this order knows: the last value of every attribute and name."""
    return {(attribute, name): value for attribute, name, value in _FACT.findall("".join(documents))}


def prompts(documents: Sequence[str], question: Question) -> tuple[Prompt, Prompt, Prompt]:
    """One question to the documents in order, in another one, and in a third one under another head."""
    first, second, third = ([documents[i] for i in order] for order in ORDERS)
    return Prompt(HEAD, first, question), Prompt(HEAD, second, question), Prompt(OTHER_HEAD, third, question)


def is_right(answer: str, expected: str) -> bool:
    """Whether ``expected`` is among the words of ``answer``: some models answer in sentences."""
    return expected in re.findall(r"\w+", answer.lower())
