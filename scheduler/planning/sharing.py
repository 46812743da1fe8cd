"""The shared tier's part of a plan: chunks of ended turns are written to it, and it is asked for
the chunks that a request in the queue misses (docs/use/shared-kv.md)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
from math import inf

from ..config import SchedulerConfig
from ..cost import CostProfile
from ..kv.chunk import NO_SLOT, Chunk
from ..kv.chunk_store import ChunkStore
from ..kv.lower_tiers import LowerTiers
from ..kv.piece_keys import state_key
from ..kv.shared_tier import SharedTier
from ..kv.states import KeptStates
from ..kv.victim_sets import Head
from ..kv.whereabouts import being_read
from ..turns.turn import Turn
from ..types import GPU, HOST, SHARED, ChunkKey
from ..work import LARGEST_PIECE, Pieces
from .link import LINK_PIECE_S, link_chunks
from .plan_builder import PlanBuilder
from .queues import RequestQueues
from .write_behind import TierWriter

ANSWER_S = 0.02
"""Seconds that a request which could join waits for the answer to its find, if that is more than
ANSWER_SHARE of the predicted time to compute what is missing."""
ANSWER_SHARE = 0.1
KEYS_A_PLAN = 1024
"""Keys of answers that one plan takes, and at most LARGEST_PIECE more: less than two ms."""
MOST_WRITES = 64  # in progress; each keeps a HOST slot

_KeysAndEnds = list[tuple[ChunkKey, int]]


class Sharing(TierWriter):
    """Exists only with a shared tier.

    Contexts shorter than `shared_min_tokens` are not written, and fewer missing tokens are not
    looked for. Before anything is written, one find tells what the store has already.

    A recurrent state is one record. Its first piece stands for it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cost: CostProfile,
        store: ChunkStore,
        tier: SharedTier,
        queues: RequestQueues,
        kept: KeptStates | None,
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
        self._kept = kept
        self._reserve = config.reserved_chunks
        self._cost = cost
        self._least_swap_ins = max(1, int(LINK_PIECE_S / cost.swap_in()))
        self._writes = config.save != "off"
        self._least = config.shared_min_tokens
        self._size = config.chunk_tokens
        # by number of the find
        self._to_write: dict[int, list[Chunk]] = {}
        self._to_read: dict[int, tuple[Turn, _KeysAndEnds, _KeysAndEnds]] = {}  # KV, states
        # turns without an answer, and until when they wait for it once they could join; None: for
        # the rest of their answer
        self._waiting: dict[Turn, float | None] = {}
        # answers that are taken in pieces
        self._read_answers: deque[Pieces] = deque()
        self._write_answers: deque[Pieces] = deque()

    @property
    def writing(self) -> bool:
        """True if chunks are on their way to the store."""
        return bool(self._pending or self._tier.writing)

    @property
    def busy(self) -> bool:
        return bool(self._read_answers or self._write_answers) or super().busy

    @property
    def next_due(self) -> float:
        """The latest time of the next plan, seconds."""
        return self._tier.next_due

    # -- writing

    def turn_ended(self, chunks: Iterable[Chunk | None], now: float) -> None:
        """Will write the keyed chunks that the store does not have, if the context is long."""
        keyed = [chunk for chunk in chunks if chunk is not None and chunk.key is not None]
        if keyed and self._writes and max(chunk.end for chunk in keyed) >= self._least:
            self._write([chunk for chunk in keyed if self._record(chunk)[0] is chunk], now)

    def _record(self, chunk: Chunk) -> Sequence[Chunk]:
        if chunk.state is None or not chunk.state.pieces:
            return (chunk,)
        return chunk.state.pieces

    def stop(self, logs: Iterable[Sequence[Chunk]], now: float) -> None:
        """The server stops: will write what is on HOST of these logs, in their order."""
        if not self._writes:
            return
        for chunks in logs:
            if chunks and chunks[-1].end >= self._least:
                states = self._states_of(chunks)
                copied = [chunk for chunk in chunks if chunk.slots[HOST] != NO_SLOT]
                self._write([*copied, *states], now)

    def _states_of(self, chunks: Iterable[Chunk]) -> list[Chunk]:
        """The first pieces of the states at the chunks' ends that are on HOST."""
        if self._kept is None:
            return []
        by_key = self._kept.by_key
        states = [by_key[chunk.key] for chunk in chunks if chunk.key in by_key]
        return [state.pieces[0] for state in states if self._kept.can_swap_in(state)]

    def _write(self, chunks: list[Chunk], now: float) -> None:
        if now < self._tier.paused_until:
            return
        new = [chunk for chunk in chunks if self._is_new(chunk) and chunk not in self._pending]
        if new:
            self._pending.update(dict.fromkeys(new))
            number = self._tier.find(map(_record_key, new))
            self._to_write[number] = new

    def _is_new(self, chunk: Chunk) -> bool:
        """Chunks that the other tier writes now are written later."""
        mine = chunk.moving is not None and chunk.moving.tier is self._tier.tier
        return chunk.resident and chunk.slots[SHARED] == NO_SLOT and not mine

    def _answered_write(self, chunks: list[Chunk], there: tuple[bool, ...]) -> Pieces:
        answer = zip(chunks, there or (True,) * len(chunks), strict=True)
        for number, (chunk, stored) in enumerate(answer, 1):
            if number % LARGEST_PIECE == 0:
                yield LARGEST_PIECE
            if chunk not in self._pending:
                continue
            if not stored:
                self._queue.append(chunk)
                continue
            is_here = self._store.has(chunk) and chunk.resident
            if there and is_here and chunk.key is not None and chunk.state is None:
                self._store.learn(chunk.key, chunk.end, self._store.now)
            self._leave(chunk)

    # -- reading

    def look_for(
        self, turn: Turn, missing: Sequence[tuple[ChunkKey, int]], last_state: int
    ) -> None:
        """The turn joins the queue. `missing`: keys and ends of its chunks in no tier here.
        `last_state`: where the last state here ends from which the turn could begin."""
        states = self._possible_states(turn, missing, last_state)
        computed = len(missing) * self._size
        if self._kept is not None:
            computed = max(computed, len(states) * self._kept.config.multiple)
        if computed >= max(1, self._least):
            keys = (key for key, _ in missing)
            number = self._tier.find([*keys, *(state_key(key) for key, _ in states)])
            self._to_read[number] = (turn, list(missing), states)
            self._waiting[turn] = inf

    def _possible_states(
        self, turn: Turn, missing: Sequence[tuple[ChunkKey, int]], last_state: int
    ) -> _KeysAndEnds:
        """Where a state may be that the turn could use: among the missing chunks, and behind the
        last state here, where even tokens whose KV is here are computed."""
        if self._kept is None or turn.context_start:
            return []
        multiple = self._kept.config.multiple
        every = multiple // self._size
        ends = {end for _, end in missing}
        pending = self._store.pending
        places = zip(
            turn.keys[every - 1 :: every], range(multiple, len(turn.tokens), multiple), strict=False
        )
        return [
            (key, end)
            for key, end in places
            if end in ends or (end > last_state and key not in pending)
        ]

    def awaits(self, turn: Turn, now: float) -> bool:
        """True if the turn, which could join, waits for the answer to its find."""
        if turn not in self._waiting:
            return False
        until = self._waiting[turn]
        if until == inf:
            until = self._waiting[turn] = now + max(ANSWER_S, ANSWER_SHARE * turn.work)
        return until is None or now < until

    def _answered_read(
        self,
        turn: Turn,
        keys: _KeysAndEnds,
        states: _KeysAndEnds,
        there: tuple[bool, ...],
        now: float,
    ) -> Pieces:
        answer = [*zip(keys, there[: len(keys)], strict=bool(there))]
        for first in range(0, len(answer), LARGEST_PIECE):
            if not self._is_queued(turn):
                break  # it has joined, or has left
            piece = answer[first : first + LARGEST_PIECE]
            hits = [self._store.learn(key, end, now) for (key, end), stored in piece if stored]
            self._queues.await_chunks(turn, hits, now)
            yield len(piece)
        if self._kept is not None and self._is_queued(turn):
            gone = [end for (_, end), stored in answer if not stored]
            hit = [one for one, stored in zip(states, there[len(keys) :], strict=False) if stored]
            for key, end in self._useful(hit, gone):
                if key not in self._kept.by_key and self._is_queued(turn):
                    learned = self._kept.learn(key, end, now)
                    yield self._queues.await_chunks(turn, learned, now)
        del self._waiting[turn]

    def _useful(self, states: _KeysAndEnds, gone: Sequence[int]) -> _KeysAndEnds:
        """Those of the states in the store that can save anything: the last one, and the last one
        before each hole of KV, from which the hole is computed. `gone`: the ends of the chunks that
        the store lacks, ascending. A hole at the start needs no state."""
        ends = [end for _, end in states]
        holes = [
            end - self._size
            for end, before in zip(gone, (0, *gone), strict=False)
            if end - self._size != before
        ]
        places = {bisect_right(ends, place) - 1 for place in (*holes, inf)}
        return [states[place] for place in sorted(places) if place >= 0]

    def _is_queued(self, turn: Turn) -> bool:
        waiting = self._queues.waiting
        place = bisect_left(waiting, turn.order, key=lambda other: other.order)
        return waiting[place : place + 1] == [turn] and not turn.resumes

    # -- plans

    def take_answers(self, now: float) -> None:
        """Called before requests are admitted. Takes KEYS_A_PLAN keys, first the keys that a turn
        waits for. Each answer gives a piece in turn, so a short one does not wait for a long
        one."""
        for number, there in self._tier.answers.items():
            if number in self._to_write:
                writing = self._answered_write(self._to_write.pop(number), there)
                self._write_answers.append(writing)
            else:
                turn, keys, states = self._to_read.pop(number)
                self._waiting[turn] = None
                self._read_answers.append(self._answered_read(turn, keys, states, there, now))
        self._tier.answers.clear()
        left = KEYS_A_PLAN
        for answers in (self._read_answers, self._write_answers):
            while answers and left > 0:
                work = answers.popleft()
                units = next(work, 0)
                if units:
                    answers.append(work)
                    left -= units

    def plan(self, builder: PlanBuilder) -> None:
        """Does one step's share."""
        self._tier.remove_again(builder.now)
        if builder.now < self._tier.paused_until:
            self._decline_all()
        else:
            self._write_copied(builder.evictor)
            self._copy_out(builder.evictor)
        self._end_staging()

    def swap_in(self, builder: PlanBuilder) -> None:
        """Copies a piece of what has been read to the GPU while the rest is read, in place of
        chunks of lower value that HOST has too. What is left is swapped in when its request joins.

        Called when the plan's rows have their GPU slots, and before chunks are copied out ahead of
        time: a swap-in cannot wait for a later copy of its plan.
        """
        arriving = self._tier.arriving
        while arriving and not (being_read(arriving[0]) or self._awaits_gpu(arriving[0])):
            arriving.popleft()
        arrived = takewhile(lambda chunk: not being_read(chunk), arriving)
        store = self._store
        most = min(link_chunks(builder, self._cost), store.available - self._reserve)
        piece = [*dict.fromkeys(islice(filter(self._awaits_gpu, arrived), max(0, most)))]
        if len(piece) < self._least_swap_ins:
            return
        missing = len(piece) - store.gpu.free
        if missing > 0:
            spare = Head(store.spare[GPU], builder.now)
            victims = [chunk for chunk in spare.peek(missing) if chunk.slots[HOST] != NO_SLOT]
            value = store.policy.value(piece[-1], builder.now)
            if len(victims) < missing or spare.value >= value:
                return
        builder.evictor.take_gpu_slots(len(piece))
        store.reserve_swap_ins(piece)
        builder.copies.early.add(
            [chunk.slots[HOST] for chunk in piece], [chunk.slots[GPU] for chunk in piece]
        )
        store.swap_ins_issued(piece)

    def _awaits_gpu(self, chunk: Chunk) -> bool:
        """True if a request in the queue waits for the chunk, which is on HOST only, in a complete
        copy."""
        on_gpu, on_host = (chunk.slots[tier] != NO_SLOT for tier in (GPU, HOST))
        return (
            on_host
            and not on_gpu
            and bool(chunk.queue_places)
            and not self._store.unconfirmed(chunk)
        )


def _record_key(chunk: Chunk) -> ChunkKey:
    if chunk.state is None:
        assert chunk.key is not None
        return chunk.key
    assert chunk.state.key is not None
    return state_key(chunk.state.key)
