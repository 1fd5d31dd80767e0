"""The device arena: one uint8 buffer, cut into blobs by a first-fit allocator on the host."""

from __future__ import annotations

import bisect

import torch

ALIGN = 256


def align(n: int) -> int:
    """`n` rounded up to the arena's granule (bytes)."""
    return -(-n // ALIGN) * ALIGN


class Arena:
    """Bytes of one device, allocated once.

    Deterministic: the same calls give the same offsets, so all TP ranks cut their arenas alike.

    Args:
        nbytes: size; rounded down to the granule.
        device: where the buffer lives.
        buffer: memory to use (uint8, at least `nbytes`); allocated if not given.
    """

    def __init__(self, nbytes: int, device: torch.device | str, buffer: torch.Tensor | None = None):
        self.nbytes = nbytes // ALIGN * ALIGN
        self.buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=device) if buffer is None else buffer
        self._free: list[tuple[int, int]] = [(0, self.nbytes)] if self.nbytes else []
        self._used: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        return sum(n for _, n in self._free)

    def alloc(self, nbytes: int) -> int | None:
        """Offset of a fresh block of `nbytes` (rounded up to the granule), or None if no hole is large enough."""
        want = align(nbytes)
        for i, (offset, size) in enumerate(self._free):
            if size >= want:
                self._free[i : i + 1] = [(offset + want, size - want)] if size > want else []
                self._used[offset] = want
                return offset
        return None

    def free(self, offset: int) -> None:
        """Give a block back. Raises KeyError if `offset` is not the start of one (a double free)."""
        size = self._used.pop(offset)
        i = bisect.bisect(self._free, (offset, 0))
        if i < len(self._free) and self._free[i][0] == offset + size:
            size += self._free.pop(i)[1]
        if i and sum(self._free[i - 1]) == offset:
            offset, before = self._free.pop(i - 1)
            size += before
            i -= 1
        self._free.insert(i, (offset, size))

    def check_integrity(self) -> None:
        """Free and used blocks are disjoint and together are the whole arena. Raises AssertionError."""
        at = 0
        for offset, size in sorted([*self._free, *self._used.items()]):
            assert offset == at and size > 0, f"arena: block at {offset} (size {size}), expected one at {at}"
            at = offset + size
        assert at == self.nbytes, f"arena: blocks end at {at} of {self.nbytes}"
