"""The bound of work between two steps: counts, so it needs no clock
(docs/design/steps.md#between-two-steps).

One unit takes about a microsecond. It is one of

    a chunk whose tokens are hashed, or that is claimed, given up, pinned, marked, awaited, released
    or dropped LOOKED_AT chunks that are only looked at COPIED bytes that are copied

A message, or a conversation that ends, costs MESSAGE units besides. Work goes on while any unit is
left. So at most WORK_A_STEP units are done between two steps, and the rest of one piece.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

WORK_A_STEP = 512
MESSAGE = 2
LARGEST_PIECE = 64  # units of a piece of long work, about
LOOKED_AT = 16
COPIED = 4096

Pieces = Iterator[int]
"""Long work. Each `next` does a piece and returns its units; the state is consistent between any
two pieces."""


class WorkBudget:
    """The units that may still be spent before the next step.

    most    units between two steps
    left    units left; below 0 if the last piece was larger than what was left
    """

    def __init__(self, most: int = WORK_A_STEP):
        self.most = self.left = most

    @property
    def spent(self) -> int:
        return self.most - self.left

    def spend(self, units: int) -> None:
        self.left -= units

    def renew(self) -> None:
        """A step is planned: all units may be spent again."""
        self.left = self.most


class Backlog:
    """Long work on chunks that is done in pieces over several steps, one after the other, in the
    order in which it began. Work also waits for what `earlier`, another backlog, had when it
    began."""

    def __init__(self, budget: WorkBudget, earlier: Backlog | None = None):
        self._budget = budget
        self._earlier = earlier
        # with the count of `earlier` that it waits for
        self._work: deque[tuple[Pieces, int]] = deque()
        self._begun = self._ended = 0

    def __bool__(self) -> bool:
        return bool(self._work)

    def begin(self, work: Pieces) -> None:
        """Adds the work. Does it at once if none waits and half of the budget is left: the other
        half is for messages, so that they do not wait for the work of those before them."""
        self._work.append((work, 0 if self._earlier is None else self._earlier._begun))
        self._begun += 1
        if len(self._work) == 1:
            self.go_on(self._budget.most // 2)

    def go_on(self, reserve: int = 0) -> None:
        """Goes on until only `reserve` units are left in the budget."""
        while self._work and self._budget.left > reserve:
            work, waits_for = self._work[0]
            if self._earlier is not None and self._earlier._ended < waits_for:
                return
            units = next(work, None)
            if units is None:
                self._work.popleft()
                self._ended += 1
            else:
                self._budget.spend(units)


def all_at_once(work: Pieces) -> None:
    """Does the work at once, where its size is no matter."""
    for _ in work:
        pass
