"""The recurrent state of a row (docs/design/states.md)."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ..kv.chunk import NO_SLOT, State


class Cut(NamedTuple):
    """A position of the prompt at which a state is kept; `modest` as in `State`."""

    end: int
    modest: bool


class RowState:
    """The recurrent state of a row, and the states that it needs and keeps.

    base      the position at which the row's context begins: the state there is zero
    slot      its state slot; NO_SLOT while it has no seat
    at        the tokens of its context that the state in the slot has seen
    kept      that state is to be copied out or is being copied
    waits     copies use the slot: its next step waits for them
    swap_ins  states on HOST from which its spans begin, ascending; it pins their pieces
    cuts      where the prompt's states are kept, ascending
    planned   the last step that computes it
    swapped   the last plan that copies its state in
    next_kept, newest
              the reply's position from which on its next state is kept, and the one kept last
    states    all states that it has read from HOST and kept: they were used when it was
    """

    __slots__ = (
        "at",
        "base",
        "cuts",
        "kept",
        "newest",
        "next_kept",
        "planned",
        "slot",
        "states",
        "swap_ins",
        "swapped",
        "waits",
    )

    def __init__(self, base: int, swap_ins: list[State], cuts: list[Cut], next_kept: int):
        self.base = self.at = base
        self.slot = NO_SLOT
        self.kept = self.waits = False
        self.swap_ins = deque(swap_ins)
        self.cuts = deque(cuts)
        self.planned = self.swapped = 0
        self.next_kept = next_kept
        self.newest: State | None = None
        self.states: list[State] = []
