"""The torch stand-ins on SGLang's Mamba2 path against token-by-token recurrences in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hypic.algebra import naive
from hypic.platform_cpu import mamba_ops as ops

H, G, V, K, SLOTS, CHUNK = 4, 2, 16, 24, 6, 32


def inputs(tokens: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "x": torch.randn(1, tokens, H, V),
        "dt": torch.randn(1, tokens, H),
        "A": -torch.tensor([0.001, 0.05, 0.5, 8.0]),
        "B": torch.randn(1, tokens, G, K),
        "C": torch.randn(1, tokens, G, K),
        "D": torch.randn(H),
        "dt_bias": torch.randn(H),
    }


def recurrence(p: dict[str, Tensor], start: int, end: int, state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Tokens [start, end): their outputs, the states before each of them and after the last."""
    q = {name: value.double() for name, value in p.items()}
    b, c = (q[name][0].repeat_interleave(H // G, 1) for name in ("B", "C"))
    step = torch.log1p((q["dt"][0] + q["dt_bias"]).exp())
    out, states = [], [state.double()]
    for t in range(start, end):
        one = slice(t, t + 1)
        o, h = naive.mamba2(c[one], b[one], q["x"][0, one], step[one], q["A"], states[-1])
        out.append(o[0] + q["D"][:, None] * q["x"][0, t])
        states.append(h)
    return torch.stack(out), states


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("continued", [True, False], ids=["continued", "fresh"])
@pytest.mark.parametrize("lengths", [(1,), (31,), (32,), (100,), (33, 1, 31, 70)], ids=str)
@pytest.mark.usefixtures("nan_empty")
def test_scan_equals_recurrence(lengths: tuple[int, ...], continued: bool) -> None:
    """Outputs, end states, and the states on the grid of chunks over all tokens, from which SGLang keeps checkpoints."""
    p, total = inputs(sum(lengths)), sum(lengths)
    bounds = torch.tensor((0, *lengths)).cumsum(0)
    initial = torch.randn(len(lengths), H, V, K) if continued else torch.zeros(len(lengths), H, V, K)
    out = torch.empty(1, total, H, V)
    grid, ends = ops.mamba_chunk_scan_combined(
        **p, chunk_size=CHUNK, z=None, initial_states=initial if continued else None, seq_idx=torch.empty(0),
        cu_seqlens=bounds.to(torch.int32), out=out, state_dtype=torch.float32, dt_softplus=True,
    )  # fmt: skip
    assert grid.shape == (1, -(-total // CHUNK), H, V, K)
    for i, (start, end) in enumerate(zip(bounds.tolist(), bounds.tolist()[1:], strict=False)):
        expected, states = recurrence(p, start, end, initial[i])
        close(out[0, start:end], expected)
        close(ends[i], states[-1])
        for point in range(0, total, CHUNK):
            if start < point <= end or start == point == 0:
                close(grid[0, point // CHUNK], states[point - start])


def test_decode_step_equals_recurrence_and_skips_padding() -> None:
    p, slots = inputs(3), torch.tensor([4, -1, 2], dtype=torch.int32)
    pool = torch.randn(SLOTS, H, V, K)
    before, out = pool.clone(), torch.empty(3, H, V)
    ops.selective_state_update(
        pool, p["x"][0], p["dt"][0][..., None].expand(-1, -1, V), p["A"][:, None, None].expand(-1, V, K), p["B"][0],
        p["C"][0], p["D"][:, None].expand(-1, V), z=None, dt_bias=p["dt_bias"][:, None].expand(-1, V),
        state_batch_indices=slots, out=out,
    )  # fmt: skip
    for row, slot in ((0, 4), (2, 2)):
        expected, states = recurrence(p, row, row + 1, before[slot])
        close(out[row], expected[0])
        close(pool[slot], states[-1])
    assert (out[1] == 0).all()
    assert torch.equal(pool[[0, 1, 3, 5]], before[[0, 1, 3, 5]])


def test_speculation_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="speculative"):
        ops.selective_state_update(*[torch.empty(0)] * 7, None, *[torch.empty(0)] * 3, disable_state_update=True)
