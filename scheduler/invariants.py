"""Checks that the scheduler's counts and sets agree with its chunks and rows. Cost: all chunks."""

from __future__ import annotations

from collections.abc import Iterable

from .kv.chunk import NO_SLOT, NOWHERE, Chunk, Claims, OrderedSet
from .kv.chunk_store import ChunkStore
from .kv.victim_sets import VictimSet
from .planning.live_states import LiveStates
from .planning.queues import RequestQueues
from .turns.turn import RunningTurn, Turn
from .types import GPU, HOST, SHARED, InvariantError, QueuePlace, RequestId, Tier

NO_LOWER = NOWHERE[HOST + 1 :]


def check_requests(
    store: ChunkStore,
    queues: RequestQueues,
    held: dict[RequestId, RunningTurn],
    turns: dict[RequestId, Turn],
    preparing: Iterable[Turn],
) -> None:
    """Checks that each request is in exactly one place: being prepared, queued, swapped in, seated,
    or held until its length is confirmed."""
    joined = list(queues.joined())
    seats = sorted([*queues.free_seats, *(row.seat for row in queues.rows)])
    if seats != list(range(queues.seats)):
        raise InvariantError(f"seats, free and taken: {seats}")
    if {key for row in (*joined, *queues.releasing) for key in row.pending} != set(store.pending):
        raise InvariantError("keys are pending that no row computes, or the other way round")
    placed = [*queues.waiting, *preparing, *(row.turn for row in (*joined, *held.values()))]
    places: dict[Chunk, list[QueuePlace]] = {chunk: [] for chunk in store.resident_chunks()}
    for turn in sorted([*queues.waiting, *preparing, *queues.ending], key=lambda turn: turn.order):
        for chunk in turn.awaited:
            places.setdefault(chunk, []).append(turn.order)
    if any(chunk.queue_places != awaited for chunk, awaited in places.items()):
        raise InvariantError(
            "a chunk's places in the queue are not those of the requests that wait for it"
        )
    if len(placed) != len(turns) or {turn.request.id for turn in placed} != set(turns):
        raise InvariantError("a request is in two places, or in none")


def check_states(store: ChunkStore, queues: RequestQueues, states: LiveStates) -> list[Chunk]:
    """Checks that each state slot is free or held, and that states are whole. Returns the pieces
    that rows are to swap in or the latest plan copies, one entry for each user."""
    live = [row.state for row in queues.joined() if row.state is not None]
    states.slots.check([state.slot for state in live if state.slot != NO_SLOT])
    for chunk in store.resident_chunks():
        if chunk.state is not None and chunk not in chunk.state.pieces:
            raise InvariantError(f"{chunk} is a piece of a state that is not whole")
    for key, state in states.kept.by_key.items():
        whole = len(state.pieces) == states.kept.config.chunks
        if state.key != key or not (whole and all(piece.resident for piece in state.pieces)):
            raise InvariantError(f"the state after {state.end} tokens is kept in part")
    used = [*states.swapping_in, *(state for row in live for state in row.swap_ins)]
    return [piece for state in used for piece in state.pieces]


