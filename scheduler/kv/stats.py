"""Counts for metrics: evictions by tier and reason, swap-in-or-recompute decisions, and all of
them together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import frexp

from ..cost import CostProfile
from ..types import LABELS, LOCAL_TIERS, Tier
from .chunk import Chunk

REGRET_S = 60.0
"""Seconds. A chunk that is recomputed within this time of its drop should have been kept."""


def _reasons(tier: Tier) -> tuple[str, ...]:
    if tier is Tier.GPU:
        return ("reclaimed", "moved", "dropped")
    return ("copy", "dropped") if tier is LOCAL_TIERS[-1] else ("copy", "reclaimed", "dropped")


class EvictionStats:
    """Evicted chunks since the start, by the tier that they left and by reason:

    reclaimed       a slower tier has the chunk
    moved           left the GPU, and a copy was made for it
    copy            a faster tier has the chunk
    dropped         the chunk is in no tier, or only in one that the GPU cannot read

    value, of_value the value V of the latest chunk that left the GPU or was dropped, and the number
                    of such chunks in a row with this value that `by_value` does not count yet:
                    victims come in groups of one value
    value_sum       sum of all their values
    """

    __slots__ = ("_counts", "_values", "of_value", "value", "value_sum")

    def __init__(self) -> None:
        self._counts = [dict.fromkeys(_reasons(tier), 0) for tier in LOCAL_TIERS]
        self.value = self.value_sum = 0.0
        self.of_value = 0
        self._values: dict[int, int] = {}

    def count(self, tier: int, reason: str, chunks: int) -> None:
        """Counts chunks that have left the tier for this reason."""
        self._counts[tier][reason] += chunks

    def _note(self) -> None:
        if self.of_value:
            exponent = frexp(self.value)[1]
            self._values[exponent] = self._values.get(exponent, 0) + self.of_value
            self.value_sum += self.value * self.of_value
        self.of_value = 0

    def count_values(self, value: float, count: int) -> None:
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
        return dict(zip(LABELS, map(dict, self._counts), strict=False))


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

    slots           by tier and by content, as in `moves.slot_counts`
    evictions, eviction_values, eviction_value_sum
                    by tier and reason, and by value, as in `EvictionStats`
    choices         of swapping in or recomputing, as in `SwapInOrRecomputeStats`
    regret_tokens   tokens of chunks that were computed again within a minute of being dropped
    spilled, promoted, failed_writes, failed_reads
                    chunks written to the tiers below HOST and read from them, and failed writes
                    and reads
    bad_copies      failed copies on HOST
    drafts, drafted, accepted
                    checks of drafts by one row, tokens drafted, and drafts that came true
    states          recurrent states copied to HOST, copied back and lost there, as in `KeptStates`;
                    {} for a model without states
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
    states: dict[str, int] = field(default_factory=dict)
