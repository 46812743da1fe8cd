"""Checks that the scheduler's counts and sets agree with its chunks and rows. Cost: all chunks."""

from __future__ import annotations

from collections.abc import Iterable

from .kv.chunk import NO_SLOT, Chunk, Claims, OrderedSet
from .kv.chunk_store import ChunkStore
from .kv.victim_sets import VictimSet
from .planning.queues import RequestQueues
from .turns.turn import RunningTurn, Turn
from .types import InvariantError, QueuePlace, RequestId


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


def check_store(store: ChunkStore, users: dict[Chunk, int], claims: dict[Chunk, Claims]) -> None:
    """Checks that each slot is free or owned once, and that users and claims are those of rows and
    conversations."""
    chunks = list(store.resident_chunks())
    store.gpu.check(chunk.gpu for chunk in chunks if chunk.gpu != NO_SLOT)
    moving_host, moving_disk = store.disk.check(chunks)
    store.host.check(
        [
            *(chunk.host for chunk in chunks if chunk.host != NO_SLOT),
            *store.late_host_slots,
            *moving_host,
        ]
    )
    store.disk.pool.check(
        [*(chunk.disk for chunk in chunks if chunk.disk != NO_SLOT), *moving_disk]
    )
    stored = set(chunks)
    if missing := {*users, *claims} - stored:
        raise InvariantError(f"held but not in the store: {missing}")
    filed = copies = 0
    for chunk in chunks:
        claimed = claims.get(chunk, Claims(0))
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
        if chunk.users and chunk.gpu == NO_SLOT:
            raise InvariantError(f"{chunk} is in use but not on the GPU")
        if chunk.key is None and (chunk.disk != NO_SLOT or chunk.moving is not None):
            raise InvariantError(f"{chunk} is private and has to do with the disk")
        if not (chunk.resident or chunk.claims):
            raise InvariantError(f"{chunk} is in no tier and unclaimed, but still in the store")
        filed += _check_filing(store, chunk)
        copies += _check_copy(store, chunk)
    sets = (
        store.reclaimable,
        store.uncopied,
        store.host_only,
        store.host_spare,
        store.disk_only,
        store.busy_copied,
    )
    if filed != sum(len(members) for members in sets) or copies != len(store.disk_copies):
        raise InvariantError("a set of victims holds a chunk that does not belong there")


def _check_filing(store: ChunkStore, chunk: Chunk) -> bool:
    """Computes, independently of `ChunkStore.file`, the set that the chunk belongs to. Returns
    whether there is one."""
    on_gpu, on_host, on_disk = (slot != NO_SLOT for slot in (chunk.gpu, chunk.host, chunk.disk))
    movable = not chunk.users and chunk.moving is None
    belongs: VictimSet | OrderedSet | None = None
    if chunk.copied_for_disk and not (on_gpu and on_host):
        raise InvariantError(
            f"{chunk} is marked as copied_for_disk, but is not on the GPU and HOST"
        )
    if (
        chunk.users
        and on_gpu
        and on_host
        and not chunk.awaits_swap_in
        and not chunk.copied_for_disk
        and chunk.moving is None
    ):
        belongs = store.busy_copied
    if movable and on_host and not on_gpu:
        belongs = store.host_spare if on_disk else store.host_only
    if movable and on_disk and not (on_gpu or on_host):
        belongs = store.disk_only
    if not chunk.users and on_gpu:
        safe = (
            (on_host and not chunk.copied_for_disk)
            or chunk.refused_by_host
            or store.host.count == 0
        )
        belongs = store.reclaimable if safe else store.uncopied
    if chunk.victim_set is not belongs or (belongs is not None and chunk not in belongs):
        raise InvariantError(f"{chunk} is not in the set of victims where it belongs")
    return belongs is not None


def _check_copy(store: ChunkStore, chunk: Chunk) -> bool:
    on_gpu = chunk.gpu != NO_SLOT and not chunk.awaits_swap_in
    is_copy = chunk.disk != NO_SLOT and on_gpu and chunk.moving is None
    if is_copy != (chunk in store.disk_copies):
        raise InvariantError(f"{chunk} is taken for a copy on DISK, or for none, wrongly")
    return is_copy
