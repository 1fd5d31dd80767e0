"""The out-of-tree platform: SGLang's own CPU device, with every multi-platform layer on its plain-torch path."""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform
from torch.profiler import ProfilerActivity

from .hooks import TABLE


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """CPU without SGLang's compiled CPU kernels (no wheel on PyPI carries them).

    Being out of tree, it makes SGLang's layers take ``forward_native``; pools and caches are SGLang's own classes.
    The two methods below that check the table run in the launching process and in every scheduler
    process, after the hooks: a half-applied table stops the server there.
    """

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        TABLE.require_applied()

    def get_paged_allocator_cls(self) -> Any:
        from .allocator import make_allocator

        TABLE.require_applied()
        return make_allocator

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_mla_kv_pool_cls(self) -> Any:
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        def make_pool(*args: Any, index_head_dim: int | None = None, **kwargs: Any) -> MLATokenToKVPool:
            """SGLang also says the width of a sparse index, which this pool has no room for."""
            if index_head_dim is not None:
                raise NotImplementedError("CPU mode has no sparse attention (DSA)")
            return MLATokenToKVPool(*args, **kwargs)

        return make_pool

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> ProfilerActivity:
        return ProfilerActivity.CPU

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False
