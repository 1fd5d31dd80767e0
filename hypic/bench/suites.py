"""What is timed. Each suite runs on one engine and yields its timings.

ttft         cold: a prompt never seen. prefix hit: the same documents in the same order, a new query (stock; on hypic it is
             called turn). prefix hit, as many new tokens: the query is as long as all that a warm link computes.
             warm: every segment is in the arena, order shuffled, query new. ordinary: a prompt without segments.
             decode: tokens per second of one request after its first token, behind a long prompt. throughput: ordinary requests
             at once, prompt and answer tokens per second.
concurrency  warm (stock: prefix hit) requests sent at once: the worst TTFT of each round.
scale        warm TTFT over numbers and lengths of segments (hypic only).
kernels      hypic's kernels at the model's shape, without an engine (``hypic.bench.kernels``); of GDN models also what joining
             adds to a state's error (``hypic.bench.composition_error``).
scatter      cold prompts over numbers of workers behind a router (``hypic.bench.scatter``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from hypic.bench.client import Client, Timed
from hypic.bench.result import Timing
from hypic.bench.scatter_result import Scatter
from hypic.bench.workload import Prompt, Prompts, Workload

T = TypeVar("T")

DECODE_TOKENS = 128
ORDINARY_TOKENS = 2048
THROUGHPUT = (16, 1024, 64)
"""Requests at once, tokens of each prompt (at most the workload's), tokens of each answer."""
TOGETHER = (1, 2, 4, 8)
MAX_SCALE_TOKENS = 1 << 18
"""Of all segments of a point together."""
CUT = 0.9
"""A point that the engine's context cannot hold is timed with segments of at least this share of their length, or left out."""


class Plan(msgspec.Struct, frozen=True):
    """What one engine is to be timed at.

    Attributes:
        suites: names out of SUITES.
        workload: of ttft and concurrency.
        seam_window: hypic's w, so that stock can be given as many new tokens.
        grid: (segments, tokens of a segment) of the scale suite.
        together: numbers of requests of the concurrency suite.
        scatter: what the scatter suite does.
    """

    suites: tuple[str, ...]
    workload: Workload
    seam_window: int
    grid: tuple[tuple[int, int], ...] = ()
    together: tuple[int, ...] = TOGETHER
    scatter: Scatter = Scatter()


def ttft(client: Client, plan: Plan) -> Iterator[Timing]:
    work = plan.workload
    prompts = Prompts(work, client.vocab)
    documents = prompts.documents()

    def case(name: str, draw: Callable[[], Prompt]) -> Timing:
        return _timing("ttft", name, _repeat(work.reps, lambda: client.ask(draw())))

    yield case("cold", lambda: prompts.prompt(prompts.documents()))
    client.ask(prompts.prompt(documents))
    if client.hypic:
        yield case("warm", lambda: prompts.prompt(prompts.shuffled(documents)))
        yield case("turn", lambda: prompts.prompt(documents))
    else:
        yield case("prefix hit", lambda: prompts.prompt(documents))
        new = work.seams(plan.seam_window)
        yield case("prefix hit, as many new tokens", lambda: prompts.prompt(documents, query=new))
    ordinary = min(ORDINARY_TOKENS, work.tokens)
    yield case("ordinary", lambda: (prompts.tokens(ordinary), []))
    answers = _repeat(work.reps, lambda: client.ask(prompts.prompt(documents), DECODE_TOKENS))
    yield Timing(suite="ttft", case="decode", unit="tok/s", values=[a.decode for a in answers])
    yield _throughput(client, prompts, work.reps)


def _throughput(client: Client, prompts: Prompts, reps: int) -> Timing:
    at_once, prompt, answer = THROUGHPUT
    prompt = min(prompt, prompts.workload.tokens)

    def rate() -> float:
        _, seconds = client.ask_together([(prompts.tokens(prompt), []) for _ in range(at_once)], answer)
        return at_once * (prompt + answer) / seconds

    return Timing(suite="ttft", case="throughput", unit="tok/s", values=_repeat(reps, rate))


def concurrency(client: Client, plan: Plan) -> Iterator[Timing]:
    work = plan.workload
    prompts = Prompts(work, client.vocab)
    documents = prompts.documents()
    client.ask(prompts.prompt(documents))
    order = prompts.shuffled if client.hypic else list
    for n in plan.together:

        def together(n: int = n) -> list[Timed]:
            return client.ask_together([prompts.prompt(order(documents)) for _ in range(n)])[0]

        rounds = _repeat(work.reps, together)
        yield Timing(
            suite="concurrency",
            case=f"{'warm' if client.hypic else 'prefix hit'}, {n} at once",
            values=[max(t.ttft for t in answers) for answers in rounds],
            cached=[sum(t.cached for t in answers) for answers in rounds],
            shape={"together": n},
        )


def scale(client: Client, plan: Plan) -> Iterator[Timing]:
    """Documents of a length are drawn once, for the point with the most of them; the others take some of those."""
    if not client.hypic:
        return
    for asked in sorted({tokens for _, tokens in plan.grid}):
        counts = sorted((n for n, tokens in plan.grid if tokens == asked), reverse=True)
        prompts = Prompts(
            msgspec.structs.replace(plan.workload, segments=counts[0], segment_tokens=asked), client.vocab
        )
        drawn = prompts.documents()
        for n in counts:
            point = fitted(plan.workload, n, asked, client.longest)
            if point is None:
                print(f"scale: {n} x {asked} left out: the engine takes {client.longest} tokens", flush=True)
                continue
            documents = [d[: point.segment_tokens] for d in drawn[:n]]
            client.ask(prompts.prompt(documents))

            def warm(prompts: Prompts = prompts, documents: list[list[int]] = documents) -> Timed:
                return client.ask(prompts.prompt(prompts.shuffled(documents)))

            timed = _repeat(point.reps, warm)
            shape = {"segments": n, "segment_tokens": point.segment_tokens, "tokens": point.tokens}
            shape |= {"computed": point.seams(plan.seam_window), "pairs": attended_pairs(point, plan.seam_window)}
            yield _timing("scale", f"warm, {n} x {point.segment_tokens}", timed, shape)


def fitted(work: Workload, segments: int, segment_tokens: int, longest: int) -> Workload | None:
    """The workload with so many segments, each as long as wanted or somewhat shorter, so that a prompt of `longest` tokens holds
    them beside its system and query; None where they would have to be much shorter."""
    length = min(segment_tokens, (longest - work.system - work.query) // segments)
    if length < CUT * segment_tokens:
        return None
    return msgspec.structs.replace(work, segments=segments, segment_tokens=length)


def attended_pairs(work: Workload, w: int) -> int:
    """(query, key) pairs of one full-attention head in a warm link."""
    run = min(w, work.segment_tokens)
    starts = [work.system + i * work.segment_tokens for i in range(work.segments)]
    runs = [(0, work.system), *((s, run) for s in starts), (work.tokens - work.query, work.query)]
    return sum(n * start + n * (n + 1) // 2 for start, n in runs)


def _repeat(reps: int, once: Callable[[], T]) -> list[T]:
    """What `once` gives, `reps` times, after one that warms up."""
    return [once() for _ in range(reps + 1)][1:]


def _timing(suite: str, case: str, timed: Sequence[Timed], shape: dict[str, int] | None = None) -> Timing:
    values, cached = [t.ttft for t in timed], [t.cached for t in timed]
    return Timing(suite=suite, case=case, values=values, cached=cached, shape=shape or {})


SUITES: dict[str, Callable[[Client, Plan], Iterator[Timing]]] = {
    "ttft": ttft,
    "concurrency": concurrency,
    "scale": scale,
}


KERNELS = "kernels"
COMPOSITION = "composition"
"""Comes with the suite kernels, see hypic.bench.composition_error."""
SCATTER = "scatter"


class NotWarm(RuntimeError):
    """A case that should have been served from artifacts was not: its time means nothing."""


def require_warm(timing: Timing, plan: Plan) -> None:
    """Raise NotWarm unless every warm repetition got all interiors from artifacts (or more, from the radix tree)."""
    if not timing.case.startswith("warm"):
        return
    shape, work = timing.shape, plan.workload
    n, length = shape.get("segments", work.segments), shape.get("segment_tokens", work.segment_tokens)
    wanted = n * max(length - plan.seam_window, 0) * shape.get("together", 1)
    short = [c for c in timing.cached if c < wanted]
    if short:
        raise NotWarm(
            f"{timing.suite} {timing.case}: {min(short)} of {wanted} tokens came from the cache; give it more memory "
            "(--hypic-memory), or see hypic's report of one such request"
        )
