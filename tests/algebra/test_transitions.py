"""P7: composing by (T, S) equals the token recurrence, for each family, to 1e-10 in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hypic.algebra import DenseTransition, ScalarTransition, Transition, compose, families, fold, naive

HEADS, DK, DV = 2, 5, 3
TOL = 1e-10


@dataclass(frozen=True)
class Family:
    """Random tokens of one family, as transitions and through the token recurrence."""

    name: str
    tokens: Callable[[int, torch.Generator], dict[str, Tensor]]
    steps: Callable[..., Transition]
    recurrence: Callable[..., tuple[Tensor, Tensor]]
    query: str = "q"

    def draw(self, n: int, seed: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Arguments, queries [n, H, K] and an initial state [H, V, K]."""
        rng = torch.Generator().manual_seed(seed)
        return self.tokens(n, rng), randn(rng, n, HEADS, DK), randn(rng, HEADS, DV, DK)

    def run(self, args: dict[str, Tensor], q: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return self.recurrence(**{self.query: q}, **args, h=h)


def randn(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def kv(n: int, rng: torch.Generator) -> dict[str, Tensor]:
    k = torch.nn.functional.normalize(randn(rng, n, HEADS, DK), dim=-1)
    return {"k": k, "v": randn(rng, n, HEADS, DV)}


def log_decay(rng: torch.Generator, *shape: int) -> Tensor:
    return -randn(rng, *shape).abs() * 0.05


def beta(n: int, rng: torch.Generator) -> Tensor:
    return randn(rng, n, HEADS).sigmoid()


def rwkv7_tokens(n: int, rng: torch.Generator) -> dict[str, Tensor]:
    other = kv(n, rng)["k"]
    return kv(n, rng) | {"g": log_decay(rng, n, HEADS, DK), "kk": other, "a": randn(rng, n, HEADS, DK).sigmoid()}


def mamba2_tokens(n: int, rng: torch.Generator) -> dict[str, Tensor]:
    t = kv(n, rng)
    return {"b": t["k"], "x": t["v"], "dt": randn(rng, n, HEADS).exp() * 0.1, "a": -randn(rng, HEADS).exp()}


FAMILIES = [
    Family("retention", lambda n, r: kv(n, r) | {"decay": log_decay(r, HEADS)}, families.retention, naive.retention),
    Family("mamba2", mamba2_tokens, families.mamba2, naive.mamba2, query="c"),
    Family("gla", lambda n, r: kv(n, r) | {"g": log_decay(r, n, HEADS, DK)}, families.gla, naive.gla),
    Family("delta_net", lambda n, r: kv(n, r) | {"beta": beta(n, r)}, families.delta_net, naive.delta_net),
    Family(
        "gated_delta_net",
        lambda n, r: kv(n, r) | {"g": log_decay(r, n, HEADS), "beta": beta(n, r)},
        families.gated_delta_net,
        naive.gated_delta_net,
    ),
    Family(
        "kimi_delta",
        lambda n, r: kv(n, r) | {"g": log_decay(r, n, HEADS, DK), "beta": beta(n, r)},
        families.kimi_delta,
        naive.kimi_delta,
    ),
    Family("rwkv7", rwkv7_tokens, families.rwkv7, naive.rwkv7, query="r"),
]
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)


def assert_same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=TOL, rtol=TOL)


def assert_same_transition(got: Transition, want: Transition) -> None:
    assert type(got) is type(want)
    assert_same(got.T, want.T)
    assert_same(got.S, want.S)


@each_family
@pytest.mark.parametrize("n", [1, 2, 7, 64, 101])
def test_composed_equals_recurrence(family: Family, n: int) -> None:
    args, q, h = family.draw(n, seed=n)
    steps = family.steps(**args)
    assert_same(fold(steps).apply(h), family.run(args, q, h)[1])
    assert_same(compose(*(steps[t] for t in range(n))).apply(h), family.run(args, q, h)[1])


@each_family
def test_outputs_read_the_composed_state(family: Family) -> None:
    args, q, h = family.draw(9, seed=1)
    steps, (out, _) = family.steps(**args), family.run(args, q, h)
    for t in range(9):
        assert_same((fold(steps[: t + 1]).apply(h) @ q[t][..., None])[..., 0], out[t])


@each_family
@settings(deadline=None, max_examples=25, derandomize=True)
@given(cuts=st.lists(st.integers(0, 30), max_size=6).map(sorted), seed=st.integers(0, 2**16))
def test_any_split_gives_the_same(family: Family, cuts: list[int], seed: int) -> None:
    """Chunked compile: pieces of any size, empty ones included, compose to the whole."""
    args, q, h = family.draw(30, seed)
    steps = family.steps(**args)
    whole = type(steps).identity(torch.zeros(HEADS, DV, DK, dtype=torch.float64))
    for lo, hi in zip([0, *cuts], [*cuts, 30], strict=True):
        if hi > lo:
            whole = whole.then(fold(steps[lo:hi]))
    assert_same(whole.apply(h), family.run(args, q, h)[1])


@each_family
@settings(deadline=None, max_examples=25, derandomize=True)
@given(seed=st.integers(0, 2**16), sizes=st.tuples(*[st.integers(1, 12)] * 3))
def test_monoid_laws(family: Family, seed: int, sizes: tuple[int, int, int]) -> None:
    x, y, z = (fold(family.steps(**family.draw(n, seed + i)[0])) for i, n in enumerate(sizes))
    one = type(x).identity(x.S)
    assert_same_transition(x.then(y).then(z), x.then(y.then(z)))
    assert_same_transition(one.then(x), x)
    assert_same_transition(x.then(one), x)


@each_family
def test_S_is_the_state_from_zero_and_T_carries_the_difference(family: Family) -> None:
    args, q, h = family.draw(20, seed=3)
    whole = fold(family.steps(**args))
    assert_same(whole.S, family.run(args, q, torch.zeros_like(h))[1])
    assert_same(whole.act(h), family.run(args, q, h)[1] - whole.S)


@pytest.mark.parametrize("family", FAMILIES[3:], ids=lambda f: f.name)
def test_the_side_of_T_matters(family: Family) -> None:
    """T is asymmetric and stands on the right of a [V, K] state: its transpose (fla's side) must be far off."""
    args, q, h = family.draw(6, seed=4)
    whole = fold(family.steps(**args))
    wrong = DenseTransition(whole.T.mT, whole.S)
    assert (wrong.apply(h) - family.run(args, q, h)[1]).abs().max() > 0.1


def test_gated_delta_net_is_alpha_times_i_minus_beta_k_k() -> None:
    """The formula of docs/SEMANTICS.md, written out once."""
    args, _, _ = FAMILIES[4].draw(1, seed=5)
    k, a, b = args["k"][0, 0], args["g"][0, 0].exp(), args["beta"][0, 0]
    assert_same(families.gated_delta_net(**args).T[0, 0], a * (torch.eye(DK) - b * torch.outer(k, k)))


def test_families_do_not_mix() -> None:
    s = torch.zeros(HEADS, DV, DK)
    with pytest.raises(TypeError, match="ScalarTransition with DenseTransition"):
        ScalarTransition.identity(s).then(DenseTransition.identity(s))  # type: ignore[arg-type]


def test_fold_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="identity"):
        fold(ScalarTransition.identity(torch.zeros(0, HEADS, DV, DK)))
