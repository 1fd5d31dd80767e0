"""Generated traces: the same spec is the same trace, and it has what the spec says."""

from __future__ import annotations

import statistics
from collections import Counter
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from hypic.traces.format import Span, TraceError, TraceRequest, write
from hypic.traces.generate import _Documents, generate
from hypic.traces.spec import Arrivals, Lengths, Spec, read_spec
from hypic.traces.summary import summarise

TRACES = Path(__file__).resolve().parents[2] / "traces"
SPECS = sorted(TRACES.glob("*.toml"))
TINY = read_spec(TRACES / "tiny.toml")


def tiny(**tables: object) -> Spec:
    """tiny.toml with values changed: `corpus={"zipf": 0}`."""
    found = TINY
    for name, value in tables.items():
        old = getattr(found, name)
        new = msgspec.structs.replace(old, **value) if isinstance(value, dict) else value
        found = msgspec.structs.replace(found, **{name: new})
    return found


def of_conversations(requests: list[TraceRequest]) -> dict[object, list[TraceRequest]]:
    found: dict[object, list[TraceRequest]] = {}
    for r in requests:
        found.setdefault(r.conversation, []).append(r)
    return found


def test_a_seed_is_a_trace() -> None:
    assert list(generate(TINY)) == list(generate(TINY))
    assert list(generate(TINY)) != list(generate(tiny(seed=2)))
    faster = list(generate(tiny(arrivals={"qps": 8.0}, chat={"turns": 1.0}, corpus={"replaced_per_hour": 0.0})))
    slower = list(generate(tiny(arrivals={"qps": 1.0}, chat={"turns": 1.0}, corpus={"replaced_per_hour": 0.0})))
    assert [r.segments for r in faster] == [r.segments for r in slower], "the rate changes times alone"


def test_the_sample_is_what_its_spec_gives(tmp_path: Path) -> None:
    write(generate(msgspec.structs.replace(TINY, requests=20)), tmp_path / "sample.jsonl")
    assert (tmp_path / "sample.jsonl").read_bytes() == (TRACES / "sample.jsonl").read_bytes()


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_committed_specs(path: Path, tmp_path: Path) -> None:
    spec = msgspec.structs.replace(read_spec(path), requests=300)
    requests = list(generate(spec))
    write(requests, tmp_path / "t.jsonl")  # refuses what a reader would
    assert len(requests) == 300 and max(r.input_length for r in requests) <= spec.prompt.budget
    assert all(sum(s.len for s in r.segments) == r.input_length for r in requests)
    firsts = [sum(not s.plain for s in r.segments) for r in requests if r.turn == 0]
    assert min(firsts) >= 1 and statistics.median(firsts) == pytest.approx(spec.retrieval.segments.median, rel=0.25)
    for spans in (r.segments for r in requests):
        marked = [s.id for s in spans if not s.plain]
        assert len(set(marked)) == len(marked)


