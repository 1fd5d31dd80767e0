"""What the front makes of a worker's answer."""

from __future__ import annotations

import array
import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import orjson
import pytest

pytest.importorskip("sglang")
from sglang.srt.managers.tokenizer_manager import ReqState

from hypic.config import HypicConfig
from hypic.engine.keys import artifact_key
from hypic.method import parse_methods
from hypic.router.costs import Costs
from hypic.router.front import placing
from hypic.router.front.wire import Assembly, body, error_of, events
from hypic.segment import Bounds, RequestSpans


async def _blocks(raw: bytes, size: int) -> AsyncIterator[bytes]:
    for i in range(0, len(raw), size):
        yield raw[i : i + size]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_events_however_they_are_cut(size: int) -> None:
    sent = [{"text": "a\n\nb", "n": 1}, {"text": "ü" * 50}, {"text": ""}]
    raw = b"".join(b"data: " + orjson.dumps(e) + b"\n\n" for e in sent) + b"data: [DONE]\n\ndata: {}\n\n"

    async def read() -> list[Any]:
        return [e async for e in events(_blocks(raw, size))]

    assert asyncio.run(read()) == sent


def _state() -> Any:
    return ReqState([], False, asyncio.Event(), SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]


def _chunks() -> list[dict[str, Any]]:
    def chunk(text: str, ids: list[int], last: bool = False) -> dict[str, Any]:
        logprobs = [[-0.5, i, None] for i in ids]
        meta = {"id": "r", "finish_reason": {"type": "length"} if last else None, "output_token_logprobs": logprobs}
        return {"text": text, "output_ids": ids, "meta_info": meta}

    return [chunk("one", [1]), chunk(" two", [2, 3]), chunk("!", [4], last=True)]


def test_a_stream_of_all_so_far() -> None:
    state = _state()
    assembly = Assembly(state, stream=True, incremental=False)
    outs = []
    for c in _chunks():
        out = assembly.add(c)
        assert out is not None
        outs.append(
            (out["text"] or state.get_text(), list(out["output_ids"]), len(out["meta_info"]["output_token_logprobs"]))
        )
    assert outs == [("one", [1], 1), ("one two", [1, 2, 3], 3), ("one two!", [1, 2, 3, 4], 4)] and state.finished


def test_a_stream_of_what_is_new() -> None:
    state = _state()
    assembly = Assembly(state, stream=True, incremental=True)
    assert [assembly.add(c) for c in _chunks()] == _chunks() and state.finished


def test_one_answer_and_a_worker_that_was_lost() -> None:
    """Nothing of the lost worker's tokens is in the answer of the next."""
    state = _state()
    assembly = Assembly(state, stream=False, incremental=False)
    assert [assembly.add(c) for c in _chunks()[:2]] == [None, None] and state.get_text() == "one two"
    assembly.start_over()
    *_, out = [assembly.add(c) for c in _chunks()]
    assert out is not None and state.finished
    assert (out["text"], out["output_ids"]) == ("one two!", [1, 2, 3, 4])
    assert [i for _, i, _ in out["meta_info"]["output_token_logprobs"]] == [1, 2, 3, 4]


