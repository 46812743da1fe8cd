"""The shared tier: records in a store that other servers read, write and remove too
(docs/use/shared-kv.md).

Nothing is known of the store but what it has answered, so it has no slots to fill: a chunk's slot
here is a number that says "the store had it". A chunk that is in no tier of this server keeps that
number only while a request in the queue waits for it.

The pieces of a recurrent state are one record there, written and read in one call. So a state is
there whole or not at all. Its reads are handed over when all of them have begun. A piece's slot
here says only that a read is to come: once the state is on HOST, it is known there alone.

A call may hang. From its deadline on it counts as late: its chunk does not wait for it any more,
and its HOST slot stays lent to it until it returns.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import count, islice
from math import inf
from operator import attrgetter

from ..plan import KeyAnswer, KeyBatch, Promotion, Spill, StepResult, TierReport, TierWork
from ..types import GPU, HOST, SHARED, ChunkKey, InvariantError, Tier
from .chunk import NO_SLOT, Chunk, Move, State

PAUSE_S = 5.0
"""Seconds without writes after one has failed: a full store is not tried in every step."""

AGAIN_S = 15.0
"""Seconds until removed keys are removed again: another server, which did not know of the deletion
yet, may have written them. It knows within 4 s (docs/use/shared-histories.md)."""

GATHERING_PLANS = 32
"""Plans until the reads of a state are given up of which not all have begun: HOST has no room."""

REMOVED_AT_ONCE = 128  # keys of one call
REMOVED_AGAIN = 1024  # keys that one plan removes again


class SharedTier:
    """A `LowerTier` without slots of its own.

    deleted     erasures since the start, one for each key
    answers     answers to finds that nobody has taken yet, by number
    read_s      seconds to read one record, as measured
    arriving    chunks of KV whose reads have begun, the earliest first; `Sharing` takes them out
    """

    tier = Tier.SHARED
    count = 0
    room = 2**30

    def __init__(self) -> None:
        self.spilled = self.promoted = self.failed_writes = self.failed_reads = 0
        self.deleted = 0
        self.paused_until = 0.0
        self.read_s = inf
        self.answers: dict[int, tuple[bool, ...]] = {}
        self.arriving: deque[Chunk] = deque()
        self._slots = count()
        self._moves: dict[int, Move] = {}
        self._in_progress = {True: 0, False: 0}  # moves that are not late: writes, reads
        self._writes: defaultdict[ChunkKey, set[int]] = defaultdict(set)  # slots by key
        self._spills: list[Spill] = []
        self._promotions: list[Promotion] = []
        # reads of states that are not handed over yet, and the plans that they still wait for
        self._gathering: dict[State, list[Promotion]] = {}
        self._patience: dict[State, int] = {}
        self._given_up: list[int] = []  # slots of reads that are never handed over
        self._numbers = count(1)  # of finds and removals
        self._finds: list[KeyBatch] = []
        self._finding: set[int] = set()  # numbers of finds without an answer
        # Erasures by number, ascending; a key is in the first of these that fits.
        self._erasures: OrderedDict[int, ChunkKey] = OrderedDict()
        self._behind_writes: defaultdict[ChunkKey, list[int]] = defaultdict(list)
        self._to_remove: dict[ChunkKey, list[int]] = {}
        self._removing: dict[int, list[tuple[ChunkKey, list[int]]]] = {}  # by number of the removal
        self._unwanted: set[int] = set()  # slots of ended writes of keys that are to be removed
        self._refused: list[int] = []  # a heap: numbers of erasures that the store refused
        # times of further removals and their keys, ascending; a first removal may have failed
        self._again: deque[tuple[float, ChunkKey]] = deque()

    # -- moves

    @property
    def writing(self) -> int:
        """Late ones do not count: nobody waits for them."""
        return self._in_progress[True]

    @property
    def reading(self) -> int:
        return self._in_progress[False]

    def new_slot(self) -> int:
        """The slot of a chunk that the store is known to have."""
        return next(self._slots)

    def begin_write(self, chunk: Chunk) -> Move:
        move = self._begin(chunk, chunk.slots[HOST], self.new_slot(), spills=True)
        assert chunk.key is not None
        self._spills.append(Spill(move.host, move.slot, chunk.key, chunk.end))
        self._writes[move.key].add(move.slot)
        return move

    def begin_read(self, chunk: Chunk, host: int) -> Move:
        move = self._begin(chunk, host, chunk.slots[SHARED], spills=False)
        assert chunk.key is not None
        read = Promotion(move.slot, host, chunk.key)
        if chunk.state is None:
            self._promotions.append(read)
            self.arriving.append(chunk)
        else:
            self._gathering.setdefault(chunk.state, []).append(read)
            self._patience.setdefault(chunk.state, GATHERING_PLANS)
        return move

    def _begin(self, chunk: Chunk, host: int, slot: int, spills: bool) -> Move:
        key = chunk.erased_with
        assert key is not None
        move = self._moves[slot] = Move(self.tier, chunk, key, host, slot, spills)
        self._in_progress[spills] += 1
        return move

    def abandon(self, move: Move) -> None:
        move.chunk = None

    def release(self, slot: int, key: ChunkKey) -> None:
        """The record stays in the store, for other servers."""
        self._unwanted.discard(slot)  # nobody asks whether a chunk that was dropped is wanted

    def wanted(self, slot: int, chunk: Chunk) -> bool:
        unwanted = slot in self._unwanted
        self._unwanted.discard(slot)
        return not unwanted and chunk.state is None

    def late(self, result: StepResult) -> Iterator[Move]:
        """Yields the reads that are past their deadline from now on. The caller abandons them."""
        for slot in _report(result).late:
            move = self._moves.get(slot)
            if move is None or move.late:
                continue
            move.late = True
            self._in_progress[move.spills] -= 1
            if move.spills:  # the client of a deletion does not wait for it
                self._refuse(self._behind_writes.get(move.key, []))
            else:
                yield move

    def report(self, result: StepResult, now: float) -> Iterator[tuple[Move, bool]]:
        report = _report(result)
        self.read_s = report.read_seconds or self.read_s
        for answer in report.looked_up:
            self._finding.discard(answer.number)
            self.answers[answer.number] = answer.keys
        for answer in report.removed:
            self._removed(answer, now)
        given_up, self._given_up = self._given_up, []
        for slot in given_up:
            self._in_progress[False] -= 1
            yield self._moves.pop(slot), False
        ended = [(slot, True) for slot in (*report.spilled, *report.promoted)]
        for slot, succeeded in (*ended, *((slot, False) for slot in report.failed)):
            move = self._moves.pop(slot, None)
            if move is None:
                raise InvariantError(f"record {slot} is reported, but no such work is under way")
            self._in_progress[move.spills] -= not move.late
            if move.spills:
                self.spilled += succeeded
                self.failed_writes += not succeeded
                self._write_ended(move)
                if not succeeded:
                    self.paused_until = now + PAUSE_S
            else:
                self.promoted += succeeded
                self.failed_reads += not succeeded
            yield move, succeeded

    def _write_ended(self, move: Move) -> None:
        """Erasures that waited for the write may begin."""
        key = move.key
        self._writes[key].discard(move.slot)
        if key in self._behind_writes:
            self._unwanted.add(move.slot)
        if not self._writes[key]:
            del self._writes[key]
            if key in self._behind_writes:
                self._to_remove.setdefault(key, []).extend(self._behind_writes.pop(key))

    # -- finding

    def find(self, keys: Iterable[ChunkKey]) -> int:
        """Asks with this plan which of the keys the store has. Returns the number of the answer."""
        batch = KeyBatch(next(self._numbers), tuple(keys))
        self._finds.append(batch)
        self._finding.add(batch.number)
        return batch.number

    # -- removing

    def erase(self, key: ChunkKey, chunks: Iterable[Chunk]) -> None:
        """Also for a chunk that this server does not know: another one may have written it. Waits
        for the end of this server's own write."""
        self.deleted += 1
        self._erasures[self.deleted] = key
        writes = self._writes.get(key, set())
        waiting = self._behind_writes[key] if writes else self._to_remove.setdefault(key, [])
        waiting.append(self.deleted)
        if any(self._moves[slot].late for slot in writes):
            self._refuse([self.deleted])

    @property
    def erased_up_to(self) -> int:
        return next(iter(self._erasures), self.deleted + 1) - 1

    def refused(self, after: int, up_to: int) -> bool:
        while self._refused and self._refused[0] <= after:
            heappop(self._refused)
        return bool(self._refused) and self._refused[0] <= up_to

    def _refuse(self, numbers: Iterable[int]) -> None:
        """These erasures have ended for their clients; their keys are removed later."""
        for number in numbers:
            if self._erasures.pop(number, None) is not None:
                heappush(self._refused, number)

    def _removed(self, answer: KeyAnswer, now: float) -> None:
        batch = self._removing.pop(answer.number)
        done = answer.keys or (False,) * len(batch)
        for (key, numbers), removed in zip(batch, done, strict=True):
            if numbers or not removed:
                self._again.append((now + AGAIN_S, key))
            if not removed:
                self._refuse(numbers)
            for number in numbers:
                self._erasures.pop(number, None)

    @property
    def next_due(self) -> float:
        """The time of the next further removal, seconds; infinity if there is none."""
        return self._again[0][0] if self._again else inf

    def remove_again(self, now: float) -> None:
        """Removes the keys again whose time has come, as many as one plan does."""
        for _ in range(REMOVED_AGAIN):
            if self.next_due > now:
                return
            self._to_remove.setdefault(self._again.popleft()[1], [])

    # -- work

    @property
    def outstanding(self) -> bool:
        return bool(
            self.writing or self.reading or self._finding or self._to_remove or self._removing
        )

    def _gather(self) -> None:
        """Hands over the reads of states of which all have begun."""
        for state, reads in list(self._gathering.items()):
            self._patience[state] -= 1
            if len(reads) == len(state.pieces):
                self._promotions += sorted(reads, key=attrgetter("key"))
            elif state.pieces and self._patience[state]:
                continue
            else:
                self._given_up += [read.slot for read in reads]
            del self._gathering[state], self._patience[state]

    def hand_over(self, step: int) -> TierWork | None:
        self._gather()
        removals = []
        while self._to_remove:
            batch = list(islice(self._to_remove.items(), REMOVED_AT_ONCE))
            number = next(self._numbers)
            self._removing[number] = batch
            removals.append(KeyBatch(number, tuple(key for key, _ in batch)))
            for key, _ in batch:
                del self._to_remove[key]
        if not (self._spills or self._promotions or self._finds or removals):
            return None
        work = TierWork(
            self.tier,
            tuple(self._spills),
            tuple(self._promotions),
            finds=tuple(self._finds),
            removals=tuple(removals),
        )
        for begun in (self._spills, self._promotions, self._finds):
            begun.clear()
        return work

    def adopt(self, slots: Iterable[int]) -> None:
        if list(slots):
            raise InvariantError("the shared tier tells of no records of its own accord")

    # -- checks

    def host_slots_moving(self) -> int:
        return sum(
            not m.spills or m.chunk is None or m.chunk.slots[GPU] == NO_SLOT
            for m in self._moves.values()
        )

    def check(self, chunks: Iterable[Chunk]) -> list[int]:
        chunks = list(chunks)
        moving = {
            chunk.moving: chunk
            for chunk in chunks
            if chunk.moving is not None and chunk.moving.tier is self.tier
        }
        owned = {move: move.chunk for move in self._moves.values() if move.chunk is not None}
        if moving != owned:
            raise InvariantError("a chunk and its move to or from the shared tier disagree")
        slots = [chunk.slots[SHARED] for chunk in chunks if chunk.slots[SHARED] != NO_SLOT]
        if len(set(slots)) < len(slots):
            raise InvariantError("two chunks have one record of the shared tier")
        waiting = [
            number
            for numbers in (
                *self._behind_writes.values(),
                *self._to_remove.values(),
                *(numbers for batch in self._removing.values() for _, numbers in batch),
            )
            for number in numbers
        ]
        if not self._erasures.keys() <= set(waiting):
            raise InvariantError("an erasure is under way that no removal will end")
        return [m.host for m in self._moves.values() if not m.spills or m.chunk is None]


def _report(result: StepResult) -> TierReport:
    return next((r for r in result.lower if r.tier is Tier.SHARED), TierReport(Tier.SHARED))
