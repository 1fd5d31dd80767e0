"""A stranger can neither read nor inject artifacts, and nothing listens where strangers could come."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import stat
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from hypic.config import HypicConfig
from hypic.router import messages as m
from hypic.router.costs import Costs
from hypic.router.service import Router
from hypic.router.transport import Peer, TransferError
from hypic.router.transport.security import Curve, InsecureError, check_address, curve_of, make_folder, make_keys
from hypic.router.transport.zmq_blobs import ZmqTransport

KEY = bytes(m.KEY_BYTES)
TCP = "tcp://127.0.0.1:0"
BLOB = os.urandom(50_000)


def keys(folder: Path, *allowed_names: str, others: tuple[str, ...] = ()) -> dict[str, Curve]:
    """Key pairs by name; only those of `allowed_names` are on the list."""
    private, allowed = folder / "private", folder / "allowed"
    private.mkdir(mode=0o700)
    allowed.mkdir(mode=0o700)
    out = {}
    for name in (*allowed_names, *others):
        public, secret = make_keys(private, name)
        out[name] = Curve(secret, allowed)
        if name in allowed_names:
            shutil.copy(public, allowed)
    return out


async def fetched(curve: Curve | None, peer: Peer, seconds: float) -> bool:
    sink = ZmqTransport(TCP if curve else f"ipc://{make_folder()}/s", curve, chunk=4096, retry_after=0.1)
    await sink.start()
    try:
        into = memoryview(bytearray(len(BLOB)))
        await sink.fetch(peer, KEY, into, timeout=seconds)
        return into == BLOB
    finally:
        await sink.close()


def test_only_allowed_keys_read(folder: Path) -> None:
    async def main() -> None:
        pairs = keys(folder, "source", "friend", others=("stranger",))
        source = ZmqTransport(TCP, pairs["source"])
        address = await source.start()
        source.offer(KEY, memoryview(BLOB))
        peer = Peer(address, source.public_key)
        try:
            assert await fetched(pairs["friend"], peer, 5)
            sent = source.stats.sent_chunks
            with pytest.raises(TransferError, match="timeout"):
                await fetched(pairs["stranger"], peer, 0.5)
            wrong = Peer(address, b"0" * 40)  # a friend, but this is not the server it means
            with pytest.raises(TransferError, match="timeout"):
                await fetched(pairs["friend"], wrong, 0.5)
            with pytest.raises(InsecureError):
                await fetched(pairs["friend"], Peer(address), 0.5)
            assert source.stats.sent_chunks == sent
            assert await fetched(pairs["friend"], peer, 5), "refusing strangers has not hurt friends"
        finally:
            await source.close()

    asyncio.run(main())


def test_plain_sockets_say_nothing_and_hear_nothing(folder: Path) -> None:
    """Without CURVE, or with keys that nobody allowed, neither a request nor a forged chunk gets in."""

    async def main() -> None:
        pairs = keys(folder, "source", others=("stranger",))
        source = ZmqTransport(TCP, pairs["source"])
        address = await source.start()
        source.offer(KEY, memoryview(BLOB))
        context = zmq.asyncio.Context()
        sockets = []
        for with_keys in (False, True):
            s = context.socket(zmq.DEALER)
            s.linger = 0
            if with_keys:
                s.curve_serverkey = source.public_key
                s.curve_publickey, s.curve_secretkey = pairs["stranger"].own_keys()
            s.connect(address)
            sockets.append(s)
        get = m.encode(m.Get(transfer=1, key=KEY, nbytes=len(BLOB), chunk=4096, wanted=(0, 1)))
        for s in sockets:
            await s.send(get)
            await s.send(b"garbage")
        assert await asyncio.gather(*(s.poll(500) for s in sockets)) == [0, 0]
        assert source.stats.sent_chunks == 0 and source.server.inbox.rejected.total() == 0
        for s in sockets:
            s.close()
        context.term()
        await source.close()

    asyncio.run(main())


def test_a_false_server_cannot_inject(folder: Path) -> None:
    """Somebody listens at a peer's address with keys of his own, allows everybody, and answers with forged chunks."""

    async def main() -> None:
        pairs = keys(folder, "source", "friend", others=("thief",))
        public, _ = pairs["source"].own_keys()
        thief = ZmqTransport(TCP, Curve(pairs["thief"].secret_file, pairs["friend"].allowed))
        address = await thief.start()
        thief.offer(KEY, memoryview(bytes(len(BLOB))))
        try:
            with pytest.raises(TransferError, match="timeout"):
                await fetched(pairs["friend"], Peer(address, public), 0.5)
            assert thief.stats.sent_chunks == 0
        finally:
            await thief.close()

    asyncio.run(main())


def test_a_key_that_is_added_later_is_let_in_after_a_reload(folder: Path) -> None:
    async def main() -> None:
        pairs = keys(folder, "source", others=("late",))
        source = ZmqTransport(TCP, pairs["source"])
        peer = Peer(await source.start(), source.public_key)
        source.offer(KEY, memoryview(BLOB))
        try:
            with pytest.raises(TransferError):
                await fetched(pairs["late"], peer, 0.3)
            shutil.copy(folder / "private" / "late.key", folder / "allowed")
            source.refresh()
            assert await fetched(pairs["late"], peer, 5)
        finally:
            await source.close()

    asyncio.run(main())


