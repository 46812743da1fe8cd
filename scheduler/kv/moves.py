"""Parts of the chunk store: the ends of moves to and from the tiers below HOST, and what it
counts."""

from __future__ import annotations

from typing import Any

from ..plan import StepResult
from ..types import GPU, HOST, LABELS
from .chunk import NO_SLOT, Move
from .chunk_store import ChunkStore
from .lower_tiers import LowerTier


def report_moves(store: ChunkStore, result: StepResult, now: float) -> None:
    """Applies the result's reports of the lower tiers: chunks get the slots that were written
    or read for them."""
    for lower in store.lower:
        for move in lower.late(result):
            store.leave_move(move, lower)
        for move, succeeded in lower.report(result, now):
            _end_move(store, lower, move, succeeded)


def _end_move(store: ChunkStore, lower: LowerTier, move: Move, succeeded: bool) -> None:
    """A chunk whose read failed gives up its record, and is dropped if it is in no other
    tier."""
    chunk = move.chunk
    if chunk is None:
        lower.release(move.slot, move.key)
        store.host.give(move.host)
        return
    chunk.moving = None
    keeps = succeeded and lower.wanted(move.slot, chunk)
    if not move.spills:
        if succeeded and chunk.slots[HOST] == NO_SLOT:
            chunk.slots[HOST] = move.host
        else:  # the read failed, or the chunk was recomputed and copied out meanwhile
            store.host.give(move.host)
    elif keeps:
        chunk.slots[lower.tier] = move.slot
    else:
        lower.release(move.slot, move.key)
    store.update_victim_set(chunk)
    if not (keeps or move.spills):
        store.release_record(chunk, lower)


def slot_counts(store: ChunkStore) -> dict[str, dict[str, int]]:
    """Slots by tier and content. `copy`: the chunk is in a faster tier too. `moving`: being
    written or read (HOST), or written (lower tiers)."""
    gpu = {"free": store.gpu.free}
    gpu |= {"reclaimable": len(store.spare[GPU]), "idle": len(store.only[GPU])}
    gpu["in_use"] = store.gpu.count - sum(gpu.values())
    idle = [len(only) + len(spare) for only, spare in zip(store.only, store.spare, strict=True)]
    host = {"free": store.host.free, "copy": 0, "idle": idle[HOST]}
    if store.lower:
        host["moving"] = sum(lower.host_slots_moving() for lower in store.lower)
    host["copy"] = store.host.count - sum(host.values())
    counts = {LABELS[GPU]: gpu, LABELS[HOST]: host}
    for lower in store.lower.local:
        copies = len(store.copies[lower.tier])
        copies += sum(len(spare) for spare in store.spare[HOST : lower.tier])
        slots = {"free": lower.room, "copy": copies, "idle": idle[lower.tier]}
        counts[LABELS[lower.tier]] = slots | {"moving": lower.count - sum(slots.values())}
    return counts


def store_counts(store: ChunkStore) -> dict[str, Any]:
    """The store's counters and gauges, by the fields of `SchedulerStats`."""
    lower = store.lower.local
    return {
        "slots": slot_counts(store),
        "dropped": store.dropped,
        "evictions": store.evictions.by_tier_and_reason(),
        "eviction_values": store.evictions.by_value(),
        "eviction_value_sum": store.evictions.value_sum,
        "regret_tokens": store.regret_tokens,
        "bad_copies": store.bad_copies,
        "spilled": sum(tier.spilled for tier in lower),
        "promoted": sum(tier.promoted for tier in lower),
        "failed_writes": sum(tier.failed_writes for tier in lower),
        "failed_reads": sum(tier.failed_reads for tier in lower),
    }
