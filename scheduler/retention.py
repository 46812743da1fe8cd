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
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from .cost import CostProfile

if TYPE_CHECKING:
    from .chunks import Chunk

SHORTEST_IDLE_S = 1e-3  # T is at least about one step
CLASSES_PER_OCTAVE = 8
PINNED_CLASS = 128 * CLASSES_PER_OCTAVE  # 2**128: no cost, and no time since the last activity, makes up for it


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """weigh        chunks weigh Cost(l) x claims; else they all weigh the same and only their stamps decide
    by_age          stamps are the first computation (FIFO) instead of the last activity
    whole           a victim takes its whole turn's chunks along, as systems that evict by conversation do

    Whatever the policy, chunks of pinned conversations go after all others.
    """

    cost: CostProfile
    weigh: bool
    by_age: bool
    whole: bool
    _cost_classes: dict[int, int] = field(default_factory=dict, repr=False, compare=False)

    def weight_class(self, chunk: Chunk) -> int:
        number = self._cost_classes.get(chunk.end)
        if number is None:
            number = self._cost_classes[chunk.end] = eighths(self.cost.recompute(chunk.end)) if self.weigh else 0
        if self.weigh and chunk.claims > 1:
            number += eighths(chunk.claims)
        return number + PINNED_CLASS if chunk.pins else number

    def stamp(self, chunk: Chunk) -> float:
        return chunk.born if self.by_age else chunk.last_active

    def value(self, chunk: Chunk, now: float) -> float:
        """V, in seconds of recomputation per second idle."""
        return class_weight(self.weight_class(chunk)) / max(now - self.stamp(chunk), SHORTEST_IDLE_S)


def eighths(weight: float) -> int:
    """The weight in eighths of an octave."""
    return round(CLASSES_PER_OCTAVE * math.log2(weight))


def class_weight(weight_class: int) -> float:
    return float(2.0 ** (weight_class / CLASSES_PER_OCTAVE))


def eviction_policy(name: str, cost: CostProfile) -> EvictionPolicy:
    """The policy for a checked `--eviction`."""
    kind = name.removesuffix("-conversation")
    return EvictionPolicy(cost, weigh=kind == "retention", by_age=kind == "fifo", whole=kind != name)


class VictimSet:
    """A set of chunks that yields its members by ascending V; ties go to the leading chunk.

    Members keep the class and stamp they were filed with: whoever changes a chunk's claims or activity files it anew.
    """

    def __init__(self, policy: EvictionPolicy):
        self._policy = policy
        self.members: dict[Chunk, tuple[int, float]] = {}
        self._classes: dict[int, _WeightClass] = {}

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, chunk: Chunk | None) -> bool:
        return chunk in self.members

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self.members)

    def add(self, chunk: Chunk) -> None:
        """Files the chunk, anew if its class or stamp has changed."""
        number, stamp = self._policy.weight_class(chunk), self._policy.stamp(chunk)
        before = self.members.get(chunk)
        if before is not None:
            if before == (number, stamp):
                return
            self._classes[before[0]].remove(chunk, before[1])
        self.members[chunk] = (number, stamp)
        weight_class = self._classes.get(number)
        if weight_class is None:
            weight_class = self._classes[number] = _WeightClass()
        weight_class.add(chunk, stamp)

    def discard(self, chunk: Chunk) -> None:
        where = self.members.pop(chunk, None)
        if where is not None:
            self._classes[where[0]].remove(chunk, where[1])

    def victims(self, now: float, descending: bool = False) -> Iterator[tuple[float, Chunk]]:
        """(V at `now`, member) by V. The caller may discard and add as it goes; members added may be missed."""
        sign = -1.0 if descending else 1.0
        merge: list[tuple[float, int, int, Chunk]] = []
        walks = {number: (sign * class_weight(number), kin.walk(descending)) for number, kin in self._classes.items()}
        for number, (weight, walk) in walks.items():
            for stamp, chunk in walk:
                merge.append((weight / max(now - stamp, SHORTEST_IDLE_S), chunk.end, number, chunk))
                break
        heapq.heapify(merge)
        while merge:
            value, _, number, chunk = merge[0]
            yield sign * value, chunk
            weight, walk = walks[number]
            for stamp, chunk in walk:
                heapq.heapreplace(merge, (weight / max(now - stamp, SHORTEST_IDLE_S), chunk.end, number, chunk))
                break
            else:
                heapq.heappop(merge)