def test_addresses_that_strangers_could_reach_are_refused(folder: Path) -> None:
    curve = Curve(folder / "secret", folder)
    check_address(f"ipc://{folder}/x", None)
    check_address("tcp://10.0.0.1:5555", curve)
    check_address("tcp://[fd00::1]:5555", curve)
    for address, keys_ in (
        ("tcp://10.0.0.1:5555", None),
        ("tcp://*:5555", curve),
        ("tcp://0.0.0.0:5555", curve),
        ("tcp://[::]:5555", curve),
        ("tcp://:5555", curve),
        ("inproc://x", None),
        ("ipc://relative/x", None),
        ("ipc://@abstract", None),
        (f"ipc://{folder}/{'x' * 120}", None),
        (f"ipc://{folder}/nowhere/x", None),
    ):
        with pytest.raises(InsecureError):
            check_address(address, keys_)
    (folder / "open").mkdir()
    (folder / "open").chmod(0o755)
    (folder / "link").symlink_to(folder)
    for name in ("open", "link"):
        with pytest.raises(InsecureError):
            check_address(f"ipc://{folder}/{name}/x", None)


def test_a_refused_address_leaves_nothing_open(folder: Path) -> None:
    async def main() -> None:
        with pytest.raises(InsecureError):
            await ZmqTransport("tcp://127.0.0.1:0").start()
        with pytest.raises(zmq.ZMQError):
            await ZmqTransport("tcp://192.0.2.1:5555", keys(folder, "a")["a"]).start()

    asyncio.run(main())


def test_folders_and_secrets_are_ours_alone(folder: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    _, secret = make_keys(folder, "a")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    Curve(secret, folder).own_keys()
    secret.chmod(0o644)
    with pytest.raises(InsecureError, match="chmod 600"):
        Curve(secret, folder).own_keys()
    (folder / "a.key").chmod(0o600)
    with pytest.raises(InsecureError, match="no secret key"):
        Curve(folder / "a.key", folder).own_keys()


def hello(worker: str) -> m.Hello:
    return m.Hello(worker=worker, epoch=b"e", identity=b"i", data=TCP, http="http://h", capacity=1 << 30, free=1 << 30)


def test_only_allowed_keys_join_a_router_of_several_hosts(folder: Path) -> None:
    """A stranger can neither be a worker, nor speak as one, nor hear of what the cluster compiles. A key that is put into the
    folder later is let in."""

    async def main() -> None:
        pairs = keys(folder, "router", "friend", others=("stranger",))
        router = Router(Costs(tokens_per_s=1, transfer_gb_s=1), TCP, curve=pairs["router"])
        address = await router.start()
        context = zmq.asyncio.Context()

        def connected(name: str | None) -> zmq.asyncio.Socket:
            s = context.socket(zmq.DEALER)
            s.linger, s.reconnect_ivl = 0, 20
            if name is not None:
                s.curve_serverkey = pairs["router"].own_keys()[0]
                s.curve_publickey, s.curve_secretkey = pairs[name].own_keys()
            s.connect(address)
            return s

        friend, strangers = connected("friend"), [connected(None), connected("stranger")]
        try:
            for s in strangers:
                await s.send(m.encode(hello("w1")))
            await friend.send(m.encode(hello("w0")))
            assert await friend.poll(5000) and isinstance(m.decode(await friend.recv(), m.ToWorker), m.Welcome)
            holds = m.encode(m.Stored(seq=1, keys=(KEY,), nbytes=(1,)))
            for s in strangers:
                for frame in (m.encode(hello("w0")), holds, m.encode(m.Bye()), b"garbage"):
                    with contextlib.suppress(zmq.Again):  # libzmq has given up on that address
                        await s.send(frame, zmq.NOBLOCK)
            assert await asyncio.gather(*(s.poll(300) for s in strangers)) == [0, 0], "they hear nothing"
            await friend.send(holds)
            while not router.coordinator.cluster.directory.count("w0"):
                await asyncio.sleep(0.01)
            assert list(router.coordinator.hellos()) == ["w0"] and not router.rejected and not router.coordinator.counts
            shutil.copy(folder / "private" / "stranger.key", folder / "allowed")
            while "w2" not in router.coordinator.hellos():  # the folder is looked at several times a second
                strangers.append(late := connected("stranger"))
                await late.send(m.encode(hello("w2")))
                await late.poll(200)
        finally:
            for s in (friend, *strangers):
                s.close()
            context.term()
            await router.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_router_of_several_hosts_without_keys_is_refused(folder: Path) -> None:
    async def main() -> None:
        with pytest.raises(InsecureError, match="TCP only with CURVE"):
            await Router(Costs(tokens_per_s=1, transfer_gb_s=1), TCP).start()

    asyncio.run(main())
    curve = keys(folder, "a")["a"]
    secret, allowed = str(curve.secret_file), str(curve.allowed)
    assert curve_of(HypicConfig(curve_secret=secret, curve_allowed=allowed)) == curve
    assert curve_of(HypicConfig()) is None
    for half in (
        {"curve_secret": secret},
        {"curve_allowed": allowed},
        {"curve_secret": secret, "curve_allowed": secret},
    ):
        with pytest.raises(InsecureError, match="public keys"):
            curve_of(HypicConfig(**half))
