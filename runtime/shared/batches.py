"""Which records one call to a shared store writes or reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from ...scheduler.kv.piece_keys import split_key
from ...scheduler.plan import Promotion, Spill

Work = TypeVar("Work", Spill, Promotion)


def batches_of(work: Sequence[Work], size: int) -> Iterable[list[list[Work]]]:
    """Records of `size` HOST slots together, or of more if one is larger."""
    batch: list[list[Work]] = []
    slots = 0
    for record in _records(work):
        if batch and slots + len(record) > size:
            yield batch
            batch = []
            slots = 0
        batch.append(record)
        slots += len(record)
    if batch:
        yield batch


def _records(work: Sequence[Work]) -> Iterator[list[Work]]:
    """A record of KV has one slot. The pieces of a state follow each other and are one record."""
    before = None
    record: list[Work] = []
    for one in work:
        key, piece = split_key(one.key)
        state = None if piece is None else (key, piece.computation)
        if record and (state is None or state != before):
            yield record
            record = []
        record.append(one)
        before = state
    if record:
        yield record