class _WeightClass:
    """Chunks of one weight, grouped by stamp: a turn's chunks share theirs, so there are far fewer groups than chunks.

    Stamps are sorted and may name empty groups, which are cleared away when they outnumber the others. A group is in
    order of position unless its stamp is in `_unsorted`: chunks mostly come in that order.
    """

    def __init__(self) -> None:
        self._stamps: list[float] = []
        self._groups: dict[float, dict[Chunk, None]] = {}
        self._unsorted: set[float] = set()
        self._empty = 0

    def add(self, chunk: Chunk, stamp: float) -> None:
        group = self._groups.get(stamp)
        if group is None:
            group = self._groups[stamp] = {}
            insort(self._stamps, stamp)
        elif not group:
            self._empty -= 1
        elif chunk.end < next(reversed(group)).end:
            self._unsorted.add(stamp)
        group[chunk] = None

    def remove(self, chunk: Chunk, stamp: float) -> None:
        group = self._groups[stamp]
        del group[chunk]
        if group:
            return
        self._empty += 1
        if 2 * self._empty > len(self._stamps) + 64:
            self._groups = {stamp: group for stamp, group in self._groups.items() if group}
            self._stamps = sorted(self._groups)
            self._unsorted.intersection_update(self._groups)
            self._empty = 0

    def walk(self, descending: bool) -> Iterator[tuple[float, Chunk]]:
        """(stamp, chunk) by stamp, then the leading one first. What leaves or comes meanwhile does no harm."""
        self._clear_end(descending)
        stamp = float("inf") if descending else float("-inf")
        while True:
            if descending:
                index = bisect_left(self._stamps, stamp) - 1
            else:
                index = bisect_right(self._stamps, stamp)
            if not 0 <= index < len(self._stamps):
                return
            stamp = self._stamps[index]
            group = self._groups[stamp]
            if stamp in self._unsorted:
                in_order = sorted(group, key=attrgetter("end"))
                group.clear()
                group.update(dict.fromkeys(in_order))
                self._unsorted.discard(stamp)
            for chunk in tuple(group):
                if chunk in group:
                    yield stamp, chunk

    def _clear_end(self, last: bool) -> None:
        """Victims leave at one end, and their empty groups with them."""
        stamps, count = self._stamps, 0
        while count < len(stamps) and not self._groups[stamps[~count if last else count]]:
            del self._groups[stamps[~count if last else count]]
            count += 1
        self._stamps = stamps[: len(stamps) - count] if last else stamps[count:]
        self._empty -= count


class Head:
    """The next victim of a set at one moment, looked at again and again while the caller uses victims up.

    One merge serves a whole plan; members filed meanwhile are found when it runs dry.
    """

    def __init__(self, members: VictimSet, now: float, descending: bool = False):
        self._members = members
        self._now, self._descending = now, descending
        self._merge: Iterator[tuple[float, Chunk]] = iter(())
        self._chunk: Chunk | None = None
        self.value = 0.0

    def peek(self) -> Chunk | None:
        """The member of lowest (or highest) V, its V in `value`; None if there is none. The same until it leaves."""
        chunk, members = self._chunk, self._members.members
        while chunk not in members:
            if not members:
                return None
            self.value, chunk = next(self._merge, (0.0, None))
            if chunk is None:
                self._merge = self._members.victims(self._now, self._descending)
        self._chunk = chunk
        return chunk
