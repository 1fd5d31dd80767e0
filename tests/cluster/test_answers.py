"""What several workers make of a prompt is what one makes of it, and they work side by side."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from hypic.bench.scatter import ask
from hypic.check.judge import EXACT, Judge
from hypic.check.session import Prompt, distance
from hypic.check.workers import Endpoint, check_p3_across
from hypic.config import HypicConfig
from tests.cases.driving import Writer
from tests.cluster.asking import ANEW, ask_several, drained, generate, long_prompt, pinned, same_answer, segments
from tests.cluster.launched import Cluster, Worker
from tests.server import requests
from tests.server.naming import Names, chat, named, report_of
from tests.server.requests import REPORT
from tests.server.serving import CHAT, COMPLETIONS, FLUSH, GENERATE, MARK, TextWriter


def overlap(timeline: dict[str, Any]) -> bool:
    """Whether two workers compiled at the same time."""
    hours: dict[str, list[float]] = {}
    for line in timeline["segments"]:
        if line["begun"] is not None:
            hours.setdefault(line["worker"], []).extend((line["begun"], line["done"]))
    spans = [(min(times), max(times)) for times in hours.values()]
    return any(max(a[0], b[0]) < min(a[1], b[1]) for a, b in combinations(spans, 2))


def test_a_cold_prompt_is_split_and_answered_as_by_one_worker(cluster: Cluster, write: Writer) -> None:
    """CASES 22, P3 and P4 across workers: the split, the overlap, the same tokens and logprobs."""
    asked = generate(long_prompt(write))
    answer = cluster.ask(GENERATE, asked)
    meta = answer["meta_info"]
    report = meta["hypic"]
    timeline, combine = report["router"]["timeline"], report["router"]["worker"]
    assert timeline["scattered"] and timeline["combine"] == combine
    found = segments(meta)
    assert "received" in {s["outcome"] for s in found} <= ANEW and meta["cached_tokens"] == 0
    assert all((s["worker"] is None) == (s["outcome"] == "compiled") for s in found)
    lines = {line["id"]: line for line in timeline["segments"]}
    for s in found:
        line = lines[s["id"]]
        assert line["worker"] == (s["worker"] or combine) and line["role"] == "compile" and not line["rerouted"]
        if line["begun"] is not None:  # else the word of it came after the answer
            assert 0 < line["begun"] < line["done"]
        assert (s["worker"] is None) == (line.get("arrived") is None)
        if s["worker"]:
            assert 0 < line["sent"] <= line["arrived"] < timeline["first_token"]
    at_work = {w: [x for x in lines.values() if x["worker"] == w] for w in {x["worker"] for x in lines.values()}}
    assert len(at_work) > 1, "how many, and which, is for measured speeds to say"
    for _ in range(4):
        if overlap(timeline):
            break
        timeline = cluster.ask(GENERATE, generate(long_prompt(write)))["meta_info"]["hypic"]["router"]["timeline"]
    else:
        raise AssertionError(f"never side by side, as far as the cores go round: {timeline}")
    alone = next(name for name in at_work if name != combine)
    worker = cluster.worker(alone)
    assert worker.http.post(FLUSH).status_code == 200
    by_one = worker.ask(GENERATE, asked)
    assert {s["outcome"] for s in segments(by_one["meta_info"])} == {"compiled"}
    same_answer(answer, by_one)


def test_hits_are_sent_to_whoever_combines(cluster: Cluster, write: Writer) -> None:
    """What one worker holds is not compiled again elsewhere, and the answer is the same."""
    prompt = long_prompt(write, n=2, length=128)
    asked = generate(prompt)
    holder = cluster.worker("w2")
    first = holder.ask(GENERATE, asked)  # not through the router, which learns of it
    cluster.wait(lambda: cluster.workers()["w2"]["artifacts"] >= 2, "announced")
    plain = cluster.ask(GENERATE, asked)
    assert [s["outcome"] for s in segments(plain["meta_info"])] == ["hit_device"] * 2, "it is combined where it lies"
    assert plain["meta_info"]["hypic"]["router"]["worker"] == "w2"
    same_answer(first, plain)


def test_every_form_of_request(cluster: Cluster, text: TextWriter) -> None:
    """Chat, streams, n, batches and separators: through SGLang's own handlers."""
    parts = [{"type": "text", "text": text.document(), **MARK} for _ in range(3)]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]
    chat = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 8, "hypic": {"report": True}}
    whole = cluster.ask(CHAT, chat)
    (report,) = whole["sglext"]["hypic"]
    assert [s["kind"] for s in report["spans"]].count("segment") == 3 and report["router"]["worker"] in "w0w1w2"
    chunks = cluster.ask(CHAT, {**chat, "stream": True, "stream_options": {"include_usage": True}})
    assert (
        "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
        == (whole["choices"][0]["message"]["content"])
    )
    assert len(chunks) > 2 and chunks[-1]["usage"]["completion_tokens"] == 8
    assert chunks[-1]["sglext"]["hypic"][0]["router"]["timeline"]["first_token"] > 0
    several = cluster.ask(CHAT, {**chat, "n": 3, "temperature": 1.0})
    assert len(several["choices"]) == 3 and len(several["sglext"]["hypic"]) == 3
    asked = several["id"].split("_")[0]  # the choices of one request are told apart by what follows
    made = [x for x in cluster.snapshot()["requests"] if x["rid"].startswith(asked)]
    assert len(made) == 4 and len({x["combine"] for x in made}) == 1, "the prompt's run and its choices are together"
    prompts = [f"{text.document()}<<S>>{text.words(5)}", text.words(6)]
    completion = {"model": "m", "prompt": prompts, "max_tokens": 3, "hypic": {"separator": "<<S>>", "report": True}}
    both = cluster.ask(COMPLETIONS, completion)
    assert [len(r["spans"]) for r in both["sglext"]["hypic"]] == [2, 1]
    message = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": text.words(5)}]}
    assert cluster.ask("/v1/messages", message)["usage"]["output_tokens"] == 4


