"""The third tier: slots on DISK, and the work that fills and reads them (docs/design/disk.md).

Disk work is on no lane: it begins with the plan that holds it and takes its time. Until a result reports it, its slots
belong to it and not to the chunk:

    spill       HOST slot (the chunk's own; may be read) -> DISK slot (the work's; the chunk's own once it is written)
    promotion   DISK slot (the chunk's own) -> HOST slot (the work's; the chunk's own once it is read and checked)

So whatever slots a chunk has are valid, and no device ever waits for the disk. A chunk that is dropped meanwhile leaves
all slots to the work, which frees them at its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..plan import Promotion, Spill, StepResult
from ..types import ChunkKey, DiskRecord, InvariantError
from .chunk import NO_SLOT
from .slots import SlotPool

if TYPE_CHECKING:
    from .chunk import Chunk
    from .chunk_store import ChunkStore

BACKOFF_S = 5.0
"""After a write has failed nothing is spilled for so long: a full or broken disk is not asked at every step."""


class Move:
    """One spill or promotion that has begun. `chunk` is None once it was dropped: then both slots are the work's."""

    __slots__ = ("chunk", "disk", "host", "key", "spills")

    def __init__(self, chunk: Chunk, key: ChunkKey, host: int, disk: int, spills: bool):
        self.chunk: Chunk | None = chunk
        self.key = key
        self.host, self.disk, self.spills = host, disk, spills


