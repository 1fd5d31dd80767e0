"""CASES row 17: cached_tokens is exact in every form of response: 0 when cold, the interiors when warm, never null."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.driving import Document, Writer
from tests.server import requests
from tests.server.requests import CHAT, COMPLETIONS, GENERATE
from tests.server.serving import Server, TextWriter

WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
EVERY_USAGE = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def counts(path: str, answer: Any) -> list[tuple[Any, int]]:
    """Every (cached tokens, prompt tokens) that the client is told, in order; those of a stream chunk by chunk."""
    items = answer if isinstance(answer, list) else [answer]
    if path == GENERATE:
        return [(i["meta_info"]["cached_tokens"], i["meta_info"]["prompt_tokens"]) for i in items]
    usages = [i["usage"] for i in items if i.get("usage")]
    return [((u["prompt_tokens_details"] or {}).get("cached_tokens"), u["prompt_tokens"]) for u in usages]


FORMS = [
    (GENERATE, {}),
    (GENERATE, {"stream": True}),
    (GENERATE, {"sampling_params": requests.native(n=4)}),
    (COMPLETIONS, {}),
    (COMPLETIONS, WITH_USAGE),
    (COMPLETIONS, EVERY_USAGE),
    (COMPLETIONS, {"n": 4}),
    (COMPLETIONS, {"n": 4, **WITH_USAGE}),
]


@pytest.mark.parametrize(("path", "fields"), FORMS)
def test_17_token_ids(server: Server, write: Writer, path: str, fields: dict[str, Any]) -> None:
    documents = write.documents(2, 300)
    make = requests.generate_body if path == GENERATE else requests.completions_body
    for cached in (0, requests.interior(*documents)):
        answer = server.ask(path, make(write, [documents], **fields))
        told = counts(path, answer)
        if path == COMPLETIONS and fields == EVERY_USAGE:
            told = told[-1:]  # SGLang counts cached tokens in the last chunk only
        assert told and set(told) == {(cached, 5 + 600 + 7)}
        if "stream" not in fields:
            (report,) = {str(r): r for r in requests.reports(path, answer)}.values()
            assert report["reused_artifacts"] == cached and report["reused_radix"] == 0


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS])
def test_17_batches(server: Server, write: Writer, path: str) -> None:
    """A document that two prompts of a cold batch share was there before neither of them."""
    a, b = write.documents(2, 100)
    batch = [[a], [b, a], []]
    make = requests.generate_body if path == GENERATE else requests.completions_body
    lengths = [112, 212, 12]
    warm = [requests.interior(*documents) for documents in batch]
    for cached in ([0, 0, 0], warm):
        told = counts(path, server.ask(path, make(write, batch)))
        expected = list(zip(cached, lengths, strict=True))
        assert told == (expected if path == GENERATE else [(sum(cached), sum(lengths))])


@pytest.mark.parametrize("fields", [{}, WITH_USAGE, EVERY_USAGE, {"n": 4}, {"n": 4, **WITH_USAGE}])
def test_17_chat(server: Server, text: TextWriter, fields: dict[str, Any]) -> None:
    documents = [text.document(), text.document()]
    tokens = sum(server.token_count(d) - requests.SEAM for d in documents)
    for cached in (0, tokens):
        answer = server.ask(CHAT, requests.chat_body(text, documents, **fields))
        prompt = {r["prompt_tokens"] for r in requests.reports(CHAT, answer)}
        told = counts(CHAT, answer)
        assert told and set(told) == {(cached, *prompt)}


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS])
def test_17_text_with_a_separator(server: Server, text: TextWriter, path: str) -> None:
    document = text.document()
    for cached in (0, server.token_count(document) - requests.SEAM):
        prompt = f"{document}<<CUT>>{text.words(5)}"
        hypic = {"separator": "<<CUT>>"}
        body = {"text": prompt, "sampling_params": requests.native()}
        if path == COMPLETIONS:
            body = {"prompt": prompt, **requests.openai()}
        ((told, of),) = counts(path, server.ask(path, {**body, "hypic": hypic}))
        assert told == cached < of


def test_17_the_radix_tree_and_artifacts_together(server: Server, write: Writer) -> None:
    """The next turn: the linked prompt comes from the radix tree, up to where a state was kept; a new one is a miss."""
    first, second = write.documents(2, 300)
    body = requests.generate_body(write, [[first]])
    answer = server.ask(GENERATE, body)
    ids = body["input_ids"] + answer["output_ids"]
    turn = ids + second.ids + write.tokens(6)
    segments = [*body["hypic"]["segments"], [len(ids), len(ids) + 300]]
    requests.know(server, write, second)
    told = server.ask(GENERATE, {**body, "input_ids": turn, "hypic": {"segments": segments, "report": True}})[
        "meta_info"
    ]
    report = told["hypic"]
    assert requests.outcomes(report) == ["hit_radix", "hit_device"]
    assert 300 < report["reused_radix"] <= len(ids) and report["reused_artifacts"] == requests.interior(second)
    assert told["cached_tokens"] == report["reused_radix"] + report["reused_artifacts"] < told["prompt_tokens"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_17_ordinary_requests_have_what_sglang_gives_them(server: Server, text: TextWriter, path: str) -> None:
    content = {"messages": [{"role": "user", "content": text.words(9)}]} if path == CHAT else {"prompt": text.words(9)}
    body = {**content, **requests.openai()}
    assert server.ask(path, body)["usage"]["prompt_tokens_details"] is None
    marked = server.ask(path, {**body, "hypic": {}})["usage"]["prompt_tokens_details"]
    assert marked["cached_tokens"] == 0


def test_17_documents_of_one_token_ids_request_count_once(server: Server, write: Writer) -> None:
    """The same document twice in a prompt: both interiors are reused."""
    document: Document = write.document(90)
    for cached in (0, 2 * requests.interior(document)):
        ((told, of),) = counts(GENERATE, server.ask(GENERATE, requests.generate_body(write, [[document, document]])))
        assert told == cached < of
