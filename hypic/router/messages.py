"""What router and workers say to each other: msgpack of tagged structs behind a protocol version.

A frame is ``b"hyp"``, one byte of protocol version, then one msgpack array: the kind, then the fields in order. Nothing
else is ever read from a wire, and nothing is ever unpickled. :class:`Inbox` turns frames into messages; what it cannot
read it counts under a name from :data:`REJECTIONS` and drops.

``python -m hypic.router.messages`` prints the tables of docs/PROTOCOL.md.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, get_args

import msgspec
from msgspec import Meta

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 2
MAGIC = b"hyp"
_PREFIX = len(MAGIC) + 1
KEY_BYTES = 24

Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Name = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
Text = Annotated[str, Meta(max_length=512)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(ge=0, le=1e6)]
Rate = Annotated[float, Meta(ge=0, le=1e12)]
Digest = Annotated[bytes, Meta(min_length=1, max_length=64)]
Tokens = Annotated[bytes, Meta(min_length=8)]
PublicKey = Annotated[bytes, Meta(max_length=40)]
Keys = Annotated[tuple[Key, ...], Meta(max_length=65536)]

REJECTIONS: Mapping[str, str] = {
    "frames": "not the number of frames that this socket takes",
    "oversized": "longer than its kind may be, or than any kind",
    "garbage": "does not begin like a frame of hypic, or is not msgpack",
    "version": "another protocol version",
    "unknown_kind": "a kind that this version does not have",
    "unexpected": "a kind that this socket does not take",
    "invalid": "a field is missing, one too many, of another type, or out of range",
    "trailing": "bytes behind the message",
    "stranger": "the sender has not said Hello, or another sender has this name",
}
"""Why a frame is dropped, and counted."""


class Rejected(ValueError):
    """A frame that must not be used. ``reason`` is a key of REJECTIONS."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail or REJECTIONS[reason]}")
        self.reason = reason


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all messages."""

    LIMIT: ClassVar[int] = 4096
    """Bytes of a frame of this kind."""
    ROUTE: ClassVar[str] = ""
    """Who says it to whom."""


def _require_tokens(tokens: bytes) -> None:
    if len(tokens) % 8:
        raise ValueError("tokens: not a whole number of 64-bit ids")


# ---------------------------------------------------------------------- worker to router


class Shape(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a worker's artifacts and passes are like: what placement reckons with."""

    artifact_bytes: Count = 0
    """Of any artifact, however short."""
    artifact_token_bytes: Count = 0
    """And for each token of its interior."""
    seam_window: Count = 0
    min_segment: Count = 0
    """Segments of fewer tokens are not cached."""
    forward_tokens: Count = 0
    """Of the largest forward pass; 0 if unbounded."""


class Hello(Message, tag=1, frozen=True):
    """I am here, empty until I say otherwise; the first message of every connection."""

    LIMIT = 4096
    ROUTE = "worker to router"
    worker: Name
    epoch: Digest
    """Drawn at random when the process starts: two runs of one worker differ."""
    identity: Digest
    """Digest of what all artifacts of this worker are a function of; all workers of a router must agree."""
    data: Text
    """Address of the socket that serves artifacts."""
    http: Text
    """Base URL of its OpenAI-compatible server."""
    capacity: Count
    free: Count
    tokens_per_s: Rate = 0.0
    """Compile speed measured so far; 0 if unknown."""
    shape: Shape = Shape()
    public_key: PublicKey = b""
    """CURVE key of its data socket; empty for ipc."""


class Heartbeat(Message, tag=2, frozen=True):
    """I live; and my load as I see it."""

    LIMIT = 256
    ROUTE = "worker to router"
    seq: Count
    queued_tokens: Count
    running: Count
    free: Count
    tokens_per_s: Rate = 0.0


