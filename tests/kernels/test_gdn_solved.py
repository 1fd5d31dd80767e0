"""gdn_transition_solved against the token recurrence in float64, from chunks solved in float64 and, on a GPU, by SGLang."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, Case, Heads, Target, assert_close, sizes
from test_gdn_transition import Inputs, random_inputs, truth

from hypic.kernels.gdn_solved import SolvedChunks, SolvedPlan, gdn_transition_solved
from hypic.kernels.gdn_transition import FORGOTTEN
from hypic.kernels.wy import CHUNK, Chunk

LAYOUTS = sizes(
    [(n, s) for n in (1, 7, 63, 64, 65, 500, 1000) for s in (0, 1, 8, 63, 64, 65, 130) if s <= n],
    [(1, 0), (7, 7), (65, 8), (130, 0), (130, 63), (130, 64), (200, 70)],
)


def solved(inputs: Inputs, rows: list[int], dtype: torch.dtype = torch.float32) -> SolvedChunks:
    """Chunks of rows of such lengths, in float64 and rounded once."""
    parts: list[list[torch.Tensor]] = [[], [], []]
    k, g, beta = (x.cpu().double() for x in inputs)
    heads = beta.shape[1] // k.shape[1]
    start = 0
    for n in rows:
        for at in range(start, start + n, CHUNK):
            part = slice(at, min(at + CHUNK, start + n))
            chunk_k = k[part].repeat_interleave(heads, 1).transpose(0, 1)
            chunk = Chunk.of(chunk_k, g[part].T, beta[part].T)
            inverse = torch.linalg.inv(torch.eye(part.stop - at, dtype=torch.float64) + chunk.lower)
            decay = chunk.log_decay[..., 0]
            w = inverse @ (chunk_k * (beta[part].T * decay.exp())[..., None])
            padded = torch.nn.functional.pad(inverse, (0, CHUNK - inverse.shape[-1]))
            for found, x in zip(parts, (decay, w, padded), strict=True):
                found.append(x.transpose(0, 1))
        start += n
    g, w, inverse = (torch.cat(p).to(inputs[0].device).contiguous() for p in parts)
    return SolvedChunks(inputs[0].to(dtype), g.float(), inputs[2], w.to(dtype), inverse.to(dtype))


def run(case: Case, target: Target, chunks: SolvedChunks, rows: list[tuple[int, int, int, bool]]) -> None:
    """Rows of (length, skip, blob, first), one behind the other."""
    lengths = [n for n, *_ in rows]
    plan = SolvedPlan.build(
        tok=[sum(lengths[:i]) for i in range(len(rows))],
        length=lengths,
        skip=[s for _, s, *_ in rows],
        blob=[b * case.stride for *_, b, _ in rows],
        first=[f for *_, f in rows],
        device=case.device,
    )
    gdn_transition_solved(
        chunks, arena=case.arena, t_off=case.t_off, plan=plan, operator_dtype=case.t_dtype, impl=target.impl
    )


@pytest.mark.parametrize(("length", "skip"), LAYOUTS)
def test_one_row(length: int, skip: int, target: Target) -> None:
    case = Case(Heads(), length, seed=length + skip, device=target.device)
    inputs = random_inputs(case, length)
    run(case, target, solved(inputs, [length]), [(length, skip, 0, True)])
    assert_close(case.t_view(0), truth(case, inputs, slice(skip, length)), 2e-5)
    case.t_view(0).view(torch.uint8).fill_(0xFF)
    assert (case.arena == 0xFF).all()


def test_rows_of_a_batch_and_calls_that_go_on(target: Target) -> None:
    """Three rows, of which one continues in a second batch; what stands in front of a continued row is all interior."""
    lengths, skips = [70, 9, 130], [8, 8, 20]
    case = Case(Heads(), 1, seed=1, device=target.device)
    inputs = random_inputs(case, sum(lengths))
    more = random_inputs(case, 66)
    run(
        case,
        target,
        solved(inputs, lengths),
        [(n, s, b, True) for b, (n, s) in enumerate(zip(lengths, skips, strict=True))],
    )
    run(case, target, solved(more, [66]), [(66, 0, 2, False)])
    start = 0
    for blob, (n, s) in enumerate(zip(lengths, skips, strict=True)):
        expected = truth(case, inputs, slice(start + s, start + n))
        if blob == 2:
            expected = expected @ truth(case, more)
        assert_close(case.t_view(blob), expected, 2e-5)
        start += n


def test_an_empty_interior_is_the_identity_once(target: Target) -> None:
    case = Case(Heads(), 1, device=target.device)
    chunks = solved(random_inputs(case, 5), [5])
    run(case, target, chunks, [(5, 5, 0, True)])
    assert (case.t_view(0).cpu() == torch.eye(case.heads.dk)).all()
    case.t_view(0).fill_(3.0)
    run(case, target, chunks, [(5, 5, 0, False)])
    assert (case.t_view(0) == 3.0).all()


@pytest.mark.parametrize("skip", [0, 8])
def test_heads_that_forget(skip: int, target: Target) -> None:
    """Their T is exactly zero, decided by the interior's decay alone, and stays zero when a later call goes on."""
    case = Case(Heads(), 1, device=target.device)
    k, g, beta = random_inputs(case, 80)
    g[:, 0], g[:, 1] = 1.2 * FORGOTTEN / (80 - skip), 0.8 * FORGOTTEN / (80 - skip)
    if skip:
        g[:skip, 1] = FORGOTTEN  # of the seam: must not count
    run(case, target, solved((k, g, beta), [80]), [(80, skip, 0, True)])
    t = case.t_view(0).clone()
    assert (t[0] == 0).all() and (t[1] != 0).any()
    assert_close(t[1], truth(case, (k, g, beta), slice(skip, 80))[1], 2e-5)
    g[:, :2] = 0.0
    run(case, target, solved((k, g, beta), [80]), [(80, 0, 0, False)])
    assert (case.t_view(0)[0] == 0).all()


