"""Counts for metrics: evictions by tier and reason, swap-in-or-recompute decisions, and all of
them together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import frexp

from ..cost import CostProfile
from .chunk import Chunk

REGRET_S = 60.0
"""Seconds. A chunk that is recomputed within this time of its drop should have been kept."""


class EvictionStats:
    """Evicted chunks since the start.

    gpu_reclaimed   left the GPU, with a copy in a lower tier
    gpu_moved       left the GPU, and a copy was made for it
    gpu_dropped     left the GPU without a copy, and none could be made
    host_copies     left HOST, but not the GPU
    host_reclaimed  left HOST, with a record on DISK
    host_dropped    left HOST and were in no other tier
    disk_copies     left DISK, but not the tiers above
    disk_dropped    left DISK and were in no other tier
    value, of_value the value V of the latest chunk that left the GPU or was dropped, and the number
    of such
                    chunks in a row with this value that `by_value` does not count yet: victims come
                    in groups of one value
    value_sum       sum of all their values
    """

    __slots__ = (
        "_values",
        "disk_copies",
        "disk_dropped",
        "gpu_dropped",
        "gpu_moved",
        "gpu_reclaimed",
        "host_copies",
        "host_dropped",
        "host_reclaimed",
        "of_value",
        "value",
        "value_sum",
    )

    def __init__(self) -> None:
        self.gpu_reclaimed = self.gpu_moved = self.gpu_dropped = 0
        self.host_copies = self.host_reclaimed = self.host_dropped = 0
        self.disk_copies = self.disk_dropped = 0
        self.value = self.value_sum = 0.0
        self.of_value = 0
        self._values: dict[int, int] = {}

    def _note(self) -> None:
        if self.of_value:
            exponent = frexp(self.value)[1]
            self._values[exponent] = self._values.get(exponent, 0) + self.of_value
            self.value_sum += self.value * self.of_value
        self.of_value = 0

    def count_evicted(self, value: float, count: int) -> None:
        """Counts `count` more evicted chunks of this value."""
        if value != self.value:
            self._note()
            self.value = value
        self.of_value += count

    def by_value(self) -> dict[int, int]:
        """Counts by e of the chunks whose value at eviction was in [2**(e-1), 2**e)."""
        self._note()
        return dict(self._values)

    def by_tier_and_reason(self) -> dict[str, dict[str, int]]:
        return {
            "gpu": {
                "reclaimed": self.gpu_reclaimed,
                "moved": self.gpu_moved,
                "dropped": self.gpu_dropped,
            },
            "host": {
                "copy": self.host_copies,
                "reclaimed": self.host_reclaimed,
                "dropped": self.host_dropped,
            },
            "disk": {"copy": self.disk_copies, "dropped": self.disk_dropped},
        }


class Choice:
    """chunks, and the predicted seconds of swapping them in and of recomputing them."""

    __slots__ = ("chunks", "recompute", "swap_in")

    def __init__(self) -> None:
        self.chunks = 0
        self.swap_in = self.recompute = 0.0

    def note(self, chunks: Iterable[Chunk], cost: CostProfile) -> None:
        swap_in = cost.swap_in()
        for chunk in chunks:
            self.chunks += 1
            self.swap_in += swap_in
            self.recompute += cost.recompute(chunk.end)


class SwapInOrRecomputeStats:
    """Counts chunks on HOST that were swapped in, or recomputed instead, with the predicted seconds
    of both ways.

    Metrics show the link's real times (`pensieve:kv_link_seconds`) next to the predictions.
    """

    def __init__(self, cost: CostProfile):
        self._cost = cost
        self._swapped_in, self._recomputed = Choice(), Choice()

    def note(self, swapped_in: Iterable[Chunk], recomputed: Iterable[Chunk]) -> None:
        self._swapped_in.note(swapped_in, self._cost)
        self._recomputed.note(recomputed, self._cost)

    def by_choice(self) -> dict[str, dict[str, float]]:
        """{"swap_in" or "recompute": {"chunks", "swap_in", "recompute"}}."""
        choices = {"swap_in": self._swapped_in, "recompute": self._recomputed}
        return {
            name: {part: getattr(choice, part) for part in Choice.__slots__}
            for name, choice in choices.items()
        }


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counters since the start (copies in chunks) and current gauges.

    slots           by tier and by content, as in `ChunkStore.slot_counts`
    evictions, eviction_values, eviction_value_sum
                    by tier and reason, and by value, as in `EvictionStats`
    choices         of swapping in or recomputing, as in `SwapInOrRecomputeStats`
    regret_tokens   tokens of chunks that were computed again within a minute of being dropped
    spilled, promoted, failed_writes, failed_reads
                    chunks written to DISK, read from DISK, and failed writes and reads
    bad_copies      failed copies on HOST
    drafts, drafted, accepted
                    checks of drafts by one row, tokens drafted, and drafts that came true
    """

    running: int = 0
    waiting: int = 0
    suspensions: int = 0
    dropped: int = 0
    swapped_in: int = 0
    swapped_out: int = 0
    conversations: int = 0
    slots: dict[str, dict[str, int]] = field(default_factory=dict)
    evictions: dict[str, dict[str, int]] = field(default_factory=dict)
    eviction_values: dict[int, int] = field(default_factory=dict)
    eviction_value_sum: float = 0.0
    choices: dict[str, dict[str, float]] = field(default_factory=dict)
    regret_tokens: int = 0
    spilled: int = 0
    promoted: int = 0
    failed_writes: int = 0
    failed_reads: int = 0
    bad_copies: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
