"""Where prompts with the same beginning went: their keys and values are in that worker's radix tree, as like as not.

A hint, never a promise: nobody announces what a radix tree has dropped. The next turn of a conversation finds its worker by it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from hypic.segment import Bounds

BLOCK = 64
"""Tokens."""
MOST = 1 << 17
"""Blocks that are remembered, of prompts of about eight million tokens; a block takes some 250 bytes."""


def digests(ids: array[int], space: str, cached: Iterable[Bounds] = (), block: int = BLOCK) -> list[bytes]:
    """A digest for each whole block of a prompt, of all that stands up to its end.

    Args:
        ids: the prompt.
        space: what keeps its keys and values apart from those of the same tokens elsewhere: tenant, adapter, method.
        cached: its segments; where they begin and end matters, as keys and values do depend on that.
        block: tokens of a block.
    """
    seen, out = blake2b(space.encode(), digest_size=8), []
    edges = [array("q", b).tobytes() for b in cached]
    starts = [b.start for b in cached]
    at = 0
    for end in range(block, len(ids) + 1, block):
        while at < len(starts) and starts[at] < end:
            seen.update(edges[at])
            at += 1
        seen.update(ids[end - block : end].tobytes())
        out.append(seen.digest())
    return out


class Prefixes:
    """Workers by block.

    Args:
        most: blocks to remember; the least recently seen go first.
    """

    def __init__(self, most: int = MOST):
        self._most = most
        self._seen: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def remember(self, worker: str, blocks: Sequence[bytes]) -> None:
        """A prompt with these digests goes to that worker."""
        for block in blocks:
            workers = self._seen.pop(block, ())
            self._seen[block] = workers if worker in workers else (*workers, worker)
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def tokens(self, blocks: Sequence[bytes]) -> dict[str, int]:
        """How much of the prompt's beginning has gone to each worker before; those that saw nothing of it are left out."""
        out: dict[str, int] = {}
        for n in range(len(blocks), 0, -1):
            for worker in self._seen.get(blocks[n - 1], ()):
                out.setdefault(worker, n * BLOCK)
        return out

    def leave(self, worker: str) -> None:
        """It is lost, and what it held with it."""
        for block in [b for b, workers in self._seen.items() if worker in workers]:
            if rest := tuple(w for w in self._seen[block] if w != worker):
                self._seen[block] = rest
            else:
                del self._seen[block]

    def clear(self) -> None:
        """All radix trees were flushed."""
        self._seen.clear()
