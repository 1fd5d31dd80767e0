"""Placement: every missing segment is assigned once, longest first comes close to the optimum, and load is shared."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypic.router.costs import Costs
from hypic.router.schedule import (
    Cluster,
    NoWorkers,
    Policy,
    Segment,
    Worker,
    lower_bound,
    lpt,
    makespan,
    place,
    round_robin,
)

COSTS = Costs(
    tokens_per_s=1000, forward_tokens=1000, transfer_gb_s=10, artifact_bytes=1_000_000, message_s=0.001, link_s=0.1
)


def key(i: int) -> bytes:
    return i.to_bytes(24, "big")


def cluster(n: int, costs: Costs = COSTS) -> Cluster:
    c = Cluster(costs)
    for i in range(n):
        c.workers[f"w{i}"] = Worker(f"w{i}")
        c.directory.join(f"w{i}", b"e")
    return c


def segments(*tokens: int, first: int = 0) -> list[Segment]:
    return [Segment(key(first + i), n, COSTS.artifact_nbytes(n)) for i, n in enumerate(tokens)]


def holds(c: Cluster, worker: str, *keys: bytes) -> None:
    assert c.directory.stored(worker, b"e", 1, keys, [1] * len(keys))


def jobs_of(lengths: list[int]) -> dict[bytes, float]:
    return {key(i): float(n) for i, n in enumerate(lengths)}


def optimum(lengths: list[int], workers: int) -> float:
    best = float("inf")
    for assigned in itertools.product(range(workers), repeat=len(lengths)):
        loads = [0] * workers
        for n, w in zip(lengths, assigned, strict=True):
            loads[w] += n
        best = min(best, max(loads))
    return best


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_lpt_is_within_four_thirds_of_the_optimum(lengths: list[int], workers: int) -> None:
    jobs, ready = jobs_of(lengths), {f"w{i}": 0.0 for i in range(workers)}
    best = optimum(lengths, workers)
    assert lower_bound(lengths, workers) <= best + 1e-9
    span = makespan(jobs, lpt(jobs, ready), ready)
    assert best - 1e-9 <= span <= best * (4 / 3 - 1 / (3 * workers)) + 1e-9


@given(
    st.lists(st.integers(1, 20_000), min_size=1, max_size=60),
    st.lists(st.integers(0, 5_000), min_size=1, max_size=16),
)
@settings(max_examples=100, deadline=None)
def test_lpt_assigns_each_job_once_and_levels_the_load(lengths: list[int], busy: list[int]) -> None:
    jobs = jobs_of(lengths)
    ready = {f"w{i:02}": float(b) for i, b in enumerate(busy)}
    assigned = lpt(jobs, ready)
    assert assigned.keys() == jobs.keys() and set(assigned.values()) <= ready.keys()
    span = makespan(jobs, assigned, ready)
    assert all(span >= ready[w] + jobs[k] for k, w in assigned.items())
    idle = dict.fromkeys(ready, 0.0)
    n = len(ready)
    assert makespan(jobs, lpt(jobs, idle), idle) <= sum(lengths) / n + max(lengths) * (1 - 1 / n) + 1e-6, (
        "Graham's bound"
    )
    more = {**ready, "w99": 0.0}
    assert makespan(jobs, lpt(jobs, more), more) <= max(span, max(lengths)) + 1e-6, "an idle worker more never hurts"
    later = {w: t + 100 for w, t in ready.items()}
    assert makespan(jobs, lpt(jobs, later), later) == pytest.approx(span + 100)
    busier = {w: t + 50 * (i == 0) for i, (w, t) in enumerate(ready.items())}
    ends = [max(makespan(jobs, lpt(jobs, r), r), *r.values()) for r in (ready, busier)]
    assert ends[0] <= ends[1] + 1e-6, "work that is there already never helps"


def test_lpt_takes_speed_into_account() -> None:
    jobs = jobs_of([100] * 9)
    assigned = lpt(jobs, {"fast": 0.0, "slow": 0.0}, {"fast": 2.0, "slow": 1.0})
    assert list(assigned.values()).count("fast") == 6


def test_one_long_segment_and_ten_short_ones() -> None:
    """CASES 26: within 10% of the bound, and round robin is further away."""
    lengths = [16_000, *[500] * 10]
    for workers in (2, 4, 8):
        jobs, ready = jobs_of(lengths), {f"w{i}": 0.0 for i in range(workers)}
        bound = lower_bound(lengths, workers)
        even = makespan(jobs, lpt(jobs, ready), ready)
        assert even <= 1.1 * bound
        assert makespan(jobs, round_robin(jobs, list(ready)), ready) > even


@given(
    tokens=st.lists(st.integers(1, 5000), min_size=1, max_size=12),
    workers=st.integers(1, 5),
    held=st.sets(st.tuples(st.integers(0, 11), st.integers(0, 4))),
    flying=st.dictionaries(st.integers(0, 11), st.integers(0, 4)),
    busy=st.lists(st.integers(0, 9000), min_size=5, max_size=5),
    policy=st.sampled_from(["lpt", "round_robin"]),
    twice=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_every_segment_has_one_source_that_can_provide_it(tokens, workers, held, flying, busy, policy, twice) -> None:  # type: ignore[no-untyped-def]
    c = cluster(workers)
    for w in range(workers):
        holds(c, f"w{w}", *(key(i) for i, at in sorted(held) if at == w))
        c.workers[f"w{w}"].queued_tokens = busy[w]
    for i, w in flying.items():
        if w < workers:
            c.order(key(i), f"w{w}", 100, {"earlier"})
    prompt = segments(*tokens)
    before = {name: w.queued_tokens for name, w in c.workers.items()}
    p = place(c, prompt * 2 if twice else prompt, policy)
    assert p.sources.keys() == {s.key for s in prompt}
    for k, (role, w) in p.sources.items():
        holders = c.directory.holders(k)
        if role == "here":
            assert w == p.combine and w in holders
        elif role == "send":
            assert p.combine not in holders and w in holders
        elif role == "join":
            assert not holders and c.flights[k].worker == w
        else:
            assert not holders and k not in c.flights and w in c.workers
    new = c.commit("r", p, prompt)
    assert new.keys() == {k for k, (role, _) in p.sources.items() if role == "compile"}
    assert all("r" in c.flights[k].requests for k, (role, _) in p.sources.items() if role in ("join", "compile"))
    for k, f in list(c.flights.items()):
        assert c.landed(k, f.number + 1) is None, "an echo of another flight"
        assert c.landed(k, f.number) == f
        assert c.landed(k, f.number) is None
    c.linked(p.combine)
    assert not c.flights and all(w.linking == 0 for w in c.workers.values())
    queued = {name: w.queued_tokens for name, w in c.workers.items()}
    assert queued == {
        name: n - 100 * sum(w == name for w in (f"w{x}" for x in flying.values())) for name, n in before.items()
    }


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20), st.integers(1, 12), st.floats(0.01, 100))
@settings(max_examples=80, deadline=None)
def test_scattering_is_never_reckoned_worse_than_one_worker(tokens: list[int], workers: int, gb_s: float) -> None:
    costs = Costs(tokens_per_s=1000, forward_s=0.3, forward_tokens=1000, transfer_gb_s=gb_s, artifact_bytes=10**8)
    prompt = [Segment(key(i), n, costs.artifact_nbytes(n)) for i, n in enumerate(tokens)]
    assert place(cluster(workers, costs), prompt).seconds <= place(cluster(1, costs), prompt).seconds + 1e-9


def test_a_short_request_stays_on_one_worker_and_a_long_one_does_not() -> None:
    costs = Costs(
        tokens_per_s=1000, forward_s=0.2, forward_tokens=1000, transfer_gb_s=1, artifact_bytes=10**8, link_s=0.2
    )

    def scattered(*tokens: int) -> bool:
        return place(
            cluster(4, costs), [Segment(key(i), n, costs.artifact_nbytes(n)) for i, n in enumerate(tokens)]
        ).scattered

    assert not scattered(50, 50), "one pass compiles both"
    assert not scattered(4000), "one segment is not cut"
    assert not scattered(100, 100, 100)
    assert scattered(1000, 1000, 1000, 1000)
    wide = Costs(tokens_per_s=1000, forward_tokens=10_000, transfer_gb_s=1000, artifact_bytes=1)
    for tokens, worth_it in (((1000, 40), False), ((1000, 80), True)):  # 3.8% saved, 7.4% saved
        pair = [Segment(key(i), n, 1) for i, n in enumerate(tokens)]
        assert place(cluster(2, wide), pair).scattered is worth_it
    slow = Costs(tokens_per_s=1000, forward_tokens=1000, transfer_gb_s=0.01, artifact_bytes=10**9)
    prompt = [Segment(key(i), 1000, slow.artifact_nbytes(1000)) for i in range(8)]
    assert not place(cluster(4, slow), prompt).scattered, "100 s for each artifact"


def test_the_combine_worker_by_hits_load_and_memory() -> None:
    costs = Costs(tokens_per_s=1000, forward_tokens=1000, transfer_gb_s=0.1, artifact_bytes=10**8)
    prompt = [Segment(key(i), 1000, costs.artifact_nbytes(1000)) for i in range(4)]
    c = cluster(3, costs)
    assert place(c, prompt).combine == "w0"
    holds(c, "w2", key(0), key(1))
    assert place(c, prompt).combine == "w2", "two artifacts of a second each need not come"
    c.workers["w2"].queued_tokens = 5000
    assert place(c, prompt).combine == "w0", "five seconds of work there"
    c.workers["w2"].queued_tokens, c.workers["w2"].capacity = 0, 10**8
    assert place(c, prompt).combine == "w0", "they do not fit there"


@pytest.mark.parametrize("policy", ["lpt", "round_robin"])
def test_a_drained_worker_gets_nothing_new_and_sends_what_it_holds(policy: Policy) -> None:
    costs = Costs(tokens_per_s=1000, forward_tokens=1000, transfer_gb_s=10, artifact_bytes=10**6)
    prompt = [Segment(key(i), 1000, costs.artifact_nbytes(1000)) for i in range(8)]
    c = cluster(3, costs)
    holds(c, "w0", key(0), key(1))
    c.workers["w0"].drained = True
    found = place(c, prompt, policy)
    assert found.combine != "w0"
    assert {k for k, (role, w) in found.sources.items() if w == "w0"} == {key(0), key(1)}
    assert {role for role, w in found.sources.values() if w == "w0"} == {"send"}
    assert {w for role, w in found.sources.values() if role == "compile"} == {"w1", "w2"}
    c.workers["w1"].drained = True
    assert {w for _, w in place(c, prompt[2:], policy).sources.values()} == {"w2"}
    assert place(c, prompt, policy, combine="w0").combine == "w0", "the choices of one prompt stay together"
    c.workers["w2"].drained = True
    with pytest.raises(NoWorkers, match="drained"):
        place(c, prompt, policy)


def test_requests_share_one_load_view_and_one_flight() -> None:
    c = cluster(4)
    first, second = segments(*[1000] * 4), segments(*[1000] * 4, first=4)
    a = place(c, first)
    c.commit("a", a, first)
    b = place(c, second)
    c.commit("b", b, second)
    assert b.combine != a.combine
    assert [w.queued_tokens for w in c.workers.values()] == [2000] * 4
    again = place(c, first)
    assert {role for role, _ in again.sources.values()} == {"join"}
    assert c.commit("c", again, first) == {}
    assert all(c.flights[s.key].requests == {"a", "c"} for s in first)


def test_a_lost_worker_leaves_orphans_and_nothing_else() -> None:
    c = cluster(2)
    holds(c, "w1", key(9))
    prompt = segments(*[1000] * 4)
    c.commit("r", place(c, prompt), prompt)
    orphans = c.lost("w1")
    assert len(orphans) == 2 and all(f.worker == "w1" for f in orphans.values())
    assert not c.directory.holders(key(9)) and {f.worker for f in c.flights.values()} == {"w0"}
    assert {w for _, w in place(c, prompt).sources.values()} == {"w0"}
    c.lost("w0")
    with pytest.raises(NoWorkers):
        place(c, prompt)


def test_speeds_that_differ_by_noise_are_equal_and_unknown_ones_are_the_others() -> None:
    """Sixteen equal segments on two equal workers: eight each. What is really slower gets less."""

    def of_w0(*speeds: float) -> int:
        c = cluster(len(speeds))
        for worker, speed in zip(c.workers.values(), speeds, strict=True):
            worker.tokens_per_s = speed
        p = place(c, segments(*[1000] * 16))
        return [x for _, x in p.sources.values()].count("w0")

    assert of_w0(1600, 1800) == of_w0(1800, 1600) == 8
    assert of_w0(1200, 1800) < 8 < of_w0(1800, 1200)
    assert of_w0(0, 200) == of_w0(200, 0) == 8, "not what costs say of a worker in general, 1000"


def test_speed_is_a_moving_average_of_what_was_measured() -> None:
    c = cluster(2)
    w = c.workers["w0"]
    f = c.order(key(0), "w0", 1000, set())
    c.landed(key(0), f.number, seconds=2.0, now=10.0)
    assert w.tokens_per_s == 500
    w.measured(1000, 1.0, 20.0)
    assert 500 < (faster := w.tokens_per_s) < 1000, "2 seconds at 500, then one at 1000"
    w.measured(1000, 0.0, 30.0)  # failed: says nothing about speed
    assert w.tokens_per_s == faster
    w.tokens_per_s, c.workers["w1"].tokens_per_s = 250.0, 1000.0
    p = place(c, segments(*[1000] * 5))
    assert [x for _, x in p.sources.values()].count("w0") == 1, "a slow worker gets a fifth"


def test_a_worker_that_was_slow_once_is_tried_again() -> None:
    c = cluster(3)
    for name, speed in (("w0", 1000), ("w1", 1000), ("w2", 10)):
        c.workers[name].measured(speed, 1.0, 10.0)

    def shares() -> list[int]:
        workers = [x.worker for x in place(c, segments(*[1000] * 9)).sources.values()]
        return [workers.count(name) for name in ("w0", "w1", "w2")]

    assert shares()[2] == 0
    c.relax(20.0)
    assert shares()[2] == 0, "measured lately"
    for second in range(30):
        c.relax(30.0 + second)
    assert shares() == [3, 3, 3]
