"""The simplest lower tier: a dict. A slot is erased before it is used again, so nothing is ever
overwritten."""

from __future__ import annotations

from collections import deque

from pensieve.scheduler.kv.chunk import NO_SLOT, Move
from pensieve.scheduler.kv.disk_tier import BACKOFF_S
from pensieve.scheduler.plan import Promotion, Spill, TierReport, TierWork
from pensieve.scheduler.types import HOST, InvariantError, Tier


class MemoryTier:
    """A `LowerTier`. `keys`: by slot, of every slot that is not free."""

    tier = Tier.DISK

    def __init__(self, count):
        self.count = count
        self.writing = self.reading = self.deleted = 0
        self.spilled = self.promoted = self.failed_writes = self.failed_reads = 0
        self.paused_until = 0.0
        self.keys = {}
        self._moves = {}
        self._released = {}
        self._erasing = deque()  # (step, slots)
        self._must_erase = {}  # slot -> numbers of its erasures
        self._refused = set()
        self._bad = set()
        self._failed = set()
        self._work = ([], [])

    @property
    def room(self):
        return self.count - len(self.keys)

    def begin_write(self, chunk):
        slot = next(slot for slot in range(self.count) if slot not in self.keys)
        self.keys[slot] = chunk.erased_with
        self._work[0].append(Spill(chunk.slots[HOST], slot, chunk.key, chunk.end))
        self.writing += 1
        return self._begin(chunk, chunk.slots[HOST], slot, True)

    def begin_read(self, chunk, host):
        slot = chunk.slots[self.tier]
        self._work[1].append(Promotion(slot, host, chunk.key))
        self.reading += 1
        return self._begin(chunk, host, slot, False)

    def _begin(self, chunk, host, slot, spills):
        move = self._moves[slot] = Move(self.tier, chunk, chunk.erased_with, host, slot, spills)
        return move

    def abandon(self, move):
        move.chunk = None

    def release(self, slot, key):
        assert self.keys[slot] in (key, None) and slot not in self._moves
        self.keys[slot] = key
        self._released[slot] = None

    def erase(self, key, chunks):
        own = {chunk.slots[self.tier] for chunk in chunks}
        for slot in [slot for slot, other in self.keys.items() if other == key or slot in own]:
            self.deleted += 1
            if slot in self._bad:
                self._refused.add(self.deleted)
            else:
                self._must_erase.setdefault(slot, []).append(self.deleted)

    @property
    def erased_up_to(self):
        waiting = [number for numbers in self._must_erase.values() for number in numbers]
        return min(waiting, default=self.deleted + 1) - 1

    def refused(self, after, up_to):
        return any(after < number <= up_to for number in self._refused)

    def wanted(self, slot, chunk):
        if chunk.claims:
            self._must_erase.pop(slot, None)
        return slot not in self._must_erase

    def adopt(self, slots):
        for slot in slots:
            if not 0 <= slot < self.count or slot in self.keys:
                raise InvariantError(f"a record is in slot {slot}, as another is, or it is none")
            self.keys[slot] = None

    @property
    def outstanding(self):
        return bool(self._moves or self._released)

    def hand_over(self, step):
        spills, promotions = map(tuple, self._work)
        erased = tuple(self._released)
        self._released.clear()
        self._work = ([], [])
        if not (spills or promotions or erased):
            return None
        self._erasing.append((step, erased))
        return TierWork(self.tier, spills, promotions, erased)

    def late(self, result):
        return ()

    def report(self, result, now):
        (report,) = result.lower or (TierReport(self.tier),)
        self._failed.update(report.erase_failed)
        while self._erasing and self._erasing[0][0] <= result.step:
            for slot in self._erasing.popleft()[1]:
                numbers = self._must_erase.pop(slot, ())
                if slot in self._failed:
                    self._bad.add(slot)
                    self._refused.update(numbers)
                else:
                    del self.keys[slot]
        ended = [(slot, True) for slot in (*report.spilled, *report.promoted)]
        for slot, succeeded in (*ended, *((slot, False) for slot in report.failed)):
            if slot not in self._moves:
                raise InvariantError(f"slot {slot} is reported, but no such work is under way")
            move = self._moves.pop(slot)
            if move.spills:
                self.writing -= 1
                self.spilled += succeeded
                self.failed_writes += not succeeded
                self.paused_until = self.paused_until if succeeded else now + BACKOFF_S
            else:
                self.reading -= 1
                self.promoted += succeeded
                self.failed_reads += not succeeded
            yield move, succeeded

    def host_slots_moving(self):
        return sum(
            not move.spills or move.chunk is None or move.chunk.slots[0] == NO_SLOT
            for move in self._moves.values()
        )

    def check(self, chunks):
        chunks = list(chunks)
        moving = {chunk.moving for chunk in chunks if chunk.moving is not None}
        assert moving == {move for move in self._moves.values() if move.chunk is not None}
        own = [chunk.slots[self.tier] for chunk in chunks if chunk.slots[self.tier] != NO_SLOT]
        works = [m.slot for m in self._moves.values() if m.spills or m.chunk is None]
        erasing = [slot for _, slots in self._erasing for slot in slots]
        taken = [*own, *works, *self._released, *erasing, *self._bad]
        assert sorted(taken) == sorted(self.keys), (taken, self.keys)
        return [m.host for m in self._moves.values() if not m.spills or m.chunk is None]

    def former_keys(self):
        """Keys whose records may be in slots that their chunks have given up."""
        own = {move.key for move in self._moves.values() if move.chunk is None}
        erasing = [slot for _, slots in self._erasing for slot in slots]
        return own | {self.keys[slot] for slot in (*self._released, *erasing, *self._bad)}

    def free_slots(self, held):
        """Those of the slots that hold records which should be free."""
        return set(held) - set(self.keys)
