"""Says of a chunk whether it is only below HOST."""

from __future__ import annotations

from ..types import GPU, HOST, SHARED
from .chunk import NO_SLOT, NOWHERE, Chunk


def only_below(chunk: Chunk) -> bool:
    """True if the chunk is in lower tiers only."""
    return chunk.resident and chunk.slots[GPU] == NO_SLOT and chunk.slots[HOST] == NO_SLOT


def shared_only(chunk: Chunk) -> bool:
    """True if the chunk is in the shared tier and in none of this server's."""
    return chunk.slots[SHARED] != NO_SLOT and chunk.slots[:SHARED] == NOWHERE[:SHARED]


def unread(chunk: Chunk) -> bool:
    """True if the chunk is in lower tiers only, and not being read yet."""
    return chunk.moving is None and only_below(chunk)


def being_read(chunk: Chunk) -> bool:
    """True if the chunk is in lower tiers only, and is being read."""
    return chunk.moving is not None and not chunk.moving.spills and only_below(chunk)