class DiskTier:
    """DISK slots, the moves under way, and what the plan in the making asks of the disk.

    A slot given up is taken again by the same plan (its record is overwritten), or its record is erased with that plan
    and the slot is free once the plan is done: a free slot holds no record. A slot is *doomed* if what it holds, or is
    being written there, was deleted: it is erased in any case, for only what is erased is gone after a loss of power
    too. A slot that cannot be erased is lost: nobody uses it any more. Until it is erased or overwritten, what a slot
    may hold of chunks that have given it up is known, for they may be deleted yet.

    spilled, promoted, failed_writes, failed_reads, erased, dooms
                chunks so far; dooms: slots that were doomed
    refused     slots that could not be erased, when that was found and whenever what they may hold was deleted since
    paused_until
                nothing is spilled before
    """

    def __init__(self, store: ChunkStore, count: int):
        self._store = store
        self.pool = SlotPool(count)
        self.count = count
        self.writing = self.reading = 0
        self.spilled = self.promoted = self.failed_writes = self.failed_reads = self.erased = 0
        self.dooms = self.refused = 0
        self.paused_until = 0.0
        self._moves: dict[int, Move] = {}  # by DISK slot
        self._vacated: dict[int, None] = {}
        self._doomed: dict[int, int] = {}  # slots that are not erased yet, numbered in the order of their deletion
        self._condemned: list[int] = []  # those of them that are given up
        self._unerased: set[int] = set()
        self._lost: dict[int, None] = {}
        self._left: dict[ChunkKey, list[int]] = {}  # slots that may hold a record of a chunk that has given them up
        self._keys: dict[int, list[ChunkKey]] = {}  # the same by slot
        self._erasing: deque[tuple[int, tuple[int, ...]]] = deque()  # by step, until its result
        self._spills: list[Spill] = []
        self._promotions: list[Promotion] = []

    # -- slots

    @property
    def room(self) -> int:
        """Slots that nothing must be given up for."""
        return self.pool.free + len(self._vacated)

    def take(self) -> int:
        """A slot, first one that was just given up; the caller makes sure that there is room."""
        return self._vacated.popitem()[0] if self._vacated else self.pool.take()

    def vacate(self, slot: int, key: ChunkKey) -> None:
        """What is there, if anything, is the key's, or of those that have given the slot up before."""
        self._leave(slot, key)
        if slot in self._doomed:
            self._condemned.append(slot)
        else:
            self._vacated[slot] = None

    def _leave(self, slot: int, key: ChunkKey) -> None:
        self._left.setdefault(key, []).append(slot)
        self._keys.setdefault(slot, []).append(key)

    def _nothing_left(self, slot: int) -> None:
        """Of what was there before."""
        for key in self._keys.pop(slot, ()):
            self._left[key].remove(slot)
            if not self._left[key]:
                del self._left[key]

    def doom(self, key: ChunkKey, chunk: Chunk | None) -> None:
        """The key's chunk, if there is one, is deleted: what it has on DISK, or what is being written there, must not
        outlast it, nor what is left of it."""
        slots = self._left.get(key, [])
        if chunk is not None:
            slots = [*slots, chunk.disk if chunk.moving is None else chunk.moving.disk]
        for slot in slots:
            if slot in self._lost:
                self.refused += 1
            elif slot != NO_SLOT and slot not in self._doomed:
                self.dooms += 1
                self._doomed[slot] = self.dooms
                if slot in self._vacated:
                    del self._vacated[slot]
                    self._condemned.append(slot)

    @property
    def erased_up_to(self) -> int:
        """The number of the last slot such that it and all that were doomed before it are erased or lost."""
        return next(iter(self._doomed.values()), self.dooms + 1) - 1

    def host_slots_moving(self) -> int:
        """HOST slots that are no chunk's copy: being read into, or spilled from a chunk that is not on the GPU."""
        return sum(not m.spills or m.chunk is None or m.chunk.gpu == NO_SLOT for m in self._moves.values())

    def slot_counts(self) -> dict[str, int]:
        store, room = self._store, self.room
        copies, idle = len(store.disk_copies) + len(store.host_spare), len(store.disk_only)
        return {"free": room, "copy": copies, "idle": idle, "moving": self.count - room - copies - idle}

    # -- work

    @property
    def outstanding(self) -> bool:
        """Work has begun and is not reported, or is to begin with the plan in the making."""
        return bool(self._moves or self._vacated or self._condemned)

    def spill(self, chunk: Chunk, slot: int) -> None:
        """The chunk's HOST copy, which is complete, is written into the DISK slot."""
        assert chunk.key is not None
        self._begin(Move(chunk, chunk.key, chunk.host, slot, spills=True))
        self._spills.append(Spill(chunk.host, slot, chunk.key, chunk.end))
        self.writing += 1

    def promote(self, chunk: Chunk, host: int) -> None:
        """The chunk's record is read into the HOST slot, which no copy on any lane uses."""
        assert chunk.key is not None
        self._begin(Move(chunk, chunk.key, host, chunk.disk, spills=False))
        self._promotions.append(Promotion(chunk.disk, host, chunk.key))
        self.reading += 1

    def _begin(self, move: Move) -> None:
        assert move.chunk is not None
        self._moves[move.disk] = move.chunk.moving = move
        self._store.file(move.chunk)

    def abandon(self, move: Move) -> None:
        """Its chunk is dropped: both slots stay taken until the work is reported."""
        chunk = move.chunk
        assert chunk is not None
        move.chunk = chunk.moving = None
        self._leave(move.disk, move.key)
        if move.spills:
            chunk.host = NO_SLOT
        else:
            chunk.disk = NO_SLOT

    def hand_over(self, step: int) -> tuple[tuple[Spill, ...], tuple[Promotion, ...], tuple[int, ...]]:
        """What the plan of this step says: its spills, promotions and erasures."""
        erased = (*self._condemned, *self._vacated)
        if erased:
            self._erasing.append((step, erased))
            self._condemned.clear()
            self._vacated.clear()
            self.erased += len(erased)
        work = tuple(self._spills), tuple(self._promotions), erased
        self._spills.clear()
        self._promotions.clear()
        return work

    # -- reports

    def report(self, result: StepResult, now: float) -> None:
        """What became of the work; slots erased by the result's plan are free."""
        self._unerased.update(result.unerased)
        while self._erasing and self._erasing[0][0] <= result.step:
            for slot in self._erasing.popleft()[1]:
                self._gone(slot)
        for slot in result.spilled:
            self._written(self._end(slot, spills=True))
        for slot in result.promoted:
            self._read(self._end(slot, spills=False))
        for slot in result.failed:
            move = self._end(slot)
            if move.spills:
                self.failed_writes += 1
                self.paused_until = now + BACKOFF_S
                self._not_written(move)
            else:
                self.failed_reads += 1
                self._not_read(move)

    def _gone(self, slot: int) -> None:
        self._doomed.pop(slot, None)
        if slot in self._unerased:
            self._unerased.remove(slot)
            self._lost[slot] = None
            self.refused += 1
        else:
            self._nothing_left(slot)
            self.pool.give(slot)

    def _end(self, slot: int, spills: bool | None = None) -> Move:
        move = self._moves.pop(slot, None)
        if move is None or (spills is not None and move.spills != spills):
            raise InvariantError(f"DISK slot {slot} is reported, but no such work is under way")
        if move.spills:
            self.writing -= 1
        else:
            self.reading -= 1
        return move

    def _written(self, move: Move) -> None:
        self.spilled += 1
        self._nothing_left(move.disk)
        chunk = move.chunk
        if chunk is None or self._unwanted(move):
            self._not_written(move)
            return
        chunk.moving, chunk.disk = None, move.disk
        self._store.file(chunk)

    def _unwanted(self, move: Move) -> bool:
        """Its chunk was deleted while a row held it, and nobody claims it anew: it is to have no record."""
        assert move.chunk is not None
        if move.chunk.claims:
            self._doomed.pop(move.disk, None)
        return move.disk in self._doomed

    def _not_written(self, move: Move) -> None:
        """Whatever is in the slot, nobody may ever read it."""
        self.vacate(move.disk, move.key)
        if move.chunk is None:
            self._store.host.give(move.host)
            return
        move.chunk.moving = None
        self._store.file(move.chunk)

    def _read(self, move: Move) -> None:
        self.promoted += 1
        chunk = move.chunk
        if chunk is None:
            self._store.host.give(move.host)
            self.vacate(move.disk, move.key)
            return
        chunk.moving = None
        if chunk.host == NO_SLOT:
            chunk.host = move.host
        else:  # computed again and copied out meanwhile
            self._store.host.give(move.host)
        self._store.file(chunk)
        if self._unwanted(move):
            self._store.release_disk(chunk)

    def _not_read(self, move: Move) -> None:
        """The record is worthless: the chunk is dropped, if it is nowhere else."""
        self._store.host.give(move.host)
        if move.chunk is None:
            self.vacate(move.disk, move.key)
            return
        move.chunk.moving = None
        self._store.release_disk(move.chunk)

    # -- an earlier life

    def adopt(self, records: Iterable[DiskRecord], now: float) -> None:
        """Chunks for the records that an earlier process left; nothing has been stored yet. Of two records with one key
        the first counts."""
        taken: dict[int, None] = {}
        for record in records:
            if not 0 <= record.slot < self.count or record.slot in taken:
                raise InvariantError(f"{record} is in no slot, or in another's; there are {self.count}")
            taken[record.slot] = None
            if self._store.find(record.key) is None:
                self._store.adopt(record.key, record.end, record.slot, now - record.age_s)
            else:
                self.vacate(record.slot, record.key)
        self.pool.take_all(taken)

    # -- proof

    def check(self, chunks: Iterable[Chunk]) -> tuple[list[int], list[int]]:
        """The HOST and DISK slots that are no chunk's but taken. InvariantError if chunks and moves disagree."""
        moving = {chunk.moving: chunk for chunk in chunks if chunk.moving is not None}
        host: list[int] = []
        disk = [*self._vacated, *self._condemned, *self._lost]
        disk += [slot for _, slots in self._erasing for slot in slots]
        for slot, move in self._moves.items():
            chunk = move.chunk
            own = (move.host, NO_SLOT) if move.spills else (NO_SLOT, move.disk)
            if slot != move.disk or moving.pop(move, None) is not chunk:
                raise InvariantError(f"the move to or from DISK slot {slot} and its chunk disagree")
            if chunk is not None and (chunk.host if move.spills else chunk.disk) != max(own):
                raise InvariantError(f"{chunk} has lost the slot that its move uses")
            if not move.spills or chunk is None:
                host.append(move.host)
            if move.spills or chunk is None:
                disk.append(move.disk)
        counts = sum(move.spills for move in self._moves.values()), sum(not m.spills for m in self._moves.values())
        if moving or counts != (self.writing, self.reading):
            raise InvariantError("a chunk is moving without work for the disk, or the work is counted wrongly")
        if not self._keys.keys() <= {*disk, *self._moves}:
            raise InvariantError("a DISK slot that is free, or a chunk's, is said to hold what is left of another")
        return host, disk
