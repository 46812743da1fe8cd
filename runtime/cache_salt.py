"""The salt of a request: requests share KV within one salt only."""

from __future__ import annotations

GIVEN = b"given:"
OWNER = b"owner:"


def kv_salt(given: str | None, owner: str) -> bytes:
    """The given salt (`cache_salt`), else the owner's. A given salt never equals an owner's."""
    if given is not None:
        return GIVEN + given.encode()
    return OWNER + owner.encode() if owner else b""


def given_salt(salt: bytes) -> str | None:
    """The salt that the client gave, or None: an owner's is not told to others."""
    return salt.removeprefix(GIVEN).decode() if salt.startswith(GIVEN) else None