@pytest.mark.parametrize("fields", [{}, {"logprob_start_len": 0}, {"logprob_start_len": 0, "top_logprobs_num": 2}])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_a_workers(cluster: Cluster, write: Writer, stream: bool, fields: dict[str, Any]) -> None:
    asked = generate(Prompt(write.tokens(40), [], 4, ""), stream=stream, **fields)
    direct = {**asked, "stream": False}
    answer, expected = cluster.ask(GENERATE, asked), cluster.worker("w1").ask(GENERATE, direct)
    if stream:
        lengths = [len(c["output_ids"]) for c in answer]
        assert lengths == sorted(set(lengths)), "all so far, as this server is set; a slow client gets fewer chunks"
        answer = answer[-1]
    same_answer(answer, expected)
    for name in ("input_token_logprobs", "input_top_logprobs", "output_top_logprobs"):
        ours, theirs = answer["meta_info"].get(name), expected["meta_info"].get(name)
        assert bool(ours) == bool(theirs) and len(ours or ()) == len(theirs or ())
        assert ("input" in name and fields.get("logprob_start_len") == 0 and "token" in name) <= bool(ours)


def test_why_a_segment_was_declined_reaches_the_report(cluster: Cluster, write: Writer, text: TextWriter) -> None:
    """Only the front knows that a prompt's logprobs were asked for, or that a mark was not text."""
    prompt = long_prompt(write, n=2, length=70)
    meta = cluster.ask(GENERATE, generate(prompt, logprob_start_len=0))["meta_info"]
    assert [(s["outcome"], s["reason"]) for s in segments(meta)] == [("declined", "input_logprobs")] * 2
    content = [{"type": "text", "text": " ", **MARK}, {"type": "text", "text": text.words(5)}]
    chat = {
        "model": "m",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 2,
        "hypic": {"report": True},
    }
    (report,) = cluster.ask(CHAT, chat)["sglext"]["hypic"]
    assert [(s["start"], s["reason"]) for s in report["spans"] if s["kind"] == "segment"] == [(-1, "empty")]


