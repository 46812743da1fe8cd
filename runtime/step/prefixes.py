"""Which generating rows have leading chunks in the same slots, so that attention reads those once.
numpy only."""

from __future__ import annotations

import numpy as np

SHARED_KEYS = 1024  # keys are shared by the smallest split of the attention kernel
BAND_KEYS = 16 * SHARED_KEYS  # the kernel splits longer contexts into longer parts, by doubling
UNKNOWN = 0  # of keys whose chunks have not all been given


class SharedPrefixes:
    """For each seat and each SHARED_KEYS keys a hash of the slots up to there, kept as chunks are
    given.

    Hashes have 64 bits and Python's random key, so equal hashes mean equal slots.
    """

    def __init__(self, table: np.ndarray, chunk_tokens: int):
        """table: the slots [seats, blocks] of each seat's chunks; the caller changes it, then calls
        `changed`."""
        self._table = table
        self._chunks = max(SHARED_KEYS // chunk_tokens, 1)
        # Other chunk sizes share nothing: a split would begin inside a chunk.
        units = table.shape[1] // self._chunks if SHARED_KEYS % chunk_tokens == 0 else 0
        self._hashes = np.full((len(table), units), UNKNOWN, np.int64)
        self._changes = 0
        # of the last question: changes and seats; whether any of the seats share a unit
        self._rows: tuple[int, bytes] | None = None
        self._any_shared = False
        # of the last answer: changes, seats, bands
        self._question: tuple[int, bytes, bytes] | None = None
        self._answer = np.zeros((0, 2), np.int32)

    def cleared(self, seat: int) -> None:
        """The seat's row of the table is empty now."""
        self._hashes[seat] = UNKNOWN
        self._changes += 1

    def changed(self, seat: int, first: int, count: int) -> None:
        """`count` chunks of the seat, from `first` on, are new in the table. They were given
        without a gap."""
        unit = first // self._chunks
        chunks = self._chunks
        units = self._hashes.shape[1]
        # what follows must be hashed again
        if unit < units and self._hashes[seat, unit] != UNKNOWN:
            end = int(np.count_nonzero(self._hashes[seat])) * chunks
            self._hashes[seat, unit:] = UNKNOWN
            self._changes += 1
        else:
            end = 0
        end = max(end, first + count)
        for i in range(unit, min(end // chunks, units)):
            before = int(self._hashes[seat, i - 1]) if i else UNKNOWN
            slots = self._table[seat, i * chunks : (i + 1) * chunks].tobytes()
            self._hashes[seat, i] = hash((before, slots)) or 1
            self._changes += 1

    def order(self, seats: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
        """An order of the rows [N, 2] int32 that puts rows with equal prefixes side by side: each
        row's index, and how many keys it shares with the row before it. None if no two rows share
        any.

        seats, lengths [N]: of generating rows, and the tokens of their contexts.
        """
        if len(seats) < 2 or not self._hashes.shape[1]:
            return None
        rows = self._changes, seats.tobytes()
        if rows != self._rows:
            self._rows = rows
            self._any_shared = self._repeats(seats, 0)
        if not self._any_shared:
            return None
        bands = np.ceil(np.log2(np.maximum(lengths, BAND_KEYS))).astype(np.int64)
        question = (*rows, bands.tobytes())
        if question != self._question:
            self._question = question
            self._answer = self._sorted(seats, bands)
        return self._answer

    def _repeats(self, seats: np.ndarray, unit: int) -> bool:
        """Returns whether two of the seats share this unit, and so all before it."""
        hashes = np.sort(self._hashes[seats, unit])
        return bool(((hashes[1:] == hashes[:-1]) & (hashes[1:] != UNKNOWN)).any())

    def _sorted(self, seats: np.ndarray, bands: np.ndarray) -> np.ndarray:
        # the deepest unit that is shared: at least the first one
        shared_units = 1
        end = self._hashes.shape[1]
        while shared_units < end:
            middle = (shared_units + end + 1) // 2
            if self._repeats(seats, middle - 1):
                shared_units = middle
            else:
                end = middle - 1
        keys = np.column_stack((bands, self._hashes[seats, :shared_units]))
        order = np.lexsort(keys.T[::-1])
        keys = keys[order]
        equal = (keys[1:] == keys[:-1]) & (keys[1:] != UNKNOWN)
        shared = np.zeros(len(seats), np.int32)
        shared[1:] = np.maximum(np.cumprod(equal, axis=1).sum(axis=1) - 1, 0) * SHARED_KEYS
        return np.column_stack((order.astype(np.int32), shared))
