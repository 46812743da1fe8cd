"""The client of a call, and the limit on its open calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Claim = Callable[[int, str], None]
"""Called with the number of sequences of a call. It replaces the one sequence that counts from the call's start.

Raises RequestError: 400, which names the body's field, if the limit is lower; 429 if the client has others open.
"""


def claim_any(sequences: int, param: str) -> None:
    """A `Claim` without a limit."""


@dataclass(frozen=True)
class Caller:
    """The client of a call.

    owner   owner of everything that the call stores; sees no other owner's data; "" if no keys are needed
    share   owner of the requests for the engine: the key's owner, or without keys the client's address
    claim   as `Claim`
    session the client's name for a series of its calls, or None. Their KV is kept as that of a conversation, but
    nothing is stored.
    """

    owner: str = ""
    share: str = ""
    claim: Claim = claim_any
    session: str | None = None
