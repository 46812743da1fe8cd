"""Writes chunks to a lower tier: soon after their turn has ended, or when HOST needs the room.

CachedAttention copies to HOST while a turn runs (section 3.2.2), and writes the chunks that HOST
evicts to DISK (3.3.2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from ..config import SchedulerConfig
from ..cost import CostProfile
from ..kv.chunk import NO_SLOT, Chunk
from ..kv.chunk_store import ChunkStore
from ..kv.lower_tiers import LowerTier
from ..plan import Lane
from ..types import HOST, Request, RowResult
from .eviction import Evictor

LINK_PIECE_S = 2e-3  # link time in a step for staged copies, seconds
WRITES_AHEAD_S = 0.1  # seconds of writing in progress at most; a read may wait this long
# share of HOST that is kept free to take, so promotions need not wait for spills
HOST_BUFFER = 1 / 16


class WriteBehind:
    """Writes behind other work, in the order in which turns end: GPU -> HOST beside the step, then
    HOST -> the fastest lower tier.

    A chunk is refused (it stays where it is) if that tier or HOST holds nothing of lower value, and
    while the tier is paused after a failed write. It is then spilled when HOST needs its slot. A
    chunk whose copy failed is not spilled.
    """

    def __init__(self, config: SchedulerConfig, cost: CostProfile, store: ChunkStore):
        self._store = store
        self._eager = bool(store.lower) and config.save != "off"
        self._in_time = self._eager and config.save == "sync"
        self._most_copies = min(64, max(1, int(LINK_PIECE_S / cost.swap_out())))
        self._most_writes = min(256, max(4, int(WRITES_AHEAD_S / cost.write())))
        self._queue: deque[Chunk] = deque()
        self._copied: deque[Chunk] = deque()  # to HOST, perhaps not completely
        self._pending: dict[Chunk, None] = {}  # chunks of both queues
        self._staged: deque[Chunk] = deque()  # chunks copied to HOST only to be spilled
        # HOST slots are short, and a copy must be confirmed before the next spill
        self._short = False
        self._endings: deque[tuple[Request, RowResult, list[Chunk]]] = deque()

    @property
    def _lower(self) -> LowerTier:
        """The tier that is written. Only asked for if there is one."""
        return self._store.lower[0]

    @property
    def busy(self) -> bool:
        """True if the next plan has work to do, even without a request."""
        return self._short or bool(self._queue or self._copied or self._staged or self._endings)

    @property
    def withholds(self) -> bool:
        """True if last outputs are kept back until chunks are spilled."""
        return bool(self._endings)

    @property
    def withheld(self) -> Iterator[Request]:
        """The requests whose last outputs are kept back."""
        return (request for request, *_ in self._endings)

    @property
    def spilling(self) -> bool:
        """True if chunks of ended turns are on their way to a lower tier, or last outputs are kept
        back."""
        return bool(self._pending or self._endings or self._store.lower.writing)

    def turn_ended(self, chunks: Iterable[Chunk | None], now: float) -> None:
        """Queues the keyed chunks that the lower tier does not have yet."""
        if not self._eager or now < self._lower.paused_until:
            return
        for chunk in chunks:
            if (
                chunk is not None
                and chunk.key is not None
                and self._unwritten(chunk)
                and chunk not in self._pending
            ):
                self._pending[chunk] = None
                self._queue.append(chunk)

    def withhold(self, request: Request, ending: RowResult, chunks: Iterable[Chunk]) -> bool:
        """With `--save sync`: keeps the turn's last output back until its chunks are spilled or
        refused. Returns whether it does."""
        unsettled = [chunk for chunk in chunks if not self._settled(chunk)] if self._in_time else []
        if unsettled:
            self._endings.append((request, ending, unsettled))
        return bool(unsettled)

    def endings(self) -> list[RowResult]:
        """Removes and returns the last outputs that need not be kept back any longer."""
        if not self._endings:
            return []
        waiting = deque[tuple[Request, RowResult, list[Chunk]]]()
        ended = []
        for request, ending, chunks in self._endings:
            unsettled = [chunk for chunk in chunks if not self._settled(chunk)]
            if unsettled:
                waiting.append((request, ending, unsettled))
            else:
                ended.append(ending)
        self._endings = waiting
        return ended

    def _settled(self, chunk: Chunk) -> bool:
        return chunk not in self._pending and chunk.moving is None

    def _unwritten(self, chunk: Chunk) -> bool:
        """True if the chunk is on the GPU or HOST, and neither in the lower tier nor being written
        or read."""
        there = chunk.slots[self._lower.tier] != NO_SLOT
        return chunk.resident and not there and chunk.moving is None

    def plan(self, evictor: Evictor, now: float) -> None:
        """Does one step's share."""
        if now < self._lower.paused_until:
            self._decline_all()
        else:
            self._spill_copied(evictor)
            self._copy_out(evictor)
            self._short = not evictor.spill_ahead(
                self._lower,
                max(1, int(HOST_BUFFER * self._store.host.count)),
                self._most_writes - self._lower.writing,
            )
        self._end_staging()

    def _decline_all(self) -> None:
        self._short = False
        for chunks in (self._queue, self._copied, self._pending):
            chunks.clear()

    def _copy_out(self, evictor: Evictor) -> None:
        copies = 0
        while self._queue and copies < self._most_copies:
            chunk = self._queue[0]
            if self._unwritten(chunk) and chunk.slots[HOST] == NO_SLOT:
                if not evictor.stage(chunk):
                    if self._copied or self._lower.writing:
                        return  # HOST slots are about to be free
                    del self._pending[chunk]
                else:
                    self._staged.append(chunk)
                    copies += 1
            self._queue.popleft()
            if chunk in self._pending:
                self._copied.append(chunk)

    def _spill_copied(self, evictor: Evictor) -> None:
        store = self._store
        while self._copied and self._lower.writing < self._most_writes:
            chunk = self._copied[0]
            wanted = self._unwritten(chunk) and chunk.slots[HOST] != NO_SLOT
            if wanted and store.host.last[Lane.OUT][chunk.slots[HOST]] > store.completed.swap_out:
                return
            self._copied.popleft()
            del self._pending[chunk]
            if wanted:
                evictor.spill(chunk, self._lower)

    def _end_staging(self) -> None:
        """Releases HOST copies that were made only to be spilled, unless their chunks have left
        the GPU meanwhile or are about to."""
        while self._staged and self._settled(self._staged[0]):
            chunk = self._staged.popleft()
            if chunk.staged:
                self._store.release_host(chunk)
