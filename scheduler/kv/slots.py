"""One tier's slots: a free list, and for every slot the last work that reads or writes it.

Nothing here waits. A slot may be given away while a step or a copy still uses it; its next user
waits *on the device* for the tickets recorded here (docs/design/chunk-store.md). The free list is
first in, first out, so those tickets are mostly complete when a slot is taken again.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Container, Iterable

from ..plan import Lane, Tickets
from ..types import InvariantError


class SlotPool:
    """`last[lane][slot]` is the last ticket on `lane` that reads or writes the slot, 0 for none.

    `beyond`: so many slots behind those of the pool, which hold states, are not in it, but have
    tickets.
    """

    def __init__(self, count: int, beyond: int = 0):
        self.count = count
        self.last = tuple(array("q", bytes(8 * (count + beyond))) for _ in Lane)
        self._free = deque(range(count))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Returns the slot that has been free for longest. The caller makes sure that there is
        one."""
        return self._free.popleft()

    def give(self, slot: int) -> None:
        self._free.append(slot)

    def grow(self, count: int) -> bool:
        """The pool has at least `count` slots now. New ones are free, behind the others. Returns
        whether there are any."""
        new = range(self.count, count)
        for last in self.last:
            last.extend(0 for _ in new)
        self._free.extend(new)
        self.count += len(new)
        return bool(new)

    def take_all(self, slots: Container[int]) -> None:
        """Takes all of these free slots."""
        self._free = deque(slot for slot in self._free if slot not in slots)

    def next_is_quiet(self, completed: Tickets) -> bool:
        """True if no unconfirmed copy uses the slot that `take` would return."""
        slot = self._free[0]
        return (
            self.last[Lane.IN][slot] <= completed.swap_in
            and self.last[Lane.OUT][slot] <= completed.swap_out
        )

    def check(self, owned: Iterable[int]) -> None:
        """Checks that every slot is free or owned, once. Raises InvariantError."""
        everything = [*self._free, *owned]
        if len(everything) != self.count or len(set(everything)) != self.count:
            raise InvariantError(
                f"{self.count} slots, but free and owned together are {sorted(everything)}"
            )