def test_errors_are_a_workers_and_reserved_fields_are_refused(cluster: Cluster, write: Writer) -> None:
    """The plan comes from the router alone: a client cannot write one, to it or to a worker."""
    worker: Worker = cluster.worker("w0")
    ids = write.tokens(30)
    too_long = {"input_ids": ids, "sampling_params": {"max_new_tokens": 10**6}}
    a, b = cluster.post(GENERATE, too_long), worker.post(GENERATE, too_long)
    assert a.status == 400 and a == b
    forged = {"input_ids": ids, "sampling_params": {"custom_params": {"hypic_cached": [0, 5]}}}
    for server in (cluster, worker):
        reply = server.post(GENERATE, forged)
        assert reply.status == 400 and "reserved" in reply.body["error"]["message"]
    reply = worker.http.post(GENERATE, json=forged, headers={"x-hypic-router": "guess"})
    assert reply.status_code == 400 and "reserved" in reply.text
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    reply = cluster.post(CHAT, {"model": "m", "messages": [{"role": "user", "content": image}]})
    assert reply.status == 501 and "ask a worker directly" in reply.body["message"]
    for path in ("/v1/embeddings", "/open_session", "/v1/loads", "/load_lora_adapter_from_tensors"):
        reply = cluster.post(path, {})
        assert reply.status == 501 and "ask a worker directly" in reply.body["error"]["message"], path


def test_registered_segments_are_the_clusters(cluster: Cluster, names: Names, text: TextWriter) -> None:
    """Compiled by some worker, used by id on any, pinned and dropped wherever they are."""
    a, b, question = text.document(), text.document(), text.words(5)
    with drained(cluster, "w1", "w2"):
        one, other = names.register(a, b)
    assert [(s["status"], s["hits"], s["pinned"]) for s in (one, other)] == [("ready", 0, False)] * 2
    cluster.wait(lambda: cluster.workers()["w0"]["artifacts"] >= 2, "announced")
    assert names.register(a, method="seam")[0]["id"] == one["id"] and len(names.listed()) == 2
    by_id = cluster.ask(CHAT, chat(names.tenant, named(one), text.words(3), named(other), question))
    report = report_of(by_id)
    assert {s["outcome"] for s in requests.segments(report)} <= {"hit_device", "hit_remote"}
    assert names.get(one["id"])["hits"] == 1

    assert names.call("POST", f"{one['id']}/pin").body["pinned"]
    assert cluster.wait(lambda: pinned(cluster), "pinned").keys() == {"w0"}, "where it is, and nowhere else"
    held = sum(w["artifacts"] for w in cluster.workers().values())
    with drained(cluster, "w0", "w2"):
        report = report_of(cluster.ask(CHAT, chat(names.tenant, named(one), question)))
    assert report["router"]["worker"] == "w1" and requests.outcomes(report) == ["hit_remote"]
    cluster.wait(lambda: pinned(cluster).keys() == {"w0", "w1"}, "pinned where it went")
    found = names.get(one["id"])
    assert (found["pinned"], found["hits"]) == (True, 2)
    assert names.call("DELETE", one["id"]).status == 200 and not pinned(cluster)
    cluster.wait(lambda: sum(w["artifacts"] for w in cluster.workers().values()) == held - 1, "both are dropped")

    stranger = f"{names.tenant}!"
    assert names.listed(stranger) == [] and names.call("GET", other["id"], stranger).status == 404
    for reply in (
        cluster.post(CHAT, chat(stranger, named(other), question)),
        cluster.post(CHAT, chat(names.tenant, named(one), question)),
        names.call("POST", f"{other['id']}/pin", stranger),
    ):
        assert reply.status == 404 and "unknown here" in str(reply.body), reply
    for server, status in ((cluster, 501), (cluster.worker("w0"), 404)):
        assert server.http.post("/hypic/segments", content=b"").status_code == status, "the router alone asks"


def test_methods_of_the_clients_choice(cluster: Cluster, names: Names, text: TextWriter, write: Writer) -> None:
    """Workers share artifacts of all of them, each method's own; a name that the cluster lacks is refused."""
    document, before = text.document(), cluster.metrics()
    (one,) = names.register(document, method="seam-24")
    assert one["status"] == "ready" and one["id"] != names.register(document)[0]["id"]
    body = chat(names.tenant, named(one), text.words(5), hypic={"method": "seam-24", **REPORT})
    report = report_of(cluster.ask(CHAT, body))
    assert (report["method"], report["seam_window"]) == ("seam-24", 24)
    assert requests.outcomes(report) == ["hit_device"], "where its name was compiled"

    def by_method(prompt: Prompt) -> dict[str, Any]:
        asked = generate(prompt)
        asked["hypic"]["method"] = "seam-24"
        return asked

    prompt, answer = ask_several(cluster, write, lambda p: cluster.ask(GENERATE, by_method(p)))
    asked = by_method(prompt)
    combine = cluster.worker(answer["meta_info"]["hypic"]["router"]["worker"])
    other = combine.ask(GENERATE, generate(prompt))
    assert {s["outcome"] for s in segments(other["meta_info"])} == {"compiled"}, "the default's are others"
    cluster.http.post("/flush_cache", params={"timeout": 10}).raise_for_status()
    alone = combine.ask(GENERATE, asked)
    assert {s["worker"] for s in segments(alone["meta_info"])} == {None}
    same_answer(answer, alone)
    assert "router_unshared_total{reason=method}" not in cluster.metrics().since(before)
    for reply in (
        cluster.post(CHAT, chat(names.tenant, "a", hypic={"method": "legolink-0"})),
        names.post(document, method="legolink-0"),
    ):
        assert reply.status == 400 and "this server has seam, seam-24 (--hypic-methods)" in str(reply.body), reply


