"""Prompts as models get them: chat templates, BOS, and what fits the context."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hypic.eval.data import DataError, Template
from hypic.eval.items import Piece

ALMANAC = Path(__file__).parents[2] / "models" / "almanac"


def text(pieces: Sequence[Piece]) -> str:
    return "".join(str(p.content) for p in pieces)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ALMANAC, local_files_only=True)


def prompt(n: int, words: int = 20) -> list[Piece]:
    return [Piece("Read.\n\n"), *(Piece(f"Text {i}." + " word" * words + "\n", True) for i in range(n)), Piece("Why?")]


def test_chat_template_stands_around_the_message(tokenizer: Any) -> None:
    pieces = Template(tokenizer).write(prompt(2), 4)
    assert text(pieces) == tokenizer.apply_chat_template(
        [{"role": "user", "content": text(prompt(2))}], tokenize=False, add_generation_prompt=True
    )
    assert [p for p in pieces if p.segment] == prompt(2)[1:3]
    assert text(Template(tokenizer).write(prompt(2), 4, lead="It is")).endswith("assistant\nIt is")
    assert text(Template(tokenizer, chat=False).write(prompt(2), 4, lead="It is")).endswith("Why?\nAnswer: It is")
    assert text(Template(tokenizer).write(prompt(2), 4, chat=False)) == text(prompt(2))


def test_a_template_that_changes_the_message_is_refused(tokenizer: Any) -> None:
    import copy

    odd = copy.deepcopy(tokenizer)
    odd.chat_template = "{{ messages[0]['content'] | upper }}"
    with pytest.raises(DataError, match="changes what a user says"):
        Template(odd).write(prompt(2), 4)
    odd.chat_template = None
    assert not Template(odd).chat
    with pytest.raises(DataError, match="has no chat template"):
        Template(odd, chat=True)
    with pytest.raises(DataError, match="needs a tokenizer"):
        Template(context=100)


def test_bos_is_written_out_where_the_tokenizer_would_add_it(tokenizer: Any) -> None:
    import copy

    from tokenizers.processors import TemplateProcessing

    bos = copy.deepcopy(tokenizer)
    bos.bos_token = "<|im_start|>"
    bos.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos.bos_token_id)]
    )
    assert text(Template(bos, chat=False).write([Piece("Hi")], 4)) == "<|im_start|>Hi"
    assert text(Template(bos, chat=True).write([Piece("Hi")], 4)).count("<|im_start|>") == 2  # the template's own two
    assert text(Template(tokenizer, chat=False).write([Piece("Hi")], 4)) == "Hi"


@pytest.mark.parametrize("context", [400, 200, 120])
def test_whole_segments_go_from_the_middle(tokenizer: Any, context: int) -> None:
    from collections import Counter

    notes: Counter[str] = Counter()
    pieces = Template(tokenizer, chat=False, context=context).write(prompt(20), 10, notes)

    def size(kept: Sequence[Piece]) -> int:
        return sum(len(tokenizer.encode(p.content, add_special_tokens=False)) for p in kept)

    assert size(pieces) <= context - 10
    left = [p for p in pieces if p.segment]
    all_of_them = prompt(20)[1:-1]
    numbers = [all_of_them.index(p) for p in left]
    outside = len(left)
    assert numbers == [i for i in range(20) if i in numbers]
    assert numbers[0] == 0 and numbers[-1] == 19
    front = next(i for i in range(20) if i not in numbers)
    back = 19 - max(i for i in range(20) if i not in numbers)
    assert front + back == outside and abs(front - back) <= 1  # one hole, in the middle
    assert notes == {"prompts cut": 1, "segments dropped": 20 - outside}
    smallest = max(size([p]) for p in all_of_them)
    assert size(pieces) > context - 10 - smallest  # no more than needed


def test_the_last_segment_loses_its_middle(tokenizer: Any) -> None:
    from collections import Counter

    notes: Counter[str] = Counter()
    long = Piece("First words." + " middle" * 400 + " Last words.", True)
    template = Template(tokenizer, chat=False, context=60)
    pieces = template.write([Piece("Read."), long, Piece("Why?")], 10, notes)
    assert 40 <= sum(len(tokenizer.encode(p.content, add_special_tokens=False)) for p in pieces) <= 50
    (short,) = (str(p.content) for p in pieces if p.segment)
    assert short.startswith("First words.") and short.endswith("Last words.")
    assert notes == {"prompts cut": 1, "segments shortened": 1}
    with pytest.raises(DataError, match="besides the documents do not fit"):
        Template(tokenizer, chat=False, context=12).write([Piece("Read."), long, Piece("Why?")], 10)
