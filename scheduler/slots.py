"""One tier's slots: a free list, and for every slot the last work that reads or writes it.

Nothing here waits. A slot may be given away while a step or a copy still uses it; whoever gets it waits *on the
device* for the tickets recorded here (DESIGN section 3, readers and writers). The free list is first in, first out,
so that those tickets are mostly complete by then.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable

from .plan import Lane
from .types import InvariantError


class SlotPool:
    def __init__(self, count: int):
        self.count = count
        self._free = deque(range(count))
        self._last = tuple(array("q", bytes(8 * count)) for _ in Lane)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """The slot that has been free for longest; the caller makes sure that there is one."""
        return self._free.popleft()

    def give(self, slot: int) -> None:
        self._free.append(slot)

    def used(self, slot: int, lane: Lane, ticket: int) -> None:
        """`ticket` on `lane` reads or writes the slot."""
        last = self._last[lane]
        last[slot] = max(last[slot], ticket)

    def last_use(self, slot: int, lane: Lane) -> int:
        return self._last[lane][slot]

    def wait_for_others(self, slot: int, lane: Lane, after: list[int]) -> None:
        """Raises `after`, a ticket a lane, to what work on `lane` must wait for before it touches the slot."""
        for other, last in zip(Lane, self._last, strict=True):
            if other != lane and last[slot] > after[other]:
                after[other] = last[slot]

    def check(self, owned: Iterable[int]) -> None:
        """Every slot is free or owned, once."""
        everything = [*self._free, *owned]
        if len(everything) != self.count or len(set(everything)) != self.count:
            raise InvariantError(f"{self.count} slots, but free and owned together are {sorted(everything)}")
