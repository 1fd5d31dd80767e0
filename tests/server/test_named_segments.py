"""`/v1/segments` on a real server: registered once, used by id in every form of prompt, kept, pinned, expired, deleted."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cases.driving import Writer
from tests.server import requests
from tests.server.conftest import ARENA_BYTES, NAMED_BYTES
from tests.server.naming import SEGMENTS, Names, chat, marked, named, report_of
from tests.server.requests import CHAT, COMPLETIONS, GENERATE, MARK, REPORT, native, openai
from tests.server.serving import FLUSH, PATIENCE, Server, TextWriter


@pytest.fixture
def names(server: Server, request: pytest.FixtureRequest) -> Iterator[Names]:
    made = Names(server, f"tenant of {request.node.nodeid}")
    yield made
    made.clear()


# ---------------------------------------------------------------------- register


def test_a_registered_segment_is_there_before_its_first_use(server: Server, names: Names, text: TextWriter) -> None:
    document, before = text.document(), server.metrics()
    (one,) = names.register(document)
    assert (one["status"], one["reason"], one["pinned"], one["hits"]) == ("ready", None, False, 0)
    assert one["tokens"] == server.token_count(document) and one["bytes"] > 0
    counted = server.metrics().since(before)
    assert counted["segments_total{outcome=compiled}"] == 1
    assert counted["tokens_total{kind=compiled}"] == one["tokens"]
    assert "tokens_total{kind=recomputed}" not in counted, "no answer was computed"
    answer = server.ask(CHAT, chat(names.tenant, marked(document), text.words(4)))
    assert requests.outcomes(report_of(answer)) == ["hit_device"], "by text, too"
    assert names.get(one["id"])["hits"] == 1


def test_the_same_content_has_the_same_id(server: Server, names: Names, text: TextWriter, write: Writer) -> None:
    document = text.document()
    (first,) = names.register(document)
    before = server.metrics()
    again, other = names.register(document, text.document())
    assert again["id"] == first["id"] != other["id"] and again["created"] == first["created"]
    assert server.metrics().since(before)["tokens_total{kind=compiled}"] == other["tokens"]
    (theirs,) = names.register(document, tenant=f"{names.tenant}!")
    assert theirs["id"] != first["id"], "an id says nothing about another tenant's"
    ids = write.tokens(80)
    assert [one["id"] for one in names.register(ids, ids)] == [names.register(ids)[0]["id"]] * 2
    assert len(names.listed()) == 3


def test_two_who_register_the_same_at_once_have_it_compiled_once(server: Server, names: Names, write: Writer) -> None:
    ids, before = write.tokens(900), server.metrics()
    with ThreadPoolExecutor() as pool:
        both = list(pool.map(lambda _: names.register(ids), range(2)))
    assert [one["status"] for (one,) in both] == ["ready", "ready"]
    counted = server.metrics().since(before)
    assert counted["tokens_total{kind=compiled}"] == 900
    assert sum(v for k, v in counted.items() if k.startswith("segments_total")) == 2


def test_what_cannot_be_cached_has_an_id_and_a_reason(server: Server, names: Names, write: Writer) -> None:
    """Too short, or larger than the arena: used like plain text."""
    short, large = names.register(write.tokens(20), write.tokens(ARENA_BYTES // 1024))
    assert (short["status"], short["reason"], short["bytes"]) == ("absent", "too_short", 0)
    assert (large["status"], large["reason"], large["bytes"]) == ("absent", "arena_full", 0)
    body = {"input_ids": write.tokens(9), "extra_key": names.tenant, "sampling_params": native()}
    answer = server.ask(GENERATE, {**body, "hypic": {"insert": [[4, short["id"]]], **REPORT}})
    assert requests.outcomes(answer["meta_info"]["hypic"]) == ["too_short"]
    assert answer["meta_info"]["prompt_tokens"] == 29


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"segments": []}, "segments: List should have at least 1"),
        ({"segments": [{"text": "a"}] * 1025}, "segments: List should have at most 1024"),
        (
            {"segments": [{"input_ids": ["leak"] * 9}]},
            "segments[0].input_ids[2]: Input should be a valid integer; and 6 more",
        ),
        ({"segments": [{}]}, "either text or input_ids"),
        ({"segments": [{"text": "a", "input_ids": [1]}]}, "either text or input_ids"),
        ({"segments": [{"text": "a", "tokens": 1}]}, "Extra inputs"),
        ({"segments": [{"input_ids": ["1"]}]}, "valid integer"),
        ({"segments": [{"input_ids": [5]}, {"input_ids": []}]}, r"segments[1]: is empty"),
        ({"segments": [{"text": ""}]}, r"segments[0]: is empty"),
        ({"segments": [{"input_ids": [5, 10**6]}]}, "less than"),
        ({"segments": [{"input_ids": [-1]}]}, "at least 0"),
        ({"segments": [{"input_ids": [5] * 200_000}]}, "do not fit into a prompt"),
        ({"segments": [{"text": "a"}], "ttl": 0}, "greater than 0"),
        ({"segments": [{"text": "a"}], "ttl": "60"}, "ttl: Input should be a valid number"),
        ({"segments": [{"text": "a"}], "tll": 1}, "Extra inputs"),
        ({"segments": [{"text": "a"}], "pin": "yes"}, "pin: Input should be a valid boolean"),
        ({"segments": [{"text": "a"}], "model": "another"}, "model 'another': this server has"),
        ({"segments": [{"text": "a"}], "model": "another:a"}, "default:ADAPTER"),
    ],
)
def test_bad_registrations_say_what_is_wrong(server: Server, body: dict[str, Any], says: str) -> None:
    """And no more: neither what was sent nor files of the server."""
    reply = server.post(SEGMENTS, body)
    assert reply.status == 400 and says in reply.body["message"], reply
    assert len(reply.body["message"]) < 250 and not re.search("leak|[.]py", reply.body["message"])


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (r'{"segments": [{"text": "a"}, {"text": "b \ud800"}]}', "segments[1].text: character 2 is a lone surrogate"),
        (r'{"segments": [{"text": "a"}], "cache_salt": "\udfff"}', "surrogates not allowed"),
        (r'{"segments": [{"text": "a"}], "\udfff": 1}', "unicode"),
    ],
)
def test_text_that_no_tokenizer_takes(server: Server, raw: str, says: str) -> None:
    """A lone surrogate, as JSON can hold one."""
    response = server.http.post(SEGMENTS, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400 and says in response.json()["message"], response.text


def test_memory_for_tokens_is_bounded(server: Server, names: Names, write: Writer) -> None:
    """What does not fit is refused as a whole; what is there stays, and makes room when it is deleted."""
    per_segment = 1024 + 12 * 64
    fits = NAMED_BYTES // per_segment
    first = names.register(*(write.tokens(64) for _ in range(fits)))
    more = write.tokens(64), write.tokens(64)
    reply = names.post(*more)
    assert reply.status == 507 and "--hypic-segment-memory" in reply.body["message"], reply
    assert len(names.listed(limit=1000)) == fits
    for one in first[:2]:
        assert names.call("DELETE", one["id"]).status == 200
    assert len(names.register(*more)) == 2


# ---------------------------------------------------------------------- use


def test_a_chat_by_id_is_the_chat_by_text(server: Server, names: Names, text: TextWriter) -> None:
    """Tokens, answer and report are those of marked text, whatever the template puts around them."""
    a, b, question = text.document(), text.document(), text.words(5)
    one, other = names.register(a, b)
    by_id = server.ask(CHAT, chat(names.tenant, text.words(0), named(one), named(other), named(one), question))
    by_text = server.ask(CHAT, chat(names.tenant, text.words(0), marked(a), marked(b), marked(a), question))
    assert by_id["choices"] == by_text["choices"] and report_of(by_id) == report_of(by_text)
    assert requests.outcomes(report_of(by_id)) == ["hit_device"] * 3
    assert by_id["usage"] == by_text["usage"]
    mixed = server.ask(CHAT, chat(names.tenant, named(one), marked(b), marked(a), question))
    assert requests.outcomes(report_of(mixed)) == ["hit_device"] * 3
    stream = server.ask(CHAT, chat(names.tenant, named(one), named(other), named(one), question, stream=True))
    assert (
        "".join(c["choices"][0]["delta"].get("content") or "" for c in stream if c["choices"])
        == (by_text["choices"][0]["message"]["content"])
    )


def test_a_segment_is_in_the_prompt_as_it_was_registered(server: Server, names: Names, text: TextWriter) -> None:
    """The template of the model trims and joins texts; it never sees a named one. Text that spells an id is text."""
    document = f"  {text.document()}\n\n"
    (one,) = names.register(document)
    report = report_of(server.ask(CHAT, chat(names.tenant, named(one), text.words(3))))
    assert [s["tokens"] for s in requests.segments(report)] == [server.token_count(document)]
    spelt = server.ask(CHAT, chat(names.tenant, one["id"], text.words(3)))
    assert requests.segments(report_of(spelt)) == []


def test_any_message_may_hold_one(server: Server, names: Names, text: TextWriter) -> None:
    """A marked message is cut at it: what stands around it is a segment of its own."""
    one, other = names.register(text.document(), text.document())
    body = chat(names.tenant, text.words(4))
    system = {"role": "system", "content": [named(one)]}
    whole = {"role": "user", "content": [{"type": "text", "text": text.document()}, named(other)], **MARK}
    report = report_of(server.ask(CHAT, {**body, "messages": [system, whole, *body["messages"]]}))
    assert requests.outcomes(report) == ["hit_device", "compiled", "hit_device"]


@pytest.mark.parametrize("path", [COMPLETIONS, GENERATE])
def test_texts_hold_segments_where_the_client_says(server: Server, names: Names, text: TextWriter, path: str) -> None:
    """Alone, repeated, beside separators, and in a batch; the answer is that of the text with separators."""
    a, b, question = text.document(), text.document(), text.words(5)
    one, other = names.register(a, b)
    tenant = {"cache_salt": names.tenant} if path == COMPLETIONS else {"extra_key": names.tenant}
    params = openai() if path == COMPLETIONS else {"sampling_params": native()}
    field = "prompt" if path == COMPLETIONS else "text"

    def ask(prompt: Any, **hypic: Any) -> Any:
        return server.ask(path, {field: prompt, **tenant, **params, "hypic": {**REPORT, **hypic}})

    insert = {"<1>": one["id"], "<11>": other["id"]}
    by_id = ask(f"<1><11>{question}", insert=insert)
    by_text = ask(f"{a}|{b}|{question}", separator="|")
    assert requests.reports(path, by_id) == requests.reports(path, by_text)
    assert requests.outcomes(requests.reports(path, by_id)[0]) == ["hit_device"] * 2
    both = ask(f"<1>|{b}|{question}", insert={"<1>": one["id"]}, separator="|")
    assert requests.reports(path, both) == requests.reports(path, by_text)
    batch = ask([f"<1>{question}", question, f"{question}<11>{question}"], insert=insert)
    assert [requests.outcomes(r) for r in requests.reports(path, batch)] == [["hit_device"], [], ["hit_device"]]
    if path == COMPLETIONS:
        assert by_id["choices"] == by_text["choices"] == both["choices"]
    else:
        assert by_id["output_ids"] == by_text["output_ids"] == both["output_ids"]


@pytest.mark.parametrize("path", [COMPLETIONS, GENERATE, CHAT])
def test_token_ids_hold_segments_at_positions(server: Server, names: Names, write: Writer, path: str) -> None:
    """Positions are those of the prompt as it is sent, also beside `segments`."""
    a, b, c = write.tokens(70), write.tokens(80), write.tokens(90)
    one, other = names.register(a, b)
    head, tail = write.tokens(5), write.tokens(6)
    tenant = {"extra_key": names.tenant} if path == GENERATE else {"cache_salt": names.tenant}
    params = {"sampling_params": native()} if path == GENERATE else openai()
    field = "prompt" if path == COMPLETIONS else "input_ids"
    rest: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {}

    def ask(ids: list[int], **hypic: Any) -> Any:
        return server.ask(path, {field: ids, **tenant, **params, **rest, "hypic": {**REPORT, **hypic}})

    by_position = ask(
        head + c + tail,
        segments=[[5, 95]],
        insert=[[5, one["id"]], [95, other["id"]], [5, other["id"]], [99, one["id"]]],
    )
    spans = [[5, 75], [75, 155], [155, 245], [245, 325], [329, 399]]
    by_ids = ask(head + a + b + c + b + tail[:4] + a + tail[4:], segments=spans)
    outcomes = ["hit_device", "hit_device", "compiled", "hit_device", "hit_device"]
    (report,) = requests.reports(path, by_position)
    assert [[s["start"], s["start"] + s["tokens"]] for s in requests.segments(report)] == spans
    assert requests.outcomes(report) == outcomes
    assert requests.outcomes(requests.reports(path, by_ids)[0]) == ["hit_device"] * 5
    texts = [x["choices"][0] if path != GENERATE else x["output_ids"] for x in (by_position, by_ids)]
    assert texts[0] == texts[1]


def test_a_batch_of_token_ids_has_a_list_for_each(server: Server, names: Names, write: Writer) -> None:
    (one,) = names.register(write.tokens(70))
    ids = [write.tokens(5), write.tokens(6), write.tokens(7)]
    insert = [[[2, one["id"]]], None, [[0, one["id"]], [7, one["id"]]]]
    body = {"input_ids": ids, "extra_key": names.tenant, "sampling_params": native()}
    answers = server.ask(GENERATE, {**body, "hypic": {"insert": insert, **REPORT}})
    found = [a["meta_info"]["hypic"] for a in answers]
    assert [requests.outcomes(r) for r in found] == [["hit_device"], [], ["hit_device", "declined"]]
    assert [r["prompt_tokens"] for r in found] == [75, 6, 147]
    reply = server.post(GENERATE, {**body, "hypic": {"insert": insert[:2]}})
    assert reply.status == 400 and "send 3 lists" in str(reply.body)


def test_choices_and_logprobs(server: Server, names: Names, text: TextWriter) -> None:
    (one,) = names.register(text.document())
    answer = server.ask(CHAT, chat(names.tenant, named(one), text.words(4), n=3, logprobs=True))
    assert [requests.outcomes(r) for r in requests.reports(CHAT, answer)] == [["hit_device"]] * 3
    assert all(len(c["logprobs"]["content"]) == 5 for c in answer["choices"])


def test_a_method_of_the_clients_choice(server: Server, names: Names, text: TextWriter) -> None:
    """Registered for a method, used with it; with another one it is compiled anew."""
    document = text.document()
    (one,) = names.register(document, method="seam-24")
    assert one["id"] != names.register(document)[0]["id"]
    for path, outcome in (("seam-24", "hit_device"), ("seam", "hit_device")):
        body = chat(names.tenant, named(one), text.words(5), hypic={"method": path, **REPORT})
        report = report_of(server.ask(CHAT, body))
        assert requests.outcomes(report) == [outcome]
        w = {"seam": 8, "seam-24": 24}[path]
        assert (report["method"], report["seam_window"], report["reused_artifacts"]) == (path, w, one["tokens"] - w)
    for reply in (
        server.post(CHAT, chat(names.tenant, "a", hypic={"method": "legolink-0"})),
        server.post(COMPLETIONS, {"prompt": "a", "hypic": {"method": "legolink-0"}, **openai()}),
        server.post(GENERATE, {"text": "a", "hypic": {"method": "legolink-0"}, "sampling_params": native()}),
        names.post(document, method="legolink-0"),
    ):
        assert reply.status == 400 and "this server has seam, seam-24 (--hypic-methods)" in str(reply.body), reply


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize("why", ["unknown", "deleted", "expired", "another tenant's"])
def test_ids_that_name_nothing_are_404_everywhere(
    server: Server, names: Names, text: TextWriter, write: Writer, why: str
) -> None:
    """And the answer is the same for all of them."""
    other = f"{names.tenant}!"
    name = "seg_" + "0" * 32
    if why != "unknown":
        ttl = 0.05 if why == "expired" else None
        (one,) = names.register(text.document(), ttl=ttl, tenant=other if why == "another tenant's" else None)
        name = one["id"]
    if why == "deleted":
        assert names.call("DELETE", name).body == {"id": name, "object": "segment", "deleted": True}
    elif why == "expired":
        time.sleep(0.1)
    salt, key = {"cache_salt": names.tenant}, {"extra_key": names.tenant}
    insert = {"hypic": {"insert": {"<1>": name}}}
    at = {"hypic": {"insert": [[1, name]]}}
    replies = [
        server.post(CHAT, chat(names.tenant, named(name), "a")),
        server.post(CHAT, chat(names.tenant, named(name), "a", stream=True)),
        server.post(CHAT, {**chat(names.tenant, "a"), "input_ids": write.tokens(4), **at}),
        server.post(COMPLETIONS, {"prompt": "<1>a", **salt, **insert, **openai()}),
        server.post(COMPLETIONS, {"prompt": write.tokens(4), **salt, **at, **openai(stream=True)}),
        server.post(GENERATE, {"text": "<1>a", **key, **insert, "sampling_params": native()}),
        server.post(GENERATE, {"input_ids": write.tokens(4), **key, **at, "sampling_params": native()}),
        *(names.call(method, name) for method in ("GET", "DELETE")),
        *(names.call("POST", f"{name}/{what}") for what in ("pin", "unpin")),
    ]
    assert [r.status for r in replies] == [404] * len(replies)
    says = f"segment '{name}': unknown here; it was never registered with this cache_salt, has expired, or was deleted"
    assert all(says in str(r.body).replace("\\'", "'") for r in replies)


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (CHAT, {"hypic": {"insert": {"a": "ID"}}, "messages": [{"role": "user", "content": "a"}]}, "content parts"),
        (
            CHAT,
            {"input_ids": [5], "messages": [{"role": "user", "content": [{"type": "segment", "id": "ID"}]}]},
            "insert",
        ),
        (COMPLETIONS, {"prompt": "a", "hypic": {"insert": {"<1>": "ID"}}}, "'<1>' does not stand in the prompt"),
        (COMPLETIONS, {"prompt": "a", "hypic": {"insert": {"": "ID"}}}, "send {"),
        (COMPLETIONS, {"prompt": "a", "hypic": {"insert": [[0, "ID"]]}}, "send {"),
        (COMPLETIONS, {"prompt": "a", "hypic": {"insert": {"a": "ID"}}, "echo": True}, "cannot be echoed"),
        (COMPLETIONS, {"prompt": [5, 6], "hypic": {"insert": {"a": "ID"}}}, "must be [position, id"),
        (GENERATE, {"input_ids": [5, 6], "hypic": {"insert": [[3, "ID"]]}}, "leaves the prompt of 2 tokens"),
        (GENERATE, {"input_ids": [5, 6], "hypic": {"insert": [[1, "ID"]], "segments": [[0, 2]]}}, "is inside of the"),
    ],
)
def test_places_that_are_none(
    server: Server, names: Names, write: Writer, path: str, body: dict[str, Any], says: str
) -> None:
    (one,) = names.register(write.tokens(64))
    tenant = {"extra_key": names.tenant} if path == GENERATE else {"cache_salt": names.tenant, **openai()}

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: filled(v) for k, v in value.items()}
        return [filled(v) for v in value] if isinstance(value, list) else one["id"] if value == "ID" else value

    reply = server.post(path, {**filled(body), **tenant})
    assert reply.status == 400 and says in str(reply.body), reply


# ---------------------------------------------------------------------- life


def flood(server: Server, write: Writer, count: int = 40) -> None:
    """One-off documents, more than the arena holds."""
    for _ in range(count // 4):
        requests.know(server, write, *write.documents(4, 100))


def test_an_evicted_artifact_is_compiled_again(server: Server, names: Names, text: TextWriter, write: Writer) -> None:
    (one,) = names.register(text.document())
    body = chat(names.tenant, named(one), text.words(5))
    flood(server, write)
    gone = names.get(one["id"])
    assert (gone["status"], gone["bytes"]) == ("absent", 0)
    cold, warm = server.ask(CHAT, body), server.ask(CHAT, body)
    assert [requests.outcomes(report_of(a)) for a in (cold, warm)] == [["compiled"], ["hit_device"]]
    assert cold["choices"] == warm["choices"]
    assert names.get(one["id"])["status"] == "ready"


def test_a_pinned_artifact_survives_a_flood(server: Server, names: Names, write: Writer) -> None:
    (kept,) = names.register(write.tokens(70), pin=True)
    (lost,) = names.register(write.tokens(70))
    assert (kept["pinned"], lost["pinned"]) == (True, False)
    flood(server, write)
    assert [names.get(one["id"])["status"] for one in (kept, lost)] == ["ready", "absent"]
    assert server.metrics().read("hypic:pinned_bytes") == kept["bytes"]
    back = names.call("POST", f"{lost['id']}/pin").body
    assert (back["status"], back["pinned"]) == ("ready", True), "compiled for it"
    assert names.register(write.tokens(70))[0]["pinned"] is False
    assert names.call("POST", f"{kept['id']}/unpin").body["pinned"] is False
    flood(server, write)
    assert [names.get(one["id"])["status"] for one in (kept, lost)] == ["absent", "ready"]


def test_pins_leave_room_for_others(server: Server, names: Names, write: Writer) -> None:
    """At most half of the arena is pinned; what then cannot be placed is plain instead of waiting for ever."""
    half = [write.tokens(100) for _ in range(9)]
    reply = names.post(*half, pin=True)
    assert reply.status == 200, reply.body
    one = reply.body["data"][0]
    count = ARENA_BYTES // 2 // one["bytes"]
    more = names.register(*(write.tokens(100) for _ in range(count - 9)), pin=True)
    assert all(m["pinned"] for m in more)
    extra = write.tokens(100)
    reply = names.post(extra, pin=True)
    assert reply.status == 507 and "--hypic-pin-percent" in reply.body["message"], reply
    (unpinned,) = names.register(extra)
    (beside,) = names.register(write.tokens(100))
    assert (unpinned["status"], unpinned["pinned"]) == ("ready", False), "registered, but not pinned"
    large = write.document(ARENA_BYTES * 5 // 8 // 1024)
    answer = server.ask(GENERATE, requests.generate_body(write, [[large]]))
    assert requests.outcomes(answer["meta_info"]["hypic"]) == ["declined"]
    assert [s["reason"] for s in requests.segments(answer["meta_info"]["hypic"])] == ["arena_full"]
    assert names.get(beside["id"])["status"] == "ready", "nothing was evicted in vain"
    flood(server, write, 20)
    assert [n["status"] for n in names.listed() if n["pinned"]] == ["ready"] * count


def test_flush_cache_drops_artifacts_and_keeps_ids_and_pins(server: Server, names: Names, write: Writer) -> None:
    pinned, other = names.register(write.tokens(70), pin=True)[0], names.register(write.tokens(80))[0]
    server.ask(FLUSH, {})
    found = [names.get(one["id"]) for one in (pinned, other)]
    assert [(f["status"], f["pinned"]) for f in found] == [("absent", True), ("absent", False)]
    body = {"input_ids": write.tokens(9), "extra_key": names.tenant, "sampling_params": native()}
    insert = [[2, pinned["id"]], [4, other["id"]]]
    answer = server.ask(GENERATE, {**body, "hypic": {"insert": insert, **REPORT}})
    assert requests.outcomes(answer["meta_info"]["hypic"]) == ["compiled", "compiled"]
    flood(server, write)
    assert [names.get(one["id"])["status"] for one in (pinned, other)] == ["ready", "absent"]


def test_a_segment_lives_as_long_as_it_is_used(server: Server, names: Names, write: Writer) -> None:
    """Its ttl begins anew at each use; looking is none. Its pin ends with it."""
    ids = write.tokens(70)
    (one,) = names.register(ids, ttl=3.0, pin=True)
    body = {"input_ids": write.tokens(9), "extra_key": names.tenant, "sampling_params": native()}
    began = time.monotonic()
    while time.monotonic() < began + 4.0:
        server.ask(GENERATE, {**body, "hypic": {"insert": [[4, one["id"]]]}})
        time.sleep(0.2)
    left = names.get(one["id"])["expires_in"]
    assert 0 < left <= 3.0
    deadline = time.monotonic() + PATIENCE
    while names.call("GET", one["id"]).status == 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert names.listed() == []
    while server.metrics().read("hypic:pinned_bytes"):
        assert time.monotonic() < deadline, "its pin never ended"
        server.ask(GENERATE, body)  # gauges move with scheduling
    (again,) = names.register(ids, ttl=None)
    assert again["id"] == one["id"] and again["expires_in"] is None and again["hits"] == 0


def test_deleting_drops_the_artifact(server: Server, names: Names, text: TextWriter) -> None:
    document = text.document()
    (one,) = names.register(document, pin=True)
    assert names.call("DELETE", one["id"]).status == 200
    answer = server.ask(CHAT, chat(names.tenant, marked(document), text.words(3)))
    assert requests.outcomes(report_of(answer)) == ["compiled"]


def test_lists_are_pages_of_one_tenant(server: Server, names: Names, write: Writer) -> None:
    made = [one["id"] for one in names.register(*(write.tokens(64) for _ in range(5)))]
    names.register(write.tokens(64), tenant=f"{names.tenant}!")
    assert [one["id"] for one in names.listed()] == made
    first = names.call("GET", limit=2).body
    assert [one["id"] for one in first["data"]] == made[:2] and first["has_more"]
    rest = names.call("GET", limit=3, after=made[1]).body
    assert [one["id"] for one in rest["data"]] == made[2:] and not rest["has_more"]
    assert names.call("GET", after="seg_none").status == 404
    assert names.listed(tenant="nobody") == []


def test_a_client_that_leaves_while_its_segments_compile(server: Server, names: Names, write: Writer) -> None:
    """Nothing is left over (the fixture's audit); what it registered is there."""
    import httpx

    ids = write.tokens(3000)
    names.tenants.add(names.tenant)
    body = {"segments": [{"input_ids": ids}], "cache_salt": names.tenant}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}{SEGMENTS}", json=body, timeout=0.1)
    server.audit()
    (one,) = names.register(ids)
    assert one["status"] == "ready"


def test_openapi_describes_it(server: Server) -> None:
    api = server.http.get("/openapi.json").json()
    paths = {p: sorted(methods) for p, methods in api["paths"].items() if p.startswith(SEGMENTS)}
    assert paths == {
        SEGMENTS: ["get", "post"],
        f"{SEGMENTS}/{{segment_id}}": ["delete", "get"],
        f"{SEGMENTS}/{{segment_id}}/pin": ["post"],
        f"{SEGMENTS}/{{segment_id}}/unpin": ["post"],
    }
    schemas = api["components"]["schemas"]
    assert {"Segment", "SegmentList", "RegisterSegments", "ChatCompletionMessageContentSegmentPart"} <= schemas.keys()
    post = api["paths"][SEGMENTS]["post"]["responses"]
    assert {"200", "400", "507"} <= post.keys()
