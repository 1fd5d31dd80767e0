"""Every endpoint of SGLang's HTTP application, end to end."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

SEGMENT = {"cache_control": {"type": "segment"}}
GREEDY = {"temperature": 0, "max_tokens": 5}
NATIVE = {"temperature": 0, "max_new_tokens": 5}
REPORT = {"report": True}
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
DOCS = ["The with statement is used to wrap a block.", "A class definition defines a class object."]


def rag(**fields: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": d, **SEGMENT} for d in DOCS] + [{"type": "text", "text": "Which one?"}]
    return {"messages": [{"role": "user", "content": parts}], **GREEDY, **fields}


@pytest.fixture
def plans(sent: list[Any]) -> Any:
    """Plans sent since the last call."""
    sent.clear()

    def take() -> list[Any]:
        out = [plan for _, plan in sent]
        sent.clear()
        return out

    return take


def segments(server: Any, sent: list[Any]) -> list[str]:
    """Texts of the cached segments of the last request sent."""
    one, plan = sent[-1]
    return [server.engine.tokenizer_manager.tokenizer.decode(list(one.input_ids)[s:e]) for s, e in plan.cached]


def outcomes(report: dict[str, Any]) -> list[str]:
    return [s["outcome"] for s in report["spans"] if s["kind"] == "segment"]


def test_chat(server: Any, sent: list[Any]) -> None:
    out = server.post(CHAT, rag(hypic=REPORT, cache_salt="tenant", extra_key="other"))
    assert out.status == 200 and segments(server, sent) == DOCS
    assert sent[-1][1].salt == "tenant" and sent[-1][0].extra_key == "tenantother"
    (report,) = out.body["sglext"]["hypic"]
    assert (
        outcomes(report) == ["compiled", "compiled"] and report["prompt_tokens"] == out.body["usage"]["prompt_tokens"]
    )
    assert report["spans"][0]["id"] and len(report["spans"][0]["id"]) == 16


def test_no_report_unless_asked(server: Any, sent: list[Any]) -> None:
    out = server.post(CHAT, rag())
    assert "sglext" not in out.body and segments(server, sent) == DOCS and not sent[-1][1].report


def test_report_without_segments(server: Any, plans: Any) -> None:
    out = server.post(CHAT, {"messages": [{"role": "user", "content": "Q"}], **GREEDY, "hypic": REPORT})
    assert out.body["sglext"]["hypic"][0]["spans"] == [] and plans()[0].report


@pytest.mark.parametrize(
    "usage", [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_report_is_in_the_last_chunk(server: Any, path: str, usage: Any) -> None:
    """The one with usage if that was asked for; else the one with the finish reason."""
    prompt = {"prompt": "A|B|Q", "hypic": {"separator": "|", **REPORT}, **GREEDY}
    body = rag(hypic=REPORT) if path == CHAT else prompt
    out = server.post(path, {**body, "stream": True, **({"stream_options": usage} if usage else {})})
    *before, last = out.chunks
    assert outcomes(last["sglext"]["hypic"][0]) == ["compiled", "compiled"]
    assert not any("sglext" in c for c in before)
    assert last["usage"]["prompt_tokens"] if usage else last["choices"][0]["finish_reason"] == "length"
    plain = server.post(path, {**body, "hypic": {**body["hypic"], "report": False}})
    key = "delta" if path == CHAT else "text"
    texts = [c["choices"][0][key] for c in out.chunks if c["choices"]]
    streamed = "".join(t.get("content") or "" if path == CHAT else t for t in texts)
    whole = plain.body["choices"][0]
    assert streamed == (whole["message"]["content"] if path == CHAT else whole["text"])


def test_streaming_does_not_lag(server: Any) -> None:
    """Chunks are passed on as they come; only after the last token one is kept back."""
    from hypic.engine.http.deliver import Delivery, _with_report

    class Request:
        delivery = Delivery(wanted=True)

    produced: list[str] = []

    async def chunks() -> Any:
        for n in range(4):
            if n == 2:
                Request.delivery.publish({"meta_info": {"hypic": ['{"spans": []}'], "finish_reason": "stop"}})
            produced.append(f'data: {{"choices": [], "n": {n}}}\n\n')
            yield produced[-1]
        yield "data: [DONE]\n\n"

    async def lags() -> list[int]:
        seen = itertools.count(1)
        return [len(produced) - next(seen) async for _ in _with_report(chunks(), Request)]

    assert asyncio.run(lags()) == [0, 0, 1, 0, -1]


def test_report_survives_every_way_of_streaming() -> None:
    """The report comes once, with the first token; SGLang repeats it, slices it away or merges chunks, as it likes."""
    from hypic.engine.http.deliver import Delivery

    def publish(delivery: Delivery, **meta: Any) -> dict[str, Any]:
        return delivery.publish({"meta_info": {"finish_reason": None, **meta}})["meta_info"]

    for later in ([], None, [None], ['{"n": 1}', None]):
        delivery = Delivery(wanted=True)
        assert "hypic" not in publish(delivery, hypic=['{"n": 1}']) and not delivery.complete
        assert publish(delivery, hypic=later, finish_reason={"type": "stop"})["hypic"] == {"n": 1} and delivery.complete
    assert "hypic" not in publish(Delivery(wanted=False), hypic=['{"n": 1}'], finish_reason={"type": "stop"})
    assert "hypic" not in publish(Delivery(wanted=True), finish_reason={"type": "abort"})


def test_parallel_samples(server: Any, plans: Any) -> None:
    out = server.post(CHAT, rag(n=3, hypic=REPORT, temperature=1.0))
    assert [c["index"] for c in out.body["choices"]] == [0, 1, 2] and len(out.body["sglext"]["hypic"]) == 3
    assert all(plan.cached for plan in plans())
    stream = server.post(CHAT, rag(n=3, hypic=REPORT, temperature=1.0, stream=True))
    assert [outcomes(r) for r in stream.chunks[-1]["sglext"]["hypic"]] == [["compiled"] * 2] * 3


def test_completions(server: Any, sent: list[Any]) -> None:
    out = server.post(
        COMPLETIONS, {"prompt": "A doc|B doc|Q", "hypic": {"separator": "|", **REPORT}, **GREEDY, "echo": True}
    )
    assert segments(server, sent) == ["A doc", "B doc"]
    assert out.body["choices"][0]["text"].startswith("A docB docQ") and outcomes(out.body["sglext"]["hypic"][0])
    plain = server.post(COMPLETIONS, {"prompt": "A doc|B doc|Q", **GREEDY, "echo": True})
    assert plain.body["choices"][0]["text"].startswith("A doc|B doc|Q") and sent[-1][1] is None


def test_completions_batch(server: Any, plans: Any) -> None:
    body = {
        "prompt": ["A|Q", "none", "B|C|Q"],
        "hypic": {"separator": "|", **REPORT},
        **GREEDY,
        "n": 2,
        "temperature": 1.0,
    }
    out = server.post(COMPLETIONS, body)
    assert [len(outcomes(r)) for r in out.body["sglext"]["hypic"]] == [1, 1, 0, 0, 2, 2]
    assert sorted(len(p.cached) for p in plans()) == [0] * 3 + [1] * 3 + [2] * 3  # n > 1: one more to fill the cache
    del body["hypic"]["report"]
    server.post(COMPLETIONS, {**body, "n": 1})
    assert [p and len(p.cached) for p in plans()] == [1, None, 2]


def test_completions_token_ids(server: Any, plans: Any) -> None:
    ids = list(range(100, 120))
    out = server.post(COMPLETIONS, {"prompt": ids, "hypic": {"segments": [[9, 12], [2, 5]], **REPORT}, **GREEDY})
    assert out.status == 200 and plans()[0].cached == ((2, 5), (9, 12))
    server.post(COMPLETIONS, {"prompt": [ids, ids], "hypic": {"segments": [None, [[2, 5]]]}, **GREEDY})
    assert [p and p.cached for p in plans()] == [None, ((2, 5),)]


def test_generate(server: Any, plans: Any) -> None:
    ids = list(range(100, 120))
    out = server.post(
        GENERATE, {"input_ids": ids, "sampling_params": NATIVE, "hypic": {"segments": [[2, 5]], **REPORT}}
    )
    assert outcomes(out.body["meta_info"]["hypic"]) == ["compiled"]
    out = server.post(GENERATE, {"input_ids": ids, "sampling_params": NATIVE, "hypic": {"segments": [[2, 5]]}})
    assert "hypic" not in out.body["meta_info"]
    body = {"text": ["A|Q", "B|Q"], "sampling_params": [NATIVE, NATIVE], "hypic": {"separator": "|", **REPORT}}
    plans()
    both = server.post(GENERATE, body).body
    assert [outcomes(o["meta_info"]["hypic"]) for o in both] == [["compiled"]] * 2 and len(plans()) == 2
    server.post(GENERATE, {"text": "A|Q", "extra_key": "t", "sampling_params": NATIVE, "hypic": {"separator": "|"}})
    assert plans()[0].salt == "t"


def test_generate_stream(server: Any) -> None:
    body = {"text": "A|Q", "sampling_params": NATIVE, "hypic": {"separator": "|", **REPORT}, "stream": True}
    *before, last = server.post(GENERATE, body).chunks
    assert outcomes(last["meta_info"]["hypic"]) == ["compiled"] and before
    assert not any("hypic" in c["meta_info"] for c in before)


def test_logprobs_and_stop(server: Any, plans: Any) -> None:
    out = server.post(CHAT, rag(logprobs=True, top_logprobs=3, stop=["zzz"], hypic=REPORT))
    content = out.body["choices"][0]["logprobs"]["content"]
    assert len(content) == 5 and all(len(c["top_logprobs"]) == 3 for c in content) and plans()[0].cached
    word = content[1]["token"]
    assert word in server.post(CHAT, rag(stop=[word])).body["choices"][0]["matched_stop"]


IDS = {"input_ids": list(range(100, 120)), "sampling_params": NATIVE}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"return_logprob": True, "logprob_start_len": 0}, "input_logprobs"),
        ({"return_logprob": True, "logprob_start_len": 4}, "input_logprobs"),
        ({"return_logprob": True, "logprob_start_len": 5}, None),
        ({"return_logprob": True}, None),
        ({"return_logprob": False, "logprob_start_len": 0}, None),
        ({"bootstrap_host": "fake", "bootstrap_room": 3}, "disaggregation"),
    ],
)
def test_refusals(server: Any, plans: Any, fields: dict[str, Any], reason: str | None) -> None:
    """The request is served natively, and the report says why."""
    out = server.post(GENERATE, {**IDS, **fields, "hypic": {"segments": [[2, 5]], **REPORT}})
    assert out.status == 200
    (plan,) = plans()
    span = out.body["meta_info"]["hypic"]["spans"][0]
    if reason:
        assert not plan.cached and [d.reason for d in plan.declined] == [reason]
        assert span["outcome"] == "declined" and span["reason"] == reason and span["start"] == 2
    else:
        assert plan.cached == ((2, 5),) and span["outcome"] == "compiled"


def test_sessions_are_refused(server: Any, plans: Any) -> None:
    session = server.run(server.http.post("/open_session", json={"capacity_of_str_len": 1000})).json()
    body = {"text": "A|Q", "sampling_params": NATIVE, "session_params": {"id": session}, "hypic": {"separator": "|"}}
    out = server.post(GENERATE, body)
    assert out.status == 200 and [d.reason for d in plans()[0].declined] == ["session"]


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (CHAT, rag(hypic={"sep": "|"}), "unknown key 'sep'; valid keys are insert, method, report, segments, separator"),
        (CHAT, rag(hypic={"sep": "|"}, stream=True), "unknown key 'sep'"),
        (CHAT, rag(hypic={"segments": [[0, 2]]}), "mark content parts with cache_control"),
        (COMPLETIONS, {"prompt": "a", "hypic": 3}, "must be an object"),
        (COMPLETIONS, {"prompt": "a", "hypic": {"segments": [[0, 1]]}}, "send input_ids"),
        (COMPLETIONS, {"prompt": "|", "hypic": {"separator": "|"}}, "empty without its separators"),
        (COMPLETIONS, {"prompt": [1, 2], "hypic": {"separator": "|"}}, "cuts text"),
        (GENERATE, {**IDS, "hypic": {"segments": [[0, 30]]}}, r"hypic.segments\[0\] = \[0, 30\]: leaves the prompt"),
        (GENERATE, {**IDS, "hypic": {"segments": [[0, 3], [2, 5]]}}, "overlaps"),
        (GENERATE, {"text": "a|b", "sampling_params": {"custom_params": [1]}, "hypic": {"separator": "|"}}, "object"),
    ],
)  # fmt: skip
def test_errors(server: Any, path: str, body: dict[str, Any], says: str) -> None:
    import re

    out = server.post(path, body)
    message = str(out.body)
    assert out.status == 400 and re.search(says, message.replace('\\"', "'"))


def test_errors_in_native_streams_are_events(server: Any) -> None:
    """As SGLang has it: /generate has answered 200 before it looks at the request."""
    (chunk,) = server.post(GENERATE, {**IDS, "stream": True, "hypic": {"segments": [[0, 99]]}}).chunks
    assert chunk["error"]["code"] == 400 and "leaves the prompt" in chunk["error"]["message"]


def test_too_long_is_sglangs_own_error(server: Any) -> None:
    limit = server.engine.tokenizer_manager.context_len
    body = {"input_ids": [5] * (limit + 1), "sampling_params": NATIVE}
    ours = server.post(GENERATE, {**body, "hypic": {"segments": [[0, 10]]}})
    assert ours.status == 400 and ours.body == server.post(GENERATE, body).body
    assert not server.engine.tokenizer_manager.rid_to_state


def test_ordinary_requests_in_one_batch_with_reports(server: Any) -> None:
    """SGLang pads the field of every request of the payload; none of it may show."""

    async def both() -> Any:
        marked = {"text": "A|Q", "sampling_params": NATIVE, "hypic": {"separator": "|", **REPORT}}
        bodies = [marked, {"text": "Q", "sampling_params": NATIVE}] * 4
        return [r.json() for r in await asyncio.gather(*(server.http.post(GENERATE, json=b) for b in bodies))]

    outs = server.run(both())
    assert ["hypic" in o["meta_info"] for o in outs] == [True, False] * 4


def test_inprocess(server: Any, sent: list[Any]) -> None:
    from hypic.engine.http.inprocess import agenerate, generate, stream

    out = generate(server.engine, input_ids=range(100, 120), segments=((2, 5),), sampling_params=NATIVE)
    assert outcomes(out["meta_info"]["hypic"]) == ["compiled"]
    out = generate(
        server.engine, messages=rag()["messages"], sampling_params=NATIVE, chat={"cache_salt": "t"}, return_logprob=True
    )
    assert segments(server, sent) == DOCS and sent[-1][1].salt == "t" and out["meta_info"]["output_token_logprobs"]

    async def together() -> Any:
        one = agenerate(server.engine, text="A|Q", separator="|", sampling_params=NATIVE)
        chunks = [c async for c in stream(server.engine, text="B|Q", separator="|", sampling_params=NATIVE)]
        return await one, chunks[-1]

    assert all(o["meta_info"]["hypic"] for o in server.run(together()))


def test_ordinary_requests_are_untouched(server: Any, sent: list[Any]) -> None:
    """The same bytes go to the scheduler and the same answer comes back as from SGLang's own function."""
    import inspect

    import msgspec
    from sglang.srt.managers.io_struct import GenerateReqInput

    manager = server.engine.tokenizer_manager
    stock = inspect.unwrap(type(manager).generate_request)
    timing = {"time_stats", "received_time"}
    noise = {"id", "e2e_latency", "response_sent_to_client_ts"}

    def drive(function: Any, **prompt: Any) -> Any:
        sent.clear()
        obj = GenerateReqInput(**prompt, sampling_params=dict(NATIVE), rid="same", return_logprob=True)
        out = server.run(function(manager, obj, None).__anext__())
        one = sent[-1][0]
        wire = {f: getattr(one, f) for f in one.__struct_fields__ if f not in timing}
        wire["sampling_params"] = msgspec.structs.asdict(one.sampling_params)
        return wire, {**out, "meta_info": {k: v for k, v in out["meta_info"].items() if k not in noise}}

    server.run(server.http.post("/flush_cache"))
    for prompt in ({"text": "Nothing | marked <<PIC_SEP>> here"}, {"input_ids": list(range(100, 120))}):
        first = drive(stock, **prompt)
        server.run(server.http.post("/flush_cache"))
        assert drive(type(manager).generate_request, **prompt) == first
        server.run(server.http.post("/flush_cache"))


