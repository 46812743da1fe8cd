"""The interface of a tier below HOST, and the tiers that a configuration has.

Every record of a lower tier is a keyed chunk, and passes through a HOST slot on its way in and out.
The chunk store, eviction, write-behind, prefetching and deletion know a lower tier by this
interface only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from ..config import SchedulerConfig
from ..plan import StepResult, TierWork
from ..types import LOCAL_TIERS, ChunkKey, Tier
from .chunk import Chunk, Move
from .disk_tier import DiskTier
from .shared_tier import SharedTier


class LowerTier(Protocol):
    """Slots of a tier below HOST, and the moves to and from it.

    A move begins with the plan being built and ends when a result reports it. Until then a slot
    that is written belongs to the move and not to the chunk. So each slot of a chunk is valid.

    count           slots in all
    writing, reading
                    moves in progress
    spilled, promoted, failed_writes, failed_reads
                    ended moves since the start, chunks
    deleted         erasures begun by `erase` since the start; they are numbered from 1
    paused_until    time before which nothing should be written, seconds
    """

    tier: Tier
    count: int
    spilled: int
    promoted: int
    failed_writes: int
    failed_reads: int
    deleted: int
    paused_until: float

    @property
    def writing(self) -> int: ...

    @property
    def reading(self) -> int: ...

    @property
    def room(self) -> int:
        """How many writes can begin without the release of a slot."""

    def begin_write(self, chunk: Chunk) -> Move:
        """Begins to write the chunk's HOST copy, which is complete. The caller has seen that there
        is room, and sets the chunk's `moving`."""

    def begin_read(self, chunk: Chunk, host: int) -> Move:
        """Begins to read the chunk's record into the HOST slot, which no copy on any lane uses. The
        caller sets the chunk's `moving`."""

    def abandon(self, move: Move) -> None:
        """The move's chunk is dropped. Both slots stay taken until the move is reported; the caller
        then releases them."""

    def late(self, result: StepResult) -> Iterable[Move]:
        """Returns the moves that no chunk waits for any more from this result on, although they
        have not ended."""

    def report(self, result: StepResult, now: float) -> Iterator[tuple[Move, bool]]:
        """Applies a result. Yields each move that has ended, and whether it succeeded. The caller
        updates its chunk before it takes the next.

        Raises InvariantError if a slot is reported that no move uses.
        """

    def wanted(self, slot: int, chunk: Chunk) -> bool:
        """Returns whether the record of a move that has ended may stay. False: its chunk was
        deleted meanwhile, so the slot must be released."""

    def release(self, slot: int, key: ChunkKey) -> None:
        """A chunk that is erased with the key gives up the slot, which no move uses."""

    def erase(self, key: ChunkKey, chunks: Iterable[Chunk]) -> None:
        """Begins the erasure of all that the tier holds, receives or may still hold of the key's
        chunk and of the state there. `chunks`: those of them that the store knows. Their slots are
        released by the caller, or have been."""

    @property
    def erased_up_to(self) -> int:
        """All erasures up to this number have ended: done, or refused."""

    def refused(self, after: int, up_to: int) -> bool:
        """True if one of the erasures above number `after` and up to `up_to` was refused. No caller
        asks for `after` and earlier ones again."""

    def adopt(self, slots: Iterable[int]) -> None:
        """Takes slots that hold records of an earlier process. Raises InvariantError for a slot
        that does not exist or comes twice."""

    @property
    def outstanding(self) -> bool:
        """True if work is in progress, or begins with the plan being built."""

    def hand_over(self, step: int) -> TierWork | None:
        """Returns the tier's work for the plan of this step, or None if there is none."""

    def host_slots_moving(self) -> int:
        """HOST slots in use by moves alone: read into, or written from a chunk that is not on the
        GPU."""

    def check(self, chunks: Iterable[Chunk]) -> list[int]:
        """Returns the HOST slots that belong to moves and to no chunk. Raises InvariantError if
        chunks, moves and slots disagree."""


class LowerTiers(tuple[LowerTier, ...]):
    """All tiers below HOST that have room for chunks, the fastest first."""

    __slots__ = ()

    @property
    def local(self) -> LowerTiers:
        """Those of this server alone, whose records stay until it evicts them."""
        return LowerTiers(lower for lower in self if lower.tier in LOCAL_TIERS)

    @property
    def shared(self) -> SharedTier | None:
        return next((lower for lower in self if isinstance(lower, SharedTier)), None)

    @property
    def writing(self) -> int:
        """Spills in progress."""
        return sum(lower.writing for lower in self)

    @property
    def reading(self) -> int:
        """Promotions in progress."""
        return sum(lower.reading for lower in self)


def lower_tiers(config: SchedulerConfig) -> LowerTiers:
    disk = [DiskTier(config.disk_kv_chunks)] if config.disk_kv_chunks else []
    return LowerTiers([*disk, *([SharedTier()] if config.shared_min_tokens else [])])
