"""What the loop, its device and its disk count since the start: plain picklable data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class KVCounters(NamedTuple):
    """Bytes copied since the start, by direction."""

    swap_in: int = 0
    swap_out: int = 0


class DiskCounters(NamedTuple):
    """Of one rank's disk tier since the start, in records; `saving`, `loading` and `full` are of now.

    saving, loading     on their way to the disk and from it
    saving_seconds, loading_seconds
                        from the plan that asked for it to its end, summed over records
    saving_queued, loading_queued
                        of that, before a thread began with them
    rejected            records that were read and are not intact, or another's
    errors              times the system refused to read, write, or make room
    full                1 while nothing is saved because the disk is full
    """

    saving: int = 0
    loading: int = 0
    saved: int = 0
    loaded: int = 0
    saved_bytes: int = 0
    loaded_bytes: int = 0
    saving_seconds: float = 0.0
    loading_seconds: float = 0.0
    saving_queued: float = 0.0
    loading_queued: float = 0.0
    rejected: int = 0
    errors: int = 0
    full: int = 0


class PowerCounts(NamedTuple):
    """A histogram: `counts[k]` sizes were above 2**(k-1) and at most 2**k; together they are `total`."""

    counts: tuple[int, ...] = ()
    total: int = 0


NO_SIZES = PowerCounts()


class Waits(NamedTuple):
    """How long so many copies together have waited between being issued and beginning."""

    seconds: float = 0.0
    copies: int = 0


NO_WAITS = Waits()


@dataclass(frozen=True, slots=True)
class LoopStats:
    """Of the loop and its device, since the start; times in seconds.

    parts               the loop's own time by part of a step: plan, launch, wait, apply, send
    tokens, requests    sizes of the steps that computed anything
    busy                time with work on the device, as the loop sees it: from a launch until nothing is in flight
    swap_in, swap_out   the link's time, by direction
    exposed             of that, what steps waited for; the rest was hidden behind compute
    queued_in, queued_out
                        what copies waited for the link, and for what their lane waits for, by direction
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
