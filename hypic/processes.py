"""Child processes that must not outlive us."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def terminable(*signals: signal.Signals) -> Iterator[None]:
    """These signals (none: SIGTERM) leave the block as Ctrl-C does, so that it ends what it started: servers hold GPUs.

    Outside of the main thread, where no signal arrives, it changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _leave) for number in signals or (signal.SIGTERM,)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)
