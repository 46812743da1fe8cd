"""Which idle chunk goes first: retention values, and LRU and FIFO beside them.

Retention value V = weight / T (Pensieve, section 4.3.1): the weight is Cost(l) times the conversations that claim the
chunk, T the time since the conversation was last active. Values change their order as time passes, so no heap of
values stays right. But among chunks of one weight the order is that of last activity, for ever: chunks are kept in
classes of (nearly) equal weight, an eighth of an octave wide, and in each class in groups of one stamp, mostly those of
one turn. The victims of one moment are found group by group, by comparing the classes' oldest groups at that moment.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from math import inf
from operator import attrgetter
from sys import maxsize
from typing import TYPE_CHECKING

from ..cost import CostProfile

if TYPE_CHECKING:
    from .chunk import Chunk

SHORTEST_IDLE_S = 1e-3  # T is at least about one step
CLASSES_PER_OCTAVE = 8
AWAITED_CLASS = 64 * CLASSES_PER_OCTAVE  # 2**64: no cost, and no time since the last activity, makes up for it
PINNED_CLASS = 2 * AWAITED_CLASS


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """weigh        chunks weigh Cost(l) x claims; else they all weigh the same and only their stamps decide
    by_age          stamps are the first computation (FIFO) instead of the last activity
    whole           a victim takes its whole turn's chunks along, as systems that evict by conversation do

    Whatever the policy, chunks that requests in the queue wait for go after all others, the queue's tail first (the
    exemption of CachedAttention, section 3.3.2: its window ends where the tiers are full), and those of pinned
    conversations behind them. With `quotas`, chunks that no conversation within its owner's quota claims go first,
    pinned or not, unless a request waits for them.

    Chunks of a context that has outgrown its window weigh all the same, as its last ones do: of one turn they are one
    group, and the next context is touched when nothing is left of this one (docs/design/overflow.md).
    """

    cost: CostProfile
    weigh: bool
    by_age: bool
    whole: bool
    quotas: bool = False
    cost_classes: dict[int, int] = field(default_factory=dict, repr=False, compare=False)
    """Of chunks that are claimed once and not pinned, by their ends: those that have been asked for."""

    def weight_class(self, chunk: Chunk) -> int:
        if chunk.queue_place:  # whatever it costs: among awaited chunks the place in the queue decides
            return AWAITED_CLASS + PINNED_CLASS if chunk.pins else AWAITED_CLASS
        end = maxsize if chunk.bound else chunk.end
        number = self.cost_classes.get(end)
        if number is None:
            number = self.cost_classes[end] = eighths(self.cost.recompute(end)) if self.weigh else 0
        if self.weigh and chunk.claims > 1:
            number += eighths(chunk.claims)
        if self.quotas and chunk.surplus == chunk.claims and chunk.key is not None:  # nobody claims a tail
            return number - AWAITED_CLASS
        return number + PINNED_CLASS if chunk.pins else number

    def stamp(self, chunk: Chunk) -> float:
        if chunk.queue_place:
            return -float(chunk.queue_place)  # the later in the queue, the longer ago
        return chunk.created if self.by_age else chunk.last_active

    def at_once(self, missing: int) -> int:
        """How many of the victims of one value go together where so many are missing."""
        return maxsize if self.whole else missing

    def value(self, chunk: Chunk, now: float) -> float:
        """V, in seconds of recomputation per second idle."""
        return class_weight(self.weight_class(chunk)) / max(now - self.stamp(chunk), SHORTEST_IDLE_S)


@cache
def eighths(weight: float) -> int:
    """The weight in eighths of an octave."""
    return round(CLASSES_PER_OCTAVE * math.log2(weight))


def class_weight(weight_class: int) -> float:
    return float(2.0 ** (weight_class / CLASSES_PER_OCTAVE))


def eviction_policy(name: str, cost: CostProfile, quotas: bool = False) -> EvictionPolicy:
    """The policy for a checked `--eviction`."""
    kind = name.removesuffix("-conversation")
    return EvictionPolicy(cost, weigh=kind == "retention", by_age=kind == "fifo", whole=kind != name, quotas=quotas)


class Group:
    """Chunks of one weight class and one stamp, such as those of one turn: their V is the same at any time."""

    __slots__ = ("_last", "_sorted", "chunks", "number", "stamp")

    def __init__(self, number: int, stamp: float):
        self.number, self.stamp = number, stamp
        self.chunks: dict[Chunk, None] = {}
        self._sorted, self._last = True, 0

    def add(self, chunk: Chunk) -> None:
        self.chunks[chunk] = None
        if chunk.end < self._last:
            self._sorted = False  # they mostly come in order of position
        self._last = chunk.end

    def extend(self, chunks: Sequence[Chunk]) -> None:
        """Adds chunks in the order of position."""
        self.chunks.update(dict.fromkeys(chunks))
        if chunks[0].end < self._last:
            self._sorted = False
        self._last = chunks[-1].end

    def leading(self, most: int) -> list[Chunk]:
        """The first ones by position."""
        if not self._sorted:
            self.chunks = dict.fromkeys(sorted(self.chunks, key=attrgetter("end")))
            self._sorted, self._last = True, next(reversed(self.chunks)).end
        return list(islice(self.chunks, most))


class _WeightClass:
    """The groups of one weight by their stamps, which `stamps` has in ascending order: none is empty."""

    __slots__ = ("groups", "stamps", "weight")

    def __init__(self, number: int):
        self.weight = class_weight(number)
        self.stamps: list[float] = []
        self.groups: dict[float, Group] = {}


class VictimSet:
    """A set of chunks that knows who of them is worth least, or most, at any moment.

    Members keep the class and stamp they were filed with: whoever changes a chunk's claims or activity files it anew.
    A chunk is in one such set at most.
    """

    def __init__(self, policy: EvictionPolicy):
        self._policy = policy
        self._classes: dict[int, _WeightClass] = {}
        self._last = Group(0, inf)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, chunk: Chunk) -> bool:
        group = chunk.group
        if group is None or chunk not in group.chunks or group.number not in self._classes:
            return False
        return self._classes[group.number].groups.get(group.stamp) is group

    def __iter__(self) -> Iterator[Chunk]:
        for weight_class in self._classes.values():
            for group in weight_class.groups.values():
                yield from group.chunks

    def add(self, chunk: Chunk) -> None:
        """Files the chunk, anew if its class or stamp has changed."""
        policy, group = self._policy, chunk.group
        plain = chunk.claims <= 1 and not (chunk.pins or chunk.queue_place or chunk.bound or policy.quotas)
        if not plain or chunk.end not in policy.cost_classes:
            number, stamp = policy.weight_class(chunk), policy.stamp(chunk)
        else:
            number = policy.cost_classes[chunk.end]
            stamp = chunk.created if policy.by_age else chunk.last_active
        if group is not None:
            if group.stamp == stamp and group.number == number:
                return
            self.discard(chunk)
        group = self._last  # chunks of one turn come one after the other
        if group.stamp != stamp or group.number != number or not group.chunks:
            group = self._last = self._open(number, stamp)
        group.add(chunk)
        chunk.group = group
        self._count += 1

    def move(self, chunks: Sequence[Chunk], target: VictimSet | None) -> None:
        """Members of one group, in the order of position, go to another set, or to none: quicker than one by one."""
        if not chunks:
            return
        group, new = chunks[0].group, None
        assert group is not None
        if target is not None:
            new = target._open(group.number, group.stamp)
            new.extend(chunks)
            target._count += len(chunks)
        for chunk in chunks:
            del group.chunks[chunk]
            chunk.victim_set, chunk.group = target, new
        self._count -= len(chunks)
        if not group.chunks:
            self._close(group)

    def _open(self, number: int, stamp: float) -> Group:
        weight_class = self._classes.get(number)
        if weight_class is None:
            weight_class = self._classes[number] = _WeightClass(number)
        group = weight_class.groups.get(stamp)
        if group is None:
            group = weight_class.groups[stamp] = Group(number, stamp)
            insort(weight_class.stamps, stamp)
        return group

    def discard(self, chunk: Chunk) -> None:
        """The chunk is a member."""
        group, chunk.group = chunk.group, None
        assert group is not None
        del group.chunks[chunk]
        self._count -= 1
        if not group.chunks:
            self._close(group)

    def _close(self, group: Group) -> None:
        weight_class = self._classes[group.number]
        del weight_class.groups[group.stamp]
        del weight_class.stamps[bisect_left(weight_class.stamps, group.stamp)]
        if not weight_class.stamps:
            del self._classes[group.number]

    def extreme(self, now: float, most: bool) -> tuple[float, Group]:
        """The lowest (or highest) V at `now` and the members that have it; the set is not empty.

        Within a class that is the group with the oldest (or latest) stamp, so there is one to compare for each class.
        """
        end, sign = (-1, -1.0) if most else (0, 1.0)
        best, found = inf, None
        for weight_class in self._classes.values():
            stamp = weight_class.stamps[end]
            value = sign * weight_class.weight / max(now - stamp, SHORTEST_IDLE_S)
            if value < best:
                best, found = value, weight_class.groups[stamp]
        assert found is not None
        return sign * best, found


class Head:
    """The next victims of a set at one moment, looked at again and again while the caller uses them up."""

    def __init__(self, members: VictimSet, now: float, descending: bool = False):
        self._members = members
        self._now, self._descending = now, descending
        self._group: Group | None = None
        self.value = 0.0

    def peek(self, most: int) -> list[Chunk]:
        """At most so many members of lowest (or highest) V, the leading ones of one group; none if the set is empty.

        Their V is then in `value`. It stays the same group until that is empty.
        """
        group = self._group
        if group is None or not group.chunks:
            if not self._members:
                return []
            self.value, group = self._members.extreme(self._now, self._descending)
            self._group = group
        return group.leading(most)
