"""The synthetic task: every answer follows from the text, documents are tokenised as a server tokenises them."""

from __future__ import annotations

import random
import re

import pytest
from transformers import AutoTokenizer

from models.task import END, KINDS, LEVELS, PADDING, STRAD, UPD, World, make

from .conftest import ALMANAC

FACT = re.compile(r"[Tt]he (\w+) of (\w+) is (\w+)\.")


@pytest.fixture(scope="module")
def tokenizer() -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(ALMANAC)


@pytest.mark.parametrize("level", range(len(LEVELS)))
def test_the_last_value_that_the_text_states_is_the_answer(world: World, tokenizer: AutoTokenizer, level: int) -> None:
    asked = set()
    for seed in range(4):
        sample = make(world, LEVELS[level], random.Random(seed))
        assert len(sample.ids) == LEVELS[level].tokens
        texts = [tokenizer.decode(sample.ids[a:b]) for a, b in sample.documents]
        stated: dict[tuple[str, str], list[str]] = {}
        for attribute, name, value in FACT.findall("".join(texts)):
            stated.setdefault((attribute, name), []).append(value)
        within = {match[:2] for text in texts for match in FACT.findall(text)}
        for q in sample.questions:
            attribute, name = re.findall(r"the (\w+) of (\w+)\?", tokenizer.decode(q.ids))[0]
            values = stated[attribute, name]
            assert tokenizer.decode([q.answer]) == values[-1]
            assert (len(values) > 1) == (q.kind == UPD)
            assert ((attribute, name) not in within) == (q.kind == STRAD)
            assert sample.ids[q.at] == q.answer and sample.marks[q.at] == q.kind and sample.marks[q.at + 1] == END
            asked.add(q.kind)
    assert len(asked) == len(KINDS)


def test_a_prompt_is_what_the_chat_template_renders(world: World, tokenizer: AutoTokenizer) -> None:
    sample = make(world, LEVELS[2], random.Random(5))
    texts = [tokenizer.decode(sample.ids[a:b]) for a, b in sample.documents]
    for (a, b), text in zip(sample.documents, texts, strict=True):
        assert tokenizer.encode(text) == sample.ids[a:b].tolist()
    first = sample.questions[0]
    question = tokenizer.decode(first.ids).removesuffix("<|im_end|>\n<|im_start|>assistant\n")
    parts = [{"type": "text", "text": text} for text in [*texts, question]]
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(sample.ids[: first.at]).endswith(rendered)


def test_samples_of_one_shape_share_their_boundaries(world: World) -> None:
    a, b = (make(world, LEVELS[5], random.Random(i), shape=random.Random(7), full=True) for i in range(2))
    assert a.documents == b.documents and a.ids.tolist() != b.ids.tolist()
    assert min(end - start for start, end in a.documents) > 32


def test_the_last_level_has_more_facts_than_the_states_hold(world: World, tokenizer: AutoTokenizer) -> None:
    sample = make(world, LEVELS[-1], random.Random(0), full=True)
    start, end = sample.documents[0][0], sample.documents[-1][1]
    keys = {match[:2] for match in FACT.findall(tokenizer.decode(sample.ids[start:end]))}
    assert len(keys) >= 300
    assert (sample.marks == PADDING).mean() < 0.02


def test_held_out_sentences_are_not_trained_on(world: World) -> None:
    trained = {tuple(s) for group in world.by_length.values() for s in group}
    held_out = {tuple(s) for group in World(ALMANAC, held_out=True).by_length.values() for s in group}
    assert len(held_out) > 500 and not trained & held_out