class Stored(Message, tag=3, frozen=True):
    """I hold these artifacts from now on. `seq` counts Stored and Evicted, so that a gap is seen."""

    LIMIT = 4 << 20
    ROUTE = "worker to router"
    seq: Count
    keys: Keys
    nbytes: Annotated[tuple[Count, ...], Meta(max_length=65536)]

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.nbytes):
            raise ValueError("keys and nbytes differ in length")


class Evicted(Message, tag=4, frozen=True):
    """I hold these no more."""

    LIMIT = 4 << 20
    ROUTE = "worker to router"
    seq: Count
    keys: Keys


class Compiled(Message, tag=5, frozen=True):
    """The compile that was ordered is done, or has failed."""

    LIMIT = 1024
    ROUTE = "worker to router"
    flight: Count
    key: Key
    ok: bool
    nbytes: Count = 0
    seconds: Seconds = 0.0
    """From the start of its prefill; without queueing, so that it measures the worker's speed."""
    reason: Text = ""


class Expecting(Message, tag=6, frozen=True):
    """Answer to Expect: what I hold, what I have reserved space for and await, what I shall compute myself."""

    LIMIT = 1 << 20
    ROUTE = "worker to router"
    request: Name
    held: Keys = ()
    awaited: Keys = ()
    refused: Keys = ()


class Arrived(Message, tag=7, frozen=True):
    """An expected artifact is in my arena, or will not come and I compile it."""

    LIMIT = 1024
    ROUTE = "worker to router"
    request: Name
    key: Key
    ok: bool
    seconds: Seconds = 0.0
    """From the first chunk to the last."""
    reason: Text = ""


class Bye(Message, tag=8, frozen=True):
    """I stop; send me nothing more."""

    LIMIT = 64
    ROUTE = "worker to router"


# ---------------------------------------------------------------------- router to worker


class Welcome(Message, tag=16, frozen=True):
    """You are part of the cluster. Announce all that you hold, then beat."""

    LIMIT = 256
    ROUTE = "router to worker"
    router: Digest
    """Drawn at random when the router starts; another one means that it knows nothing of what was before."""
    heartbeat: Seconds
    dead_after: Seconds


class Refused(Message, tag=17, frozen=True):
    """You are not part of the cluster (another model, dtype, seam window, protocol)."""

    LIMIT = 1024
    ROUTE = "router to worker"
    reason: Text


class Resync(Message, tag=18, frozen=True):
    """An announcement was lost: announce all that you hold once more."""

    LIMIT = 64
    ROUTE = "router to worker"


class Compile(Message, tag=19, frozen=True):
    """Compile this segment; serve it to whoever asks for it."""

    LIMIT = 16 << 20
    ROUTE = "router to worker"
    flight: Count
    request: Name
    key: Key
    tenant: Text
    adapter: Text
    tokens: Tokens
    """int64 little-endian ids of the whole segment, as in the header of its artifact."""
    deadline: Seconds
    """From receipt; a compile that has not begun by then is dropped."""
    more: Count = 0
    """Orders that follow at once: they belong into one forward pass."""
    method: Text = ""
    """Name of a caching method of the server; "" is its default."""

    def __post_init__(self) -> None:
        _require_tokens(self.tokens)


