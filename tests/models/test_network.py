"""Our forward pass is that of transformers, what is saved loads there, and the batched reference is the oracle."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
import transformers

from hypic.check.oracle import Oracle
from models.gates import load_weights
from models.linked import linked_hidden
from models.network import Network, build, save
from models.task import LEVELS, Sample, World, make

from .conftest import ALMANAC, SMALL


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    save(build(SMALL), path, ALMANAC)
    return path


@pytest.fixture(scope="module")
def net(folder: Path) -> Network:
    return load_weights(folder)


@pytest.fixture(scope="module")
def samples(world: World) -> list[Sample]:
    return [make(world, LEVELS[1], random.Random(i), shape=random.Random(3)) for i in range(2)]


@torch.no_grad()
def test_forward_is_transformers_own(folder: Path, net: Network) -> None:
    theirs = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(7, 6144, (2, 150), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(net.logits(net(ids)), theirs(input_ids=ids).logits, atol=5e-5, rtol=1e-5)


def test_the_real_shape_fits(tmp_path: Path) -> None:
    save(build(), tmp_path, ALMANAC)
    assert (tmp_path / "model.safetensors").stat().st_size <= 16 * 2**20
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]


@pytest.mark.parametrize("w", [0, 1, 3, 8, 20])
@torch.no_grad()
def test_links_are_the_oracles(folder: Path, net: Network, samples: list[Sample], w: int) -> None:
    at = samples[0].questions[0].at
    assert at == samples[1].questions[0].at
    ids = torch.stack([torch.from_numpy(s.ids[:at]).long() for s in samples])
    ours = net.logits(linked_hidden(net, ids, samples[0].documents, w=w)[:, -1]).log_softmax(-1)
    oracle = Oracle(folder)
    for row, sample in zip(ours, samples, strict=True):
        theirs = oracle.link(
            ids[0].tolist() if sample is samples[0] else ids[1].tolist(), sample.documents, w=w, n_new=1
        )
        torch.testing.assert_close(row, theirs.logprobs[0], atol=5e-5, rtol=0)


@torch.no_grad()
def test_no_interior_is_full_recompute_and_ablations_are_not(net: Network, samples: list[Sample]) -> None:
    ids = torch.stack([torch.from_numpy(s.ids).long() for s in samples])
    at = samples[0].questions[0].at - 1
    full = net(ids)[:, at]
    documents = samples[0].documents
    torch.testing.assert_close(linked_hidden(net, ids, documents, w=float("inf"))[:, at], full, atol=1e-5, rtol=0)
    first = [documents[0]]  # nothing but the template stands before it: a state that steps by T, S is almost exact
    for how in ({"state": "zero"}, {"state": "last"}, {"kv": False}):
        changed = linked_hidden(net, ids, first, w=8, **how)[:, at]
        assert (changed - full).abs().max() > 1e-3, how


@torch.no_grad()
def test_additive_adds_the_state_from_zero(net: Network) -> None:
    """Two interiors and a query on one layer's recurrence, against sums of states that are computed apart."""
    from models.gdn import gated_delta_rule
    from models.linked import Delta, _recurrence

    g = torch.Generator().manual_seed(1)
    k = torch.nn.functional.normalize(torch.randn(1, 30, 2, 8, generator=g), dim=-1)
    q, v = torch.randn(1, 30, 2, 8, generator=g), torch.randn(1, 30, 2, 8, generator=g)
    decay, beta = -torch.rand(1, 30, 2, generator=g), torch.rand(1, 30, 2, generator=g)
    tokens, spans = Delta(k, k, v, decay, beta), [(0, 10), (10, 25)]

    def end(start: int, stop: int) -> torch.Tensor:
        s = slice(start, stop)
        return gated_delta_rule(q[:, s], k[:, s], v[:, s], decay[:, s], beta[:, s])[1]

    first, second = end(0, 10), end(10, 25)
    shrunk = decay[:, 10:25].sum(1).exp()[..., None, None] * first
    for state, h in {
        "additive": first + second,
        "decay": shrunk + second,
        "last": second,
        "zero": torch.zeros_like(first),
    }.items():
        s = slice(25, 30)
        expected = gated_delta_rule(q[:, s], k[:, s], v[:, s], decay[:, s], beta[:, s], h)[0]
        torch.testing.assert_close(_recurrence(q, tokens, spans, spans, state)[:, s], expected, msg=state)