def test_popularity_is_that_of_ragcache() -> None:
    """3% of the documents take 60% of the retrievals (arXiv 2404.12457)."""
    spec = read_spec(TRACES / "rag-production.toml")
    upto = _Documents(spec)._upto
    assert upto[len(upto) * 3 // 100 - 1] / upto[-1] == pytest.approx(0.6, abs=0.01)
    drawn = Counter(s.id for r in generate(spec) if r.turn == 0 for s in r.segments if not s.plain)
    top = [n for name, n in drawn.items() if int(str(name)[1:].split(".")[0]) < 600]
    assert sum(top) / drawn.total() == pytest.approx(0.58, abs=0.06), "less the draws that were repeats"


def test_lengths_and_arrivals_follow_the_spec() -> None:
    length = Lengths(median=500, sigma=0.5, min=50, max=4000)
    spec = tiny(
        requests=3000, output=length, corpus={"documents": 4000, "zipf": 0.0, "tokens": length},
        prompt={"budget": 60000}, arrivals={"qps": 5.0}, chat={"turns": 1.0},
    )  # fmt: skip
    requests = list(generate(spec))
    for values in ([r.output_length for r in requests], [s.len for r in requests for s in r.segments if not s.plain]):
        assert statistics.median(values) == pytest.approx(500, rel=0.06)
        assert statistics.mean(values) == pytest.approx(500 * 2.718 ** (0.5**2 / 2), rel=0.06)
    gaps = [(b.timestamp - a.timestamp) / 1e3 for a, b in pairwise(requests)]
    assert statistics.mean(gaps) == pytest.approx(1 / 5, rel=0.06)
    assert statistics.stdev(gaps) == pytest.approx(1 / 5, rel=0.1), "exponential"


def test_conversations_append_what_was_said() -> None:
    spec = tiny(requests=400, chat={"replacing": 0.0, "turns": 3.0}, prompt={"header": 0, "budget": 9000})
    requests = list(generate(spec))
    turns = of_conversations(requests)
    assert statistics.mean(len(t) for t in turns.values()) == pytest.approx(3.0, rel=0.2)
    added = 0
    for conversation in turns.values():
        assert [r.turn for r in conversation] == list(range(len(conversation)))
        for before, after in pairwise(conversation):
            n = len(before.segments)
            assert after.segments[:n] == before.segments
            answer = after.segments[n]
            assert answer.plain and answer.len == before.output_length
            assert after.segments[-1].plain and after.segments[-1].id == f"c{after.conversation}.q{after.turn}"
            added += len(after.segments) - n - 2
    assert added > 20, "later turns retrieve too"


def test_conversations_that_replace_keep_what_was_said_behind_other_documents() -> None:
    spec = tiny(requests=200, chat={"replacing": 1.0, "turns": 3.0}, prompt={"header": 0, "budget": 9000})
    changed = 0
    for conversation in of_conversations(list(generate(spec))).values():
        for before, after in pairwise(conversation):
            said = [s for s in after.segments if s.plain and s.id != "system"]
            assert said[: 2 * before.turn + 1] == [s for s in before.segments if s.plain and s.id != "system"]
            changed += [s for s in before.segments if not s.plain] != [s for s in after.segments if not s.plain]
    assert changed > 20


def test_a_prompt_over_budget_loses_its_last_documents() -> None:
    loose = list(generate(tiny(requests=100, chat={"turns": 1.0}, prompt={"budget": 9000})))
    tight = list(generate(tiny(requests=100, chat={"turns": 1.0}, prompt={"budget": 330})))
    shorter = 0
    for a, b in zip(loose, tight, strict=True):
        kept = [s for s in b.segments if not s.plain]
        assert kept == [s for s in a.segments if not s.plain][: len(kept)] and b.input_length <= 330
        shorter += b.input_length < a.input_length
    assert shorter > 50


def test_new_documents_make_room_before_old_turns_do() -> None:
    added = Lengths(4, 0.1, 4, 4)
    spec = tiny(requests=200, chat={"replacing": 0.0, "turns": 5.0, "added": added}, prompt={"budget": 900})
    shortened, oldest = 0, dict[object, object]()
    for r in generate(spec):
        said = [s for s in r.segments if str(s.id).startswith("c")]
        behind = r.segments[r.segments.index(said[-2]) + 1 : -1] if len(said) > 1 else []
        if said[0].id != oldest.setdefault(r.conversation, said[0].id):
            oldest[r.conversation] = said[0].id
            assert len(behind) <= 1, "a turn was left out for want of room, and yet this one keeps what it retrieved"
            shortened += 1
    assert shortened > 10


def test_headers_tenants_and_new_documents() -> None:
    requests = list(generate(tiny(requests=300, tenants=3, corpus={"replaced_per_hour": 300.0})))
    assert len({r.segments[0].id for r in requests}) == 300, "a header is new in every request"
    assert {r.tenant for r in requests} == {"t0", "t1", "t2"}
    for r in requests:
        assert all(
            str(s.id).startswith(f"{r.tenant}/") for s in r.segments if not s.plain or str(s.id).endswith("system")
        )
    documents = {str(s.id).split("/")[1] for r in requests for s in r.segments if not s.plain}
    versions = Counter(d.split(".")[0] for d in documents)
    assert len(versions) == 12 and sum(versions.values()) > 30, "new documents take the places of old ones"
    still = list(generate(tiny(requests=300, corpus={"replaced_per_hour": 0.0})))
    assert {str(s.id).split(".")[1] for r in still for s in r.segments if not s.plain} == {"0"}


def test_blocks_say_the_same_as_spans_about_prefixes() -> None:
    """hash_ids, counted in whole blocks, against the prefix that the summary finds in the spans."""
    requests = list(generate(msgspec.structs.replace(read_spec(TRACES / "rag-appending.toml"), requests=400)))
    known: set[int] = set()
    shared = 0
    for r in requests:
        assert r.hash_ids is not None and len(r.hash_ids) == -(-r.input_length // 512)
        n = next((i for i, h in enumerate(r.hash_ids) if h not in known), len(r.hash_ids))
        assert not known.intersection(r.hash_ids[n:]), "behind a new block all blocks are new"
        known |= set(r.hash_ids)
        shared += min(512 * n, r.input_length - 1)
    share, exact = shared / sum(r.input_length for r in requests), summarise(requests).prefix
    assert exact - 256 * 400 / sum(r.input_length for r in requests) * 2 < share <= exact


def test_recorded_arrivals(tmp_path: Path) -> None:
    write([TraceRequest(t, 9, 1) for t in (100, 200, 900, 1000)], tmp_path / "a.jsonl")
    at = Arrivals("recorded", qps=0.0, path=str(tmp_path / "a.jsonl"))
    alone = {"turns": 1.0}
    assert [r.timestamp for r in generate(tiny(requests=4, arrivals=at, chat=alone))] == [0, 100, 800, 900]
    faster = msgspec.structs.replace(at, qps=10.0)
    assert [r.timestamp for r in generate(tiny(requests=4, arrivals=faster, chat=alone))] == pytest.approx(
        [0, 33.333, 266.667, 300]
    )
    with pytest.raises(TraceError, match="arrivals for 4 requests, and 5"):
        list(generate(tiny(requests=5, arrivals=at, chat=alone)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[corpus]\nzipff = 1", "zipff"),
        ("[retrieval]\nrepeated = 2", "repeated = 2"),
        ("[retrieval.segments]\nmax = 100", "100 of 12 documents"),
        ("[prompt]\nbudget = 100", "already have"),
        ("[arrivals]\nkind = 'recorded'", "arrivals.path"),
        ("[output]\nmin = 9\nmax = 3", "output: needs"),
        ("[chat]\nturns = 0.5", "begin at 1"),
        ("oops", "spec.toml: "),
        ("base = 'spec.toml'", "its own base"),
    ],
)
def test_a_bad_spec_is_named(tmp_path: Path, text: str, said: str) -> None:
    based = text if text.startswith("base") else f"base = '{TRACES / 'tiny.toml'}'\n{text}"
    (tmp_path / "spec.toml").write_text(based)
    with pytest.raises(TraceError, match=said) as e:
        read_spec(tmp_path / "spec.toml")
    assert str(e.value).startswith(f"{tmp_path}/spec.toml: ")


def test_a_span_is_told_apart_by_its_id() -> None:
    assert Span("1", 2) != Span(1, 2)
