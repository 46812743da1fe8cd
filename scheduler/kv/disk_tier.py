"""The third tier: slots on DISK, and the work that fills and reads them (docs/design/disk.md).

Disk work is on no lane: it begins with the plan that contains it and may take many steps. Until a
result reports its end, its target slot belongs to the work and not to the chunk:

    spill       HOST slot (the chunk's own; may be read) -> DISK slot (the work's; the chunk's own
                once it is written)
    promotion   DISK slot (the chunk's own) -> HOST slot (the work's; the chunk's own once it is
                read and verified)

So all slots of a chunk are valid, and the device never waits for the disk. A chunk that is dropped
meanwhile leaves all its slots to the work, which frees them at its end.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from heapq import heappop, heappush

from ..plan import Promotion, Spill, StepResult, TierReport, TierWork
from ..types import GPU, HOST, ChunkKey, InvariantError, Tier
from .chunk import NO_SLOT, Chunk, Move
from .slots import SlotPool

BACKOFF_S = 5.0
"""Seconds without new spills after a failed write: a full or broken disk is not tried in every
step."""

ERASE_AGAIN_S = 60.0
"""Seconds until slots that the disk refused to erase are erased again. A full disk refuses, and has
room later."""


class SlotState(Enum):
    """FREE     in the pool; it holds no record
    VALID       a chunk's: its record is there, or about to be written
    WRITING     a spill fills it
    READING     a promotion reads it
    RELEASED    given up: this plan takes it again (its record is overwritten) or erases it
    DELETE      given up, and it may hold a deleted chunk: this plan erases it
    ERASING     a plan erases it; free at that plan's result
    BAD         it could not be erased: not used before another try succeeds (ERASE_AGAIN_S)
    """

    FREE = auto()
    VALID = auto()
    WRITING = auto()
    READING = auto()
    RELEASED = auto()
    DELETE = auto()
    ERASING = auto()
    BAD = auto()


class DiskTier:
    """The state of every DISK slot, the moves in progress, and the disk work of the plan being
    built.

    The slot of a deleted chunk must be erased: after a power failure only an erased record is
    certainly gone. Until a slot is erased or overwritten it may hold records of former chunks.
    These chunks may be deleted later, so their keys are kept.

    spilled, promoted, failed_writes, failed_reads, erased
                chunks since the start
    deleted     erasures since the start that a deleted chunk needs: one for each slot that may hold
                its record
    paused_until
                time before which nothing is spilled, seconds
    """

    tier = Tier.DISK

    def __init__(self, count: int):
        self.pool = SlotPool(count)
        self.count = count
        self.writing = self.reading = 0
        self.spilled = self.promoted = self.failed_writes = self.failed_reads = self.erased = 0
        self.deleted = 0
        self.paused_until = 0.0
        self._states = [SlotState.FREE] * count
        self._moves: dict[int, Move] = {}  # moves of the slots WRITING and READING
        self._released: dict[int, None] = {}  # the slots RELEASED, the latest last
        self._delete: list[int] = []  # the slots DELETE
        self._erasing: deque[tuple[int, tuple[int, ...]]] = deque()  # the slots ERASING, by step
        # slots in any state, with the numbers of their erasures
        self._must_erase: dict[int, list[int]] = {}
        self._erasures: OrderedDict[int, int] = OrderedDict()  # the same by number, ascending
        self._refused: list[int] = []  # a heap: numbers of the erasures that the disk refused
        self._overwritten: set[int] = set()  # slots WRITING over the record of a deleted chunk
        self._erase_failed: set[int] = set()  # reported before their plan's result
        self._bad: list[int] = []  # the slots BAD
        self._erase_again_at = 0.0
        # by key: slots that its chunk has given up and that may hold its record
        self._former_slots: dict[ChunkKey, list[int]] = {}
        self._former_keys: dict[int, list[ChunkKey]] = {}  # the same by slot
        self._spills: list[Spill] = []
        self._promotions: list[Promotion] = []

    # -- slots

    @property
    def room(self) -> int:
        """Slots that can be taken without evicting a chunk."""
        return self.pool.free + len(self._released)

    def take(self) -> int:
        """Returns a slot, first one that was just given up."""
        slot = self._released.popitem()[0] if self._released else self.pool.take()
        self._states[slot] = SlotState.VALID
        return slot

    def release(self, slot: int, key: ChunkKey) -> None:
        """The key's chunk gives the slot up. The slot may still hold its record until it is erased
        or overwritten."""
        self._remember(slot, key)
        if slot in self._must_erase:
            self._states[slot] = SlotState.DELETE
            self._delete.append(slot)
        else:
            self._states[slot] = SlotState.RELEASED
            self._released[slot] = None

    def _remember(self, slot: int, key: ChunkKey) -> None:
        self._former_slots.setdefault(key, []).append(slot)
        self._former_keys.setdefault(slot, []).append(key)

    def _forget_former(self, slot: int) -> None:
        """Forgets the slot's former keys: it has been erased or overwritten."""
        for key in self._former_keys.pop(slot, ()):
            self._former_slots[key].remove(slot)
            if not self._former_slots[key]:
                del self._former_slots[key]

    def erase(self, key: ChunkKey, chunks: Iterable[Chunk]) -> None:
        """Every slot that holds, receives or may hold a record of the key's chunks must be
        erased."""
        slots = dict.fromkeys(self._former_slots.get(key, ()))
        for chunk in chunks:
            if chunk.moving is not None and chunk.moving.tier is self.tier:
                slots[chunk.moving.slot] = None
            elif chunk.slots[self.tier] != NO_SLOT:
                slots[chunk.slots[self.tier]] = None
        for slot in slots:
            self.deleted += 1
            if self._states[slot] is SlotState.BAD:
                heappush(self._refused, self.deleted)
                continue
            self._must_erase.setdefault(slot, []).append(self.deleted)
            self._erasures[self.deleted] = slot
            if self._states[slot] is SlotState.RELEASED:
                del self._released[slot]
                self._states[slot] = SlotState.DELETE
                self._delete.append(slot)
            elif self._states[slot] is SlotState.WRITING and self._moves[slot].key != key:
                self._overwritten.add(slot)

    @property
    def erased_up_to(self) -> int:
        """Erasures are numbered by `deleted`. All up to this number have ended: done, or
        refused."""
        return next(iter(self._erasures), self.deleted + 1) - 1

    def refused(self, after: int, up_to: int) -> bool:
        """True if the disk refused one of the erasures above number `after` and up to `up_to`. No
        caller asks for `after` and earlier ones again."""
        while self._refused and self._refused[0] <= after:
            heappop(self._refused)
        return bool(self._refused) and self._refused[0] <= up_to

    def host_slots_moving(self) -> int:
        """HOST slots in use by moves alone: read into, or spilled from a chunk that is not on the
        GPU."""
        return sum(
            not m.spills or m.chunk is None or m.chunk.slots[GPU] == NO_SLOT
            for m in self._moves.values()
        )

    # -- work

    @property
    def outstanding(self) -> bool:
        """True if work is in progress, or begins with the plan being built."""
        return bool(self._moves or self._released or self._delete)

    def begin_write(self, chunk: Chunk) -> Move:
        move = self._begin(chunk, chunk.slots[HOST], self.take(), spills=True)
        assert chunk.key is not None
        self._spills.append(Spill(move.host, move.slot, chunk.key, chunk.end))
        self.writing += 1
        return move

    def begin_read(self, chunk: Chunk, host: int) -> Move:
        move = self._begin(chunk, host, chunk.slots[self.tier], spills=False)
        assert chunk.key is not None
        self._promotions.append(Promotion(move.slot, host, chunk.key))
        self.reading += 1
        return move

    def _begin(self, chunk: Chunk, host: int, slot: int, spills: bool) -> Move:
        key = chunk.erased_with
        assert key is not None
        move = self._moves[slot] = Move(self.tier, chunk, key, host, slot, spills)
        self._states[slot] = SlotState.WRITING if spills else SlotState.READING
        return move

    def abandon(self, move: Move) -> None:
        move.chunk = None
        self._remember(move.slot, move.key)

    def hand_over(self, step: int) -> TierWork | None:
        erased = (*self._delete, *self._released)
        if erased:
            self._erasing.append((step, erased))
            self._delete.clear()
            self._released.clear()
            self.erased += len(erased)
        for slot in erased:
            self._states[slot] = SlotState.ERASING
        if not (self._spills or self._promotions or erased):
            return None
        work = TierWork(self.tier, tuple(self._spills), tuple(self._promotions), erased)
        self._spills.clear()
        self._promotions.clear()
        return work

    # -- reports

    def late(self, result: StepResult) -> tuple[()]:
        """A disk has no deadline."""
        return ()

    def report(self, result: StepResult, now: float) -> Iterator[tuple[Move, bool]]:
        """Frees the slots that the result's plan erased, then ends moves."""
        report = next((r for r in result.lower if r.tier == self.tier), TierReport(self.tier))
        self._erase_failed.update(report.erase_failed)
        while self._erasing and self._erasing[0][0] <= result.step:
            for slot in self._erasing.popleft()[1]:
                self._erasure_ended(slot, now)
        if self._bad and now >= self._erase_again_at:
            for slot in self._bad:
                self._states[slot] = SlotState.DELETE
            self._delete += self._bad
            self._bad.clear()
        for slot in report.spilled:
            move = self._end(slot, spills=True)
            self.spilled += 1
            if slot not in self._overwritten:
                self._forget_former(slot)
            yield move, True
        for slot in report.promoted:
            move = self._end(slot, spills=False)
            self.promoted += 1
            yield move, True
        for slot in report.failed:
            move = self._end(slot)
            if move.spills:
                self.failed_writes += 1
                self.paused_until = now + BACKOFF_S
            else:
                self.failed_reads += 1
            yield move, False

    def _erasure_ended(self, slot: int, now: float) -> None:
        numbers = self._end_erasures(slot)
        if slot in self._erase_failed:
            self._erase_failed.remove(slot)
            self._states[slot] = SlotState.BAD
            self._bad.append(slot)
            self._erase_again_at = now + ERASE_AGAIN_S
            for number in numbers:
                heappush(self._refused, number)
        else:
            self._forget_former(slot)
            self._states[slot] = SlotState.FREE
            self.pool.give(slot)

    def _end_erasures(self, slot: int) -> list[int]:
        """The slot need not be erased any more. Returns the numbers of its erasures."""
        self._overwritten.discard(slot)
        numbers = self._must_erase.pop(slot, [])
        for number in numbers:
            del self._erasures[number]
        return numbers

    def _end(self, slot: int, spills: bool | None = None) -> Move:
        move = self._moves.pop(slot, None)
        if move is None or (spills is not None and move.spills != spills):
            raise InvariantError(f"DISK slot {slot} is reported, but no such work is under way")
        if move.spills:
            self.writing -= 1
        else:
            self.reading -= 1
        self._states[slot] = SlotState.VALID
        return move

    def wanted(self, slot: int, chunk: Chunk) -> bool:
        """Returns whether the record of a move that has ended may stay. It must be erased in two
        cases:

        * Its chunk was deleted during the move, and no conversation has claimed the chunk since.
        * It overwrote the record of a chunk that was deleted during the move. Only erasing makes
          sure that the old record is gone.
        """
        if chunk.claims and slot not in self._overwritten:
            self._end_erasures(slot)
        return slot not in self._must_erase

    # -- records of an earlier process

    def adopt(self, slots: Iterable[int]) -> None:
        taken: dict[int, None] = {}
        for slot in slots:
            if not 0 <= slot < self.count or slot in taken:
                raise InvariantError(
                    f"a record is in DISK slot {slot}, as another is, or there are only "
                    f"{self.count}"
                )
            taken[slot] = None
            self._states[slot] = SlotState.VALID
        self.pool.take_all(taken)

    # -- checks

    def check(self, chunks: Iterable[Chunk]) -> list[int]:
        chunks = list(chunks)
        moving = {
            chunk.moving: chunk
            for chunk in chunks
            if chunk.moving is not None and chunk.moving.tier is self.tier
        }
        host: list[int] = []
        own: list[int] = []  # DISK slots that only a move owns
        for slot, move in self._moves.items():
            chunk = move.chunk
            kept = (move.host, NO_SLOT) if move.spills else (NO_SLOT, move.slot)
            if slot != move.slot or moving.pop(move, None) is not chunk:
                raise InvariantError(f"the move to or from DISK slot {slot} and its chunk disagree")
            if chunk is not None and (
                chunk.slots[HOST] if move.spills else chunk.slots[self.tier]
            ) != max(kept):
                raise InvariantError(f"{chunk} has lost the slot that its move uses")
            if not move.spills or chunk is None:
                host.append(move.host)
            if move.spills or chunk is None:
                own.append(move.slot)
        counts = (
            sum(move.spills for move in self._moves.values()),
            sum(not m.spills for m in self._moves.values()),
        )
        if moving or counts != (self.writing, self.reading):
            raise InvariantError(
                "a chunk is moving without work for the disk, or the work is counted wrongly"
            )
        listed = {
            slot: SlotState.WRITING if move.spills else SlotState.READING
            for slot, move in self._moves.items()
        }
        listed |= dict.fromkeys(self._released, SlotState.RELEASED) | dict.fromkeys(
            self._delete, SlotState.DELETE
        )
        for _, slots in self._erasing:
            listed |= dict.fromkeys(slots, SlotState.ERASING)
        if {n: slot for slot, numbers in self._must_erase.items() for n in numbers} != dict(
            self._erasures
        ):
            raise InvariantError(
                "the slots that must be erased and the numbers of their erasures disagree"
            )
        if not self._overwritten <= self._must_erase.keys():
            raise InvariantError(
                "a spill overwrites the record of a deleted chunk, and its slot need not be erased"
            )
        bad = [slot for slot, state in enumerate(self._states) if state is SlotState.BAD]
        if sorted(self._bad) != bad:
            raise InvariantError("the state of a DISK slot is not that of its list")
        idle = (SlotState.FREE, SlotState.VALID, SlotState.BAD)
        if listed != {slot: state for slot, state in enumerate(self._states) if state not in idle}:
            raise InvariantError("the state of a DISK slot is not that of its list")
        own_valid = [
            chunk.slots[self.tier] for chunk in chunks if chunk.slots[self.tier] != NO_SLOT
        ]
        valid = {slot for slot in own_valid if slot not in self._moves}
        if valid != {slot for slot, state in enumerate(self._states) if state is SlotState.VALID}:
            raise InvariantError(
                "a chunk has a DISK slot that is not VALID, or a VALID slot has no chunk"
            )
        if not self._former_keys.keys() <= {*listed, *bad}:
            raise InvariantError(
                "a DISK slot that is free, or a chunk's, may hold the record of another chunk"
            )
        taken = [
            slot
            for slot, state in listed.items()
            if state not in (SlotState.WRITING, SlotState.READING)
        ]
        self.pool.check([*own_valid, *own, *taken, *bad])
        return host
