"""Ports for programs that cannot bind any free one and say which."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

_OURS = range(20_000, 32_000)
_SYSTEM = Path("/proc/sys/net/ipv4/ip_local_port_range")
_claims: list[socket.socket] = []


def free_ports(count: int) -> list[int]:
    """Returns TCP ports that nothing on this machine uses.

    No other caller on the machine gets them while this process lives. They are outside the range
    from which the system gives ports to sockets, if that range leaves any. RuntimeError if too few
    are free.
    """
    system = _range_of_the_system()
    candidates = [port for port in _OURS if port not in system] or list(_OURS)
    random.SystemRandom().shuffle(candidates)  # differs between processes with one seed
    ports: list[int] = []
    for port in candidates:
        if _claim(port):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError(f"{len(ports)} ports are free, {count} were wanted")


def _claim(port: int) -> bool:
    """The claim is an abstract Unix socket: it is of the port's network namespace, and ends with
    the process, however that ends."""
    claim = socket.socket(socket.AF_UNIX)
    with suppress(OSError), socket.socket() as probe:
        claim.bind(f"\0pensieve-port-{port}")
        probe.bind(("", port))
        _claims.append(claim)
        return True
    claim.close()
    return False


def _range_of_the_system() -> range:
    with suppress(FileNotFoundError):
        first, last = map(int, _SYSTEM.read_text().split())
        return range(first, last + 1)
    return range(0)
