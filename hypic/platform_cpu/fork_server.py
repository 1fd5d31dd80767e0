"""A process that imports SGLang once; CPU mode forks schedulers and detokenizers from it.

SGLang spawns a new interpreter for each of them, which imports for ten seconds on a laptop, one after the other and after
the launcher's own imports. With a GPU that stays so: CUDA does not survive a fork.
"""

from __future__ import annotations

import functools
import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from typing import Any

_PRELOAD = ["hypic.platform_cpu.preload"]
_ENTRIES = ("run_scheduler_process", "run_detokenizer_process")

_started = False
_inherited = False


def start() -> None:
    """Begin the imports, beside whatever this process does meanwhile; it ends with this process.

    From here on :func:`launch` forks what SGLang would spawn. The environment must be set up: plugins load in there, too.
    """
    global _started
    if _inherited:
        return
    mp.set_forkserver_preload(_PRELOAD)
    forkserver.ensure_running()
    _started = True


def inherit() -> None:
    """This process has imported SGLang itself, or was forked from one that has: :func:`start` has nothing to do, and what SGLang
    would spawn is forked from here. For a process that starts one engine and does nothing else before: threads do not survive a
    fork."""
    global _started, _inherited
    _started = _inherited = True


def use() -> None:
    """Make the fork server the start method of this process: SGLang has just chosen "spawn"."""
    if _inherited:
        mp.set_start_method("fork", force=True)
        return
    mp.set_start_method("forkserver", force=True)
    mp.set_forkserver_preload(_PRELOAD)


def launch(original: Callable[..., Any], cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the methods of SGLang's Engine that start processes: fork them, if :func:`start` was called."""
    if not _started:
        return original(cls, *args, **kwargs)
    use()
    return original(cls, *map(_forked, args), **{name: _forked(value) for name, value in kwargs.items()})


def _forked(value: Any) -> Any:
    """An entry point of SGLang's processes, under this process's environment; anything else as it is."""
    name = getattr(value, "__name__", None)
    return in_env(os.environ, name) if name in _ENTRIES else value


def in_env(env: Mapping[str, str], entry: str) -> Callable[..., None]:
    """SGLang's process entry point `entry` ("run_scheduler_process", say), to be run under `env` and nothing else."""
    return functools.partial(_run, dict(env), entry)


def _run(env: Mapping[str, str], entry: str, *args: Any) -> None:
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    os.environ.clear()
    os.environ.update(env)
    from sglang.srt.environ import envs
    from sglang.srt.managers import detokenizer_manager, scheduler

    for name in ("TEST_RETRACT", "TEST_RETRACT_INTERVAL"):  # read at import, in the fork server
        setattr(scheduler, name, getattr(envs, f"SGLANG_{name}").get())
    target: Callable[..., None] = getattr(scheduler, entry, None) or getattr(detokenizer_manager, entry)
    target(*args)


def _end_with_launcher() -> None:
    """SGLang's processes ask the kernel to end them with their parent; here that is the fork server, which they keep alive."""
    launcher = mp.parent_process()
    assert launcher is not None
    launcher.join()
    os.kill(os.getpid(), signal.SIGKILL)
