"""The GPU's slots for recurrent states, (docs/design/states.md).

A state slot is as many neighbouring GPU slots as a state has pieces, behind the slots of the KV. A
row in a seat holds one. A state that is to be copied out holds its slot as well.
"""

from __future__ import annotations

from collections import deque

from ..config import StateConfig
from ..plan import Lane
from ..types import InvariantError
from .chunk import State
from .slots import SlotPool


class StateSlots:
    """`fresh`: states in slots that are to be copied out."""

    def __init__(self, states: StateConfig, first: int, gpu: SlotPool):
        """`first`: the GPU slot of the first piece of state slot 0."""
        self.config = states
        self._first = first
        self._gpu = gpu
        self._free = deque(range(states.slots))
        self._holders = [0] * states.slots
        # by slot: the last launched step that reads or writes it
        self._used = [0] * states.slots
        self._late: list[int] = []
        self.fresh: list[State] = []

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Returns the slot that has been free for longest. The caller makes sure that there is
        one."""
        slot = self._free.popleft()
        self._holders[slot] = 1
        return slot

    def hold(self, slot: int) -> None:
        """One more state or row holds the slot."""
        self._holders[slot] += 1

    def let_go(self, slot: int) -> None:
        """One fewer does. Without any, the slot is free from the next plan on: this plan's step may
        read it."""
        self._holders[slot] -= 1
        if not self._holders[slot]:
            self._late.append(slot)

    def begin_plan(self) -> None:
        self._free.extend(self._late)
        self._late.clear()

    def used_by(self, slot: int, step: int) -> None:
        self._used[slot] = step

    def first_piece(self, slot: int) -> int:
        """The GPU slot of its first piece. Copies of a state are of all its pieces, so the first
        one's tickets are those of all."""
        return self._first + slot * self.config.chunks

    def pieces(self, slot: int) -> range:
        """The GPU slots of its pieces, for a copy: the copy waits for the last step that uses
        them."""
        first = self.first_piece(slot)
        pieces = range(first, first + self.config.chunks)
        computed = self._gpu.last[Lane.COMPUTE]
        for piece in pieces:
            computed[piece] = self._used[slot]
        return pieces

    def check(self, seated: list[int]) -> None:
        """Checks that every slot is free or held, as often as counted. `seated`: the rows' slots.
        Raises InvariantError."""
        held = [*seated, *(state.slot for state in self.fresh)]
        counted = [held.count(slot) for slot in range(self.config.slots)]
        unheld = sorted([*self._free, *self._late])
        if counted != self._holders or unheld != [
            slot for slot, holders in enumerate(counted) if not holders
        ]:
            raise InvariantError(
                f"state slots: held by {counted}, counted {self._holders}, free {unheld}"
            )
