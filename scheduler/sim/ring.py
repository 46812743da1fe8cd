"""The consistent-hash ring of a router: each replica has many places, and a name belongs to the
next place."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

HASHES = 2**64
VIRTUAL_NODES = 100  # places of a replica


def ring(replicas: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of each (number, generation) many (place, number), sorted. A name belongs to the next
    place."""
    return sorted(
        (place(f"{number} {generation} {node}"), number)
        for number, generation in replicas
        for node in range(VIRTUAL_NODES)
    )


def fullest_share(replicas: int) -> float:
    """Of all names, the share that belongs to the replica with the most; even shares would be 1 /
    `replicas`."""
    places = ring((number, 0) for number in range(replicas))
    shares = [0 for _ in range(replicas)]
    before = places[-1][0] - HASHES
    for at, number in places:
        shares[number] += at - before
        before = at
    return max(shares) / HASHES


def place(text: str) -> int:
    """A number below HASHES, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
