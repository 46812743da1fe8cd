"""The client that makes a call, and what its calls may ask for at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Claim = Callable[[int, str], None]
"""Counts so many sequences for a call, instead of the one that it counts as from its start.

Raises RequestError: 400, which names the body's field, if the limit is lower; 429 if the client has others open.
"""


def claim_any(sequences: int, param: str) -> None:
    """There is no limit."""


@dataclass(frozen=True)
class Caller:
    """The client that makes a call.

    owner   owns what the call stores, and sees no other's; "" where no keys are needed
    share   owner of the requests for the engine: the key's owner, or without keys the client's address
    claim   as `Claim`
    session the name that the client gives to a run of its calls, None: it gives none. Their KV is kept as that of a
            conversation, but nothing is stored.
    """

    owner: str = ""
    share: str = ""
    claim: Claim = claim_any
    session: str | None = None
