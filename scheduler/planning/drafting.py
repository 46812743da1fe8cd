"""Rows that check drafts: which ones, their spans, and which of their samples count
(docs/design/drafts.md)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..config import SchedulerConfig
from ..draft_timing import DraftTiming
from ..kv.chunk_store import ChunkStore
from ..plan import Span, StepPlan, StepResult
from ..turns.drafts import Acceptance, Drafts, may_draft
from ..turns.turn import RunningTurn
from ..types import Request, RowId
from .plan_builder import PlanBuilder
from .queues import RequestQueues

Extend = Callable[[RunningTurn, PlanBuilder, int], bool]
"""`Batcher._extend`: takes slots for the row's positions below the given one."""

JOINING = 4
"""Seats that drafts leave to waiting requests. If more join in one step, it may sample more
positions than there are seats, and then runs without a captured graph."""

MOST_ROWS, WATCHED = 64, 16
"""Rows that are searched for drafts in a step: this bounds the host's time. After so many steps
these are other rows."""

NONE = array("i")

MOST_LEAST = 0.9
"""If drafts above this chance do not fit into a step, rows behind the first ones have none."""


class Rates(NamedTuple):
    """What the next step is like, and what a draft must give in it.

    rows, context  rows past their prompts, and their mean context
    prompt         tokens of prompts beside them
    lag            tokens that the rows compute again, because their states are so far behind
    room           drafts that the step can check
    token          seconds that the rows add to a step without drafts, for each of its tokens: a
                   token more saves so much, less `draft` if the row has a state
    draft          seconds that one more draft adds
    """

    rows: int
    context: int
    prompt: int
    lag: int
    room: int
    token: float
    draft: float

    @property
    def least(self) -> float:
        """The least chance of coming true with which a draft is worth its own seconds."""
        return self.draft / self.token


