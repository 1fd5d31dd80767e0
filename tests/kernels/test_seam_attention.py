"""Seam attention against softmax attention in float64, token by token."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from cases import Target, assert_close, sizes
from torch import Tensor

from hypic.kernels.seam_attention import seam_attention, seam_scratch
from hypic.kernels.seam_plan import SeamPlan, SeamShape

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
HALF = BF16
TOLERANCE = {F32: 1e-5, F16: 3e-3, BF16: 2e-2}


def spread(count: int, prefix: int) -> list[int]:
    """``count`` positions in runs of 8 with gaps between, the first one ``prefix``."""
    gap = 37
    return [prefix + i // 8 * gap + i % 8 for i in range(count)]


@dataclass
class Batch:
    """Requests, their positions, and pools and a batch around them; everything not written on purpose is NaN."""

    positions: list[list[int]]
    shape: SeamShape = field(default_factory=lambda: SeamShape(8, 2, 32, 32, F32))
    page: int = 1
    seed: int = 0
    target: Target = field(default_factory=lambda: Target("torch", "cpu"))

    def __post_init__(self) -> None:
        rng, s = torch.Generator().manual_seed(self.seed), self.shape
        lengths = [p[-1] + 1 if p else 0 for p in self.positions]
        pages = [-(-n // self.page) for n in lengths]
        order = torch.randperm(2 * sum(pages) + 3, generator=rng)
        width = max(lengths) + 5
        self.rows = list(range(2 * len(lengths), 0, -2))
        self.table = torch.full((2 * len(lengths) + 1, width), 10**9, dtype=torch.int32)  # far outside of the pool
        total, done = len(order) * self.page, 0
        self.k = torch.full((total, s.kv_heads, s.k_dim), float("nan"), dtype=s.dtype)
        self.v = torch.full((total, s.kv_heads, s.v_dim), float("nan"), dtype=s.dtype)
        for row, n, count in zip(self.rows, lengths, pages, strict=True):
            first = order[done : done + count] * self.page
            done += count
            slots = (first[:, None] + torch.arange(self.page)).flatten()[:n]
            self.table[row, :n] = slots.to(torch.int32)
            self.k[slots] = torch.randn(n, s.kv_heads, s.k_dim, generator=rng).to(s.dtype)
            self.v[slots] = torch.randn(n, s.kv_heads, s.v_dim, generator=rng).to(s.dtype)
        # The computed tokens stand in the batch request after request, with a token of somebody else in between.
        self.tokens, at = [], 1
        for p in self.positions:
            self.tokens.append(list(range(at, at + len(p))))
            at += len(p) + 1
        self.q = torch.full((at, s.q_heads, s.k_dim), float("nan"), dtype=s.dtype)
        for tokens in self.tokens:
            self.q[tokens] = torch.randn(len(tokens), s.q_heads, s.k_dim, generator=rng).to(s.dtype)
        for name in ("q", "k", "v", "table"):
            setattr(self, name, getattr(self, name).to(self.target.device))

    def plan(self, **options: int) -> SeamPlan:
        return SeamPlan.build(
            rows=self.rows,
            tokens=self.tokens,
            positions=self.positions,
            shape=self.shape,
            device=self.target.device,
            **options,
        )

    def run(self, plan: SeamPlan, cap: float = 0.0) -> Tensor:
        s = self.shape
        out = torch.full((len(self.q), s.q_heads, s.v_dim), float("nan"), dtype=s.dtype, device=self.q.device)
        scratch = torch.full((seam_scratch(plan),), float("nan"), device=self.q.device)
        seam_attention(
            self.q, self.k, self.v, self.table, plan=plan, scale=s.k_dim**-0.5, logit_cap=cap, out=out,
            scratch=scratch, **self.target.dots,
        )  # fmt: skip
        return out

    def truth(self, cap: float = 0.0) -> Tensor:
        s = self.shape
        q, k, v, table = (t.cpu() for t in (self.q, self.k, self.v, self.table))
        out = torch.full((len(q), s.q_heads, s.v_dim), float("nan"), dtype=torch.float64)
        for row, tokens, positions in zip(self.rows, self.tokens, self.positions, strict=True):
            for t, p in zip(tokens, positions, strict=True):
                slots = table[row, : p + 1].long()
                for head in range(s.q_heads):
                    kv = head // s.group
                    scores = k[slots, kv].double() @ q[t, head].double() * s.k_dim**-0.5
                    scores = cap * torch.tanh(scores / cap) if cap else scores
                    out[t, head] = scores.softmax(0) @ v[slots, kv].double()
        return out

    def check(self, cap: float = 0.0, **options: int) -> SeamPlan:
        plan = self.plan(**options)
        assert_close(self.run(plan, cap), self.truth(cap), TOLERANCE[self.shape.dtype])
        return plan


@pytest.mark.parametrize("prefix", sizes([0, 1, 63, 500], [0, 1, 63, 300]))
@pytest.mark.parametrize("count", sizes([1, 7, 63, 64, 65], [1, 17]))
def test_one_request(count: int, prefix: int, target: Target) -> None:
    Batch([spread(count, prefix)], seed=count, target=target).check()


SPLITS = [{}, {"workers": 2}, {"split": 1}, {"split": 150}]


@pytest.mark.parametrize("options", sizes([*SPLITS, {"workers": 10}], SPLITS), ids=str)
def test_several_requests_however_the_work_is_split(options: dict[str, int], target: Target) -> None:
    """One of them computes nothing, one has no prefix, one computes only its last token."""
    last, many = sizes([699, 40], [200, 17])
    batch = Batch([spread(19, 5), [], list(range(21)), [last], spread(many, 130)], target=target)
    plan = batch.check(**options)
    if options.get("workers") == 2:
        assert plan.workers == 1
        assert plan.merged == 0
    if options == {"split": 1}:
        assert plan.parts >= 11


SHAPES = [
    SeamShape(14, 2, 80, 48, F32),
    SeamShape(8, 1, 20, 12, F32),
    SeamShape(8, 1, 256, 256, HALF),
    SeamShape(8, 2, 128, 128, F16),
    SeamShape(2, 2, 80, 80, HALF),
]
MORE_SHAPES = [SeamShape(3, 3, 32, 32, F32), SeamShape(8, 2, 48, 80, F32), SeamShape(8, 1, 256, 256, F32)]


@pytest.mark.parametrize(
    "shape",
    sizes(SHAPES + MORE_SHAPES, SHAPES),
    ids=lambda s: f"{s.q_heads}-{s.kv_heads}-{s.k_dim}-{s.v_dim}-{s.dtype}"[:24],
)
def test_heads_dims_and_types(shape: SeamShape, target: Target) -> None:
    Batch([spread(20, 70), spread(3, 200)], shape=shape, target=target).check(workers=3 * shape.kv_heads)


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_logit_cap(cap: float, target: Target) -> None:
    Batch([spread(20, 70)], target=target).check(cap=cap)


@pytest.mark.parametrize("page", [16, 64])
def test_pages(page: int, target: Target) -> None:
    Batch([spread(20, 70), spread(9, 3)], page=page, target=target).check()


def test_no_tokens_no_launch(target: Target) -> None:
    plan = SeamPlan.build(
        rows=[0, 0], tokens=[[], []], positions=[[], []], shape=SeamShape(8, 2, 32, 32, F32), device=target.device
    )
    assert (plan.workers, plan.parts, plan.merged, seam_scratch(plan)) == (0, 0, 0, 0)
    batch = Batch([[3]], target=target)
    assert batch.run(plan).isnan().all()


def test_requests_may_index_the_rows_of_a_larger_batch(target: Target) -> None:
    batch = Batch([spread(9, 100), spread(5, 3)], target=target)
    rows = torch.tensor([0, batch.rows[1], 0, batch.rows[0]], device=target.device)
    plan = SeamPlan.build(
        rows=rows, requests=[3, 1], tokens=batch.tokens, positions=batch.positions, shape=batch.shape,
        device=target.device,
    )  # fmt: skip
    assert_close(batch.run(plan), batch.truth(), 1e-5)


def test_same_as_one_row_per_run(target: Target) -> None:
    """SGLang's extend semantics on hypic's expanded view: every run a row, its prefix all that stands before it."""
    runs = [(0, 32), (96, 8), (224, 8), (300, 24)]
    batch = Batch([[p for start, n in runs for p in range(start, start + n)]], target=target)
    s, out, at = batch.shape, batch.run(batch.plan()), batch.tokens[0][0]
    q, k, v, table = (t.cpu() for t in (batch.q, batch.k, batch.v, batch.table))
    for start, n in runs:
        slots = table[batch.rows[0], : start + n].long()
        prefix_and_self = torch.ones(n, start + n, dtype=torch.bool).tril(start)
        want = torch.nn.functional.scaled_dot_product_attention(
            q[at : at + n].transpose(0, 1), k[slots].transpose(0, 1), v[slots].transpose(0, 1), prefix_and_self,
            scale=s.k_dim**-0.5, enable_gqa=True,
        ).transpose(0, 1)  # fmt: skip
        assert_close(out[at : at + n], want, 1e-5)
        at += n


def test_work_is_shared_evenly() -> None:
    """The shape of the docstring: no worker has more than its share, and partial results are few."""
    seams = [32 + 2048 * i + j for i in range(16) for j in range(8)]
    positions = [*range(32), *seams, *range(32 + 16 * 2048, 32 + 16 * 2048 + 64)]
    shape = SeamShape(16, 2, 256, 256, BF16)
    positions = sorted(set(positions))
    plan = SeamPlan.build(
        rows=[0], tokens=[list(range(len(positions)))], positions=[positions], shape=shape, device="cpu"
    )
    assert plan.workers == 66
    blocks = -(-(plan.segments[:, 4] - plan.segments[:, 3]) // plan.tiling.columns)
    shares = [int(blocks[a:b].sum()) for a, b in zip(plan.worker_ptr[:-1], plan.worker_ptr[1:], strict=True)]
    assert max(shares) == -(-sum(shares) // 66)
    assert plan.parts <= 66 + 14
    assert (plan.segments[:, 3] % plan.tiling.columns == 0).all()
    assert seam_scratch(plan) * 4 < 22e6


def test_wrong_arguments_are_refused(target: Target) -> None:
    batch = Batch([spread(5, 3)], target=target)
    for bad, message in [
        ([[3, 3, 5, 6, 7]], "ascend"),
        ([[-1, 3, 5, 6, 7]], "ascend"),
        ([[3, 4]], "positions"),
        ([[3], [4]], "position lists"),
    ]:
        with pytest.raises(ValueError, match=message):
            _with_positions(batch, bad).plan()
    with pytest.raises(ValueError, match="at most 256"):
        SeamPlan.build(rows=[], tokens=[], positions=[], shape=SeamShape(1, 1, 512, 512, F32), device="cpu")
    with pytest.raises(ValueError, match="query heads"):
        SeamPlan.build(rows=[], tokens=[], positions=[], shape=SeamShape(3, 2, 32, 32, F32), device="cpu")
    plan = batch.plan()
    batch.k = batch.k.to(BF16)
    with pytest.raises(ValueError, match="one type"):
        batch.run(plan)
    batch.q, batch.v = batch.q.to(BF16), batch.v.to(BF16)
    with pytest.raises(ValueError, match="the plan is for"):
        batch.run(plan)


def _with_positions(batch: Batch, positions: list[list[int]]) -> Batch:
    other = Batch.__new__(Batch)
    other.__dict__.update(batch.__dict__, positions=positions)
    return other
