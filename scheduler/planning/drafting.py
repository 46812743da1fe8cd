"""Rows that check drafts: their spans, and which of their samples count (docs/design/drafts.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..config import SchedulerConfig
from ..kv.chunk_store import ChunkStore
from ..plan import Span, StepPlan, StepResult
from ..turns.drafts import MOST_DRAFTS, Drafts, may_draft
from ..turns.turn import RunningTurn
from ..types import Request, RowId
from .plan_builder import PlanBuilder
from .queues import RequestQueues

Extend = Callable[[RunningTurn, PlanBuilder, int], bool]
"""`Batcher._extend`: takes slots for the row's positions below the given one."""

SKIPPED = 1
"""A check costs one skipped step, which would give this many tokens. More drafts than this must be
expected to come true."""


class Drafting:
    """Plans checks of drafts. Counts since the start: checks, drafted tokens and accepted ones."""

    def __init__(self, config: SchedulerConfig, store: ChunkStore, queues: RequestQueues):
        self._on = config.speculate == "lookup"
        self._seats = config.max_num_seqs
        self._budget = config.max_num_batched_tokens
        self._store = store
        self._queues = queues
        self.checks = self.drafted = self.accepted = 0

    def begin(self, request: Request) -> Drafts | None:
        """Returns the drafts of the request's reply, or None if it has none."""
        return Drafts() if self._on and may_draft(request) else None

    @property
    def _most(self) -> int:
        """Drafts of a step. With one position of each row it then samples no more positions than
        there are seats, so it fits the captured graphs. Half of the budget that the rows leave is
        kept for prompts."""
        rows = len(self._queues.rows)
        return min(self._seats - rows, (self._budget - rows) // 2)

    def waits(self, row: RunningTurn, builder: PlanBuilder) -> bool:
        """True if this step leaves the row out. Its newest token is not known yet, and is needed:
        for the mask of a grammar or of bad words, because drafts behind it are being checked, or
        because enough drafts are expected to come true."""
        drafts = row.drafts
        if drafts is None:  # a constrained row
            return True
        if drafts.checked <= builder.applied:
            room = self._most - builder.drafting * MOST_DRAFTS
            if room <= SKIPPED + 1 or not drafts.next(row.tokens, SKIPPED + 1):
                return False
        builder.drafting += 1
        return True

    def plan(self, row: RunningTurn, builder: PlanBuilder, extend: Extend) -> list[RowId]:
        """Plans the row's newest token, which is known, and the drafts behind it. Returns the
        step's samples of the row, which follow those of the rows that generate. Drafts never cost
        another row its slots."""
        assert row.drafts is not None
        start = row.position
        others = len(builder.token_ids) - len(builder.spans)  # drafts of other rows
        most = min(row.last_position - start, self._most - others)
        drafts = row.drafts.next(row.tokens, SKIPPED)[: max(0, most)]
        spare = self._store.available - len(self._queues.rows)
        if (
            start + len(drafts) >= row.first_without_slot
            and row.first_without_slot < row.window_end
            and spare > 0
        ):
            extend(row, builder, row.first_without_slot + 1)
        drafts = drafts[: row.first_without_slot - start - 1]
        if len(drafts) <= SKIPPED and start + len(drafts) < row.last_position:
            drafts = drafts[:0]  # it would skip a step for no more than that step's token
        count = 1 + len(drafts)
        if drafts:
            row.drafts.checked = builder.step
        builder.spans.append(Span(row.seat, start, start + count, start, count))
        builder.span_rows.append(row)
        builder.token_ids.append(row.tokens.at(start))
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
                drafts = plan.token_ids[first + 1 : end]
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
