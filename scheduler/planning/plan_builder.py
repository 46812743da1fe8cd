"""One step plan while it is built."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from math import ceil

from ..plan import BlockUpdate, Join, RowStart, Span, StateSwapIn, StepPlan, TierWork
from ..turns.turn import RunningTurn
from ..types import RequestId, RowId
from .eviction import Evictor
from .plan_copies import StepCopies

# prompt positions scored in one step: each takes a row of logits as wide as the vocabulary
MOST_SCORED = 256


class PlanBuilder:
    """The planning parts add their work in turn; `freeze` makes the plan."""

    def __init__(
        self, step: int, applied: int, now: float, copies: StepCopies, evictor: Evictor, budget: int
    ):
        self.step = step
        self.applied = applied
        self.now = now
        self.copies = copies
        self.evictor = evictor
        # the tokens that the step can still take, each counted as `weigh` says
        self.budget = budget
        # context -> tokens of the budget for a prompt token; None: 1
        self.weigh: Callable[[int], float] | None = None
        self.least = 0  # known tokens that the step takes with any context, within the budget
        self.joins: list[Join] = []
        self.origins: list[RowStart] = []
        self.blocks: list[BlockUpdate] = []
        self.generate: list[int] = []
        self.positions: list[int] = []
        self.spans: list[Span] = []
        self.span_rows: list[RunningTurn] = []
        self.token_ids: array[int] = array("i")
        self.samples: list[RowId] = []
        self.scored: array[int] = array("i")
        # an empty plan is needed: a copy must be confirmed, or more requests are to be tried
        self.polls = False
        self.short = 0  # GPU slots that running rows lacked
        self.wanted = 0  # GPU slots that the first waiting request needed and did not get
        self.lower: tuple[TierWork, ...] = ()
        self.ended: tuple[RequestId, ...] = ()
        # the state slots that are read and written, for each of `generate` and of `spans`
        self.generate_states: list[tuple[int, int]] = []
        self.span_states: list[tuple[int, int]] = []
        self.state_swap_ins: list[StateSwapIn] = []

    @property
    def tokens(self) -> int:
        return len(self.generate) + len(self.token_ids)

    def rows_context(self) -> int:
        """The mean position of the rows that generate."""
        return sum(self.positions) // len(self.positions) if self.positions else 0

    def room_for(self, span: Span, share: int) -> int:
        """Returns how many tokens of the span the step takes for `share` of its budget."""
        room = max(self._affords(span, share), min(share, self.least - len(self.token_ids)))
        return min(room, MOST_SCORED - len(self.scored)) if span.scores else room

    def spend(self, span: Span, tokens: int, share: int) -> None:
        """Takes the span's first `tokens` tokens off the budget: all of `share` if it affords no
        more."""
        enough = tokens < self._affords(span, share)
        self.budget -= ceil(tokens * self._weight(span, share)) if enough else share

    def _affords(self, span: Span, share: int) -> int:
        return max(int(share / self._weight(span, share)), min(share, 1))

    def _weight(self, span: Span, share: int) -> float:
        return 1.0 if self.weigh is None else self.weigh(span.start + (share + 1) // 2)

    def freeze(self) -> StepPlan:
        states = self.generate_states + self.span_states
        state_in, state_out = zip(*states, strict=True) if states else ((), ())
        return StepPlan(
            step=self.step,
            copies=self.copies.batches(),
            after=self.copies.after,
            joins=tuple(self.joins),
            origins=tuple(self.origins),
            blocks=tuple(self.blocks),
            generate=array("i", self.generate),
            positions=array("i", self.positions),
            spans=tuple(self.spans),
            token_ids=self.token_ids,
            samples=tuple(self.samples),
            scored=self.scored,
            lower=self.lower,
            ended=self.ended,
            state_in=state_in,
            state_out=state_out,
            state_swap_ins=tuple(self.state_swap_ins),
        )
