"""Processes of a cluster forked from one that has imported SGLang, on a CPU: a start takes seconds, and pages are shared.

With a GPU each process is an interpreter of its own, as SGLang has it: CUDA does not survive a fork.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

_PRELOAD = [
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.tokenizer_manager",
    "hypic.router.launch.preload",
]


class Nursery:
    """A process that has imported what the others need.

    Args:
        env: what all have in common; it counts while modules are imported, and plugins are activated.
    """

    def __init__(self, env: Mapping[str, str]):
        self._context: Any = mp.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        before = dict(os.environ)
        os.environ.update(env)
        try:
            forkserver.ensure_running()
        finally:
            os.environ.clear()
            os.environ.update(before)

    def close(self) -> None:
        """Fork no more; whoever waits in :meth:`spawn` gets an OSError or EOFError. What was forked goes on."""
        if (pid := getattr(forkserver._forkserver, "_forkserver_pid", None)) is not None:
            os.kill(pid, signal.SIGKILL)

    def spawn(self, module: str, args: Sequence[str], env: Mapping[str, str], output: int) -> BaseProcess:
        """``python -m MODULE ARGS`` under `env`, in a session of its own, its output into the pipe `output`.

        Blocks while modules are imported.
        """
        with Connection(os.dup(output), readable=False) as log:
            process: BaseProcess = self._context.Process(target=_run, args=(module, list(args), dict(env), log))
            process.start()
        return process


def _run(module: str, args: list[str], env: dict[str, str], log: Connection) -> None:
    os.setsid()
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [module, *args]
    from hypic.platform_cpu import fork_server

    fork_server.inherit()
    if module == "hypic.router.front":
        from hypic.router.front.__main__ import main

        sys.exit(main(args))
    from hypic.cli import app

    app(args)