def test_adapters_are_those_of_all_workers(
    cluster: Cluster, names: Names, write: Writer, adapter: Path, tmp_path: Path
) -> None:
    """CASES 16: loaded and unloaded everywhere or nowhere. Workers compile for each other under it: the answer is that of one
    worker, and never made of artifacts of the base model, nor of a namesake's that was there before."""
    before = cluster.metrics()
    reply = cluster.post("/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"})
    assert reply.status == 400 and "w0: " in str(reply.body) and "w2: " in str(reply.body)
    loaded = cluster.ask("/load_lora_adapter", {"lora_name": "a", "lora_path": str(adapter)})
    assert loaded["success"] and list(loaded["loaded_adapters"]) == ["a"]
    bases = []

    def with_adapter(prompt: Prompt) -> dict[str, Any]:
        bases.append(cluster.ask(GENERATE, generate(prompt)))  # whose artifacts are there, then
        answer: dict[str, Any] = cluster.ask(GENERATE, generate(prompt, lora_path="a"))
        return answer

    try:
        prompt, answer = ask_several(cluster, write, with_adapter)
        asked = generate(prompt, lora_path="a")
        assert answer["output_ids"] != bases[-1]["output_ids"]
        cluster.http.post("/flush_cache", params={"timeout": 10}).raise_for_status()
        for name in cluster.alive():
            alone = cluster.worker(name).ask(GENERATE, asked)
            assert {s["worker"] for s in segments(alone["meta_info"])} == {None}
            assert "a" in {model["id"] for model in cluster.worker(name).http.get("/v1/models").json()["data"]}
            same_answer(answer, alone)
        (one,) = names.register(write.tokens(80), model="default:a", pin=True)
        assert (one["status"], one["pinned"]) == ("ready", True)
    finally:
        assert cluster.ask("/unload_lora_adapter", {"lora_name": "a"})["success"]
    namesake = shutil.copytree(adapter, tmp_path / "a")
    weights = load_file(adapter / "adapter_model.safetensors")
    save_file({name: 0.5 * w for name, w in weights.items()}, namesake / "adapter_model.safetensors")
    cluster.ask("/load_lora_adapter", {"lora_name": "a", "lora_path": str(namesake)})
    try:
        renewed = cluster.ask(GENERATE, asked)
        assert {s["outcome"] for s in segments(renewed["meta_info"])} <= ANEW
        assert renewed["output_ids"] != answer["output_ids"]
        cluster.http.post("/flush_cache", params={"timeout": 10}).raise_for_status()
        same_answer(renewed, cluster.worker("w0").ask(GENERATE, asked))
    finally:
        assert cluster.ask("/unload_lora_adapter", {"lora_name": "a"})["success"]
    assert "router_unshared_total{reason=adapter}" not in cluster.metrics().since(before)
    for server in (cluster, *map(cluster.worker, cluster.alive())):
        assert "a" not in {model["id"] for model in server.http.get("/v1/models").json()["data"]}, "unloaded"


def test_what_the_endpoint_says_of_itself(cluster: Cluster, write: Writer) -> None:
    before = cluster.metrics()
    cluster.ask(GENERATE, generate(Prompt(write.tokens(30), [], 2, "")))
    changed = cluster.metrics().since(before)
    assert changed["router_requests_total{outcome=answered}"] == changed["router_placements_total{kind=plain}"] == 1
    assert changed["router_first_token_seconds_count"] == changed["router_forward_seconds_count"] == 1
    assert cluster.router_metric("workers") == 3
    assert cluster.http.get("/v1/models").json()["data"][0]["max_model_len"] == 16384
    for worker in cluster.workers().values():
        assert worker["state"] == "alive" and worker["restarts"] == 0 and worker["arena_bytes"] == 16 << 20
    costs = cluster.snapshot()["costs"]
    assert costs["artifact_bytes"] > 0 and costs["forward_tokens"] > 0
    assert cluster.http.post(FLUSH).status_code == 200
    cluster.wait(lambda: not any(w["artifacts"] for w in cluster.workers().values()), "flushed everywhere")


