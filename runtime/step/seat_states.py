"""States of linear attention in steps without reuse: each seat has the slot of its number, and its
row's state is there. numpy only."""

from __future__ import annotations

import numpy as np

from ...builder.forward_batch import NO_STATE
from ...scheduler.types import InvariantError


class SeatStates:
    """The position behind the last token of each seat's state. A row begins with the zero state."""

    def __init__(self, seats: int):
        self._begins = np.zeros(seats, np.int32)
        self._ends = np.zeros(seats, np.int32)

    def begun(self, seat: int, start: int) -> None:
        """The row in the seat now begins at position `start`."""
        self._begins[seat] = self._ends[seat] = start

    def follow(
        self, step: int, seats: np.ndarray, starts: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the slots of the states in front of the segments and behind them ([S] int32).

        seats, starts, ends: [S], positions of each segment's row. InvariantError if a segment does
        not begin where its row's state ends, or a seat has two segments.
        """
        behind = self._ends[seats]
        if (behind != starts).any() or len(np.unique(seats)) < len(seats):
            raise InvariantError(
                f"step {step} computes seats {seats.tolist()} from positions {starts.tolist()} on, "
                f"and their states are those behind {behind.tolist()} tokens"
            )
        self._ends[seats] = ends
        return np.where(starts == self._begins[seats], NO_STATE, seats), seats