class Drafting:
    """Plans checks of drafts. Counts since the start: checks, drafted tokens and accepted ones."""

    def __init__(
        self, config: SchedulerConfig, timing: DraftTiming, store: ChunkStore, queues: RequestQueues
    ):
        self._on = config.speculate == "lookup"
        self._seats = config.max_num_seqs
        self._budget = config.max_num_batched_tokens
        self._timing = timing
        self._store = store
        self._queues = queues
        self._states = queues.states
        self._acceptance = Acceptance()
        self.checks = self.drafted = self.accepted = 0

    def begin(self, request: Request) -> Drafts | None:
        """Returns the drafts of the request's reply, or None if it has none."""
        return Drafts(self._acceptance) if self._on and may_draft(request) else None

    # -- whether drafts pay

    def awaits_result(self, applied: int, planned: int) -> bool:
        """True if the next plan is better made when the result of the step that runs is applied,
        because its rows can then draft behind their newest tokens. Steps up to `applied` are
        applied, those behind, up to `planned`, are not.

        A plan made now leaves out the rows whose newest token must be known: those whose drafts are
        being checked, and constrained ones.
        """
        if not self._on or applied == planned:
            return False
        rows = self._watched(applied)
        rates = self._rates(rows)
        if rates is None:
            return False
        expected = checked = lag = 0.0
        left_out = 0
        for row in rows:
            drafts = row.drafts
            if drafts is None:
                left_out += row.constrained and row.awaits_token
                continue
            running = drafts.checked > applied
            left_out += running
            left = 0 if running else len(drafts.next(row.tokens))
            count, true = drafts.coming(left, row.awaits_token, rates.least)
            checked += count
            expected += true
            lag += min(count, 1) * self._lag_behind(row)
        if left_out == rates.rows and not rates.prompt:
            return not self._queues.waiting  # without them there is nothing else to plan
        # The plan behind the checks waits as well. If this one waits behind checks, that is counted
        # as the next one's.
        return self._pays(rates, expected, checked, 1 if left_out else 2, lag, left_out)

    def choose(self, applied: int) -> Mapping[RowId, array[int]]:
        """Returns the drafts that the next plan checks, of rows whose newest token is known; none
        if they do not pay."""
        if not self._on:
            return {}
        rows = self._watched(applied)
        rates = self._rates(rows)
        if rates is None:
            return {}
        open_rows = []
        for row in rows:
            drafts = row.drafts
            if drafts is not None and not row.awaits_token:
                left = drafts.next(row.tokens)[: self._most_drafts(row)]
                if left:
                    open_rows.append((row, drafts, left))
        least = rates.least
        counts = [drafts.depth(len(left), least) for _, drafts, left in open_rows]
        while sum(counts) > rates.room and least < MOST_LEAST:
            least = max(least, 0.1) ** 0.5
            counts = [drafts.depth(len(left), least) for _, drafts, left in open_rows]
        room = rates.room
        expected = lag = 0.0
        chosen = {}
        for (row, drafts, left), count in zip(open_rows, counts, strict=True):
            count = min(count, room)
            if count:
                chosen[row.id] = left[:count]
                expected += drafts.expected(count)
                lag += self._lag_behind(row)
                room -= count
        return chosen if self._pays(rates, expected, rates.room - room, 1, lag) else {}

    def _most_drafts(self, row: RunningTurn) -> int:
        most = row.last_position + 1 - len(row.tokens)
        return most if self._states is None else min(most, self._states.most_drafts(row))

    def _lag(self, row: RunningTurn) -> int:
        """How many tokens the row's next span computes again: those between its state and its
        newest token, because a check does not move the state. Those of a check whose result is
        awaited may all come true."""
        if row.state is None or row.spans:
            return 0
        checking = row.drafts.checking if row.drafts is not None and row.awaits_token else 0
        return max(0, len(row.tokens) - 1 - row.state.at) + checking

    def _lag_behind(self, row: RunningTurn) -> int:
        """The row's lag behind a check, without the drafts that come true."""
        return 0 if row.state is None else self._lag(row) + 1

    def _pays(
        self,
        rates: Rates,
        expected: float,
        drafts: float,
        waits: int,
        lag: float = 0,
        left_out: int = 0,
    ) -> bool:
        """True if so many drafts, of which `expected` come true, save more seconds than they cost.

        They save the seconds of the tokens that they give, and of those of rows that would be left
        out. They cost a longer step, `lag` tokens that a later step computes again, and `waits`
        times a turnaround, in which the device idles.
        """
        if not drafts or not expected:
            return False
        if drafts > rates.room:
            expected, drafts = expected * rates.room / drafts, rates.room
        step = self._timing.step
        others = rates.prompt + rates.lag
        added = step(others, rates.rows, rates.context, round(drafts)) + lag * rates.draft
        added -= step(others, rates.rows - left_out, rates.context)
        return (expected + left_out) * rates.token > added + waits * self._timing.turnaround

    def _watched(self, applied: int) -> list[RunningTurn]:
        """The rows that this step looks at, of those that are past their prompts; none if there is
        no room for drafts."""
        if self._room <= 0:
            return []
        rows = self._queues.rows
        if len(rows) > MOST_ROWS:
            first = applied // WATCHED * MOST_ROWS % len(rows)
            rows = (rows + rows[:MOST_ROWS])[first : first + MOST_ROWS]
        return [
            row
            for row in rows
            if not row.spans and not row.leaving and row.position <= row.last_position
        ]

    @property
    def _room(self) -> int:
        """Drafts that the next step can check: with one position of each row, and those that join,
        it samples no more positions than there are seats, so it fits the captured graphs. Half of
        the budget that the rows leave is kept for prompts. With states a step may have to compute
        again all that the step before it checked, so that has to fit as well."""
        queues = self._queues
        rows = len(queues.rows)
        free = self._seats - rows
        free -= min(JOINING, len(queues.waiting) + len(queues.swapping_in))
        if self._states is None:
            return min(free, (self._budget - rows) // 2)
        left = self._budget - self._seats
        lag = sum(map(self._lag, queues.rows))
        # a check of n drafts adds at most 1 + n tokens to it
        return min(free, left // 2 - lag, left - lag - rows)

    def _rates(self, watched: Sequence[RunningTurn]) -> Rates | None:
        """Returns None if no drafts can pay: there is no room, or even drafts that all come true
        would not save a turnaround."""
        if not watched:
            return None
        room = self._room
        seated = self._queues.rows
        computing = [row.spans for row in seated if row.spans]
        rows = len(seated) - len(computing)
        prompt = sum(spans[-1].end - spans[0].start for spans in computing)
        prompt = min(prompt, self._budget - rows)
        context = sum(row.position for row in watched) // len(watched)
        step = self._timing.step
        without = step(prompt, rows, context)
        token = (without - step(prompt, 0, 0)) / rows
        some = min(room, 4 * rows)
        lag = 0
        if self._states is not None:
            lag = sum(map(self._lag, seated))
            without = step(prompt + lag, rows, context)
        draft = max(0.0, step(prompt + lag, rows, context, some) - without) / some
        if self._states is not None:
            token -= draft  # the token is computed again
        if room * (token - draft) <= self._timing.turnaround:
            return None
        return Rates(rows, context, prompt, lag, room, token, draft)

    # -- their spans

    def plan(
        self,
        row: RunningTurn,
        chosen: Mapping[RowId, array[int]],
        builder: PlanBuilder,
        extend: Extend,
    ) -> list[RowId]:
        """Plans the row's newest token, which is known, and the drafts chosen for it. Returns the
        step's samples of the row, which follow those of the rows that generate. Drafts never cost
        another row its slots."""
        drafts = chosen.get(row.id, NONE)
        start = position = row.position
        spare = self._store.available - len(self._queues.rows)
        if (
            position + len(drafts) >= row.first_without_slot
            and row.first_without_slot < row.window_end
            and spare > 0
        ):
            extend(row, builder, row.first_without_slot + 1)
        drafts = drafts[: row.first_without_slot - position - 1]
        count = 1 + len(drafts)
        if drafts:
            assert row.drafts is not None
            row.drafts.checked = builder.step
        if row.drafts is not None:
            row.drafts.checking = count if drafts else 0
        if row.state is not None:
            assert self._states is not None
            start = row.state.at
            builder.span_states.append(
                self._states.check_drafts(row, builder)
                if drafts
                else self._states.reply(row, start, position + 1, builder)
            )
        builder.spans.append(Span(row.seat, start, position + count, position, count))
        builder.span_rows.append(row)
        builder.token_ids += row.tokens[start : position + 1]
        builder.token_ids += drafts
        return [row.id] * count

    def accepted_samples(
        self, plan: StepPlan, result: StepResult
    ) -> tuple[Sequence[RowId], Sequence[int]]:
        """Returns the result's samples and tokens without those behind a draft that has not come
        true."""
        if not self._on:
            return result.samples, result.tokens
        at = len(plan.generate)
        first = 0
        samples, tokens = [*result.samples[:at]], [*result.tokens[:at]]
        for span in plan.spans:
            drawn = result.tokens[at : at + span.samples]
            end = first + span.end - span.start
            kept = span.samples
            if span.samples > 1:
                drafts = plan.token_ids[end - span.samples + 1 : end]
                kept = 1 + next(
                    (i for i, draft in enumerate(drafts) if draft != drawn[i]), len(drafts)
                )
                self.checks += 1
                self.drafted += len(drafts)
                self.accepted += kept - 1
            samples += result.samples[at : at + kept]
            tokens += drawn[:kept]
            at = at + span.samples
            first = end
        return samples, tokens