def test_workers_are_drained_and_had_back(cluster: Cluster, write: Writer, text: TextWriter) -> None:
    """Two are drained: the third does all alone. Unknown names and words change nothing. With the third drained, too, nobody
    answers. The next turn of a chat comes back to it when there are others again."""
    turns = [{"role": "user", "content": text.words(150)}]
    chat = {"model": "m", "temperature": 0, "max_tokens": 4, "ignore_eos": True, "hypic": {"report": True}}
    reply = cluster.post("/workers", {"drain": ["w0", "w2"], "policy": "round_robin"})
    assert reply.status == 200 and reply.body["policy"] == "round_robin"
    assert {w["name"]: w["state"] for w in reply.body["workers"]} == {"w0": "drained", "w1": "alive", "w2": "drained"}
    try:
        prompt = long_prompt(write)
        sample = ask(cluster.url, list(prompt.ids), [list(s) for s in prompt.segments])
        assert sample.workers == 1 and sample.timeline["combine"] == "w1"
        for wrong, says in (
            ({"drain": ["w1", "w9"]}, "no worker w9 is alive; there are w0, w1, w2"),
            ({"policy": "fifo"}, "Invalid enum value 'fifo'"),
            ({"drian": ["w1"]}, "unknown field `drian`"),
            ({"drain": ["w1"], "resume": ["w0", "w1"]}, "drain and resume both name w1"),
        ):
            reply = cluster.post("/workers", wrong)
            assert reply.status == 400 and says in reply.body["error"]["message"]
        assert cluster.alive() == ["w1"]
        assert cluster.http.get("/health").json() == {"workers": 1}
        said = cluster.ask(CHAT, {**chat, "messages": turns})["choices"][0]["message"]["content"]
        cluster.ask("/workers", {"drain": ["w1"]})
        health, reply = cluster.http.get("/health"), cluster.post(CHAT, {**chat, "messages": turns})
        assert (health.status_code, health.json()) == (503, {"workers": 0})
        assert reply.status == 503 and "all workers are drained; resume one" in str(reply.body), reply
    finally:
        cluster.ask("/workers", {"resume": ["w0", "w1", "w2"], "policy": "lpt"})
    prompt = long_prompt(write)
    assert ask(cluster.url, list(prompt.ids), [list(s) for s in prompt.segments]).workers > 1
    turns += [{"role": "assistant", "content": said}, {"role": "user", "content": text.words(5)}]
    second = cluster.ask(CHAT, {**chat, "messages": turns})
    assert second["sglext"]["hypic"][0]["router"]["worker"] == "w1"
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 100


def test_a_benchmark_and_the_self_check_on_it(
    cluster: Cluster, tiny_model: Callable[[str], Path], write: Writer
) -> None:
    """`hypic bench --suites scatter` and `hypic selfcheck --workers` ask like this; P3 of the latter, on long documents."""
    prompt = long_prompt(write)
    sample = ask(cluster.url, list(prompt.ids), [list(s) for s in prompt.segments])
    assert sample.workers > 1 and min(sample.compile, sample.link) > 0 <= sample.exposed
    assert sample.timeline["scattered"] and sample.ttft >= sample.timeline["first_token"]
    model = tiny_model("qwen35")
    ends = [
        Endpoint(url, HypicConfig(), 1536, "float32")
        for url in (cluster.url, *(w["http"] for w in cluster.workers().values()))
    ]
    judge = Judge("qwen35", str(model), 1)
    found = check_p3_across(ends[0], ends[1:], judge, seed=1, rounds=1, lengths=(600,) * 6)
    assert found.passed, found.detail
    assert found.n == 2 and "received" in found.detail
    layout = long_prompt(write, 3, 100)
    answer = ends[0].ask(layout)
    truth, linked = judge.link(ends[0], layout, answer.ids)  # type: ignore[arg-type]
    assert answer.linked == linked and distance(answer, truth) < EXACT, "as P4 does"
