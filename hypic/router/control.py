"""The router's control socket: frames in, the coordinator's decisions out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import zmq

from hypic.router import messages as m
from hypic.router.actions import Action, Broken, Forward, Send, Settings
from hypic.router.transport.security import Curve, Listener
from hypic.router.transport.zmq_client import ENVELOPE
from hypic.router.transport.zmq_server import send_now

_QUEUE = 1024
"""Frames that libzmq may hold for each worker, each way. What does not fit is lost, which every message survives."""


class Decides(Protocol):
    """What is used of a :class:`hypic.router.coordinator.Coordinator`."""

    settings: Settings

    def receive(self, peer: bytes, message: Any, now: float) -> list[Action]: ...

    def tick(self, now: float) -> list[Action]: ...


class ControlSocket:
    """A ROUTER that workers connect to.

    Args:
        coordinator: decides.
        address: what to bind: ``ipc://`` in a folder of ours, or ``tcp://`` with `curve`.
        act: called with each Forward and Broken, from the event loop; must not block.
        curve: keys; needed for TCP.
    """

    def __init__(
        self,
        coordinator: Decides,
        address: str,
        act: Callable[[Forward | Broken], None],
        curve: Curve | None = None,
    ):
        self.coordinator, self._address, self._act, self._curve = coordinator, address, act, curve
        self.inbox = m.Inbox(m.ToRouter, "router")
        self.unsent = 0
        """Messages for workers that are gone or do not read."""

    async def start(self) -> str:
        """Raises InsecureError or zmq.ZMQError; then nothing is left open."""
        options = {
            zmq.MAXMSGSIZE: m.limit(m.ToRouter) + ENVELOPE,
            zmq.SNDHWM: _QUEUE,
            zmq.RCVHWM: _QUEUE,
        }
        self._listener = Listener(self._address, self._curve, options)
        self._socket = self._listener.socket
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._tick())]
        return self._listener.address

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()

    def carry_out(self, actions: Iterable[Action]) -> None:
        """Send what is to be sent, hand the rest to the front."""
        for action in actions:
            if not isinstance(action, Send):
                self._act(action)
                continue
            try:
                send_now(self._socket, [action.peer, m.encode(action.message)])
            except zmq.ZMQError:
                self.unsent += 1

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 2:
                self.inbox.reject("frames")
            elif (message := self.inbox.read(frames[1])) is not None:
                self.carry_out(self.coordinator.receive(frames[0], message, time.monotonic()))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.coordinator.settings.heartbeat / 4)
            self._listener.gate.refresh()
            self.carry_out(self.coordinator.tick(time.monotonic()))
