"""Checks that each segment reads the recurrent state of exactly the tokens before it."""

from __future__ import annotations

import numpy as np

from ...scheduler.plan import StepPlan
from ...scheduler.types import InvariantError

NOBODY = -1


class StateCheck:
    """What the state slots hold after the last plan: by slot, the seat whose row wrote or
    got the state from HOST, and the number of tokens that the state has seen."""

    def __init__(self, slots: int):
        self._seat = np.full(slots, NOBODY, np.int32)
        self._end = np.zeros(slots, np.int32)

    def follow(
        self,
        plan: StepPlan,
        seats: np.ndarray,
        begins: np.ndarray,
        starts: np.ndarray,
        ends: np.ndarray,
        samples: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the slots of the states in front of the segments and behind them ([S] int32).

        Each segment computes the positions [start, end) of the row in its seat, which begins at
        `begins`; all arrays are [S]. `samples`: their numbers of samples, if any has several.
        InvariantError if the state that it reads has not seen exactly the tokens before `start`, if
        it writes a state behind drafts, or if a slot that it reads or writes is written by another
        segment."""
        for join in plan.joins:
            self._seat[self._seat == join.seat] = NOBODY
        for seat, slot, end in plan.state_swap_ins:
            self._seat[slot] = seat
            self._end[slot] = end
        read = np.array(plan.state_in, np.int32)
        written = np.array(plan.state_out, np.int32)
        if not len(read) == len(written) == len(seats):
            raise InvariantError(f"step {plan.step} has segments without a state")
        zero = read < 0
        right = np.where(
            zero, starts == begins, (self._seat[read] == seats) & (self._end[read] == starts)
        )
        if not right.all():
            wrong = int(right.argmin())
            raise InvariantError(
                f"step {plan.step} computes seat {seats[wrong]} from position {starts[wrong]} "
                f"with a state of other tokens, in slot {read[wrong]}"
            )
        kept = written >= 0
        if samples is not None and (kept & (samples > 1)).any():
            raise InvariantError(f"step {plan.step} keeps a state behind drafts")
        slots = written[kept]
        writers = np.full(len(self._seat), NOBODY, np.int32)
        writers[slots] = seats[kept]
        if (writers[slots] != seats[kept]).any() or (
            (writers[read] != NOBODY) & (writers[read] != seats) & ~zero
        ).any():
            raise InvariantError(f"two segments of step {plan.step} use one state slot")
        self._seat[slots] = seats[kept]
        self._end[slots] = ends[kept]
        return read, written
