"""The third tier: slots on DISK, and the work that fills and reads them (DESIGN sections 3 and 4).

Disk work is on no lane: it begins with the plan that holds it and takes its time. Until a result reports it, its slots
belong to it and not to the chunk:

    spill       HOST slot (the chunk's own; may be read) -> DISK slot (the work's; the chunk's own once it is written)
    promotion   DISK slot (the chunk's own) -> HOST slot (the work's; the chunk's own once it is read and checked)

So whatever slots a chunk has are valid, and no device ever waits for the disk. A chunk that is dropped meanwhile leaves
all slots to the work, which frees them at its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from ..plan import Promotion, Spill, StepResult
from ..types import ChunkKey, InvariantError
from .chunk import NO_SLOT, Chunk, Move
from .slots import SlotPool

BACKOFF_S = 5.0
"""After a write has failed nothing is spilled for so long: a full or broken disk is not asked at every step."""


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

    def __init__(self, count: int):
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
        self._erase_failed: set[int] = set()
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

    # -- work

    @property
    def outstanding(self) -> bool:
        """Work has begun and is not reported, or is to begin with the plan in the making."""
        return bool(self._moves or self._vacated or self._condemned)

    def spill(self, chunk: Chunk, slot: int) -> Move:
        """The chunk's HOST copy, which is complete, is written into the DISK slot."""
        move = self._begin(chunk, chunk.host, slot, spills=True)
        self._spills.append(Spill(chunk.host, slot, move.key, chunk.end))
        self.writing += 1
        return move

    def promote(self, chunk: Chunk, host: int) -> Move:
        """The chunk's record is read into the HOST slot, which no copy on any lane uses."""
        move = self._begin(chunk, host, chunk.disk, spills=False)
        self._promotions.append(Promotion(chunk.disk, host, move.key))
        self.reading += 1
        return move

    def _begin(self, chunk: Chunk, host: int, disk: int, spills: bool) -> Move:
        assert chunk.key is not None
        move = self._moves[disk] = Move(chunk, chunk.key, host, disk, spills)
        return move

    def abandon(self, move: Move) -> None:
        """Its chunk is dropped: both slots stay taken until the work is reported."""
        move.chunk = None
        self._leave(move.disk, move.key)

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

    def report(self, result: StepResult, now: float) -> Iterator[tuple[Move, bool]]:
        """Frees the slots erased by the result's plan. Yields the moves that have ended, and whether each succeeded:
        the caller files each chunk before it takes the next."""
        self._erase_failed.update(result.erase_failed)
        while self._erasing and self._erasing[0][0] <= result.step:
            for slot in self._erasing.popleft()[1]:
                self._gone(slot)
        for slot in result.spilled:
            move = self._end(slot, spills=True)
            self.spilled += 1
            self._nothing_left(slot)
            yield move, True
        for slot in result.promoted:
            move = self._end(slot, spills=False)
            self.promoted += 1
            yield move, True
        for slot in result.failed:
            move = self._end(slot)
            if move.spills:
                self.failed_writes += 1
                self.paused_until = now + BACKOFF_S
            else:
                self.failed_reads += 1
            yield move, False

    def _gone(self, slot: int) -> None:
        self._doomed.pop(slot, None)
        if slot in self._erase_failed:
            self._erase_failed.remove(slot)
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

    def wanted(self, slot: int, chunk: Chunk) -> bool:
        """False if the chunk was deleted while a row held it and the slot was moved to or from, and no conversation has
        claimed it anew: then its record must go."""
        if chunk.claims:
            self._doomed.pop(slot, None)
        return slot not in self._doomed

    # -- an earlier life

    def take_slots(self, slots: Iterable[int]) -> None:
        """Slots with records of an earlier process; InvariantError for one that does not exist or comes twice."""
        taken: dict[int, None] = {}
        for slot in slots:
            if not 0 <= slot < self.count or slot in taken:
                raise InvariantError(f"a record is in DISK slot {slot}, as another is, or there are only {self.count}")
            taken[slot] = None
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
