"""Who may speak on our sockets.

Inside a host: ``ipc://`` in a folder that only this user can enter. Between hosts: ``tcp://`` with an explicit address and
CURVE, where both sides prove a key: the server to the client, and the client to the server's allow-list. There is no third
way; plain TCP is refused.

libzmq lets every CURVE client in as long as nobody answers its ZAP questions. :func:`guard` therefore also sets the
socket option that refuses connections while no authenticator runs.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio
import zmq.auth
from zmq.auth.asyncio import AsyncioAuthenticator

from hypic.config import HypicConfig

_DOMAIN = b"hypic"
_SUN_PATH = 107
"""Bytes of a socket path that Linux takes."""


class InsecureError(ValueError):
    """An address, folder or key that would let strangers in, or that cannot be used; the text says what to do."""


class Curve(msgspec.Struct, frozen=True):
    """Keys of this process.

    Attributes:
        secret_file: our key pair, as zmq.auth.create_certificates writes it.
        allowed: folder of the public keys (``*.key``) of all that may connect to us.
    """

    secret_file: Path
    allowed: Path

    def own_keys(self) -> tuple[bytes, bytes]:
        """Public and secret key. Raises InsecureError if others may read the file."""
        if self.secret_file.stat().st_mode & 0o077:
            raise InsecureError(f"{self.secret_file} can be read by others: chmod 600 {self.secret_file}")
        public, secret = zmq.auth.load_certificate(self.secret_file)
        if secret is None:
            raise InsecureError(f"{self.secret_file} holds no secret key: it is the .key_secret file that is meant")
        return public, secret


def curve_of(config: HypicConfig) -> Curve | None:
    """The keys that the settings name. Raises InsecureError: half of them."""
    if bool(config.curve_secret) != bool(config.curve_allowed):
        raise InsecureError("CURVE takes both a key pair of ours and the folder of the public keys that may connect")
    if not config.curve_secret:
        return None
    curve = Curve(Path(config.curve_secret), Path(config.curve_allowed))
    if not curve.allowed.is_dir():
        raise InsecureError(f"{curve.allowed}: a folder with the public keys (*.key) of all that may connect is wanted")
    return curve


def make_folder() -> Path:
    """A fresh folder for ``ipc://`` sockets, mode 0700, ours."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="hypic-", dir=base if os.access(base, os.W_OK) else None))


def make_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """A new key pair: (public, secret) files ``NAME.key`` and ``NAME.key_secret`` (mode 0600) in `folder`."""
    before = os.umask(0o077)
    try:
        public, secret = zmq.auth.create_certificates(folder, name)
    finally:
        os.umask(before)
    return Path(public), Path(secret)


def public_key(file: Path) -> bytes:
    """The public key in a certificate file. Raises InsecureError."""
    try:
        return zmq.auth.load_certificate(file)[0]
    except (OSError, ValueError) as e:
        raise InsecureError(f"{file}: not a public key file as zmq.auth writes it: {e}") from None


def check_address(address: str, curve: Curve | None) -> None:
    """Raise InsecureError unless only those whom we let in can reach a socket bound to `address`."""
    scheme, _, rest = address.partition("://")
    if scheme == "ipc":
        path = Path(rest)
        if not path.is_absolute() or len(os.fsencode(rest)) > _SUN_PATH:
            raise InsecureError(f"{address}: an absolute path of at most {_SUN_PATH} bytes is wanted")
        try:
            info = path.parent.lstat()
        except OSError as e:
            raise InsecureError(f"{address}: {e}") from None
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
            raise InsecureError(f"{path.parent}: not a folder of ours that only we can enter: chmod 700 {path.parent}")
    elif scheme == "tcp":
        if curve is None:
            raise InsecureError(f"{address}: TCP only with CURVE keys; inside a host use ipc://")
        host = rest.rpartition(":")[0].strip("[]")
        try:
            wild = ipaddress.ip_address(host).is_unspecified
        except ValueError:
            wild = host in ("", "*")
        if wild:
            raise InsecureError(f"{address}: name the address of the interface that peers use, not all of them")
    else:
        raise InsecureError(f"{address}: ipc:// or tcp:// is wanted")


class Gate:
    """The authenticator of one context: answers ZAP, so that only allowed keys (TCP) or the same user (ipc) get in."""

    def __init__(self, context: zmq.asyncio.Context, curve: Curve | None):
        self._curve = curve
        self._auth: AsyncioAuthenticator | None = None
        if curve is not None:
            self._keys, self._read = curve.own_keys(), 0
            self._auth = AsyncioAuthenticator(context)
            self._auth.start()
            self.refresh()

    @property
    def public_key(self) -> bytes:
        return self._keys[0] if self._curve else b""

    def guard(self, socket: zmq.Socket, address: str) -> None:
        """Options of a socket that is about to be bound to `address`. Raises InsecureError."""
        check_address(address, self._curve)
        if self._curve is not None and address.startswith("tcp://"):
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = self._keys
            socket.zap_domain = _DOMAIN
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def introduce(self, socket: zmq.Socket, address: str, server_key: bytes) -> None:
        """Options of a socket that is about to connect. Raises InsecureError."""
        if address.startswith("tcp://"):
            if self._curve is None or len(server_key) != 40:
                raise InsecureError(f"{address}: TCP only with CURVE keys, ours and the peer's public one")
            socket.curve_serverkey = server_key
            socket.curve_publickey, socket.curve_secretkey = self._keys
        else:
            check_address(address, self._curve)

    def refresh(self) -> None:
        """Read the folder of allowed keys again, if anything was put there or taken out. Who is connected stays so."""
        if self._curve is None or self._auth is None or self._read == (now := self._curve.allowed.stat().st_mtime_ns):
            return
        self._read = now
        self._auth.configure_curve(domain=_DOMAIN.decode(), location=self._curve.allowed)

    def close(self) -> None:
        if self._auth is not None:
            self._auth.stop()


class Listener:
    """A ROUTER bound to an address that only those reach whom we let in.

    Args:
        address: ``ipc://`` in a folder of ours, or ``tcp://`` with `curve`.
        curve: keys; needed for TCP.
        options: of the socket, beside what every listener has.

    Attributes:
        context, gate: of the socket, for others that speak to the same peers; close those first.

    Raises:
        InsecureError, zmq.ZMQError: then nothing is left open.
    """

    def __init__(self, address: str, curve: Curve | None, options: Mapping[zmq.SocketOption, int]):
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        try:
            for option, value in {zmq.LINGER: 0, zmq.ROUTER_MANDATORY: 1, **options}.items():
                self.socket.setsockopt(option, value)
            self.gate = Gate(self.context, curve)
            self.gate.guard(self.socket, address)
            self.socket.bind(address)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """Where it listens: a TCP port 0 was chosen by the system."""
        return self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        """Returns when libzmq has let go of every frame."""
        self.socket.close()
        if hasattr(self, "gate"):
            with contextlib.suppress(zmq.ZMQError):
                self.gate.close()
        self.context.term()


def _main(folder: Path, *names: str) -> None:
    """Key pairs for hosts or workers: ``python -m hypic.router.transport.security FOLDER NAME...``."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in names:
        print(*make_keys(folder, name))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), *sys.argv[2:])
