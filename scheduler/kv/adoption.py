"""Makes chunks and states of the records that an earlier process left in a lower tier."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from ..types import ChunkKey, StoredRecord
from .chunk import NO_SLOT, State
from .chunk_store import ChunkStore
from .lower_tiers import LowerTier
from .piece_keys import split_key
from .states import KeptStates


def adopt(
    store: ChunkStore,
    kept: KeptStates | None,
    lower: LowerTier,
    records: Iterable[StoredRecord],
    now: float,
) -> None:
    """Called before anything is stored. Of two records with one key the first counts. A state
    counts only whole: with all its pieces, once each, of one computation. Of several such states
    with one key the first counts. The slots of all other records are released.

    Raises InvariantError for a slot that does not exist or has two records.
    """
    records = list(records)
    lower.adopt(record.slot for record in records)
    states: dict[tuple[ChunkKey, bytes], list[StoredRecord]] = {}
    for record in records:
        key, piece = split_key(record.key)
        if piece is not None:
            states.setdefault((key, piece.computation), []).append(record)
        elif store.find(key) is not None:
            lower.release(record.slot, key)
        else:
            store.adopt(lower, record, store.chunk_tokens, now - record.age_s)
    for (key, _), pieces in states.items():
        pieces.sort(key=attrgetter("key"))
        if kept is None or key in kept.by_key or not _whole(pieces, kept.config.chunks):
            for record in pieces:
                lower.release(record.slot, key)
            continue
        state = State(pieces[0].end, NO_SLOT, key)
        active = now - min(record.age_s for record in pieces)
        kept.adopt(state, [store.adopt(lower, record, 1, active) for record in pieces])


def _whole(pieces: list[StoredRecord], count: int) -> bool:
    """Whether the pieces of one computation, sorted, are all there, once each, and tell one
    position."""
    numbers = [piece.number for _, piece in (split_key(one.key) for one in pieces) if piece]
    return numbers == [*range(count)] and len({one.end for one in pieces}) == 1
