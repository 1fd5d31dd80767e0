"""One real cluster of three workers for all tests of this folder: its start takes most of the time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytest.register_assert_rewrite(
    "tests.server.serving", "tests.cases.driving", "tests.cluster.launched", "tests.cluster.asking"
)
from hypic.router.transport.security import make_folder  # noqa: E402
from tests.cases.driving import Writer  # noqa: E402
from tests.cluster.launched import Cluster, launched  # noqa: E402
from tests.server.naming import Names  # noqa: E402
from tests.server.serving import TextWriter  # noqa: E402

ARENA_BYTES = 16 << 20
FLAGS = (
    "--hypic-memory",
    str(ARENA_BYTES),
    "--hypic-methods",
    "seam,seam-24",
    "--log-level",
    "error",
    "--enable-cache-report",
    "--enable-metrics",
    "--enable-lora",
    "--lora-backend",
    "torch_native",
    "--max-lora-rank",
    "4",
    "--lora-target-modules",
    "o_proj",
)


@pytest.fixture(scope="session")
def cluster_of_session(tiny_model: Callable[[str], Path]) -> Iterator[Cluster]:
    folder = make_folder()
    try:
        with launched(tiny_model("qwen35"), folder, *FLAGS) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def cluster(cluster_of_session: Cluster) -> Iterator[Cluster]:
    """The cluster; after every test all workers are alive, and none has a request, lock or slot left over (exact sets)."""
    yield cluster_of_session
    cluster_of_session.audit()


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LoRA adapter of the model, strong enough to change every answer."""
    folder, rng = tmp_path_factory.mktemp("adapter"), torch.Generator().manual_seed(0)
    module = "base_model.model.model.layers.3.self_attn.o_proj"
    weights = {"lora_A": 0.3 * torch.randn(4, 256, generator=rng), "lora_B": 0.3 * torch.randn(128, 4, generator=rng)}
    save_file({f"{module}.{name}.weight": w for name, w in weights.items()}, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def names(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Names]:
    made = Names(cluster, f"tenant of {request.node.nodeid}")
    yield made
    made.clear()


@pytest.fixture
def write(request: pytest.FixtureRequest) -> Writer:
    return Writer(request.node.nodeid)


@pytest.fixture
def text(request: pytest.FixtureRequest) -> TextWriter:
    return TextWriter(request.node.nodeid)
