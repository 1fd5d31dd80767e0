"""Start SGLang engines on a CPU from one Python process, quickly, one after another.

Their processes are forked from one that has imported SGLang already (``platform_cpu/fork_server.py``); all else is SGLang's
own ``Engine``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypic.platform_cpu import CPU_MODE
from hypic.platform_cpu.defaults import set_environment
from hypic.platform_cpu.fork_server import in_env, use


def start_engine(
    model: str | Path, *, env: Mapping[str, str] | None = None, spawn: bool = False, **server_args: Any
) -> Any:
    """An ``sglang.Engine`` on the CPU. Call its ``shutdown()``; have one alive at a time.

    Args:
        model: path of a checkpoint, for example ``tiny_models.build("qwen3next")``.
        env: variables for this engine's processes, on top of this process's own. SGLang loads plugins once per
            process, so what must reach hooks in *this* process has to be in ``os.environ`` before the first call.
        spawn: start the processes as SGLang does; needed when ``env`` holds what is read at import (TRITON_INTERPRET).
        server_args: fields of SGLang's ServerArgs.
    """
    os.environ.setdefault(CPU_MODE, "1")
    set_environment()
    environ = dict(os.environ) | dict(env or {})
    set_environment(environ, server_args.get("dtype"))
    server_args = {"log_level": "error", "skip_server_warmup": True, **server_args}
    engine = _engine_class(environ, spawn)
    return engine(model_path=str(model), **server_args)


@contextmanager
def running_engine(model: str | Path, **kwargs: Any) -> Iterator[Any]:
    """:func:`start_engine`, shut down at the end of the block."""
    engine = start_engine(model, **kwargs)
    try:
        yield engine
    finally:
        engine.shutdown()


def _engine_class(env: Mapping[str, str], spawn: bool) -> Any:
    from sglang.srt.entrypoints.engine import Engine

    managers: list[Any] = []

    def init_tokenizer_manager(*args: Any) -> Any:
        made = Engine.init_tokenizer_manager_func(*args)
        managers.append(made[0])
        return made

    class CpuEngine(Engine):
        tokenizer_manager: Any
        init_tokenizer_manager_func = staticmethod(init_tokenizer_manager)

        if not spawn:
            run_scheduler_process_func = staticmethod(in_env(env, "run_scheduler_process"))
            run_detokenizer_process_func = staticmethod(in_env(env, "run_detokenizer_process"))

        def __init__(self, **kwargs: Any) -> None:
            try:
                super().__init__(**kwargs)
            except BaseException:
                for manager in managers:  # it is made before the model is loaded
                    _close(manager)
                raise

        @classmethod
        def _launch_scheduler_processes(cls, *args: Any, **kwargs: Any) -> Any:
            # The detokenizer is launched later in the same call.
            if not spawn:
                use()
            with environ_with(env):
                return super()._launch_scheduler_processes(*args, **kwargs)

        @classmethod
        def _launch_detokenizer_subprocesses(cls, *args: Any, **kwargs: Any) -> Any:
            with environ_with(env):
                return super()._launch_detokenizer_subprocesses(*args, **kwargs)

        def shutdown(self) -> None:
            """End this engine's processes; unlike the original, leave the fork server for the next engine."""
            manager, self.tokenizer_manager = self.tokenizer_manager, None
            if manager is None:
                return
            watchdog = manager._subprocess_watchdog
            watchdog.stop()
            for process in watchdog._processes:
                process.kill()
                process.join()
            _close(manager)
            self.send_to_rpc.close(linger=0)

    return CpuEngine


def _close(manager: Any) -> None:
    """Collected in one cycle with its context, a socket may be closed behind it, which waits for it for ever."""
    for connection in (manager.recv_from_detokenizer, manager.send_to_scheduler):
        connection.close(linger=0)


@contextmanager
def environ_with(env: Mapping[str, str]) -> Iterator[None]:
    """``os.environ`` with ``env`` on top, for the block."""
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
