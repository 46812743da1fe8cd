"""The shared tier's part of a plan: chunks of ended turns are written to it, and it is asked for
the chunks that a request in the queue misses (docs/use/shared-kv.md)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import inf

from ..config import SchedulerConfig
from ..cost import CostProfile
from ..kv.chunk import NO_SLOT, Chunk
from ..kv.chunk_store import ChunkStore
from ..kv.lower_tiers import LowerTiers
from ..kv.shared_tier import SharedTier
from ..turns.turn import Turn
from ..types import HOST, SHARED, ChunkKey
from .eviction import Evictor
from .queues import RequestQueues
from .write_behind import LINK_PIECE_S, TierWriter

ANSWER_S = 0.02
"""Seconds that a request which could join waits for the answer to its find."""
MOST_WRITES = 64  # in progress; each keeps a HOST slot


class Sharing(TierWriter):
    """Exists only with a shared tier.

    Contexts shorter than `shared_min_tokens` are not written, and fewer missing tokens are not
    looked for. Before anything is written, one find tells what the store has already.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cost: CostProfile,
        store: ChunkStore,
        tier: SharedTier,
        queues: RequestQueues,
    ):
        super().__init__(
            store,
            LowerTiers([tier]),
            most_copies=min(64, max(1, int(LINK_PIECE_S / cost.swap_out()))),
            most_writes=MOST_WRITES,
        )
        # With a disk, HOST keeps free slots. Without one it is full sooner or later. Chunks that
        # are dropped then make room for those on their way, and for later ones in the same slots.
        self._drops = not store.lower.local
        self._tier = tier
        self._queues = queues
        self._writes = config.save != "off"
        self._least = config.shared_min_tokens
        self._size = config.chunk_tokens
        # by number of the find
        self._to_write: dict[int, list[Chunk]] = {}
        self._to_read: dict[int, tuple[Turn, list[tuple[ChunkKey, int]]]] = {}
        # turns without an answer, and until when they wait for it once they could join
        self._waiting: dict[Turn, float] = {}

    @property
    def writing(self) -> bool:
        """True if chunks are on their way to the store."""
        return bool(self._pending or self._tier.writing)

    @property
    def next_due(self) -> float:
        """The latest time of the next plan, seconds."""
        return self._tier.next_due

    # -- writing

    def turn_ended(self, chunks: Iterable[Chunk | None], now: float) -> None:
        """Will write the keyed chunks that the store does not have, if the context is long."""
        keyed = [chunk for chunk in chunks if chunk is not None and chunk.key is not None]
        if keyed and self._writes and keyed[-1].end >= self._least:
            self._write(keyed, now)

    def stop(self, logs: Iterable[Sequence[Chunk]], now: float) -> None:
        """The server stops: will write what is on HOST of these logs, in their order."""
        if not self._writes:
            return
        for chunks in logs:
            if chunks and chunks[-1].end >= self._least:
                self._write([chunk for chunk in chunks if chunk.slots[HOST] != NO_SLOT], now)

    def _write(self, chunks: list[Chunk], now: float) -> None:
        if now < self._tier.paused_until:
            return
        new = [chunk for chunk in chunks if self._is_new(chunk) and chunk not in self._pending]
        if new:
            self._pending.update(dict.fromkeys(new))
            number = self._tier.find(chunk.key for chunk in new if chunk.key is not None)
            self._to_write[number] = new

    def _is_new(self, chunk: Chunk) -> bool:
        """Chunks that the other tier writes now are written later."""
        mine = chunk.moving is not None and chunk.moving.tier is self._tier.tier
        return chunk.resident and chunk.slots[SHARED] == NO_SLOT and not mine

    def _answered_write(self, chunks: list[Chunk], there: tuple[bool, ...]) -> None:
        for chunk, stored in zip(chunks, there or (True,) * len(chunks), strict=True):
            if chunk not in self._pending:
                continue
            if not stored:
                self._queue.append(chunk)
                continue
            if there and chunk.key is not None and self._store.has(chunk) and chunk.resident:
                self._store.learn(chunk.key, chunk.end, self._store.now)
            self._leave(chunk)

    # -- reading

    def look_for(self, turn: Turn, missing: Sequence[tuple[ChunkKey, int]]) -> None:
        """The turn joins the queue. `missing`: keys and ends of its chunks in no tier here."""
        if len(missing) * self._size >= self._least:
            number = self._tier.find(key for key, _ in missing)
            self._to_read[number] = (turn, list(missing))
            self._waiting[turn] = inf

    def awaits(self, turn: Turn, now: float) -> bool:
        """True if the turn, which could join, waits for the answer to its find."""
        until = self._waiting.get(turn)
        if until == inf:
            until = self._waiting[turn] = now + ANSWER_S
        return until is not None and now < until

    def _answered_read(
        self, turn: Turn, keys: list[tuple[ChunkKey, int]], there: tuple[bool, ...], now: float
    ) -> None:
        del self._waiting[turn]
        waiting = self._queues.waiting
        place = bisect_left(waiting, turn.order, key=lambda other: other.order)
        if waiting[place : place + 1] != [turn]:
            return  # it has joined, or has left
        hits = [
            self._store.learn(key, end, now)
            for (key, end), stored in zip(keys, there, strict=bool(there))
            if stored
        ]
        self._queues.await_chunks(turn, hits, now)

    # -- plans

    def take_answers(self, now: float) -> None:
        """Called before requests are admitted."""
        answers = self._tier.answers
        while answers:
            number, there = answers.popitem()
            if number in self._to_write:
                self._answered_write(self._to_write.pop(number), there)
            else:
                self._answered_read(*self._to_read.pop(number), there, now)

    def plan(self, evictor: Evictor, now: float) -> None:
        """Does one step's share."""
        self._tier.remove_again(now)
        if now < self._tier.paused_until:
            self._decline_all()
        else:
            self._write_copied(evictor)
            self._copy_out(evictor)
        self._end_staging()
