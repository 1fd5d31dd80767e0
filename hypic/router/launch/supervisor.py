"""Looks after the processes of a cluster: starts them, prefixes their logs, starts them again, and ends them all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Awaitable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

from hypic.router.launch.nursery import Nursery
from hypic.router.launch.plan import LaunchError, Process, status_file

_POLL = 0.2
_BACKOFF = (0.5, 30.0)
"""Seconds before the first restart in a row, and at most."""
_STEADY = 60.0
"""A process that ran this long begins anew with short waits."""
_GRACE = 3.0
"""From SIGTERM to SIGKILL. A worker has nothing to save; its clients get their errors from the router."""
_LAST_LINES = 30


class Child:
    """One process and its restarts.

    Args:
        nursery: forks it; None starts an interpreter.
    """

    def __init__(self, process: Process, out: TextIO, width: int, nursery: Nursery | None = None):
        self._nursery = nursery
        self.process, self.out, self._prefix = process, out, f"{process.name:{width}} | "
        self.restarts = 0
        self.pid = 0
        """0 while it does not run."""
        self.last: deque[str] = deque(maxlen=_LAST_LINES)
        """What it printed last."""

    async def run(self) -> int:
        """Run it once, to its end. Returns the exit status."""
        reader, writer = os.pipe()
        try:
            ended = await self._start(writer)
        except (OSError, EOFError):  # the nursery was closed
            os.close(reader)
            return -signal.SIGKILL
        finally:
            os.close(writer)
        loop, stream = asyncio.get_running_loop(), asyncio.StreamReader()
        pipe = open(reader, "rb", buffering=0)  # noqa: SIM115 - the transport closes it
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
        copying = asyncio.create_task(self._copy(stream))
        try:
            return await ended
        finally:
            self.kill()  # what it has started, too: then the pipe ends
            self.pid = 0
            with contextlib.suppress(TimeoutError):  # unless something has left the group
                await asyncio.wait_for(copying, _GRACE)
            transport.close()

    async def _start(self, output: int) -> Awaitable[int]:
        """Start it, in a session of its own: Ctrl-C reaches the launcher alone, and its group can be ended as a whole."""
        command, env = self.process.command, self.process.env
        if self._nursery is not None:
            forked = await asyncio.to_thread(self._nursery.spawn, command[2], command[3:], env, output)
            self.pid = forked.pid or 0
            return _ended(forked)
        process = subprocess.Popen(
            command, env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        self.pid = process.pid
        return asyncio.to_thread(process.wait)

    def terminate(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """The whole process group."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _copy(self, stream: asyncio.StreamReader) -> None:
        """Lines with the name in front."""
        while line := await _line(stream):
            self.last.append(line)
            print(self._prefix + line, end="", file=self.out, flush=True)


