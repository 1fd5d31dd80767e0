"""How large the arena of artifacts is. It shares what is left beside the weights with SGLang's KV and state pools.

Of the memory that is free once the weights are loaded SGLang keeps a part for activations and CUDA graphs, by
--mem-fraction-static; the rest goes to its pools, or to the arena, which is taken first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hypic.config import HypicConfig
from hypic.engine.support import Unsupported

CPU_ARENA_BYTES = 1 << 30
GPU_ARENA_SHARE = 0.25
"""Of what SGLang's flags leave for pools and arena, where --hypic-memory is not given."""

REMEDY = (
    "raise --mem-fraction-static or lower --chunked-prefill-size and --cuda-graph-max-bs-decode, for which SGLang keeps memory "
    "free; or have fewer bytes of weights on each GPU (--tp-size, quantisation)"
)


class Budget(NamedTuple):
    """Bytes of a GPU with its weights loaded: those free, and those of them that SGLang keeps for neither pools nor arena."""

    free: int
    reserved: int

    @property
    def caches(self) -> int:
        return max(self.free - self.reserved, 0)

    @property
    def arena(self) -> int:
        return int(self.caches * GPU_ARENA_SHARE)

    def __str__(self) -> str:
        free, reserved, caches = (f"{n / 2**30:.2f} GiB" for n in (self.free, self.reserved, self.caches))
        return f"{free} free beside the weights, less {reserved} for activations and CUDA graphs, leave {caches} for all caches"


def measured(model_runner: Any) -> Budget:
    """Of the loaded model, by SGLang's own rule (KVCacheConfigurator._profile_available_bytes).

    Of several TP ranks it is the one with least that counts: all cut their arenas alike.
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.distributed import get_world_group
    from sglang.srt.model_executor.model_runner_components.kv_pool_runtime import is_post_capture_kv_active
    from sglang.srt.utils.common import get_available_gpu_memory, get_device_memory_capacity

    world, device, args = get_world_group(), model_runner.device, model_runner.server_args
    free = get_available_gpu_memory(
        device, model_runner.gpu_id, distributed=world.world_size > 1, cpu_group=world.cpu_group
    )
    reserved = model_runner.pre_model_load_memory * (1 - model_runner.mem_fraction_static)
    late = is_post_capture_kv_active(server_args=args, is_draft_worker=False)
    if late and mambaish_config(model_runner.model_config) is not None:
        reserved = max(reserved, args.pre_capture_activation_reserve_mb(get_device_memory_capacity(device)) / 1024)
    return Budget(int(free * 2**30), int(reserved * 2**30))


def estimated(server_args: Any, free: int, weights: int) -> Budget:
    """Before anything is loaded on a GPU with `free` bytes, for so many bytes of weights on it."""
    return Budget(max(free - weights, 0), int(free * (1 - server_args.mem_fraction_static)))


def arena_bytes(config: HypicConfig, model_runner: Any) -> int:
    """Size of the arena on this rank.

    Raises:
        Unsupported: --hypic-memory leaves nothing for SGLang's pools.
    """
    if model_runner.device == "cpu":
        return config.memory or CPU_ARENA_BYTES
    return arena_of(config, measured(model_runner))


def arena_of(config: HypicConfig, budget: Budget) -> int:
    """Size of the arena on a GPU. Raises Unsupported as arena_bytes does."""
    if config.memory >= budget.caches and config.memory:
        raise Unsupported(
            f"--hypic-memory {config.memory / 2**30:.2f}GiB leaves SGLang no memory for KV cache and states: {budget}; "
            f"give less ({budget.arena / 2**20:.0f}MiB is the default here), or {REMEDY}"
        )
    return config.memory or budget.arena


def none_fits(arena: int, needed: int, tokens: int) -> str:
    """That an arena whose size we chose holds not one segment of the fewest tokens."""
    return (
        f"the memory beside the weights is too small for hypic: an arena of {arena / 2**20:.0f}MiB ({GPU_ARENA_SHARE:.0%} of "
        f"what is left for all caches) does not hold one segment of {tokens} tokens, which takes {needed / 2**20:.0f}MiB; "
        f"{REMEDY}; or set --hypic-memory"
    )