def test_what_a_worker_is_sent() -> None:
    """One prompt at a time, with what the client set, zero included, and SGLang's limit for it."""
    given = {"return_logprob": True, "logprob_start_len": 0, "extra_key": "", "lora_path": None, "no_logs": False}
    obj = SimpleNamespace(**given, stream=False, sampling_params={"n": 3, "max_new_tokens": 9, "temperature": 0})
    tokenized = SimpleNamespace(
        rid="r", input_ids=array.array("q", [5, 6]), sampling_params=SimpleNamespace(max_new_tokens=0)
    )
    assert body(obj, tokenized, "r1") == {
        "rid": "r",
        "input_ids": [5, 6],
        "sampling_params": {"n": 1, "max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "extra_key": "",
        "stream": False,  # every chunk of a stream would repeat the logprobs of the prompt
    }
    obj.logprob_start_len = -1
    assert body(obj, tokenized, "r1")["stream"] is True
    plan = RequestSpans(cached=(Bounds(0, 2),), salt="t")
    obj.sampling_params["custom_params"] = {"theirs": 1, **plan.to_params()}
    custom = body(obj, tokenized, "r1")["sampling_params"]["custom_params"]
    assert custom == {"theirs": 1, **plan.to_params(), "hypic_request": "r1"}
    assert obj.sampling_params["custom_params"]["hypic_request"] == "", "another attempt has another name"


@pytest.mark.parametrize(
    ("chunk", "status", "text"),
    [
        ({"error": {"message": "queue full", "code": 503}}, 503, "queue full"),
        ({"error": {"message": "odd", "code": "x"}}, 500, "odd"),
        ({"error": "plain"}, 500, "plain"),
    ],
)
def test_errors_of_a_worker(chunk: dict[str, Any], status: int, text: str) -> None:
    error = error_of(chunk)
    assert error is not None and (error.status, str(error)) == (status, text)
    assert error_of({"text": "a", "meta_info": {}}) is None


def test_what_is_placed_of_a_prompt() -> None:
    """What a worker would link, under the names that it uses; nothing that it would compute in place."""
    ids = array.array("q", range(400))
    plan = RequestSpans(cached=(Bounds(0, 100), Bounds(100, 120), Bounds(130, 300), Bounds(300, 400)), salt="tenant")
    config, costs = HypicConfig(), Costs(tokens_per_s=1, transfer_gb_s=1, artifact_bytes=1000, artifact_token_bytes=2)

    def asked(plan: RequestSpans | None, **fields: Any) -> Any:
        params = SimpleNamespace(custom_params=plan.to_params() if plan else None)
        return SimpleNamespace(input_ids=ids, lora_id=None, extra_key="x", sampling_params=params, **fields)

    methods = parse_methods("seam,legolink-0", config.seam_window)

    def placed(plan: RequestSpans | None, adapter: str = "") -> list[Any]:
        tokenized = asked(plan)
        return placing.segments(
            tokenized, placing.plan_of(tokenized), b"id", methods, config.min_segment, costs, adapter
        )

    first, third = placed(plan)
    assert (first.tokens, third.tokens) == (ids[:100].tobytes(), ids[130:300].tobytes()), (
        "short, and at the prompt's end"
    )
    assert first.key == artifact_key(b"id", "tenant", "", ids[:100]) and first.nbytes == 1000 + 2 * 92
    assert placed(None) == []
    whole = msgspec.structs.replace(plan, cached=(Bounds(0, 400),))
    assert placed(whole) == [] and len(placed(msgspec.structs.replace(whole, name="seg_1"))) == 1, "all of it is named"
    other = placed(msgspec.structs.replace(plan, method="legolink-0"))[0]
    assert other.key == artifact_key(b"id", "tenant", "", ids[:100], "legolink-0:0:4") != first.key
    assert (other.method, other.nbytes) == ("legolink-0", 1200), "its window is 0"
    adapted = placed(plan, "name")[0]
    assert adapted.adapter == "name" and adapted.key == artifact_key(b"id", "tenant", "name", ids[:100])
    assert placed(msgspec.structs.replace(plan, method="seam"))[0].key == first.key, "the default, by its name"


def test_what_other_workers_may_not_compile() -> None:
    plan = RequestSpans(cached=(Bounds(0, 100),))
    base, adapted = SimpleNamespace(lora_id=None), SimpleNamespace(lora_id="drawn at random")
    cases = (base, plan, ""), (adapted, plan, "its name"), (adapted, plan, ""), (adapted, RequestSpans(), "")
    assert [placing.unshared(*case) for case in cases] == [None, None, "adapter", None]


def test_beginnings_are_of_one_tenant_adapter_and_method() -> None:
    """And of links apart from plain prompts, which share no keys and values with them."""
    ids = array.array("q", range(200))
    tokenized, other = (SimpleNamespace(input_ids=ids, extra_key=x) for x in ("x", "y"))
    plan = RequestSpans(cached=(Bounds(0, 100),), salt="t")
    found = [
        placing.beginning(tokenized, RequestSpans(), None),
        placing.beginning(other, RequestSpans(), None),
        placing.beginning(tokenized, RequestSpans(), "an adapter"),
        placing.beginning(tokenized, plan, None),
        placing.beginning(tokenized, msgspec.structs.replace(plan, method="seam-24"), None),
    ]
    assert [len(blocks) for blocks in found] == [3] * 5 and len({b for blocks in found for b in blocks}) == 15
    assert placing.beginning(tokenized, msgspec.structs.replace(plan, name="seg_1"), None) == []
