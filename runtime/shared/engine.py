"""The interface of a store that several servers share.

A store is a map from keys to records, and may lose any record at any time. The tier above checks
every record, sets the deadlines and switches a failing store off (`store.py`), so an engine only
moves bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol

import numpy as np

Parts = Sequence[np.ndarray]
"""One record's bytes, in order: [bytes] uint8 each, contiguous. The tier gives a header page and a
HOST slot."""


class StoreOutcome(Enum):
    """DONE      the record is stored, read or removed
    MISSING      the store does not have it
    FULL         the store has no room for it now; not an error
    FAILED       the store did not do it: an error or a time-out of its own
    """

    DONE = auto()
    MISSING = auto()
    FULL = auto()
    FAILED = auto()


class SharedEngine(Protocol):
    """A store's client. Several threads call it at the same time, and every call may block.

    A key is ASCII, at most 200 characters: words of letters, digits, "_", "-" and "." between
    slashes. A key names its content, so a second put of it may keep the first record. Outcomes are
    in the order of the keys. Methods do not raise: what cannot be done is FAILED and logged.
    """

    def register(self, buffer: np.ndarray) -> None:
        """Later records have their parts in this memory ([bytes] uint8), which is valid until
        `close`. Called before the first record of it; engines without use for it do nothing."""

    def exists(self, keys: Sequence[str]) -> list[bool] | None:
        """Returns which records are there and can be read, or None if the store does not answer."""

    def put(self, keys: Sequence[str], records: Sequence[Parts]) -> list[StoreOutcome]:
        """Stores the records. Others see a record wholly or not at all. The call reads the parts
        until it returns, and not afterwards."""

    def get(self, keys: Sequence[str], records: Sequence[Parts]) -> list[StoreOutcome]:
        """Fills the parts of each record. A record of another size than its parts is MISSING, and
        is removed. After any outcome but DONE the parts hold anything. The call writes the parts
        until it returns, and not afterwards."""

    def remove(self, keys: Sequence[str]) -> list[StoreOutcome]:
        """Removes the records. DONE, also for a missing one: no later `get` finds it, except a
        record that another client puts again."""

    def drop_cached(self, keys: Sequence[str]) -> None:
        """The next `get` of these records comes from the store and not from memory of this machine
        that caches it, as far as that can be told. For measurements."""

    def close(self) -> None:
        """Frees what the client holds; the records stay. No call is in progress. Idempotent."""
