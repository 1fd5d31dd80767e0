"""What a coordinator takes and gives: segments of a request, times, and the actions that its caller carries out."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from hypic.router import messages as m


class Send(NamedTuple):
    """Send `message` to the connection `peer`."""

    peer: bytes
    message: m.Message


class Forward(NamedTuple):
    """The client's HTTP request may go to this worker now."""

    request: str
    worker: str
    http: str


class Broken(NamedTuple):
    """The combine worker is gone. If nothing was streamed yet, submit the request again under another id."""

    request: str
    worker: str


Action = Send | Forward | Broken


class Prompt(NamedTuple):
    """A segment of a request: what `Compile` and `Expect` say of it, and the size of its artifact."""

    key: bytes
    tenant: str
    adapter: str
    tokens: bytes
    nbytes: int
    method: str = ""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the cluster, in seconds."""

    heartbeat: float = 0.5
    dead_after: float = 3.0
    expect_within: float = 0.5
    """For the answer to Expect; then the request goes to the combine worker all the same."""
    compile_within: float = 60.0
    arrive_within: float = 60.0