def test_server_wide_separator(server: Any, hooked: Any, plans: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For clients of the official fork, which mark nothing else."""
    from hypic.config import OFFICIAL_SEPARATOR, HypicConfig

    monkeypatch.setattr(hooked, "_config", HypicConfig(enabled=True, separator=OFFICIAL_SEPARATOR))
    text = OFFICIAL_SEPARATOR.join(["A doc", "B doc", "Q"])
    messages = [{"role": "user", "content": text}]
    for path, body in (
        (CHAT, {"messages": messages, **GREEDY}),
        ("/invocations", {"messages": messages, **GREEDY}),
        ("/v1/messages", {"model": "m", "messages": messages, "max_tokens": 3}),
        (COMPLETIONS, {"prompt": text, **GREEDY, "echo": True}),
        (GENERATE, {"text": text, "sampling_params": NATIVE}),
        ("/vertex_generate", {"instances": [{"text": text}], "parameters": {"sampling_params": NATIVE}}),
        ("/api/generate", {"model": "m", "prompt": text, "stream": False, "options": {"num_predict": 3}}),
    ):
        out = server.post(path, body)
        assert out.status == 200 and [len(p.cached) for p in plans()] == [2], path
        assert OFFICIAL_SEPARATOR not in str(out.body)
    server.post(COMPLETIONS, {"prompt": text, **GREEDY, "hypic": {"separator": ""}})
    server.post(COMPLETIONS, {"prompt": list(range(100, 120)), **GREEDY})
    assert plans() == [None, None]


def test_vertex_parameters(server: Any, plans: Any) -> None:
    parameters = {"sampling_params": NATIVE, "hypic": {"separator": "|", **REPORT}}
    out = server.post("/vertex_generate", {"instances": [{"text": "A|Q"}], "parameters": parameters})
    assert [len(p.cached) for p in plans()] == [1]
    assert outcomes(out.body[0]["meta_info"]["hypic"]) == ["compiled"]