class Supervisor:
    """A cluster while it runs.

    Args:
        front, workers: what to start.
        folder: of the sockets.
        stagger: start a worker only once the one before it is alive.
        out: where logs go.
        nursery: forks them all; None starts interpreters.
        local: the control socket is in the folder; else workers of other hosts may join, too.
        api_key: what the front wants to hear before it answers; "" if nothing.
    """

    def __init__(
        self,
        front: Process,
        workers: Sequence[Process],
        folder: Path,
        stagger: bool = False,
        out: TextIO | None = None,
        nursery: Nursery | None = None,
        local: bool = True,
        api_key: str = "",
    ):
        width = max(len(p.name) for p in (front, *workers))
        self.front, *self.workers = (Child(p, out or sys.stdout, width, nursery) for p in (front, *workers))
        self._folder, self._stagger, self._local = folder, stagger, local
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._up: set[str] = set()
        """Workers that were alive once, and "router" once its front answered."""
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Ends with a LaunchError once the cluster cannot go on."""

    async def start(self, least: int) -> None:
        """Start everything, and wait until `least` workers are alive. Raises LaunchError."""
        self._tasks.append(asyncio.create_task(self._keep(self.front)))
        control = self._folder / "control"
        while not control.exists() and "router" not in self._up:  # then its flags, its model and its port are good
            await (self._moment() if self._local else self._look())
        for child in self.workers:
            self._tasks.append(asyncio.create_task(self._keep(child)))
            while self._stagger and child.process.name not in self._up:
                await self._look()
        while len(self._up - {"router"}) < least:
            await self._look()

    async def run(self) -> None:
        """Until stopped. Raises LaunchError."""
        while True:
            await self._look()

    async def stop(self) -> None:
        """End all processes; takes seconds."""
        self._stopping.set()
        children = [self.front, *self.workers]
        for child in children:
            child.terminate()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_GRACE)
        for child in children:
            child.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.failed.done():
            self.failed.exception()

    # ------------------------------------------------------------------ helpers

    async def _keep(self, child: Child) -> None:
        """Run it, and again whenever it ends."""
        wait = _BACKOFF[0]
        while not self._stopping.is_set():
            began = time.monotonic()
            self._write_status()
            status = await child.run()
            self._write_status()
            if self._stopping.is_set():
                return
            if (child is self.front and "router" not in self._up) or (
                child.process.name not in self._up and not child.restarts
            ):
                self._fail(f"{child.process.name} ended with status {status} before it was ready", child)
                return
            child.restarts += 1
            wait = _BACKOFF[0] if time.monotonic() - began > _STEADY else wait
            print(
                f"hypic launch: {child.process.name} ended with status {status}; starting it again in {wait:g} s "
                f"(restart {child.restarts})",
                file=sys.stderr,
                flush=True,
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait)
            wait = min(2 * wait, _BACKOFF[1])

    def _fail(self, text: str, child: Child) -> None:
        """With what it said last, unless that stands right above."""
        if self.failed.done():
            return
        if last := "".join(child.last)[-2000:].rstrip():
            text += "; see above" if _one_place(child.out, sys.stderr) else f"\n{last}"
        self.failed.set_exception(LaunchError(text))

    def _write_status(self) -> None:
        """For the front, which need not wait for a dead worker's heartbeats; a reader sees the old file or the new one."""
        known = {c.process.name: {"pid": c.pid, "restarts": c.restarts} for c in (self.front, *self.workers)}
        part = status_file(self._folder).with_suffix(".part")
        part.write_text(json.dumps(known))
        part.replace(status_file(self._folder))

    async def _look(self) -> None:
        """See which workers are alive."""
        await self._moment()
        self._write_status()
        url = f"{self.front.process.http}/workers"
        if (snapshot := await asyncio.to_thread(get_json, url, self._headers)) is not None:
            self._up |= {"router", *(w["name"] for w in snapshot["workers"] if w["state"] != "absent")}

    async def _moment(self) -> None:
        await asyncio.wait((self.failed,), timeout=_POLL if len(self._up) <= len(self.workers) else 1.0)
        if self.failed.done():
            self.failed.result()


def _one_place(*streams: TextIO) -> bool:
    """Whether all are one file, terminal or pipe."""
    try:
        return len({(s.st_dev, s.st_ino) for s in (os.fstat(stream.fileno()) for stream in streams)}) == 1
    except (OSError, ValueError):  # closed, or kept in memory
        return False


async def _ended(process: BaseProcess) -> int:
    """The exit status of a forked process, once it has ended."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process.sentinel, done.set)
    try:
        await done.wait()
    finally:
        loop.remove_reader(process.sentinel)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


async def _line(stream: asyncio.StreamReader) -> str:
    """The next line; "" at the end. A line that is too long comes in parts."""
    try:
        raw = await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as e:
        raw = e.partial
    except asyncio.LimitOverrunError as e:
        raw = await stream.readexactly(e.consumed) + b"\n"
    return raw.decode(errors="replace")


def get_json(url: str, headers: dict[str, str] | None = None, timeout: float = 5.0) -> Any:
    """What a server of ours answers; None if it does not."""
    try:
        request = urllib.request.Request(url, headers=headers or {})
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.load(response)
    except (OSError, ValueError, urllib.error.URLError):
        return None
