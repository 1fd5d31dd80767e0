"""A worker's side of the control socket, played by a test over a real socket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from hypic.router import messages as m
from hypic.router.actions import Prompt


def key(i: int) -> bytes:
    return i.to_bytes(24, "big")


def prompts(n: int, tokens: int = 1000, nbytes: int = 1000) -> list[Prompt]:
    return [Prompt(key(i), "", "", bytes(8 * tokens), nbytes) for i in range(n)]


class ScriptedWorker:
    """Says what the test tells it to say."""

    def __init__(self, context: zmq.asyncio.Context, address: str, name: str, identity: bytes = b"model"):
        self.name = name
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(address)
        self.hello = m.Hello(
            worker=name,
            epoch=name.encode(),
            identity=identity,
            data=f"ipc:///{name}",
            http=f"http://{name}",
            capacity=10**9,
            free=10**9,
            shape=m.Shape(
                artifact_bytes=500, artifact_token_bytes=10, seam_window=8, min_segment=64, forward_tokens=512
            ),
        )

    async def say(self, message: m.Message) -> None:
        await self.socket.send(m.encode(message))

    async def hear(self, kind: type) -> Any:
        """The next message, which must be of this kind."""
        message = m.decode(await self.socket.recv(), m.ToWorker)
        assert isinstance(message, kind), message
        return message

    async def join(self) -> None:
        await self.say(self.hello)
        await self.hear(m.Welcome)


def control(folder: Path) -> str:
    return f"ipc://{folder}/control"
