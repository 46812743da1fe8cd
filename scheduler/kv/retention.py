"""The order in which idle chunks are evicted: LRU, by retention value, or FIFO for comparison.

Value V = weight / T: T is the time since the conversation was last active. With LRU all weights are
equal. In retention value (Pensieve, section 4.3.1) the weight is Cost(l) times the conversations
that claim the chunk. The order of values changes as time passes, so a heap of values becomes wrong.
But among chunks of one weight the order is that of last activity, at any time. So chunks are in
classes of (nearly) equal weight, an eighth of an octave wide, and in each class in groups of one
stamp, mostly one turn's. Victims are found by groups: the oldest ones of all classes are compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from sys import maxsize

from ..cost import CostProfile
from .chunk import Chunk

SHORTEST_IDLE_S = 1e-3  # T is at least about one step
CLASSES_PER_OCTAVE = 8
# 2**96: outweighs any cost, any idle time and any place in the queue
AWAITED_CLASS = 96 * CLASSES_PER_OCTAVE
PINNED_CLASS = 2 * AWAITED_CLASS
MOST_PRIORITY = 2**10  # priorities beyond +-1,024 count as these for the order of victims
ARRIVALS = 2**32  # places in the queue of one priority


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """weigh        chunks weigh Cost(l) x claims; otherwise all weigh the same and only their
    stamps decide
    by_age          stamps are the first computation (FIFO) instead of the last activity
    whole           a victim takes its whole turn's chunks along, as in systems that evict by
                    conversation
    sees_queue      chunks that requests in the queue wait for are evicted last

    Order of eviction: with `quotas`, chunks that only conversations over quota claim, pinned or
    not; then chunks that no request waits for; then those that requests in the queue wait for, the
    last request's first; then those of pinned conversations. A chunk over quota that a request
    waits for counts as waited for. (CachedAttention, section 3.3.2, exempts awaited chunks.) A
    context that has outgrown its window is evicted whole before the next one is touched: all of its
    chunks weigh as much as its last ones, so one turn's are one group (docs/design/overflow.md).
    """

    cost: CostProfile
    weigh: bool
    by_age: bool
    whole: bool
    sees_queue: bool = True
    quotas: bool = False
    cost_classes: dict[int, int] = field(default_factory=dict, repr=False, compare=False)
    """Weight classes of chunks with one claim and no pin, by the chunks' ends; filled on demand."""

    def weight_class(self, chunk: Chunk) -> int:
        # before any cost: the place in the queue decides
        if chunk.queue_places and self.sees_queue:
            return AWAITED_CLASS + PINNED_CLASS if chunk.pins else AWAITED_CLASS
        end = maxsize if chunk.past_window else chunk.end
        number = self.cost_classes.get(end)
        if number is None:
            number = self.cost_classes[end] = eighths(self.cost.recompute(end)) if self.weigh else 0
        if self.weigh and chunk.claims > 1:
            number += eighths(chunk.claims)
        # a tail is never claimed, nor is a state's piece
        if (
            self.quotas
            and chunk.over_quota == chunk.claims
            and chunk.key is not None
            and chunk.state is None
        ):
            return number - AWAITED_CLASS
        return number + PINNED_CLASS if chunk.pins else number

    def stamp(self, chunk: Chunk) -> float:
        if chunk.queue_places and self.sees_queue:
            # a later place in the queue counts as longer idle
            priority, arrival = chunk.queue_places[0]
            rank = MOST_PRIORITY + max(-MOST_PRIORITY, min(priority, MOST_PRIORITY))
            return -float(rank * ARRIVALS + arrival)
        return chunk.created if self.by_age else chunk.last_active

    def at_once(self, missing: int) -> int:
        """How many victims of one value to take at once when `missing` slots are needed."""
        return maxsize if self.whole else missing

    def value(self, chunk: Chunk, now: float) -> float:
        """V, in seconds of recomputation per second idle."""
        return class_weight(self.weight_class(chunk)) / max(
            now - self.stamp(chunk), SHORTEST_IDLE_S
        )


@cache
def eighths(weight: float) -> int:
    """The weight in eighths of an octave."""
    return round(CLASSES_PER_OCTAVE * math.log2(weight))


def class_weight(weight_class: int) -> float:
    return float(2.0 ** (weight_class / CLASSES_PER_OCTAVE))


def eviction_policy(name: str, cost: CostProfile, quotas: bool = False) -> EvictionPolicy:
    """The policy for a checked `--eviction`. `-conversation` and `-plain` evict whole turns; the
    latter does not see the queue."""
    kind, _, form = name.partition("-")
    return EvictionPolicy(
        cost,
        weigh=kind == "retention",
        by_age=kind == "fifo",
        whole=form != "",
        sees_queue=form != "plain",
        quotas=quotas,
    )
