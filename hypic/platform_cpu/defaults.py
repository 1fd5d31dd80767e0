"""Settings under which SGLang runs well on a CPU, applied only where the user chose nothing."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import MutableMapping
from typing import Any

from hypic.ports import free_ports

_CONV_DTYPE = "SGLANG_MAMBA_CONV_DTYPE"
_CONV_DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "half": "float16"}

ENVIRONMENT = {
    # Tiny matrices: OpenMP's barriers cost thirty times the arithmetic.
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    # The bfloat16 default for convolution windows alone moves logprobs by 1e-3.
    _CONV_DTYPE: "float32",
    "TOKENIZERS_PARALLELISM": "false",
}

SERVER_ARGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    # The loop of an idle scheduler takes a whole core, which the rest of a laptop needs.
    "sleep_on_idle": True,
    # Without bounds SGLang sizes its pools by the machine's memory.
    "max_total_tokens": 32768,
    "max_running_requests": 32,
    "max_mamba_cache_size": 64,
}


def set_environment(environ: MutableMapping[str, str] = os.environ, dtype: str | None = None) -> None:
    """Set what is unset; reaches the processes that SGLang spawns, and this one if torch is not imported yet.

    Args:
        dtype: as ``--dtype`` has it. Convolution windows must be in that type: SGLang's CPU path copies inputs as they are.
    """
    if dtype in _CONV_DTYPES and environ.get(_CONV_DTYPE, ENVIRONMENT[_CONV_DTYPE]) == ENVIRONMENT[_CONV_DTYPE]:
        environ[_CONV_DTYPE] = _CONV_DTYPES[dtype]
    for name, value in ENVIRONMENT.items():
        environ.setdefault(name, value)


def fill_server_args(server_args: Any) -> None:
    """Give ServerArgs fields that still hold their dataclass default the value that suits a CPU."""
    defaults = {f.name: f.default for f in dataclasses.fields(server_args)}
    for name, value in SERVER_ARGS.items():
        if getattr(server_args, name) == defaults[name]:
            setattr(server_args, name, value)
    if server_args.nccl_port is None and server_args.dp_size == 1:
        # SGLang takes one that the system may give to a connection before the scheduler, seconds later, binds it.
        (server_args.nccl_port,) = free_ports(1)
