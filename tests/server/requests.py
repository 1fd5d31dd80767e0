"""Requests of every form that a prompt with documents can take, and what their answers say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.cases.driving import Document, Writer
from tests.server.serving import CHAT, COMPLETIONS, GENERATE, MARK, Server, TextWriter

SEAM = 8
"""The server's seam window, its default."""
REPORT = {"report": True}
TOKENS = 3


def native(**params: Any) -> dict[str, Any]:
    """Sampling parameters of `/generate`: greedy, and a length that is known."""
    return {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True, **params}


def openai(**params: Any) -> dict[str, Any]:
    """The same for the OpenAI endpoints."""
    return {"model": "m", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **params}


def interior(*documents: Document) -> int:
    """Tokens of documents that come from their artifacts."""
    return sum(len(d) - SEAM for d in documents)


def generate_body(write: Writer, prompts: Sequence[Sequence[Document]], **fields: Any) -> dict[str, Any]:
    """`/generate` with token ids: new plain tokens around the documents of each prompt; one prompt is no batch."""
    made = [write.prompt(5, *documents, 7) for documents in prompts]
    ids, segments = [list(p.ids) for p in made], [[list(s) for s in p.segments] for p in made]
    one = len(made) == 1
    hypic = {"segments": segments[0] if one else segments, **REPORT}
    return {"input_ids": ids[0] if one else ids, "hypic": hypic, "sampling_params": native(), **fields}


def completions_body(write: Writer, prompts: Sequence[Sequence[Document]], **fields: Any) -> dict[str, Any]:
    """`/v1/completions` with the same."""
    body = generate_body(write, prompts)
    return {"prompt": body["input_ids"], "hypic": body["hypic"], **openai(), **fields}


def chat_body(text: TextWriter, documents: Sequence[str], **fields: Any) -> dict[str, Any]:
    """Chat with the documents as marked parts between new words."""
    parts = [{"type": "text", "text": text.words(4)}]
    parts += [{"type": "text", "text": d, **MARK} for d in documents]
    parts += [{"type": "text", "text": text.words(4)}]
    return {"messages": [{"role": "user", "content": parts}], "hypic": REPORT, **openai(), **fields}


def reports(path: str, answer: Any) -> list[dict[str, Any]]:
    """The reports of an answer: one for each choice."""
    if path == GENERATE:
        single = isinstance(answer, dict)
        return [a["meta_info"]["hypic"] for a in ([answer] if single else answer) if "hypic" in a["meta_info"]]
    last = answer[-1] if isinstance(answer, list) else answer
    return list(last["sglext"]["hypic"])


def segments(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [s for s in report["spans"] if s["kind"] == "segment"]


def outcomes(report: dict[str, Any]) -> list[str]:
    return [s["outcome"] for s in segments(report)]


def know(server: Server, write: Writer, *documents: Document) -> None:
    """Have the documents compiled."""
    answer = server.ask(GENERATE, generate_body(write, [documents], sampling_params=native(max_new_tokens=1)))
    assert set(outcomes(answer["meta_info"]["hypic"])) <= {"compiled", "hit_device"}


def know_text(server: Server, text: TextWriter, *documents: str) -> None:
    server.ask(CHAT, chat_body(text, documents, max_tokens=1))


__all__ = [
    "CHAT",
    "COMPLETIONS",
    "GENERATE",
    "MARK",
    "REPORT",
    "SEAM",
    "TOKENS",
    "chat_body",
    "completions_body",
    "generate_body",
    "interior",
    "know",
    "know_text",
    "native",
    "openai",
    "outcomes",
    "reports",
    "segments",
]
