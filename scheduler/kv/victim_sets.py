"""Sets of idle chunks that find their least and most valuable members at any time (see
`retention`)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from math import inf

from .chunk import Chunk, VictimGroup
from .retention import SHORTEST_IDLE_S, EvictionPolicy, class_weight


class _WeightClass:
    """The groups of one weight by their stamps. `stamps` lists these in ascending order. No group
    is empty."""

    __slots__ = ("groups", "stamps", "weight")

    def __init__(self, number: int):
        self.weight = class_weight(number)
        self.stamps: list[float] = []
        self.groups: dict[float, VictimGroup] = {}


class VictimSet:
    """A set of chunks that finds its least or most valuable members at any time.

    Members keep the class and stamp that they were filed with: a chunk is filed again when its
    claims or activity change. A chunk is in at most one such set.
    """

    def __init__(self, policy: EvictionPolicy):
        self._policy = policy
        self._classes: dict[int, _WeightClass] = {}
        self._last = VictimGroup(0, inf)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, chunk: Chunk) -> bool:
        group = chunk.victim_group
        if group is None or chunk not in group.chunks or group.number not in self._classes:
            return False
        return self._classes[group.number].groups.get(group.stamp) is group

    def __iter__(self) -> Iterator[Chunk]:
        for weight_class in self._classes.values():
            for group in weight_class.groups.values():
                yield from group.chunks

    def add(self, chunk: Chunk) -> None:
        """Files the chunk, or files it again if its class or stamp has changed."""
        number = self._policy.weight_class(chunk)
        stamp = self._policy.stamp(chunk)
        group = chunk.victim_group
        if group is not None:
            if group.stamp == stamp and group.number == number:
                return
            self.discard(chunk)
        group = self._last  # chunks of one turn arrive one after the other
        if group.stamp != stamp or group.number != number or not group.chunks:
            group = self._last = self._open(number, stamp)
        group.add(chunk)
        chunk.victim_group = group
        self._count += 1

    def move(self, chunks: Sequence[Chunk], target: VictimSet | None) -> None:
        """Moves members of one group, in order of position, to another set, or removes them (None).
        Faster than one by one."""
        if not chunks:
            return
        group = chunks[0].victim_group
        new = None
        assert group is not None
        if target is not None:
            new = target._open(group.number, group.stamp)
            new.extend(chunks)
            target._count += len(chunks)
        for chunk in chunks:
            del group.chunks[chunk]
            chunk.victim_set = target
            chunk.victim_group = new
        self._count -= len(chunks)
        if not group.chunks:
            self._close(group)

    def _open(self, number: int, stamp: float) -> VictimGroup:
        weight_class = self._classes.get(number)
        if weight_class is None:
            weight_class = self._classes[number] = _WeightClass(number)
        group = weight_class.groups.get(stamp)
        if group is None:
            group = weight_class.groups[stamp] = VictimGroup(number, stamp)
            insort(weight_class.stamps, stamp)
        return group

    def discard(self, chunk: Chunk) -> None:
        """Removes the chunk, which must be a member."""
        group = chunk.victim_group
        chunk.victim_group = None
        assert group is not None
        del group.chunks[chunk]
        self._count -= 1
        if not group.chunks:
            self._close(group)

    def _close(self, group: VictimGroup) -> None:
        weight_class = self._classes[group.number]
        del weight_class.groups[group.stamp]
        del weight_class.stamps[bisect_left(weight_class.stamps, group.stamp)]
        if not weight_class.stamps:
            del self._classes[group.number]

    def extreme(self, now: float, most: bool) -> tuple[float, VictimGroup]:
        """Returns the lowest (or highest) V at `now` and the group that has it. The set must not be
        empty.

        In a class that is the group with the oldest (or latest) stamp, so one group of each class
        is compared.
        """
        end, sign = (-1, -1.0) if most else (0, 1.0)
        best = inf
        group = None
        for weight_class in self._classes.values():
            stamp = weight_class.stamps[end]
            value = sign * weight_class.weight / max(now - stamp, SHORTEST_IDLE_S)
            if value < best:
                best = value
                group = weight_class.groups[stamp]
        assert group is not None
        return sign * best, group


class Head:
    """The next victims of a set at one time. The caller looks repeatedly and takes them out of the
    set."""

    def __init__(self, members: VictimSet, now: float, descending: bool = False):
        self._members = members
        self._now = now
        self._descending = descending
        self._group: VictimGroup | None = None
        self.value = 0.0

    def peek(self, most: int) -> list[Chunk]:
        """Returns at most `most` members of the lowest (or highest) V, the leading ones of one
        group; none if the set is empty.

        Afterwards `value` is their V. Calls return members of the same group until it is empty.
        """
        group = self._group
        if group is None or not group.chunks:
            if not self._members:
                return []
            self.value, group = self._members.extreme(self._now, self._descending)
            self._group = group
        return group.leading(most)
