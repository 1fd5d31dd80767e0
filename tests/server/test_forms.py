"""CASES rows 19 and 32: batches, several choices, one token, logprobs and stop strings, all with hits; foreign marks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.driving import Writer
from tests.server import requests
from tests.server.requests import CHAT, COMPLETIONS, GENERATE
from tests.server.serving import FLUSH, Server, TextWriter

NOISE = 1e-4
"""Bound on logprobs in float32, as in docs/SEMANTICS.md."""
PATHS = [GENERATE, COMPLETIONS, CHAT]


class Question:
    """One prompt with two documents, known to the server, in the form of an endpoint. Too short for the radix tree to keep
    a state of it, so every call links it."""

    def __init__(self, server: Server, path: str, write: Writer, text: TextWriter) -> None:
        self.server, self.path = server, path
        if path == GENERATE:
            self.body = requests.generate_body(write, [write.documents(2, 70)])
        elif path == COMPLETIONS:
            prompt = "<<CUT>>".join([text.document(), text.document(), text.words(5)])
            self.body = {"prompt": prompt, "hypic": {"separator": "<<CUT>>", "report": True}, **requests.openai()}
        else:
            self.body = requests.chat_body(text, [text.document(), text.document()])
        self.ask(max_tokens=1)

    def ask(self, **params: Any) -> Any:
        """The answer; ``params`` are named as OpenAI has them, except for what `/generate` has beside them."""
        if self.path == GENERATE:
            named = {"max_tokens": "max_new_tokens"}
            extra = {k: params.pop(k) for k in list(params) if k in ("return_logprob", "top_logprobs_num")}
            sampling = {named.get(k, k): v for k, v in params.items()}
            return self.server.ask(GENERATE, {**self.body, **extra, "sampling_params": requests.native(**sampling)})
        return self.server.ask(self.path, {**self.body, **params})

    def choices(self, answer: Any) -> list[dict[str, Any]]:
        """Text, finish reason and tokens of every choice."""
        if self.path == GENERATE:
            items = answer if isinstance(answer, list) else [answer]
            out = []
            for a in items:
                meta = a["meta_info"]
                out.append(
                    {"text": a["text"], "reason": meta["finish_reason"]["type"], "tokens": meta["completion_tokens"]}
                )
            return out
        texts = [c["text"] if self.path == COMPLETIONS else c["message"]["content"] for c in answer["choices"]]
        reasons = [c["finish_reason"] for c in answer["choices"]]
        tokens = answer["usage"]["completion_tokens"] // len(texts)
        return [{"text": t, "reason": r, "tokens": tokens} for t, r in zip(texts, reasons, strict=True)]

    def assert_hits(self, answer: Any, choices: int = 1) -> None:
        found = [requests.outcomes(r) for r in requests.reports(self.path, answer)]
        assert found == [["hit_device", "hit_device"]] * choices


@pytest.fixture(params=PATHS)
def question(request: pytest.FixtureRequest, server: Server, write: Writer, text: TextWriter) -> Question:
    return Question(server, request.param, write, text)


def test_19_four_choices_of_one_prompt(question: Question) -> None:
    """Greedy, so all four are the answer to the single request."""
    (single,) = question.choices(question.ask(max_tokens=6))
    answer = question.ask(max_tokens=6, n=4)
    question.assert_hits(answer, 4)
    assert question.choices(answer) == [single] * 4 and single["tokens"] == 6


def test_19_one_token(question: Question) -> None:
    """The request ends with its prefill."""
    answer = question.ask(max_tokens=1)
    question.assert_hits(answer)
    (choice,) = question.choices(answer)
    assert (choice["tokens"], choice["reason"]) == (1, "length")
    assert question.choices(question.ask(max_tokens=6))[0]["text"].startswith(choice["text"].rstrip("\ufffd"))


def test_19_no_token(server: Server, write: Writer) -> None:
    """`max_new_tokens` 0: a prefill for its own sake; the report comes all the same."""
    document = write.document(80)
    body = requests.generate_body(write, [[document]], sampling_params=requests.native(max_new_tokens=0))
    meta = server.ask(GENERATE, body)["meta_info"]
    assert meta["completion_tokens"] == 0 and requests.outcomes(meta["hypic"]) == ["compiled"]


def test_19_a_stop_string_ends_the_answer(question: Question) -> None:
    whole = question.choices(question.ask(max_tokens=40))[0]["text"]
    stop = whole[len(whole) // 2 :].strip()[:3]
    answer = question.ask(max_tokens=40, stop=[stop])
    question.assert_hits(answer)
    (choice,) = question.choices(answer)
    assert stop and choice["reason"] == "stop" and choice["text"] == whole[: whole.index(stop)]


def logprobs(path: str, answer: Any) -> tuple[list[float], list[float]]:
    """Logprobs of the answer's tokens, and of the most likely token of every step."""
    if path == GENERATE:
        meta = answer["meta_info"]
        chosen = [value for value, _, _ in meta["output_token_logprobs"]]
        return chosen, [max(value for value, _, _ in step) for step in meta["output_top_logprobs"]]
    (choice,) = answer["choices"]
    if path == COMPLETIONS:
        return choice["logprobs"]["token_logprobs"], [max(step.values()) for step in choice["logprobs"]["top_logprobs"]]
    steps = choice["logprobs"]["content"]
    return [s["logprob"] for s in steps], [max(t["logprob"] for t in s["top_logprobs"]) for s in steps]


