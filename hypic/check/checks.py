"""P1 to P4 of docs/SEMANTICS.md: what a link means, measured on a running engine. P5 is in `soak`, P6 in `turns`."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from hypic.check.judge import Judge, exact
from hypic.check.layouts import document_pool, random_layout
from hypic.check.result import CheckResult, Tally, skipped
from hypic.check.session import Answer, Prompt, Session, distance
from hypic.segment import span_id

P1_LENGTHS = (9, 63, 64, 65, 100, 200, 500)
P2_LONGEST = 200
P4_LONGEST = 500

ARTIFACT_EXACT = 1e-5
"""Bound on the difference of two compiles of a segment in float32, relative to the largest entry of each part."""
ARTIFACT_16_BIT = 5e-2
"""The same in 16-bit types, where hidden states differ by rounding from one batch to another."""

_BEHIND_DUMMIES = (
    "segments are compiled behind dummy tokens, so a link is not full recompute even at the start of a prompt"
)
_FIRST_TOKEN = 3
_QUERIES = (20, 1, 5, 70)


def check_p1(session: Session, judge: Judge, seed: int) -> CheckResult:
    """One segment at start 0, then a query: a link equals full recompute, when compiled for it and when hit."""
    if session.method().dummies:
        return skipped("P1", judge.name, seed, _BEHIND_DUMMIES)
    tally = judge.tally("P1", session)
    rng = random.Random(seed)
    w = session.method().seam_window
    lengths = [n for n in P1_LENGTHS if n > w]
    for i, length in enumerate(lengths):
        document = tokens(rng, session, length)
        for expected in ("compiled", "hit"):
            ids = document + tokens(rng, session, _QUERIES[i % len(_QUERIES)])
            what = f"a segment of {length} tokens, {expected}"
            stock = session.ask(Prompt(ids, tenant=f"P1 stock {i} {expected}"))
            linked = session.ask(Prompt(ids, [(0, length)], tenant=f"P1 {i}"))
            judge.against_full(tally, session, linked, stock, ids, what)
            tally.require(
                len(linked.outcomes) == 1 and linked.outcomes[0].startswith(expected), f"{what}: {explain(linked)}"
            )
            cached = {"compiled": (0,), "hit_device": (length - w,)}.get(linked.outcomes[0], (length,))
            tally.require(linked.cached_tokens in cached, f"{what}: cached_tokens {linked.cached_tokens}")
    tally.note(f"segments of {', '.join(map(str, lengths))} tokens, compiled and hit")
    return tally.result()


def check_p2(session: Session, judge: Judge, seed: int, n: int = 12) -> CheckResult:
    """The seam window is longer than every segment and links are forced: equals full recompute.

    The session needs ``force_link`` and a seam window of at least P2_LONGEST.
    """
    if session.method().dummies:
        return skipped("P2", judge.name, seed, _BEHIND_DUMMIES)
    assert session.config.force_link and session.method().seam_window >= P2_LONGEST
    tally = judge.tally("P2", session)
    rng = random.Random(seed)
    pool = document_pool(rng, session.vocab_size)
    joined = 0
    for i in range(n):
        layout = random_layout(rng, session.vocab_size, max_tokens=P4_LONGEST, pool=pool)
        stock = session.ask(Prompt(layout.ids, tenant=f"P2 stock {i}"))
        linked = session.ask(Prompt(layout.ids, layout.cached, tenant="P2"))
        judge.against_full(tally, session, linked, stock, layout.ids, f"layout {i}")
        wanted = tuple(s for s in layout.cached if s[1] < len(layout.ids))
        tally.require(linked.linked == wanted, f"layout {i} was not linked: {explain(linked)}")
        joined += len(wanted)
    tally.require(joined > 0, "no segment was linked")
    tally.note(f"{n} random layouts, {joined} segments joined with empty interiors")
    return tally.result()


def check_p3(session: Session, judge: Judge, seed: int) -> CheckResult:
    """Artifacts do not depend on what compiled them; a permuted prompt links from them; a batch does not mix requests."""
    tally = judge.tally("P3", session, pairs=True)
    rng = random.Random(seed)
    documents = [tokens(rng, session, n) for n in (9, 64, 100, 200, 300) if n > session.method().seam_window]
    session.flush()
    worst = _same_artifacts(tally, session, rng, documents)
    _permuted(tally, session, rng, documents)
    _together(tally, session, rng, documents)
    tally.note(
        f"{len(documents)} documents compiled three ways agree to {worst:.0e}; permuted; 4 linked and 4 plain at once"
    )
    return tally.result()


def _same_artifacts(tally: Tally, session: Session, rng: random.Random, documents: list[list[int]]) -> float:
    """Compile alone, in one prompt in reverse, and all at once among plain requests; leaves the last artifacts in place."""
    alone = [assemble(rng, session, [d]) for d in documents]
    at_once = [assemble(rng, session, [d]) for d in documents for _ in range(2)]
    at_once += [Prompt(tokens(rng, session, n)) for n in (3, 80, 150)]
    rng.shuffle(at_once)
    rounds: list[dict[str, dict[str, torch.Tensor]]] = []
    for prompts in ([[p] for p in alone], [[assemble(rng, session, documents[::-1])]], [at_once]):
        session.flush()
        for group in prompts:
            session.ask_together(group)
        rounds.append(session.dump())
    bound = ARTIFACT_EXACT if exact(session) else ARTIFACT_16_BIT
    worst = 0.0
    names = {span_id(d) for d in documents}
    for i, other in enumerate(rounds):
        tally.require(other.keys() == names, f"compile round {i} left {len(other)} artifacts of {len(names)} documents")
        for name in other.keys() & rounds[0].keys():
            error = artifact_distance(rounds[0][name], other[name])
            tally.require(error <= bound, f"an artifact of compile round {i} is off by {error:.1e} (bound {bound:.0e})")
            worst = max(worst, error)
    return worst


def _permuted(tally: Tally, session: Session, rng: random.Random, documents: list[list[int]]) -> None:
    """All documents are in the arena: any order of them is served without a compile, like a cold request."""
    w = session.method().seam_window
    before = session.dump()
    prompts = [assemble(rng, session, rng.sample(documents, len(documents))) for _ in range(3)]
    warm = [session.ask(p) for p in prompts]
    after = session.dump()
    overwritten = [n for n, a in before.items() if n not in after or artifact_distance(a, after[n]) != 0.0]
    tally.require(not overwritten, f"{len(overwritten)} artifacts were overwritten or lost by hits")
    wanted = sum(len(d) - w for d in documents)
    for i, (prompt, answer) in enumerate(zip(prompts, warm, strict=True)):
        cold = session.ask(prompt._replace(tenant=f"P3 cold {i}"))
        tally.error(distance(answer, cold), f"permutation {i}, warm against cold")
        tally.require(answer.outcomes == ["hit_device"] * len(documents), f"permutation {i}: {explain(answer)}")
        tally.require(answer.report.compiled == 0, f"permutation {i}: {answer.report.compiled} tokens were compiled")
        cached = answer.cached_tokens, cold.cached_tokens
        tally.require(cached == (wanted, 0), f"permutation {i}: cached_tokens {cached}, not {(wanted, 0)}")


def _together(tally: Tally, session: Session, rng: random.Random, documents: list[list[int]]) -> None:
    """Linked and plain requests answer as they do alone when they are sent at once."""
    prompts = []
    for n in (1, 40, 64, 130):
        prompts.append(assemble(rng, session, rng.sample(documents, 2)))
        prompts.append(Prompt(tokens(rng, session, n)))
    alone = [session.ask(p._replace(tenant=f"P3 alone {i}")) for i, p in enumerate(prompts)]
    together = session.ask_together([p._replace(tenant=f"P3 together {i}") for i, p in enumerate(prompts)])
    for i, (a, b) in enumerate(zip(alone, together, strict=True)):
        kind = "linked" if prompts[i].segments else "plain"
        tally.error(distance(a, b), f"{kind} request {i}, in a batch against alone")


def check_p4(session: Session, judge: Judge, seed: int, n: int = 16) -> CheckResult:
    """Random layouts, in groups at once, equal the oracle; documents recur, so segments are compiled, hit and waited for."""
    if judge.oracle is None:
        return skipped("P4", judge.name, seed, f"no oracle: {judge.no_oracle}")
    tally = judge.tally("P4", session)
    rng = random.Random(seed)
    pool = document_pool(rng, session.vocab_size)
    seen: dict[str, int] = {}
    done = 0
    while done < n:
        layouts = [
            random_layout(rng, session.vocab_size, max_tokens=P4_LONGEST, pool=pool)
            for _ in range(min(rng.randint(1, 4), n - done))
        ]
        prompts = [Prompt(layout.ids, layout.cached, rng.randint(1, 8), "P4") for layout in layouts]
        for prompt, answer in zip(prompts, session.ask_together(prompts), strict=True):
            truth, linked = judge.link(session, prompt, answer.ids)
            tally.error(distance(answer, truth), f"layout {done}")
            tally.require(answer.linked == linked, f"layout {done} linked {answer.linked}, the oracle {linked}")
            if not exact(session):
                stock = session.ask(Prompt(prompt.ids, (), prompt.new_tokens, f"P4 stock {done}"))
                tally.baseline(distance(stock, judge.full(session, prompt.ids, stock.ids)))
            for outcome in answer.outcomes:
                seen[outcome] = seen.get(outcome, 0) + 1
            done += 1
    tally.require(any(seen.get(o) for o in ("compiled", "waited", "hit_device")), f"nothing was linked: {seen}")
    tally.note(f"{n} random layouts; segments {', '.join(f'{o} {c}' for o, c in sorted(seen.items()))}")
    return tally.result()


# ---------------------------------------------------------------------- parts


def tokens(rng: random.Random, session: Session, n: int) -> list[int]:
    """Random token ids."""
    return [rng.randrange(_FIRST_TOKEN, session.vocab_size) for _ in range(n)]


def assemble(rng: random.Random, session: Session, documents: Sequence[list[int]]) -> Prompt:
    """A prompt of a new head, the documents as segments with short gaps, and a new query."""
    ids = tokens(rng, session, rng.randint(1, 20))
    segments = []
    for document in documents:
        segments.append((len(ids), len(ids) + len(document)))
        ids += document + tokens(rng, session, rng.choice((0, 1, 3, 12)))
    return Prompt(ids + tokens(rng, session, rng.randint(1, 30)), segments)


def artifact_distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference of two artifacts, relative to the largest entry of each part of a layer."""
    if a.keys() != b.keys() or any(a[k].shape != b[k].shape for k in a):
        return float("inf")
    worst = 0.0
    for part, x in a.items():
        for one, other in zip(x, b[part], strict=True):
            error = (one - other).abs().max() / one.abs().max().clamp(min=1e-20)
            worst = max(worst, float(error.nan_to_num(nan=torch.inf)))
    return worst


def explain(answer: Answer) -> str:
    """What the report says of the segments."""
    parts = [f"{s.outcome}{f' ({s.reason})' if s.reason else ''}" for s in answer.report.spans if s.kind == "segment"]
    return "segments " + (", ".join(parts) or "none")
