"""Counts of the loop, its device and its disk since the start: plain picklable data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class KVCounters(NamedTuple):
    """Bytes copied since the start, by direction."""

    swap_in: int = 0
    swap_out: int = 0


class DiskCounters(NamedTuple):
    """One rank's disk tier since the start, in records. `spilling`, `promoting` and
    `full` are current.

    spilling, promoting records on their way to the disk and from it
    spilling_seconds, promoting_seconds
                        from the plan that began a record's transfer to its end, summed over records
    spilling_queued, promoting_queued
                        the part of these before a thread began the transfer
    rejected            records that were read and are damaged, or another chunk's
    errors              times the system refused to read, write, or allocate
    full                1 while no record is spilled because the disk is full
    """

    spilling: int = 0
    promoting: int = 0
    spilled: int = 0
    promoted: int = 0
    spilled_bytes: int = 0
    promoted_bytes: int = 0
    spilling_seconds: float = 0.0
    promoting_seconds: float = 0.0
    spilling_queued: float = 0.0
    promoting_queued: float = 0.0
    rejected: int = 0
    errors: int = 0
    full: int = 0


class KVEventCounters(NamedTuple):
    """Events published since the start, by kind.

    queue_batches   steps whose changes wait to be published now
    resets          times that routers were told to forget all, because too many waited
    """

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    queue_batches: int = 0
    resets: int = 0


class SharedCounters(NamedTuple):
    """One rank's shared tier since the start. `lent` and `off` are current.

    hits, misses        chunks that the store had, or had not, when it was asked, by turns that
                        arrived or had ended
    written, read       records; of a state, its pieces
    refused             records that were not written because the store has no room
    rejected            records that were read and are damaged, or another chunk's
    errors              calls that failed
    late                calls that missed their deadline
    removed             records
    lent                HOST slots in use by calls past their deadline
    off                 1 while the tier is off after errors or a missed deadline
    """

    hits: int = 0
    misses: int = 0
    written: int = 0
    read: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    refused: int = 0
    rejected: int = 0
    errors: int = 0
    late: int = 0
    removed: int = 0
    lent: int = 0
    off: int = 0


class PowerCounts(NamedTuple):
    """A histogram: `counts[k]` sizes were above 2**(k-1) and at most 2**k; `total` is their sum."""

    counts: tuple[int, ...] = ()
    total: int = 0


NO_SIZES = PowerCounts()


class Waits(NamedTuple):
    """Total seconds between the issue and the start of copies, and the number of these copies."""

    seconds: float = 0.0
    copies: int = 0


NO_WAITS = Waits()


@dataclass(frozen=True, slots=True)
class LoopStats:
    """The loop and its device since the start; times in seconds.

    parts               the loop's own time by part of a step: plan, launch, wait, apply, send
    tokens, requests    sizes of the steps that computed tokens
    busy                time with work on the device, as seen by the loop: from a launch until
                        nothing is in flight
    swap_in, swap_out   the link's time, by direction
    exposed             the part of it that steps waited for; the rest overlapped with compute
    queued_in, queued_out
                        waits of copies for the link and for work that their lane waits for, by
                        direction
    """

    steps: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)
    tokens: PowerCounts = NO_SIZES
    requests: PowerCounts = NO_SIZES
    busy: float = 0.0
    swap_in: float = 0.0
    swap_out: float = 0.0
    exposed: float = 0.0
    queued_in: Waits = NO_WAITS
    queued_out: Waits = NO_WAITS
