"""TCP ports for servers that are about to be started."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from pathlib import Path

LOCAL = "127.0.0.1"
_FIRST, _SGLANGS = 10_000, 30_000


def free_ports(n: int) -> list[int]:
    """Ports of this host that nobody listens on, all different.

    They are below SGLang's defaults and below those that the system gives to connections by itself, which could take one before
    it is bound.
    """
    systems = _SGLANGS
    with contextlib.suppress(FileNotFoundError):  # not on Linux
        systems = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(_FIRST, max(min(systems, _SGLANGS), _FIRST + 1000)), k=1000):
        if len(ports) == n:
            break
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind((LOCAL, port))
            ports.append(port)
    return ports


def is_taken(host: str, port: int) -> bool:
    """Whether a server could not listen at `port` of `host`, a name or an address, since another one does.

    What else may be wrong with the two is left to the server that tries.
    """
    with contextlib.suppress(OSError, OverflowError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as s:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    s.bind(address)
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        return True
    return False