@pytest.mark.parametrize("operator_dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_16_bit(operator_dtype: torch.dtype, target: Target) -> None:
    """Operands in bf16, as SGLang has them."""
    case = Case(Heads(dk=128, dv=128), 1, operator_dtype=operator_dtype, device=target.device)
    length = sizes([1000], [130])[0]
    k, g, beta = random_inputs(case, length)
    k = k.bfloat16()
    inputs = (k.float(), g, beta)
    run(case, target, solved(inputs, [length], torch.bfloat16), [(length, 8, 0, True)])
    expected = truth(case, inputs, slice(8, length))
    assert float((case.t(0).cpu().double() - expected).norm() / expected.norm()) < 4 * BF16


def test_wrong_shapes(target: Target) -> None:
    case = Case(Heads(), 1, device=target.device)
    chunks = solved(random_inputs(case, 5), [5])
    with pytest.raises(ValueError, match="disagree"):
        run(case, target, chunks._replace(w=chunks.w[:4]), [(5, 0, 0, True)])
    with pytest.raises(ValueError, match="contiguous"):
        run(case, target, chunks._replace(beta=chunks.beta.T.contiguous().T), [(5, 0, 0, True)])
    with pytest.raises(ValueError, match="skip"):
        run(case, target, chunks, [(5, 6, 0, True)])
    with pytest.raises(ValueError, match="multiples"):
        SolvedPlan.build(tok=[0], length=[1], skip=[0], blob=[4], first=[True], device="cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="SGLang's chunk kernels need a GPU")
@pytest.mark.parametrize("length", [7, 64, 65, 500, 2048])
def test_from_sglangs_own_chunks(length: int) -> None:
    """Two rows through SGLang's pass, T through the hook's terms, against float64 and against our own way to T."""
    from sglang.kernels.ops.attention.fla import chunk

    from hypic.engine.solved_chunks import chunks_of_pass

    target = Target("triton", "cuda")
    case = Case(Heads(hk=2, hv=4, dk=128, dv=128), 1, device="cuda")
    rows = [length, 130]
    k, g, beta = random_inputs(case, sum(rows))
    k = k.bfloat16()
    q, v = (case.randn(1, sum(rows), h, 128).to("cuda").bfloat16() for h in (2, 4))
    states = torch.zeros(2, 4, 128, 128, device="cuda")
    where = {"device": "cuda", "dtype": torch.int32}
    original = chunk.chunk_gated_delta_rule_fwd_intra
    found: list[SolvedChunks] = []

    def taking(*args: object, **kwargs: object) -> object:
        result = original(*args, **kwargs)
        found.append(chunks_of_pass(result, *args, **kwargs))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk, "chunk_gated_delta_rule_fwd_intra", taking)
        chunk.chunk_gated_delta_rule(
            q, k[None], v, g[None], beta[None], initial_state=states, initial_state_indices=torch.arange(2, **where),
            cu_seqlens=torch.tensor([0, length, sum(rows)], **where), use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
    run(case, target, found[0], [(length, min(8, length), 0, True), (130, 0, 1, True)])
    inputs = (found[0].k.float(), g, beta)
    for blob, part in ((0, slice(min(8, length), length)), (1, slice(length, sum(rows)))):
        expected = truth(case, inputs, part)
        assert float((case.t_view(blob).cpu().double() - expected).norm() / expected.norm()) < 6 * BF16
