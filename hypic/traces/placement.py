"""Which of several independent servers a prompt goes to, whole: what a load balancer in front of prefix caches does."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from hypic.router.prefixes import digests
from hypic.traces.prompts import Prompt

BLOCK = 128
"""Tokens: prefixes are compared in steps of so many."""


class Sent(NamedTuple):
    """Where a prompt goes, and how many of its tokens are to be computed there as far as is known."""

    server: int
    tokens: int


class Placement(Protocol):
    """Chooses for one prompt after the other."""

    def choose(self, prompt: Prompt) -> Sent: ...

    def begun(self, sent: Sent) -> None:
        """That prompt has its first token, or will get none."""

    def flushed(self) -> None:
        """All servers have empty caches."""


class RoundRobin:
    """One after the other, whatever they hold."""

    def __init__(self, servers: int) -> None:
        self._servers, self._next = servers, 0

    def choose(self, prompt: Prompt) -> Sent:
        server, self._next = self._next, (self._next + 1) % self._servers
        return Sent(server, len(prompt.ids))

    def begun(self, sent: Sent) -> None:
        return

    def flushed(self) -> None:
        self._next = 0


class Affinity:
    """Where the first token comes soonest: the fewest tokens to compute, of prompts that wait there and of this one, less the
    prefix that it shares with what was sent there before.

    What SGLang's router does with thresholds for load and for the length of a match, this does with one sum.

    Args:
        servers: how many.
        capacity: tokens that each server's cache holds; what was sent longest ago is taken to be gone.
    """

    def __init__(self, servers: int, capacity: int = 1 << 62) -> None:
        self._waiting = [0] * servers
        self._sent = [0] * servers
        self._blocks: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(servers)]
        self._most = max(capacity // BLOCK, 1)

    def choose(self, prompt: Prompt) -> Sent:
        blocks = digests(array("q", prompt.ids), repr(prompt.tenant), block=BLOCK)
        left = [len(prompt.ids) - BLOCK * self._match(known, blocks) for known in self._blocks]
        server = min(range(len(left)), key=lambda i: (self._waiting[i] + left[i], self._sent[i], i))
        known = self._blocks[server]
        for block in reversed(blocks):  # a tree loses leaves first: the head of a prefix is the youngest
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._most:
            known.popitem(last=False)
        self._waiting[server] += left[server]
        self._sent[server] += 1
        return Sent(server, left[server])

    def begun(self, sent: Sent) -> None:
        self._waiting[sent.server] -= sent.tokens

    def flushed(self) -> None:
        for known in self._blocks:
            known.clear()

    @staticmethod
    def _match(known: OrderedDict[bytes, None], blocks: Sequence[bytes]) -> int:
        return next((i for i, block in enumerate(blocks) if block not in known), len(blocks))


PLACEMENTS: dict[str, Callable[[int, int], Placement]] = {
    "affinity": Affinity,
    "round_robin": lambda servers, _: RoundRobin(servers),
}
"""By name: of a number of servers, and the tokens that each one's cache holds."""
