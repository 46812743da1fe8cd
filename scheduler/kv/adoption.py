"""Makes chunks and states of the records that an earlier process left in a lower tier."""

from __future__ import annotations

from collections.abc import Iterable

from ..types import ChunkKey, StoredRecord
from .chunk import NO_SLOT, State
from .chunk_store import ChunkStore
from .lower_tiers import LowerTier
from .piece_keys import piece_key, split_key
from .states import KeptStates


def adopt(
    store: ChunkStore,
    kept: KeptStates | None,
    lower: LowerTier,
    records: Iterable[StoredRecord],
    now: float,
) -> None:
    """Called before anything is stored. Of two records with one key the first counts. A state
    counts only whole. The slots of all other records are released.

    Raises InvariantError for a slot that does not exist or has two records.
    """
    records = list(records)
    lower.adopt(record.slot for record in records)
    states: dict[ChunkKey, list[StoredRecord]] = {}
    for record in records:
        key, piece = split_key(record.key)
        if piece is not None:
            states.setdefault(key, []).append(record)
        elif store.find(key) is not None:
            lower.release(record.slot, key)
        else:
            store.adopt(lower, record, store.chunk_tokens, now - record.age_s)
    for key, pieces in states.items():
        if kept is None or key in kept.by_key or not _whole(key, pieces, kept.config.chunks):
            for record in pieces:
                lower.release(record.slot, key)
            continue
        state = State(pieces[0].end, NO_SLOT, key)
        active = now - min(record.age_s for record in pieces)
        kept.adopt(state, [store.adopt(lower, record, 1, active) for record in pieces])


def _whole(key: ChunkKey, pieces: list[StoredRecord], count: int) -> bool:
    """Sorts the pieces. Returns whether they are all of one state, and each is there once."""
    pieces.sort(key=lambda record: record.key)
    keys = [piece_key(key, number) for number in range(count)]
    return [record.key for record in pieces] == keys and len({one.end for one in pieces}) == 1
