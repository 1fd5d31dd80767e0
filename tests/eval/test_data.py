"""Specs, the synthetic task, and LongBench's files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hypic
from hypic.eval.data import DataError, Template, almanac, load
from hypic.eval.data.longbench import TASKS, parts
from hypic.eval.items import Item, Piece

ALMANAC = Path(__file__).parents[2] / "models" / "almanac"
PLAIN = Template()


def text(pieces: Sequence[Piece]) -> str:
    return "".join(str(p.content) for p in pieces)


def segments(item: Item) -> list[str]:
    return [str(p.content) for p in item.pieces if p.segment]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ALMANAC, local_files_only=True)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("squad", "no data set 'squad': there are almanac, longbench"),
        ("foldoc:documents", "'documents' should read option=value"),
        ("foldoc:documents=2,documents=3", "each option once"),
        ("foldoc:passages=3", "no option 'passages'; there are documents, questions, path"),
        ("foldoc:documents=0", "documents should be a number from 1 to 256, not '0'"),
        ("foldoc:path=/no/such/file", "/no/such/file does not exist"),
        ("longbench", "should read longbench:TASK=FILE"),
        ("longbench:qasper=/x", "no option 'qasper'; there are hotpotqa"),
        ("longbench:hotpotqa=/no/such/file", "/no/such/file does not exist: get hotpotqa.jsonl"),
        ("almanac:level=6", "level should be a number from 0 to 5"),
    ],
)
def test_a_wrong_spec_says_what_would_be_right(spec: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        load(spec, PLAIN, 1)


def test_at_least_one_item() -> None:
    with pytest.raises(DataError, match="n = 0"):
        load("almanac", PLAIN, 0)


def test_almanac_asks_what_its_documents_say(tokenizer: Any) -> None:
    items = load("almanac:level=1", Template(tokenizer), 25, seed=3).items
    assert len(items) == 25 and len({i.id for i in items}) == 25
    assert {i.kind for i in items} == {"recall", "upd", "strad"}
    for item in items:
        assert all(isinstance(p.content, tuple) for p in item.pieces)
        head, *documents, ask = item.pieces
        assert [p.segment for p in item.pieces] == [False, *[True] * 4, False]
        assert item.closed_book == (head, ask)
        question = tokenizer.decode(ask.content)
        assert question.startswith("What is the ") and question.endswith("<|im_start|>assistant\n")
        fact = question.removeprefix("What is ").partition("?")[0]
        whole = tokenizer.decode([t for p in documents for t in p.content])
        *_, last = (whole.lower().split(f"{fact.lower()} is ")) or [""]
        assert last.startswith(item.answers[0] + "."), (item.kind, fact)  # the last statement counts
        inside = [fact.lower() + " is " + item.answers[0] in tokenizer.decode(p.content).lower() for p in documents]
        assert any(inside) == (item.kind != "strad")


def test_almanac_questions_share_documents_and_turn_from_kind_to_kind() -> None:
    items = load("almanac:level=1,questions=3", PLAIN, 9).items
    sets = list(dict.fromkeys(i.pieces[1:-1] for i in items))
    assert [sum(i.pieces[1:-1] == s for i in items) for s in sets] == [3, 3, 3]
    assert all(len({i.kind for i in items[k : k + 3]}) == 3 for k in (0, 3, 6))
    assert load("almanac:level=1,questions=3", PLAIN, 9).items == items
    assert load("almanac:level=1,questions=3", PLAIN, 9, seed=1).items != items


def test_almanac_documents_hold_sentences_that_training_never_sees(tokenizer: Any) -> None:
    import lzma

    known = lzma.decompress((ALMANAC / "sentences.txt.xz").read_bytes()).decode().splitlines()
    held_out, trained = known[: len(known) // 10], known[len(known) // 10 :]
    (item,) = load("almanac:level=3", PLAIN, 1).items
    documents = "".join(tokenizer.decode(p.content) for p in item.pieces if p.segment)
    seen = [sum(s in documents for s in some) for some in (held_out, trained)]
    assert seen[0] > 20 and seen[1] == 0


def test_almanac_is_for_its_own_tokenizer(tokenizer: Any) -> None:
    from transformers import AutoTokenizer

    from hypic.check import tiny_models

    other = AutoTokenizer.from_pretrained(tiny_models.build("llama"), local_files_only=True)
    with pytest.raises(DataError, match="this model has another tokenizer"):
        load("almanac", Template(other), 1)
    with pytest.raises(DataError, match="192 tokens do not fit the model's 100: lower level="):
        load("almanac:level=0", Template(tokenizer, context=100), 1)
    with pytest.raises(DataError, match="say how many"):
        load("almanac", PLAIN, None)


def test_almanac_needs_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hypic, "__file__", str(tmp_path / "hypic" / "__init__.py"))
    with pytest.raises(DataError, match="run from a checkout of hypic"):
        almanac.load(almanac.Wanted("almanac", PLAIN, 1, 0, tmp_path, {}))


Write = Callable[..., Path]


@pytest.fixture
def jsonl(tmp_path: Path) -> Write:
    def write(*rows: dict[str, Any] | str, dataset: str = "hotpotqa") -> Path:
        base = dict(input="Who?", context="Passage 1:\nA\nLong ago.", answers=["Ann"], length=9, dataset=dataset,
                    language="en", all_classes=None)  # fmt: skip
        lines = [r if isinstance(r, str) else json.dumps(base | {"_id": f"id{i}"} | r) for i, r in enumerate(rows)]
        path = tmp_path / f"{dataset}.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


def test_hotpotqa(jsonl: Write) -> None:
    context = "Passage 1:\nOslo\nA town in {input}.\n\nPassage 2:\nRome\nSee Passage 9: not one.\n\nPassage 3:\nBonn\nx"
    path = jsonl({"context": context, "input": "Where is {context}?", "answers": ["Norway", "Norge"]})
    (item,) = load(f"longbench:hotpotqa={path}", PLAIN)
    assert segments(item) == [
        "Passage 1:\nOslo\nA town in {input}.\n\n",
        "Passage 2:\nRome\nSee Passage 9: not one.\n\n",
        "Passage 3:\nBonn\nx",
    ]
    assert text(item.pieces) == (
        "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
        f"The following are given passages.\n{context}\n\n"
        "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
        "Question: Where is {context}?\nAnswer:"
    )
    assert "Oslo" not in text(item.closed_book) and "Where is {context}?" in text(item.closed_book)
    assert (item.id, item.metric, item.max_new_tokens, item.first_line) == ("hotpotqa/id0", "f1", 32, False)
    assert item.answers == ("Norway", "Norge")


def test_triviaqa_has_examples_and_no_chat_template(jsonl: Write, tokenizer: Any) -> None:
    one = "Passage:\nOn cats.\nQuestion:\nWhat purrs?\nAnswer:\nA cat\n"
    two = "Passage:\nOn dogs.\nQuestion:\nWhat barks?\nAnswer:\nA dog"
    asked = "Passage:\nOn cows. Question: none.\nQuestion:\nWhat moos?\nAnswer:\n"
    path = jsonl({"context": one + two, "input": asked, "answers": ["cow"]}, dataset="triviaqa")
    (item,) = load(f"longbench:triviaqa={path}", Template(tokenizer))
    assert segments(item) == [one, two, "Passage:\nOn cows. Question: none.\n"]
    assert text(item.pieces) == (
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. The "
        f"following are some examples.\n\n{one}{two}\n\n{asked}"
    )
    closed = text(item.closed_book)
    assert "On c" not in closed and "On d" not in closed
    assert "What purrs?\nAnswer:\nA cat" in closed and closed.endswith("What moos?\nAnswer:\n")
    assert item.first_line


@pytest.mark.parametrize("task", ["multi_news", "gov_report"])
def test_summaries(jsonl: Write, task: str) -> None:
    context = (
        "Passage 1:\nOne fell.\n\nPassage 2:\nTwo rose." if task == "multi_news" else "A line of a report.\n" * 250
    )
    path = jsonl({"context": context, "input": "", "answers": ["All moved."]}, dataset=task)
    (item,) = load(f"longbench:{task}={path}", PLAIN)
    assert "".join(segments(item)) == context
    assert len(segments(item)) == (2 if task == "multi_news" else 3)
    assert context not in text(item.closed_book) and text(item.closed_book).endswith("Summary:")
    assert (item.metric, item.max_new_tokens) == ("rouge_l", 512)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", r"hotpotqa.jsonl:2: no JSON \("),
        ("[1]", r":2: list instead of an object"),
        ('{"input": "a", "answers": ["b"]}', r":2: 'context' should be a text, and is missing"),
        ({"context": " "}, r":2: 'context' is empty"),
        ({"input": None}, r":2: 'input' should be a text, and is NoneType"),
        ({"answers": []}, r":2: 'answers' should be a list of texts, and is empty"),
        ({"answers": "Ann"}, r":2: 'answers' should be a list of texts, and is str"),
        ({"dataset": "musique"}, r":2: a line of musique, but the file was given as hotpotqa"),
        ({"_id": "id0"}, r":2: _id 'id0' is that of line 1: remove one of them"),
    ],
)
def test_a_bad_line_is_named(jsonl: Write, row: dict[str, Any] | str, says: str) -> None:
    path = jsonl({}, row)
    with pytest.raises(DataError, match=says):
        load(f"longbench:hotpotqa={path}", PLAIN)


def test_a_binary_or_empty_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="should be a UTF-8 file"):
        load(f"longbench:hotpotqa={path}", PLAIN)
    path.write_text("\n\n")
    with pytest.raises(DataError, match="no item in"):
        load(f"longbench:hotpotqa={path}", PLAIN)


def test_a_sample_depends_on_the_seed(jsonl: Write) -> None:
    spec = f"longbench:hotpotqa={jsonl(*[{}] * 30)}"
    assert len(load(spec, PLAIN)) == len(load(spec, PLAIN, 99)) == 30
    ids = [[i.id for i in load(spec, PLAIN, 10, seed)] for seed in (0, 0, 1)]
    assert ids[0] == ids[1] != ids[2] and len(set(ids[0])) == 10


def test_prompts_have_the_fields_that_are_filled() -> None:
    for task in TASKS.values():
        assert task.prompt.count("{context}") == 1 and task.prompt.count("{input}") <= 1
        assert "{" not in text(PLAIN.write([Piece(task.prompt.format(context="", input=""))], 1))


@given(st.text(alphabet="ab. \n", max_size=200), st.integers(4, 40))
def test_parts_join_to_the_text(whole: str, size: int) -> None:
    cut = parts(whole, size)
    assert "".join(cut) == whole
    assert all(len(p) <= size for p in cut)


def test_cuts_are_counted_in_what_the_data_set_says_of_itself(jsonl: Write, tokenizer: Any) -> None:
    context = "".join(f"Passage {i}:\nName\n{'word ' * 40}\n\n" for i in range(1, 9))
    path = jsonl({"context": context})
    loaded = load(f"longbench:hotpotqa={path}", Template(tokenizer, chat=False, context=400))
    assert loaded.about["notes"]["prompts cut"] == 1
    assert loaded.about["notes"]["segments dropped"] == 8 - len(segments(loaded.items[0]))
