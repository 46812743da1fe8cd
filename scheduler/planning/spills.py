"""Makes room in the tiers below HOST during one plan, and begins to write chunks there."""

from __future__ import annotations

from ..kv.chunk import NO_SLOT, Chunk
from ..kv.lower_tiers import LowerTier
from ..plan import Lane
from ..types import HOST
from .eviction import Evictor


def spill(evictor: Evictor, chunk: Chunk, lower: LowerTier) -> None:
    """Begins to write the chunk's HOST copy to the tier, unless that holds only chunks of
    higher value."""
    value = evictor.store.policy.value(chunk, evictor.now)
    # a piece may have gone with another one of its state, to make the room
    if _makes_room(evictor, lower, value) and chunk.slots[HOST] != NO_SLOT:
        evictor.store.spill(chunk, lower)


def spill_ahead(evictor: Evictor, lower: LowerTier, spare: int, most: int) -> bool:
    """Begins to write the chunks of lowest V that are only on HOST to the tier, until `spare`
    HOST slots are free to take or will be; at most `most`. Drops tails, and chunks of lower
    value than all in the tier.

    The slot of a chunk that is also in a lower tier counts as free to take, unless the chunk is
    worth more than the victims (for example, it was read for the queue): chunks of turns that
    have just ended could not take that slot. Returns False if the next victim's copy on HOST is
    not known to be complete, so the caller must try again.
    """
    store = evictor.store
    host_only = evictor.head(store.only[HOST])
    host_spare = evictor.head(store.spare[HOST])
    while most > 0 and store.host.free + lower.writing < spare:
        victims = host_only.peek(1)
        takeable = host_spare.peek(1) and host_spare.value <= host_only.value
        if not victims or (
            takeable and store.host.free + len(store.spare[HOST]) + lower.writing >= spare
        ):
            return True
        victim = victims[0]
        if store.host.last[Lane.OUT][victim.slots[HOST]] > store.completed.swap_out:
            return False
        room = victim.key is not None and _makes_room(
            evictor, lower, host_only.value, for_host=True
        )
        if victim.slots[HOST] == NO_SLOT:
            pass  # it has gone with another piece of its state, to make the room
        elif room:
            store.spill(victim, lower)
        else:
            evictor.drop_from_host(victims, host_only.value)
        most -= 1
    return True


def _makes_room(evictor: Evictor, lower: LowerTier, value: float, for_host: bool = False) -> bool:
    """Makes room in the tier for a chunk of that value. Returns False if the tier holds nothing
    of lower value, or must erase a slot before it is used again.

    `for_host`: the caller frees a HOST slot. Then a record whose chunk is also on the GPU goes
    first, if that chunk will stay there longer: the latest one, which has about the highest
    value.
    """
    if lower.room:
        return True
    store = evictor.store
    tier = lower.tier
    copy = next(reversed(store.copies[tier]), None) if for_host else None
    if copy is not None and store.policy.value(copy, evictor.now) > value:
        store.release_record(copy, lower)
        store.evictions.count(tier, "copy", 1)
        return lower.room > 0
    head = evictor.head(store.only[tier])
    victims = head.peek(store.policy.at_once(1))
    if not victims or head.value >= value:
        return False
    store.evictions.count(tier, "dropped", len(victims))
    store.evictions.count_values(head.value, len(victims))
    for victim in victims:
        if victim.resident:  # else it has gone with another piece of its state
            store.drop(victim)
    return lower.room > 0