class Wanted(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A segment that a request will link, and who has its artifact or is making it."""

    key: Key
    tenant: Text
    adapter: Text
    tokens: Tokens
    source: Name
    address: Text
    cold: bool
    """It is compiled for this request; otherwise the source has it already."""
    public_key: PublicKey = b""
    method: Text = ""

    def __post_init__(self) -> None:
        _require_tokens(self.tokens)


class Expect(Message, tag=20, frozen=True):
    """A request for these segments follows: reserve space for all of them or none, and fetch them."""

    LIMIT = 32 << 20
    ROUTE = "router to worker"
    request: Name
    segments: Annotated[tuple[Wanted, ...], Meta(min_length=1, max_length=16384)]
    deadline: Seconds
    """From receipt; what has not arrived by then is compiled here."""


class Reroute(Message, tag=21, frozen=True):
    """The source of an expected artifact is lost: fetch it from this one; an empty address says compile it yourself."""

    LIMIT = 2048
    ROUTE = "router to worker"
    request: Name
    key: Key
    source: Name
    address: Text
    public_key: PublicKey = b""


class Cancel(Message, tag=22, frozen=True):
    """The request is gone: drop its compiles that have not begun, and what is fetched for it alone."""

    LIMIT = 256
    ROUTE = "router to worker"
    request: Name


# ---------------------------------------------------------------------- worker to worker


class Get(Message, tag=32, frozen=True):
    """Send these chunks of a blob; wait with it if you are still making it. Each chunk asked for is one credit."""

    LIMIT = 1024
    ROUTE = "worker to worker"
    transfer: Count
    key: Key
    nbytes: Annotated[int, Meta(ge=1, le=2**48)]
    chunk: Annotated[int, Meta(ge=4096, le=64 << 20)]
    wanted: Annotated[tuple[Annotated[int, Meta(ge=0, lt=2**32)], ...], Meta(min_length=1, max_length=64)]


class Chunk(Message, tag=33, frozen=True):
    """One chunk; its bytes are the next frame."""

    LIMIT = 128
    ROUTE = "worker to worker"
    transfer: Count
    index: Annotated[int, Meta(ge=0, lt=2**32)]
    crc: Annotated[int, Meta(ge=0, lt=2**32)]


class Gone(Message, tag=34, frozen=True):
    """There is no such blob here, and none is being made."""

    LIMIT = 1024
    ROUTE = "worker to worker"
    transfer: Count
    reason: Text


class Pending(Message, tag=35, frozen=True):
    """The blob is not there yet; I have not forgotten you."""

    LIMIT = 128
    ROUTE = "worker to worker"
    transfer: Count


class Stop(Message, tag=36, frozen=True):
    """Send no more of this transfer."""

    LIMIT = 128
    ROUTE = "worker to worker"
    transfer: Count


class Locate(Message, tag=37, frozen=True):
    """Where in memory that this host shares is that blob? Wait if you are still making it."""

    LIMIT = 256
    ROUTE = "worker to worker"
    transfer: Count
    key: Key
    nbytes: Annotated[int, Meta(ge=1, le=2**48)]


class Located(Message, tag=38, frozen=True):
    """There: copy it, then ask whether it was there all the time."""

    LIMIT = 1024
    ROUTE = "worker to worker"
    transfer: Count
    window: Annotated[bytes, Meta(min_length=1, max_length=768)]
    """How to map the memory (`hypic/engine/cluster/windows.py`)."""
    offset: Count
    stamp: Count
    """Of this offer; another offer of the same blob has another."""


class Confirm(Message, tag=39, frozen=True):
    """I have copied the blob. Was it on offer, under this stamp, until now?"""

    LIMIT = 256
    ROUTE = "worker to worker"
    transfer: Count
    key: Key
    stamp: Count


class Confirmed(Message, tag=40, frozen=True):
    """Yes; or no: what you have copied is worth nothing."""

    LIMIT = 128
    ROUTE = "worker to worker"
    transfer: Count
    ok: bool


ToRouter = Hello | Heartbeat | Stored | Evicted | Compiled | Expecting | Arrived | Bye
ToWorker = Welcome | Refused | Resync | Compile | Expect | Reroute | Cancel
ToSource = Get | Stop | Locate | Confirm
ToSink = Chunk | Gone | Pending | Located | Confirmed

KINDS: Mapping[int, type[Message]] = {
    kind.__struct_config__.tag: kind for union in (ToRouter, ToWorker, ToSource, ToSink) for kind in get_args(union)
}
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS = {tag: msgspec.msgpack.Decoder(kind) for tag, kind in KINDS.items()}
_HEAD = MAGIC + bytes([PROTOCOL_VERSION])


def limit(kinds: Any) -> int:
    """The longest frame of a union of kinds: what its socket's MAXMSGSIZE must let through."""
    return max(kind.LIMIT for kind in get_args(kinds))


def encode(message: Message) -> bytes:
    """The frame of a message. Raises ValueError if it is longer than its kind may be: nobody would read it."""
    frame = _HEAD + _ENCODER.encode(message)
    if len(frame) > message.LIMIT:
        raise ValueError(f"{type(message).__name__} of {len(frame)} bytes, the limit is {message.LIMIT}")
    return frame


def decode(frame: bytes | memoryview, kinds: Any) -> Any:
    """The message in a frame, one of the union `kinds`. Raises Rejected, and nothing else, on anything else.

    The size is checked against the kind before anything is parsed.
    """
    raw = memoryview(frame)
    if raw.nbytes < _PREFIX + 2 or raw[: len(MAGIC)] != MAGIC:
        raise Rejected("garbage")
    if raw[len(MAGIC)] != PROTOCOL_VERSION:
        raise Rejected("version", f"{raw[len(MAGIC)]}, this one is {PROTOCOL_VERSION}")
    body = raw[_PREFIX:]
    if not 0x90 < body[0] <= 0x9F:  # a short array, as every message is
        raise Rejected("garbage")
    kind = KINDS.get(body[1])
    if kind is None:
        raise Rejected("unknown_kind", str(body[1]))
    if raw.nbytes > kind.LIMIT:
        raise Rejected("oversized", f"{kind.__name__} of {raw.nbytes} bytes, the limit is {kind.LIMIT}")
    if kind not in get_args(kinds):
        raise Rejected("unexpected", kind.__name__)
    try:
        return _DECODERS[body[1]].decode(body)
    except msgspec.ValidationError as e:
        raise Rejected("invalid", f"{kind.__name__}: {e}") from None
    except msgspec.DecodeError as e:
        raise Rejected("trailing" if "trailing" in str(e) else "garbage", f"{kind.__name__}: {e}") from None


class Inbox:
    """The receiving end of a socket: what it takes, and what it has dropped.

    Args:
        kinds: union of the kinds that may arrive.
        name: of the socket, for the log.
    """

    def __init__(self, kinds: Any, name: str):
        self.kinds, self.name = kinds, name
        self.rejected: Counter[str] = Counter()

    def read(self, frame: bytes | memoryview) -> Any:
        """The message, or None if the frame was dropped."""
        try:
            return decode(frame, self.kinds)
        except Rejected as e:
            self.reject(e.reason, str(e))
            return None

    def reject(self, reason: str, detail: str = "") -> None:
        """Count a drop. The log gets the first of each reason, and then every power of two: garbage must not fill disks."""
        self.rejected[reason] += 1
        n = self.rejected[reason]
        if n & (n - 1) == 0:
            logger.warning("%s: dropped a frame (%s), %d so far", self.name, detail or reason, n)


# ---------------------------------------------------------------------- documentation


def tables() -> str:
    """The tables of kinds and of rejections, as docs/PROTOCOL.md has them."""
    lines = ["| kind | message | route | at most | fields | meaning |", "| --- | --- | --- | --- | --- | --- |"]
    for tag, kind in sorted(KINDS.items()):
        fields = ", ".join(f"`{name}`" for name in kind.__struct_fields__) or "none"
        lines.append(f"| {tag} | `{kind.__name__}` | {kind.ROUTE} | {_size(kind.LIMIT)} | {fields} | {_first(kind)} |")
    lines += ["", "| dropped as | because |", "| --- | --- |"]
    lines += [f"| `{reason}` | {text} |" for reason, text in REJECTIONS.items()]
    return "\n".join(lines)


def _first(kind: type) -> str:
    return (kind.__doc__ or "").split("\n")[0]


def _size(n: int) -> str:
    units: Iterable[tuple[str, int]] = (("MiB", 20), ("KiB", 10))
    return next((f"{n >> shift} {unit}" for unit, shift in units if n >> shift), f"{n} B")


if __name__ == "__main__":
    print(tables())
