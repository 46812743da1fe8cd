"""Begins to read chunks from the tiers below HOST, and makes room for them there."""

from __future__ import annotations

from ..kv.chunk import NO_SLOT, Chunk
from ..types import GPU, HOST
from .eviction import Evictor


def promote(evictor: Evictor, chunk: Chunk, drops: bool) -> bool | None:
    """Begins to read the chunk from a lower tier. Returns False if HOST has no room for it, None if
    a slot will be unused soon.

    `drops`: HOST may drop a chunk of lower value for it, or the copy of any idle GPU chunk.
    """
    store = evictor.store
    value = store.policy.value(chunk, evictor.now)
    has_room = (
        store.host.free
        or evictor.give_up_host_slots(1, value, drops)
        or (drops and _give_up_any_copy(evictor))
    )
    # the chunk may have gone with another piece of its state, to make the room
    if not has_room or not chunk.resident:
        return False
    if not store.host.next_is_quiet(store.completed):
        return None
    store.promote(chunk, store.host.take())
    return True


def _give_up_any_copy(evictor: Evictor) -> bool:
    """Frees the HOST slot of an idle GPU chunk, about the one that stays longest on the GPU. A plan
    looks at each once, so many reads cost no more than a few."""
    idle = evictor.store.spare[GPU]
    for chunk in evictor.idle_on_gpu:
        movable = chunk in idle and chunk.slots[HOST] != NO_SLOT and chunk.moving is None
        if movable and evictor.give_up_copies([chunk]):
            return True
    return False