def test_19_logprobs_of_cold_and_warm_answers_agree(server: Server, write: Writer, text: TextWriter) -> None:
    wanted: dict[str, dict[str, Any]] = {
        GENERATE: {"return_logprob": True, "top_logprobs_num": 3},
        COMPLETIONS: {"logprobs": 3},
        CHAT: {"logprobs": True, "top_logprobs": 3},
    }
    for path, fields in wanted.items():
        question = Question(server, path, write, text)
        first = logprobs(path, question.ask(max_tokens=6, **fields))
        server.ask(FLUSH, {})
        cold = question.ask(max_tokens=6, **fields)
        assert [requests.outcomes(r) for r in requests.reports(path, cold)] == [["compiled", "compiled"]]
        for chosen, top in (first, logprobs(path, cold)):
            assert len(chosen) == 6 and chosen == pytest.approx(top, abs=NOISE) and max(chosen) < 0
        assert first[0] == pytest.approx(logprobs(path, cold)[0], abs=NOISE)


def test_19_batch_of_texts(server: Server, text: TextWriter) -> None:
    """Each text is cut by itself, and answered as it is alone."""
    a, b = text.document(), text.document()
    texts = [f"{a}|{text.words(4)}", text.words(6), f"{b}|{a}|{text.words(5)}"]
    hypic = {"separator": "|", "report": True}
    for path, name, params in (
        (COMPLETIONS, "prompt", requests.openai(max_tokens=5)),
        (GENERATE, "text", {"sampling_params": requests.native(max_new_tokens=5)}),
    ):
        server.ask(FLUSH, {})
        batch = server.ask(path, {name: texts, "hypic": hypic, **params})
        assert [requests.outcomes(r) for r in requests.reports(path, batch)] == [
            ["compiled"],
            [],
            ["compiled", "waited"],
        ]
        alone = [server.ask(path, {name: t, "hypic": hypic, **params}) for t in texts]
        assert [requests.outcomes(requests.reports(path, one)[0]) for one in alone] == [
            ["hit_device"],
            [],
            ["hit_device", "hit_device"],
        ]
        if path == COMPLETIONS:
            assert [c["text"] for c in batch["choices"]] == [one["choices"][0]["text"] for one in alone]
        else:
            assert [one["text"] for one in batch] == [one["text"] for one in alone]


@pytest.mark.parametrize("mark", [{"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}, None, "ephemeral", ["x"]])
def test_32_foreign_cache_control_is_ignored(server: Server, text: TextWriter, mark: Any) -> None:
    """On parts, messages and tools: the same answer as without, and no segment."""
    content = [{"type": "text", "text": text.document()}, {"type": "text", "text": text.words(4)}]
    tool = {"type": "function", "function": {"name": "find", "description": text.words(5), "parameters": {}}}
    messages = [{"role": "system", "content": text.words(6)}, {"role": "user", "content": content}]
    plain = {"messages": messages, "tools": [tool], "hypic": requests.REPORT, **requests.openai()}
    ours = {"cache_control": mark}
    marked = {
        **plain,
        "messages": [
            {**messages[0], **ours},
            {"role": "user", "content": [{**part, **ours} for part in content], **ours},
        ],
        "tools": [{**tool, **ours}],
    }
    answer, reference = server.ask(CHAT, marked), server.ask(CHAT, plain)
    assert answer["choices"] == reference["choices"]
    assert answer["usage"]["prompt_tokens"] == reference["usage"]["prompt_tokens"]
    assert requests.segments(answer["sglext"]["hypic"][0]) == []
