"""Which idle chunk goes first: retention values, and LRU and FIFO beside them.

Retention value V = weight / T (Pensieve, section 4.3): the weight is Cost(l) times the conversations that claim the
chunk, T the time since the conversation was last active. Values change their order as time passes, so no heap of
values stays right. But among chunks of one weight the order is that of last activity, for ever: chunks are kept in
classes of (nearly) equal weight, an eighth of an octave wide, and the victims of one moment come from one merge of the
classes at that moment.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .cost import CostProfile

if TYPE_CHECKING:
    from .chunks import Chunk

SHORTEST_IDLE_S = 1e-3  # T is at least about one step
CLASSES_PER_OCTAVE = 8


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """weigh        chunks weigh Cost(l) x claims; else they all weigh the same and only their stamps decide
    by_age          stamps are the first computation (FIFO) instead of the last activity
    whole           a victim takes its whole turn's chunks along, as systems that evict by conversation do
    """

    cost: CostProfile
    weigh: bool
    by_age: bool
    whole: bool

    def weight_class(self, chunk: Chunk) -> int:
        if not self.weigh:
            return 0
        weight = self.cost.recompute(chunk.end) * max(1, chunk.claims)
        return round(CLASSES_PER_OCTAVE * math.log2(weight))

    def stamp(self, chunk: Chunk) -> float:
        return chunk.born if self.by_age else chunk.last_active

    def value(self, chunk: Chunk, now: float) -> float:
        """V, in seconds of recomputation per second idle."""
        return class_value(self.weight_class(chunk), self.stamp(chunk), now)


def class_value(weight_class: int, stamp: float, now: float) -> float:
    weight: float = 2.0 ** (weight_class / CLASSES_PER_OCTAVE)
    return weight / max(now - stamp, SHORTEST_IDLE_S)


def eviction_policy(name: str, cost: CostProfile) -> EvictionPolicy:
    """The policy for a checked `--eviction`."""
    kind = name.removesuffix("-conversation")
    return EvictionPolicy(cost, weigh=kind == "retention", by_age=kind == "fifo", whole=kind != name)


class VictimSet:
    """A set of chunks that yields its members by ascending V; ties go to the leading chunk.

    Members keep the class and stamp they were filed with: whoever changes a chunk's claims or activity files it anew.
    `descending` yields the highest V first (which copy to give up when all will stay on the GPU anyway).
    """

    def __init__(self, policy: EvictionPolicy, descending: bool = False):
        self._policy = policy
        self._sign = -1.0 if descending else 1.0
        self._members: dict[Chunk, int] = {}
        self._classes: dict[int, list[tuple[float, int, int, Chunk]]] = {}
        self._filings = 0
        self._entries = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk in self._members

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._members)

    def add(self, chunk: Chunk) -> None:
        """Files the chunk, anew if it is a member."""
        self._filings += 1
        self._members[chunk] = self._filings
        heap = self._classes.setdefault(self._policy.weight_class(chunk), [])
        heapq.heappush(heap, (self._sign * self._policy.stamp(chunk), chunk.end, self._filings, chunk))
        self._entries += 1
        if self._entries > 2 * len(self._members) + 1024:
            self._compact()

    def discard(self, chunk: Chunk) -> None:
        """Takes the chunk out; its heap entry stays until it surfaces."""
        self._members.pop(chunk, None)

    def victims(self, now: float) -> Generator[Chunk]:
        """Members by V at `now`. The caller may discard what it was given; members added meanwhile may be missed."""
        merge: list[tuple[float, int, int]] = []
        seen: list[tuple[int, tuple[float, int, int, Chunk]]] = []
        try:
            for weight_class in self._classes:
                self._push_top(merge, weight_class, now)
            while merge:
                weight_class = merge[0][2]
                entry = heapq.heappop(self._classes[weight_class])
                self._entries -= 1
                seen.append((weight_class, entry))
                yield entry[3]
                heapq.heappop(merge)
                self._push_top(merge, weight_class, now)
        finally:
            for weight_class, entry in seen:
                if self._members.get(entry[3]) == entry[2]:
                    heapq.heappush(self._classes[weight_class], entry)
                    self._entries += 1

    def _push_top(self, merge: list[tuple[float, int, int]], weight_class: int, now: float) -> None:
        heap = self._classes[weight_class]
        while heap and self._members.get(heap[0][3]) != heap[0][2]:
            heapq.heappop(heap)
            self._entries -= 1
        if heap:
            value = class_value(weight_class, self._sign * heap[0][0], now)
            heapq.heappush(merge, (self._sign * value, heap[0][1], weight_class))

    def _compact(self) -> None:
        """Throws away the entries of chunks that left or were filed anew."""
        for weight_class, heap in list(self._classes.items()):
            live = [entry for entry in heap if self._members.get(entry[3]) == entry[2]]
            heapq.heapify(live)
            self._classes[weight_class] = live
        self._entries = sum(map(len, self._classes.values()))


class Head:
    """The next victim of a set at one moment, looked at again and again while the caller uses victims up.

    One merge serves a whole plan; members filed meanwhile are found when it runs dry.
    """

    def __init__(self, members: VictimSet, now: float):
        self._members = members
        self._now = now
        self._merge = members.victims(now)
        self._chunk: Chunk | None = None

    def peek(self) -> Chunk | None:
        """The member of lowest V, or None when the set is empty. It stays the same until it leaves the set."""
        while len(self._members):
            if self._chunk is not None and self._chunk in self._members:
                return self._chunk
            self._chunk = next(self._merge, None)
            if self._chunk is None:
                self._merge = self._members.victims(self._now)
        return None

    def close(self) -> None:
        self._merge.close()
