"""The tokens of a step: rows that generate, spans of prompts, and suspensions
(docs/design/scheduling.md)."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from ..config import SchedulerConfig
from ..context_window import RECOMPUTE, ContextWindow
from ..cost import CostProfile
from ..draft_timing import DraftTiming
from ..kv.chunk_store import ChunkStore
from ..plan import BlockUpdate, RowStart
from ..turns.turn import RunningTurn
from ..types import GPU, RowId
from .drafting import Drafting
from .plan_builder import PlanBuilder
from .queues import RequestQueues
from .step_limit import limit_prompts


class Batcher:
    """Plans for the rows in seats, in their order."""

    def __init__(
        self,
        config: SchedulerConfig,
        cost: CostProfile,
        timing: DraftTiming,
        store: ChunkStore,
        queues: RequestQueues,
        windows: ContextWindow | None,
    ):
        self._config = config
        self._cost = cost
        self._store = store
        self._queues = queues
        self._windows = windows
        self.drafting = Drafting(config, timing, store, queues)
        self._states = queues.states

    # -- generation

    def plan_generation(self, builder: PlanBuilder) -> None:
        """Plans one token for each row that is past its prompt, in row order, and the chosen
        drafts. Takes slots when a row needs them. A row takes no part if its newest token must be
        known and is not: for the mask of a grammar or of bad words, or behind drafts."""
        step, generate, positions, samples = (
            builder.step,
            builder.generate,
            builder.positions,
            builder.samples,
        )
        generating = False
        chosen = self.drafting.choose(builder.applied)
        checked = list[RowId]()
        for row in tuple(self._queues.rows):
            position = row.position
            if row.spans or row.leaving or position > row.last_position:
                continue
            generating = True
            drafts = row.drafts
            checks = False
            if drafts is not None or row.constrained:
                if row.awaits_token:
                    if drafts is None or row.constrained or drafts.checked > builder.applied:
                        continue
                elif drafts is not None:  # accepted drafts have moved the row on
                    row.position = position = len(row.tokens) - 1
                    # After a check its newest token is not the device's last sample.
                    checks = drafts.checked == row.launched or row.id in chosen
            if position == row.first_without_slot and not self._extend(row, builder, position + 1):
                continue
            row.launched = step
            if checks:
                checked += self.drafting.plan(row, chosen, builder, self._extend)
            else:
                generate.append(row.seat)
                positions.append(position)
                samples.append(row.id)
            row.position = position + 1
        if self._states is not None:
            for row_id, position in zip(samples, positions, strict=True):
                self._states.generate(self._queues.by_id[row_id], position, builder)
        samples += checked
        builder.budget -= builder.tokens
        target = self._config.target_ms_per_token
        if (
            generating
            and target is not None
            and (self._queues.waiting or self._queues.swapping_in or self._rows_with_spans())
        ):
            limit_prompts(builder, self._cost, target / 1e3, self._config.chunk_tokens)

    def _extend(self, row: RunningTurn, builder: PlanBuilder, end: int) -> bool:
        """Takes slots for the row's positions below `end`, or fewer if its window or the pool ends
        first. Returns False if it took none.

        If the pool is short, a row is suspended, perhaps this one. The device learns of new chunks
        only when the row is planned, because another row may lose its seat before this plan is
        complete.
        """
        position = row.first_without_slot
        if position == row.window_end and not self._move_on(row, builder):
            return False
        first = len(row.chunks)
        end = min(end, row.window_end)
        while row.chunks[-1].end < end:
            if not self._store.obtainable:
                self._suspend_for(builder)
                if row.leaving:
                    return False
                if not self._store.obtainable:
                    break
            builder.evictor.take_gpu_slots(1)
            chunk = self._store.new(row.chunks[-1].end + self._config.chunk_tokens, builder.now)
            builder.copies.step_writes(chunk.slots[GPU])
            row.chunks.append(chunk)
        row.first_without_slot = min(row.chunks[-1].end, row.window_end)
        if row.first_without_slot == position:
            return False
        self.send_chunks(row, builder, first)
        return True

    def _move_on(self, row: RunningTurn, builder: PlanBuilder) -> bool:
        """The row has filled its window. It now begins at the next window's start, and the chunks
        before that are released.

            | released |   kept    |<- first_without_slot
            first      start       window_end        window_end after the move

        Every launched step of the row must be applied before the move. Then its chunks have their
        keys, and no step in flight begins at `first`.
        """
        if row.launched > builder.applied:
            return False
        turn = row.turn
        windows = self._windows
        assert windows is not None
        if windows.mode == RECOMPUTE:
            self._queues.unseat(row)
            if self._states is not None:
                self._states.forget(turn)  # it belongs to the context that ends here
            self._queues.requeue(row, builder.now, keeps_tail=False)
            row.leaving = True
            return False
        start = windows.start(row.first_without_slot, turn.context_start)
        first = start // self._config.chunk_tokens
        gone = row.chunks[: first - row.first]
        self._queues.release(row, gone, None, builder.now)
        row.first = first
        row.chunks = row.chunks[len(gone) :]
        row.moved = True
        row.window_end = windows.end(start)
        row.first_without_slot = min(row.chunks[-1].end, row.window_end)
        return True

    def send_chunks(self, row: RunningTurn, builder: PlanBuilder, first: int) -> None:
        """Tells the device the row's chunks from number `first` on, or all of them if the row's
        start has moved."""
        if row.moved:
            start = row.first * self._config.chunk_tokens
            assert self._windows is not None
            builder.origins.append(RowStart(row.seat, start, self._windows.zero(start)))
            row.moved, first = False, 0
        slots = tuple(chunk.slots[GPU] for chunk in row.chunks[first:])
        if slots:
            builder.blocks.append(BlockUpdate(row.seat, first, slots))

    def _suspend_for(self, builder: PlanBuilder) -> None:
        """Called for each missing slot. Suspends a row, unless enough slots are about to become
        free: the last row, in order, of the owner with the most seats."""
        builder.short += 1
        if builder.short <= self._queues.coming_free():
            return
        staying = [row for row in self._queues.rows if not row.leaving]
        joined = self._queues.swapping_in + staying
        seats = Counter(row.turn.request.owner for row in joined)
        last = max(joined, key=lambda row: (seats[row.turn.request.owner], row.order))
        if last in self._queues.swapping_in:
            self._queues.swapping_in.remove(last)
            self._queues.requeue(last, builder.now)
        elif len(staying) > 1:
            self._queues.suspend(last)
            self._queues.release_suspended(builder.applied, builder.now)
        # no candidate: the others are leaving already, or wait for the confirmation of their
        # reply's length

    # -- known tokens

    def plan_fair_spans(self, builder: PlanBuilder) -> None:
        """Plans like `plan_spans`, but if several owners have prompts to compute, each gets an
        equal share of the budget.

        The rest of the budget is for requests that join, then for any row.
        """
        rows = self._rows_with_spans()
        turns = chain((row.turn for row in rows), self._queues.waiting)
        owners = {turn.request.owner for turn in turns}
        shares = dict.fromkeys(owners, -(-builder.budget // max(1, len(owners))))
        for row in rows:
            owner = row.turn.request.owner
            budget = builder.budget
            self.take_spans(row, builder, shares[owner])
            shares[owner] -= budget - builder.budget

    def plan_spans(self, builder: PlanBuilder) -> None:
        """Plans pieces of prompts (and of dropped history), row by row in their order, until the
        token budget is used up."""
        for row in self._rows_with_spans():
            self.take_spans(row, builder, builder.budget)

    def _rows_with_spans(self) -> list[RunningTurn]:
        return [row for row in self._queues.rows if row.spans and not row.leaving]

    def take_spans(self, row: RunningTurn, builder: PlanBuilder, most: int) -> None:
        """Plans tokens of the row's spans for at most `most` of the budget."""
        least = max(0, builder.budget - most)
        while (
            row.spans
            and not row.leaving
            and (room := builder.room_for(row.spans[0], builder.budget - least)) > 0
        ):
            start, end = row.spans[0].start, row.spans[0].end
            states = self._states
            if states is not None and not states.may_begin(row, start, builder):
                return
            if start >= row.first_without_slot and not self._extend(
                row, builder, min(end, start + room)
            ):
                return
            row.launched = builder.step
            span = row.spans.popleft()._replace(seat=row.seat)
            cut = min(start + room, row.first_without_slot)
            if states is not None:
                cut = states.cut(row, start, cut, end)
            if end > cut:
                row.spans.appendleft(span._replace(start=cut, write_from=max(cut, span.write_from)))
                span = span._replace(end=cut, samples=0)
            builder.spend(span, span.end - start, builder.budget - least)
            builder.spans.append(span)
            builder.span_rows.append(row)
            builder.token_ids += row.tokens[span.start : span.end]
            if span.scores:
                builder.scored += row.turn.tokens[span.start + 1 : span.end + (not span.samples)]
            if span.samples:
                builder.samples.append(row.id)
            if states is not None:
                builder.span_states.append(states.compute(row, span.start, span.end, builder))
