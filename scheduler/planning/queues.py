"""The waiting queue, requests whose KV is being swapped in, and running requests."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from ..config import SchedulerConfig
from ..kv.chunk import Chunk
from ..kv.chunk_store import ChunkStore
from ..turns.turn import RunningTurn, Turn
from ..types import RowId
from ..work import LARGEST_PIECE, Pieces
from .live_states import LiveStates


class RequestQueues:
    """`waiting`, `swapping_in` and `rows` (the rows in seats) are sorted by their `order`.
    `states`: None if the model has no recurrent states."""

    def __init__(
        self, config: SchedulerConfig, store: ChunkStore, states: LiveStates | None = None
    ):
        self.states = states
        self._config = config
        self._store = store
        self.waiting: list[Turn] = []
        self.swapping_in: list[RunningTurn] = []
        self.rows: list[RunningTurn] = []
        self.by_id: dict[RowId, RunningTurn] = {}
        self.seats = config.max_num_seqs
        self.free_seats = deque(range(self.seats))
        self.suspensions = 0
        # rows that have left, with the chunks left to release
        self.releasing: dict[RunningTurn, list[Chunk]] = {}
        # turns that have left the queue, and whose waits end in pieces
        self.ending: dict[Turn, None] = {}
        self._leaving: list[RunningTurn] = []

    def joined(self) -> Iterator[RunningTurn]:
        """The rows that hold chunks: rows in seats, and rows whose KV is being swapped in."""
        yield from self.rows
        yield from self.swapping_in

    @property
    def no_rows(self) -> bool:
        """True if no request has joined; some may wait."""
        return not (self.rows or self.swapping_in)

    @property
    def full(self) -> bool:
        """True if no seat is left for another request."""
        return len(self.rows) + len(self.swapping_in) >= self.seats

    # -- the queue

    def enqueue(self, turn: Turn) -> None:
        insort(self.waiting, turn, key=lambda turn: turn.order)

    def await_chunks(self, turn: Turn, chunks: Sequence[Chunk | None], now: float) -> int:
        """The turn waits in the queue, so the idle chunks among its hits are evicted last. Returns
        their number.

        This does not hold for the chunks of a suspended request.
        """
        place = None if turn.resumes else turn.order
        idle = 0
        for chunk in chunks:
            if chunk is not None and chunk.resident and not chunk.users:
                idle += 1
                self._store.touch(chunk, now, place)
                if place is not None:
                    turn.awaited[chunk] = None
        return idle

    def leave_queue(self, turn: Turn) -> None:
        self.waiting.remove(turn)
        self._store.end_wait(turn.awaited, turn.order)
        turn.awaited.clear()

    def end_waits(self, turn: Turn) -> Pieces:
        """The turn has ended, and has left the queue: it waits for no chunks any more."""
        self.ending[turn] = None
        return self._end_waits(turn)

    def _end_waits(self, turn: Turn) -> Pieces:
        while turn.awaited:
            piece = [
                turn.awaited.popitem()[0] for _ in range(min(LARGEST_PIECE, len(turn.awaited)))
            ]
            self._store.end_wait(piece, turn.order)
            yield len(piece)
        del self.ending[turn]

    # -- seats

    def seat_row(self, row: RunningTurn) -> None:
        """Seats a row that has been swapped in. There must be a free seat."""
        self.swapping_in.remove(row)
        row.seat = self.free_seats.popleft()
        insort(self.rows, row, key=lambda row: row.order)
        self.by_id[row.id] = row

    def unseat(self, row: RunningTurn) -> None:
        self.rows.remove(row)
        if row.leaving:
            self._leaving.remove(row)
        del self.by_id[row.id]
        self.free_seats.append(row.seat)
        row.seat = -1
        if self.states is not None:
            self.states.leave(row)

    def release_row(self, row: RunningTurn, tail: Chunk | None, now: float) -> None:
        """Releases the row's chunks. Keyed ones and `tail` stay as cache, other private ones are
        dropped.

        The row's launched steps may still use the slots; the next users of the slots wait for that
        on the device.
        """
        self._store.cancel_swap_ins(row.swap_ins)
        row.swap_ins.clear()
        for key in row.pending:
            del self._store.pending[key]
        row.pending.clear()
        self.release(row, row.chunks, tail, now)
        row.chunks = []
        if self.states is not None:
            self.states.release(row, now)

    def release_in_pieces(self, row: RunningTurn, now: float) -> Pieces:
        """Releases the chunks of a row that keeps no tail (see `release_row`). The row has none
        from now on, so the results of its launched steps publish no key."""
        self.releasing[row] = row.chunks
        row.chunks = []
        if self.states is not None:
            self.states.release(row, now)
        return self._release_pieces(row, self.releasing[row], now)

    def _release_pieces(self, row: RunningTurn, chunks: list[Chunk], now: float) -> Pieces:
        while chunks or row.pending:
            piece = chunks[:LARGEST_PIECE]
            self._store.cancel_swap_ins([chunk for chunk in piece if chunk.awaits_swap_in])
            for key in list(islice(row.pending, LARGEST_PIECE)):
                del row.pending[key], self._store.pending[key]
            self.release(row, piece, None, now)
            del chunks[:LARGEST_PIECE]
            yield len(piece)
        row.swap_ins.clear()
        del self.releasing[row]

    def release(
        self, row: RunningTurn, chunks: list[Chunk], tail: Chunk | None, now: float
    ) -> None:
        for chunk in chunks:
            if chunk.key is None and chunk is not tail:
                chunk.tokens = 0
        self._store.unpin(chunks, row.launched, now)

    # -- suspension

    def suspend(self, row: RunningTurn) -> None:
        """Plans the row no more. It leaves its seat when its launched steps are applied."""
        row.leaving = True
        self._leaving.append(row)
        self.suspensions += 1

    def coming_free(self) -> int:
        return sum(chunk.users == 1 for row in self._leaving for chunk in row.chunks)

    def release_suspended(self, applied: int, now: float) -> None:
        """Returns suspended rows to the queue once all their launched steps are applied; their
        seats and chunks become free."""
        for row in [row for row in self._leaving if row.launched <= applied]:
            self.unseat(row)
            self.requeue(row, now)

    def requeue(self, row: RunningTurn, now: float, keeps_tail: bool = True) -> None:
        """Releases a row that has no seat, and returns its turn to the queue."""
        tail = self._tail_to_keep(row) if keeps_tail else None
        turn = row.turn
        turn.tail = tail
        turn.promotes = True
        turn.read.clear()
        self.release_row(row, tail, now)
        self.enqueue(turn)

    def _tail_to_keep(self, row: RunningTurn) -> Chunk | None:
        """The partly filled chunk that the row would append to when it resumes; with states the
        last one, which the exact state needs."""
        if not self._config.reuse:
            return None
        size = self._config.chunk_tokens
        if not row.spans and not row.swap_ins:
            full, valid = divmod(len(row.turn.tokens) - 1, size)
            index = full - row.first
            if index < len(row.chunks) and row.chunks[index].key is None:
                row.chunks[index].tokens = valid
        chunks = row.chunks[:: 1 if row.state is None else -1]
        return next((c for c in chunks if c.key is None and 0 < c.tokens < size), None)
