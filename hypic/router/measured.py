"""Costs that follow what workers say: sizes from their Hello, the rate of transfers and of messages as they are seen.

Compile speeds are each worker's own and live in :class:`hypic.router.schedule.Worker`.
"""

from __future__ import annotations

import msgspec

from hypic.router import messages as m
from hypic.router.costs import Costs
from hypic.router.schedule import EWMA

BUILT_IN = Costs(
    source="built in, until measured",
    tokens_per_s=10_000,
    forward_s=0.02,
    link_s=0.05,
    message_s=0.001,
    transfer_gb_s=1.0,
)
"""What is reckoned with before anything was measured. Cautious about what a worker does, hopeful about what scatter gains:
the first long request must be scattered for anything to be measured."""

_FROM_SHAPE = ("artifact_bytes", "artifact_token_bytes", "seam_window", "forward_tokens")
_LEAST_SECONDS = 50e-6


class _Window:
    """Transfers into one worker that overlap: its pipe is one, so only their sum measures it."""

    def __init__(self, begin: float, rate_before: float, weight: float):
        self.begin, self.until, self.nbytes = begin, begin, 0
        self.rate_before, self.weight = rate_before, weight


class Measured:
    """`costs`, kept up to date."""

    def __init__(self, costs: Costs):
        self.costs = costs
        self.transfers = 0
        self._windows: dict[str, _Window] = {}

    def hello(self, hello: m.Hello) -> None:
        """Sizes of this model's artifacts and passes; 0 is unknown."""
        said = {name: getattr(hello.shape, name) for name in _FROM_SHAPE}
        self.costs = msgspec.structs.replace(self.costs, **{k: v for k, v in said.items() if v})

    def arrived(self, worker: str, nbytes: int, seconds: float, now: float) -> None:
        """`worker` received an artifact, in `seconds` up to `now`."""
        if nbytes <= 0:
            return
        begin = now - max(seconds, _LEAST_SECONDS)
        window = self._windows.get(worker)
        if window is None or begin > window.until:
            weight = EWMA if self.transfers else 1.0
            window = self._windows[worker] = _Window(begin, self.costs.transfer_gb_s, weight)
        window.begin, window.until = min(window.begin, begin), now
        window.nbytes += nbytes
        self.transfers += 1
        rate, before = window.nbytes / (window.until - window.begin) / 1e9, window.rate_before
        self.costs = msgspec.structs.replace(self.costs, transfer_gb_s=before + window.weight * (rate - before))

    def round_trip(self, seconds: float) -> None:
        """A worker answered a message."""
        before = self.costs.message_s
        self.costs = msgspec.structs.replace(self.costs, message_s=max(before + EWMA * (seconds / 2 - before), 0.0))