def check_store(store: ChunkStore, users: dict[Chunk, int], claims: dict[Chunk, Claims]) -> None:
    """Checks that each slot is free or owned once, and that users and claims are those of rows and
    conversations."""
    chunks = list(store.resident_chunks())
    store.gpu.check(chunk.slots[GPU] for chunk in chunks if chunk.slots[GPU] != NO_SLOT)
    moving_host = [slot for lower in store.lower for slot in lower.check(chunks)]
    store.host.check(
        [
            *(chunk.slots[HOST] for chunk in chunks if chunk.slots[HOST] != NO_SLOT),
            *store.late_host_slots,
            *moving_host,
        ]
    )
    stored = set(chunks)
    if missing := {*users, *claims} - stored:
        raise InvariantError(f"held but not in the store: {missing}")
    filed = copies = 0
    for chunk in chunks:
        claimed = claims.get(chunk, Claims(0))
        if chunk.state is not None:
            claimed = Claims(0, int(chunk.state.pinned))
        if (
            chunk.users != users.get(chunk, 0)
            or (chunk.claims, chunk.pins, chunk.over_quota) != claimed
        ):
            raise InvariantError(
                f"{chunk}, pins={chunk.pins}, over_quota={chunk.over_quota}: "
                f"{users.get(chunk, 0)} rows and {claimed} hold it"
            )
        if chunk.key is not None and store.find(chunk.key) is not chunk:
            raise InvariantError(f"{chunk} is not the owner of its key")
        if chunk.users and chunk.slots[GPU] == NO_SLOT and chunk.state is None:
            raise InvariantError(f"{chunk} is in use but not on the GPU")
        if chunk.users and chunk.slots[HOST] == NO_SLOT and chunk.state is not None:
            raise InvariantError(f"{chunk}, a state's piece, is in use but not on HOST")
        if chunk.key is None and (chunk.moving is not None or chunk.slots[HOST + 1 :] != NO_LOWER):
            raise InvariantError(f"{chunk} is private and has to do with a lower tier")
        only_shared = chunk.slots[:SHARED] == NOWHERE[:SHARED] and chunk.slots[SHARED] != NO_SLOT
        if only_shared and not (chunk.queue_places or chunk.moving):
            raise InvariantError(f"{chunk} is in the shared tier only, and no request waits for it")
        if not (chunk.resident or chunk.claims):
            raise InvariantError(f"{chunk} is in no tier and unclaimed, but still in the store")
        filed += _check_filing(store, chunk)
        copies += sum(_is_copy(chunk, lower.tier) for lower in store.lower.local)
        for lower in store.lower.local:
            if _is_copy(chunk, lower.tier) != (chunk in store.copies[lower.tier]):
                raise InvariantError(f"{chunk} is taken for a copy, or for none, wrongly")
    sizes = [len(members) for members in (*store.spare, *store.only)]
    if filed != sum(sizes) + len(store.busy_copied) or copies != sum(
        map(len, store.copies.values())
    ):
        raise InvariantError("a set of victims holds a chunk that does not belong there")


def _lower_slots(chunk: Chunk) -> list[int]:
    """Slots of this server's tiers below HOST."""
    return [slot for slot in chunk.slots[HOST + 1 : SHARED] if slot != NO_SLOT]


def _check_filing(store: ChunkStore, chunk: Chunk) -> bool:
    """Computes, independently of `ChunkStore.update_victim_set`, the set that the chunk belongs to.
    Returns whether there is one."""
    on_gpu = chunk.slots[GPU] != NO_SLOT
    on_host = chunk.slots[HOST] != NO_SLOT
    in_lower = bool(_lower_slots(chunk))
    idle = not chunk.users
    moving = chunk.moving is not None
    belongs: VictimSet | OrderedSet | None = None
    if chunk.staged and not (on_gpu and on_host):
        raise InvariantError(f"{chunk} is staged, but is not on the GPU and HOST")
    held_copy = on_gpu and on_host and not (chunk.awaits_swap_in or chunk.staged or moving)
    if chunk.users and held_copy:
        belongs = store.busy_copied
    if idle and on_gpu:
        spare = (on_host and not chunk.staged) or chunk.refused_by_host or store.host.count == 0
        belongs = store.spare[GPU] if spare else store.only[GPU]
    if idle and on_host and not (on_gpu or moving):
        belongs = store.spare[HOST] if in_lower else store.only[HOST]
    if idle and in_lower and not (on_gpu or on_host or moving):
        tiers = [lower.tier for lower in store.lower.local if chunk.slots[lower.tier] != NO_SLOT]
        belongs = store.only[tiers[0]] if len(tiers) == 1 else store.spare[tiers[0]]
    if chunk.victim_set is not belongs or (belongs is not None and chunk not in belongs):
        raise InvariantError(f"{chunk} is not in the set of victims where it belongs")
    return belongs is not None


def _is_copy(chunk: Chunk, tier: Tier) -> bool:
    on_gpu = chunk.slots[GPU] != NO_SLOT and not chunk.awaits_swap_in
    return chunk.slots[tier] != NO_SLOT and on_gpu and chunk.moving is None
