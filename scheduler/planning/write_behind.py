"""Writes chunks to a lower tier: soon after their turn has ended, or when HOST needs the room.

CachedAttention copies to HOST while a turn runs (section 3.2.2), and writes the chunks that HOST
evicts to DISK (3.3.2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from ..config import SchedulerConfig
from ..cost import CostProfile
from ..kv.chunk import NO_SLOT, Chunk
from ..kv.chunk_store import ChunkStore
from ..kv.lower_tiers import LowerTier, LowerTiers
from ..plan import Lane
from ..types import GPU, HOST, Request, RowResult
from .eviction import Evictor
from .link import LINK_PIECE_S
from .spills import spill, spill_ahead

WRITES_AHEAD_S = 0.1  # seconds of writing in progress at most; a read may wait this long
# share of HOST that is kept free to take, so promotions need not wait for spills
HOST_BUFFER = 1 / 16


class TierWriter:
    """Writes chunks of ended turns to one lower tier, in the order in which they are queued:
    GPU -> HOST beside the step, then HOST -> the tier.

    A chunk is refused (it stays where it is) if that tier or HOST holds nothing of lower value, or
    while its write to another tier is late. A chunk whose copy failed is not written.
    """

    _drops = False
    """True if HOST may drop chunks of lower value for copies on their way."""

    def __init__(self, store: ChunkStore, lower: LowerTiers, most_copies: int, most_writes: int):
        """lower     the first of these is written; none: there is nothing to do
        most_copies, most_writes
                     copies that begin in one step, and writes in progress
        """
        self._store = store
        self._tiers = lower
        self._most_copies = most_copies
        self._most_writes = most_writes
        self._queue: deque[Chunk] = deque()
        self._copied: deque[Chunk] = deque()  # to HOST, perhaps not completely
        self._pending: dict[Chunk, None] = {}  # chunks that will be written or refused
        self._staged: deque[Chunk] = deque()  # chunks copied to HOST only to be written
        self.other: TierWriter | None = None
        """The writer of another tier. A copy that is staged for both stays until both are done."""

    @property
    def busy(self) -> bool:
        """True if the next plan has work to do, even without a request."""
        staged = not all(map(_is_late, self._staged))
        return bool(self._queue or self._copied) or staged

    @property
    def _lower(self) -> LowerTier:
        """The tier that is written. Only asked for if there is one."""
        return self._tiers[0]

    def wants(self, chunk: Chunk) -> bool:
        """True if the chunk will be written, or is being written or read."""
        moving = chunk.moving is not None and chunk.moving.tier is self._lower.tier
        return moving or chunk in self._pending

    def _unwritten(self, chunk: Chunk) -> bool:
        """True if the chunk is on the GPU or HOST, and neither in the lower tier nor being written
        or read."""
        above = chunk.slots[GPU] != NO_SLOT or chunk.slots[HOST] != NO_SLOT
        return above and chunk.slots[self._lower.tier] == NO_SLOT and chunk.moving is None

    def _record(self, chunk: Chunk) -> Sequence[Chunk]:
        """The chunks that are one record in the tier; this one stands for all."""
        return (chunk,)

    def _leave(self, chunk: Chunk) -> None:
        """The chunk is being written now, or is refused."""
        self._pending.pop(chunk, None)  # after two finds it is queued twice
        if chunk.staged and self.other is not None:  # perhaps staged by the other writer
            self._staged.append(chunk)

    def _decline_all(self) -> None:
        self._queue.clear()
        self._copied.clear()
        for chunk in list(self._pending):
            self._leave(chunk)

    def _copy_out(self, evictor: Evictor) -> None:
        copies = 0
        while self._queue and copies < self._most_copies:
            chunk = self._queue[0]
            if self._unwritten(chunk) and chunk.slots[HOST] == NO_SLOT:
                if not evictor.stage(chunk, self._drops):
                    if self._copied or self._lower.writing:
                        return  # HOST slots are about to be free
                    self._leave(chunk)
                else:
                    self._staged.append(chunk)
                    copies += 1
            self._queue.popleft()
            if chunk in self._pending:
                self._copied.append(chunk)

    def _write_copied(self, evictor: Evictor) -> None:
        store = self._store
        for _ in range(len(self._copied)):
            if self._lower.writing >= self._most_writes:
                return
            chunk = self._copied[0]
            record = self._record(chunk)
            others = [
                one
                for one in record
                if one.moving is not None and one.moving.tier is not self._lower.tier
            ]
            if others:
                if any(map(_is_late, others)):
                    self._copied.popleft()
                    self._leave(chunk)
                else:
                    self._copied.rotate(-1)  # the other tier's turn
                continue
            wanted = all(self._unwritten(one) and one.slots[HOST] != NO_SLOT for one in record)
            last_out = store.host.last[Lane.OUT]
            if wanted and any(
                last_out[one.slots[HOST]] > store.completed.swap_out for one in record
            ):
                return
            self._copied.popleft()
            self._leave(chunk)
            if wanted:
                for one in record:
                    spill(evictor, one, self._lower)

    def _end_staging(self) -> None:
        """Releases HOST copies that were made only to be written, unless their chunks have left
        the GPU meanwhile or are about to."""
        for _ in range(len(self._staged)):
            chunk = self._staged[0]
            if _is_late(chunk):
                self._staged.rotate(-1)
                continue
            if self.wants(chunk):
                return
            self._staged.popleft()
            if chunk.staged and not (self.other is not None and self.other.wants(chunk)):
                self._store.release_host(chunk)


def _is_late(chunk: Chunk) -> bool:
    return chunk.moving is not None and chunk.moving.late


class WriteBehind(TierWriter):
    """Writes to this server's fastest tier below HOST.

    While the tier is paused after a failed write, chunks are refused. They are then spilled when
    HOST needs their slots.
    """

    def __init__(self, config: SchedulerConfig, cost: CostProfile, store: ChunkStore):
        super().__init__(
            store,
            store.lower.local,
            most_copies=min(64, max(1, int(LINK_PIECE_S / cost.swap_out()))),
            most_writes=min(256, max(4, int(WRITES_AHEAD_S / cost.write()))),
        )
        self._eager = bool(self._tiers) and config.save != "off"
        self._in_time = self._eager and config.save == "sync"
        # HOST slots are short, and a copy must be confirmed before the next spill
        self._short = False
        self._endings: deque[tuple[Request, RowResult, list[Chunk]]] = deque()

    @property
    def busy(self) -> bool:
        """True if the next plan has work to do, even without a request."""
        return self._short or bool(self._endings) or super().busy

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
        return bool(self._pending or self._endings or self._tiers.writing)

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
        unsettled = [chunk for chunk in chunks if self.wants(chunk)] if self._in_time else []
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
            unsettled = [chunk for chunk in chunks if self.wants(chunk)]
            if unsettled:
                waiting.append((request, ending, unsettled))
            else:
                ended.append(ending)
        self._endings = waiting
        return ended

    def plan(self, evictor: Evictor, now: float) -> None:
        """Does one step's share."""
        if not self._tiers:
            return
        if now < self._lower.paused_until:
            self._short = False
            self._decline_all()
        else:
            self._write_copied(evictor)
            self._copy_out(evictor)
            self._short = not spill_ahead(
                evictor,
                self._lower,
                max(1, int(HOST_BUFFER * self._store.host.count)),
                self._most_writes - self._lower.writing,
            )
        self._end_staging()
