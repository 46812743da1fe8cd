"""The scheduler decides what to compute next, what to copy, and what to keep. It touches no device.

    submit(request)   a turn joins the queue, when its prompt is prepared; add(request): at once
    next_plan(now)    one step: generation, pieces of prompts, joining requests, copies
    apply(result)     the step's tokens; replies that end are committed to their conversations
    abort, finish     a client has left; the length of a reply is known
    time_out(now)     requests that have waited too long end
    conversations     the logs: fork, keep, delete, residency of their KV
    lower             records of an earlier process, chunks to spill, records to erase
    work              the budget of work until the next plan
    grow_host(slots)  HOST has more slots

`next_plan` makes plan n+1 while step n runs, before the results of earlier plans are applied.
Results are applied in order. Times are seconds on any clock that does not run backwards.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

from .config import SchedulerConfig
from .context_window import check_length
from .cost import CostProfile
from .draft_timing import DraftTiming
from .invariants import check_requests, check_states, check_store
from .kv.chunk import Chunk
from .kv.chunk_keys import ChunkKeys
from .kv.chunk_store import ChunkStore
from .kv.deletion import Deletions
from .kv.moves import report_moves, store_counts
from .kv.retention import eviction_policy
from .kv.states import KeptStates
from .kv.stats import SchedulerStats
from .plan import Lane, StepPlan, StepResult
from .planning.admission import Admission
from .planning.batcher import Batcher
from .planning.commit import Committer
from .planning.eviction import Evictor
from .planning.link import link_chunks
from .planning.live_states import LiveStates, written
from .planning.lookup import CacheLookup
from .planning.lower_work import LowerTierWork
from .planning.plan_builder import PlanBuilder
from .planning.plan_copies import StepCopies
from .planning.prefetch import Prefetcher
from .planning.preparation import Preparation
from .planning.queue_order import QueueOrder
from .planning.queues import RequestQueues
from .planning.sharing import Sharing
from .planning.state_lookup import StateLookup
from .planning.write_behind import WriteBehind
from .swap_out_mark import swap_out_mark
from .turns.conversations import Conversations
from .turns.turn import RunningTurn, Turn
from .types import (
    Applied,
    ErrorKind,
    FinishReason,
    InvariantError,
    Request,
    RequestError,
    RequestId,
    RowResult,
)
from .work import LOOKED_AT, Backlog, WorkBudget


class Scheduler:
    """One thread uses it. See the module's description."""

    def __init__(
        self,
        config: SchedulerConfig,
        cost: CostProfile,
        make_store: Callable[..., ChunkStore] = ChunkStore,
    ):
        """`make_store`: takes the configuration and the eviction policy."""
        cost = replace(cost, most_context=config.max_model_len)
        self.config = config
        self.cost = cost
        self._windows = windows = config.windows
        self._chunk_keys = ChunkKeys(config.seed, config.chunk_tokens, windows)
        self._store = make_store(
            config, eviction_policy(config.eviction, cost, config.owner_kv_chunks is not None)
        )
        self.work = WorkBudget()
        # of rows that have left: slots that others may wait for
        self._releases = Backlog(self.work)
        kept = None if config.states is None else KeptStates(config.states, self._store)
        self._states = (
            None if kept is None else LiveStates(config, self._store, kept, self._releases)
        )
        self._claim_work = Backlog(self.work)
        # A deletion waits for the claims of earlier forks, so it leaves them their chunks.
        self._deletion_work = Backlog(self.work, self._claim_work)
        self._deletions = Deletions(self._store, self._deletion_work)
        self.conversations = Conversations(
            config,
            self._store,
            self._chunk_keys,
            self._deletions,
            self._claim_work,
            self.work,
            kept,
        )
        self._lookup = CacheLookup(
            self._store,
            cost,
            config.chunk_tokens,
            config.reuse,
            self._chunk_keys,
            windows,
            None if kept is None else StateLookup(config, cost, kept, self._store.lower),
        )
        self._queues = RequestQueues(config, self._store, self._states)
        self._write_behind = WriteBehind(config, cost, self._store)
        self._sharing: Sharing | None = None
        if self._store.shared is not None:
            self._sharing = Sharing(
                config, cost, self._store, self._store.shared, self._queues, kept
            )
            self._sharing.other, self._write_behind.other = self._write_behind, self._sharing
        self._order = QueueOrder(config, cost, self._lookup, self._queues.waiting)
        self.draft_timing = DraftTiming(cost)
        self._batcher = Batcher(config, cost, self.draft_timing, self._store, self._queues, windows)
        self._admission = Admission(
            config,
            cost,
            self._store,
            self.conversations,
            self._lookup,
            self._queues,
            self._order,
            self._batcher,
            windows,
            self._sharing,
        )
        self._prefetcher = Prefetcher(
            config, cost, self._store, self.conversations, self._lookup, self._order
        )
        self._preparing = Preparation(
            config,
            self._chunk_keys,
            self._store,
            self.conversations,
            self._lookup,
            self._queues,
            self._order,
            self.work,
            self._sharing,
        )
        self._committer = Committer(
            config, self._chunk_keys, self._store, self.conversations, self._prefetcher
        )
        self.lower = LowerTierWork(
            self._store,
            kept,
            self._chunk_keys,
            self._deletions,
            self._prefetcher,
            self._write_behind,
            self._sharing,
        )
        self._turns: dict[RequestId, Turn] = {}
        # rows whose reply is complete, until `finish` confirms its length
        self._held: dict[RequestId, RunningTurn] = {}
        self._inflight: deque[tuple[StepPlan, list[RunningTurn]]] = deque()
        self._step = self._applied = 0
        self._arrivals = 0
        # requests with a grammar that have ended since the last plan
        self._ended_grammars: list[RequestId] = []
        # by arrival; entries that have a seat or have ended are skipped
        self._timing_out: deque[Turn] = deque()
        self._copied = [0] * len(Lane)  # chunks, by lane
        self._last_out = 0  # ticket of the last swap-out
        self.awaits_result = False
        self._configured_mark = swap_out_mark(cost, config)

    # -- requests

    def add(self, request: Request, now: float) -> None:
        """Queues the turn. Raises RequestError if it cannot fit (INVALID) or too many wait
        (TOO_MANY)."""
        turn = self._begin(request, now)
        self.conversations.expire(now, self._write_behind.withheld)
        self._preparing.finish(turn)

    def submit(self, request: Request, now: float) -> None:
        """Prepares a long prompt in pieces, the first one now, and queues the turn when that is
        done. Raises RequestError as `add`."""
        self._preparing.prepare(self._begin(request, now))

    def _begin(self, request: Request, now: float) -> Turn:
        check_length(request, self.config.max_model_len, self._windows)
        if request.id in self._turns:
            raise RequestError(
                ErrorKind.INVALID, f"request {request.id} is being served already", "id"
            )
        waiting = len(self._queues.waiting) + len(self._preparing)
        if waiting >= self.config.max_queue:
            raise RequestError(ErrorKind.TOO_MANY, f"{waiting} requests wait already", None)
        if request.conversation is not None:  # this turn must not revive an expired conversation
            self.conversations.end_if_over(request.conversation, now, self._write_behind.withheld)
        self._arrivals += 1
        turn = Turn(request, self._arrivals, now)
        turn.drafts = self._batcher.drafting.begin(request)
        self._turns[request.id] = turn
        self.conversations.touch(request, now)
        self._preparing.begin(turn, now)
        if self.config.queue_timeout is not None:
            self._timing_out.append(turn)
        return turn

    def abort(self, request: RequestId, now: float) -> None:
        """Ends the request without committing its turn. Its full chunks stay as cache. An unknown
        id has already ended."""
        turn = self._turns.get(request)
        if turn is None:
            return
        self._close(turn)
        if turn in self._preparing:
            self._preparing.leave(turn)
            self._releases.begin(self._queues.end_waits(turn))
        elif turn in self._queues.waiting:
            self.work.spend(len(self._queues.waiting) // LOOKED_AT)
            self._queues.waiting.remove(turn)
            self._releases.begin(self._queues.end_waits(turn))
            if turn.tail is not None and turn.tail.resident:
                self._store.drop(turn.tail)
        else:
            self._releases.begin(self._queues.release_in_pieces(self._take_row(turn), now))
            if self._states is not None:
                self._states.forget(turn)

    def time_out(self, now: float) -> list[RequestId]:
        """Ends requests that have waited longer than `queue_timeout` for their first seat, as long
        as the budget of work lasts. Returns their ids."""
        timed_out = []
        patience = self.config.queue_timeout
        while (
            patience is not None
            and self._timing_out
            and self._timing_out[0].arrived + patience <= now
            and self.work.left > 0
        ):
            self.work.spend(1)
            turn = self._timing_out.popleft()
            if turn.queued is None and self._turns.get(turn.request.id) is turn:
                self.abort(turn.request.id, now)
                timed_out.append(turn.request.id)
        return timed_out

    def finish(self, request: RequestId, tokens: int, now: float) -> RowResult | None:
        """Cuts the reply to its first `tokens` tokens. Returns the request's last output if it was
        still running. With `--save sync` that output may come from a later `apply` instead. An
        unknown id has already ended."""
        turn = self._turns.get(request)
        if turn is None:
            return None
        self.work.spend(len(turn.keys))
        if not 0 < tokens <= len(turn.tokens) - len(turn.request.prompt):
            raise InvariantError(
                f"request {request} is to end after {tokens} tokens it does not have"
            )
        ended = request in self._held  # then its last output has been given
        truncated = self._truncated(turn, len(turn.request.prompt) + tokens)
        output = RowResult(request, finish=FinishReason.STOP, truncated=truncated)
        if turn in self._queues.waiting:
            self._queues.leave_queue(turn)
            self._committer.commit(turn, None, tokens, turn.tail, now)
            matches = map(self._store.find, self._lookup.seen_keys(turn))
            chunks = [chunk for chunk in matches if chunk is not None]
            self._write_later(chunks, now)
            if turn.tail is not None and turn.request.conversation is None and turn.tail.resident:
                self._store.drop(turn.tail)
            self._close(turn)
        else:
            row = self._take_row(turn)
            chunks = written(row)
            self._end(row, tokens, now)
        if ended or self._write_behind.withhold(turn.request, output, chunks):
            return None
        return output

    # -- work in pieces

    def go_on(self, now: float) -> None:
        """Does one step's share of the work that is done in pieces.

        Each of the five kinds gets a sixth of the budget, and what the kinds before it do not need.
        Messages get the last sixth, and what no kind needs. Conversations expire last, because
        their deletions may begin at once.
        """
        self.work.renew()
        sixth = self.work.most // 6
        self._releases.go_on(5 * sixth)
        self._preparing.forget_latest()
        self._preparing.go_on(4 * sixth)
        self._claim_work.go_on(3 * sixth)
        self._deletion_work.go_on(2 * sixth)
        self.conversations.expire(now, self._write_behind.withheld, sixth)

    def has_work(self, now: float) -> bool:
        """True if work that is done in pieces is left to a later step."""
        return self._has_begun_work or self.conversations.overdue(now)

    @property
    def _has_begun_work(self) -> bool:
        return bool(self._releases or self._preparing or self._claim_work or self._deletion_work)

    # -- tiers

    def grow_host(self, slots: int) -> bool:
        """HOST has `slots` slots now; fewer than before change nothing. Returns whether some are
        new. May come between any two other calls."""
        return self._store.host.grow(slots)

    def stop(self, now: float) -> None:
        """The server is about to end: what is on HOST and not in the shared tier yet is written,
        that of the conversations which were active last first."""
        if self._sharing is not None:
            self._sharing.stop(self.conversations.latest_chunks(), now)

    # -- steps

    def next_plan(self, now: float) -> StepPlan | None:
        """Returns the next step, or None if there is nothing to do until a result, a request or an
        abort arrives.

        A plan without tokens, copies and work of lower tiers exists only so that its result reports
        progress. It is made while such work is in progress, while a copy is not confirmed yet, or
        while a deletion continues.

        None while a step is in flight may also mean that drafts behind its tokens are expected to
        be worth more than a plan now (`awaits_result`).
        """
        self._store.now = now
        self.go_on(now)
        batcher = self._batcher
        step = self._step + 1
        self.awaits_result = batcher.drafting.awaits_result(self._applied, self._step)
        if self.awaits_result:
            return None
        copies = StepCopies(step, self._store.gpu, self._store.host)
        evictor = Evictor(self._store, copies, now)
        builder = PlanBuilder(
            step, self._applied, now, copies, evictor, self.config.max_num_batched_tokens
        )

        if self._sharing is not None:
            self._sharing.take_answers(now)
        self._queues.release_suspended(self._applied, now)
        if self._states is not None:
            self._states.begin_plan(builder)
        if self.config.batching == "unified":
            batcher.plan_generation(builder)
        batcher.plan_fair_spans(builder)
        self._admission.admit(builder)
        batcher.plan_spans(builder)
        if self.config.batching == "separate" and not builder.tokens:
            batcher.plan_generation(builder)
            # the only row may have outgrown its window and gone back to the queue
            if not builder.tokens:
                self._admission.admit(builder)
        if self._sharing is not None:
            self._sharing.swap_in(builder)
        self._swap_out_ahead(builder)
        if self._store.lower:
            self.lower.plan(builder)

        self._store.end_plan()
        builder.ended = tuple(self._ended_grammars)
        plan = builder.freeze()
        if not plan.tokens and not plan.copies and not self._polls(builder):
            return None
        self._ended_grammars.clear()
        self._step = step
        self._inflight.append((plan, builder.span_rows))
        for batch in plan.copies:
            self._copied[batch.lane] += len(batch.sources)
            if batch.lane is Lane.OUT:
                self._last_out = batch.ticket
        return plan

    def apply(self, result: StepResult, now: float, took: float | None = None) -> Applied:
        """Applies the oldest plan's result. Results of rows that have ended or left are skipped;
        their epoch shows it. `took`: seconds of the step, if its begin and end were seen."""
        plan, span_rows = self._inflight.popleft()
        if (result.step, result.samples) != (plan.step, plan.samples):
            raise InvariantError(
                f"the result of step {result.step} came where that of step {plan.step} was due"
            )
        if took is not None and self.config.speculate != "off":
            self.draft_timing.took(plan, took)
        self._applied = plan.step
        self._store.completed = result.completed._replace(compute=plan.step)
        if result.bad_copies:
            self._store.drop_bad_copies(result.bad_copies)
        report_moves(self._store, result, now)
        for span, span_row in zip(plan.spans, span_rows, strict=True):
            if span_row.chunks and span.samples < 2:  # with drafts: below, token by token
                self._committer.on_computed(span_row, span.start, span.end)
        by_id = self._queues.by_id
        chunk_tokens = self.config.chunk_tokens
        rows = {
            row_id.request: row_result
            for row_id, row_result in result.rows.items()
            if row_id in by_id
        }
        for row_result in rows.values():
            if row_result.error is not None:
                self.abort(row_result.request, now)
        if plan.scored:
            self._note_scored(plan, span_rows)
        requests: list[RequestId] = []
        tokens: list[int] = []
        for row_id, token in zip(
            *self._batcher.drafting.accepted_samples(plan, result), strict=True
        ):
            row = by_id.get(row_id)
            if row is None:
                continue
            row.reply.append(token)
            requests.append(row_id.request)
            tokens.append(token)
            count = row.begin - 1 + len(row.reply)  # of the row's tokens; the newest has no KV
            if (count - 1) % chunk_tokens == 0:
                self._committer.publish_full(row, (count - 1) // chunk_tokens - 1)
            if count == row.begin or count == row.end or token in row.stop_ids:
                self._begin_or_end_reply(row, token, now, rows)
        if rows:
            _move_tokens(requests, tokens, rows)
        endings = self._write_behind.endings()
        return Applied(array("q", requests), array("i", tokens), (*rows.values(), *endings))

    @property
    def wake_at(self) -> float:
        """The latest time of the next `next_plan` call if nothing arrives before, seconds; infinity
        if none is needed."""
        due = min(self.conversations.next_due, self._prefetcher.next_due)
        return due if self._sharing is None else min(due, self._sharing.next_due)

    # -- state for callers

    @property
    def idle(self) -> bool:
        """True if nothing runs, waits or is in flight, and no last output is kept back."""
        return not self._turns and not self._inflight and not self._write_behind.withholds

    def open_requests(self) -> list[RequestId]:
        """Requests that have been added and have neither ended nor left."""
        return list(self._turns)

    @property
    def in_flight(self) -> int:
        return len(self._inflight)

    def stats(self) -> SchedulerStats:
        queues = self._queues
        drafting = self._batcher.drafting
        return SchedulerStats(
            running=len(queues.rows) + len(queues.swapping_in),
            waiting=len(queues.waiting) + len(self._preparing),
            suspensions=queues.suspensions,
            drafts=drafting.checks,
            drafted=drafting.drafted,
            accepted=drafting.accepted,
            swapped_in=self._copied[Lane.IN],
            swapped_out=self._copied[Lane.OUT],
            conversations=len(self.conversations),
            choices=self._admission.choices.by_choice(),
            states={} if self._states is None else self._states.kept.counts(),
            **store_counts(self._store),
        )

    def check(self) -> None:
        """Checks that slots, users and claims agree, counted anew from rows and conversations.
        Raises InvariantError. Cost: all chunks."""
        check_requests(self._store, self._queues, self._held, self._turns, self._preparing)
        held = [row.chunks for row in (*self._queues.joined(), *self._held.values())]
        users = Counter(
            chunk for chunks in (*held, *self._queues.releasing.values()) for chunk in chunks
        )
        if self._states is not None:
            users.update(check_states(self._store, self._queues, self._states))
        check_store(self._store, users, self.conversations.claims())

    # -- internal

    def _mark(self) -> int:
        """While fewer GPU slots than this are available, chunks are copied out ahead of time. Most
        of HOST is kept for chunks that are in no other tier: a second copy of a chunk on the GPU
        gains nothing."""
        return min(self._configured_mark, self._store.host.count // 4)

    def _swap_out_ahead(self, builder: PlanBuilder) -> None:
        """Copies chunks out ahead of time while fewer GPU slots are available than the mark, or
        than the first waiting request needs if that is more.

        The next plan takes slots for generation before it admits that request. The slots for both
        are freed now.
        """
        needed = builder.wanted + builder.short
        if builder.wanted:
            needed += sum(row.position == row.first_without_slot for row in self._queues.rows)
        target = max(self._mark(), needed) - self._queues.coming_free()
        if self._store.available < target:
            builder.evictor.swap_out_ahead(
                target, most=max(needed, link_chunks(builder, self.cost))
            )

    def _polls(self, builder: PlanBuilder) -> bool:
        """True if an empty plan is needed: it carries work of lower tiers, or, with nothing
        in flight, its result reports their progress."""
        if builder.lower:
            return True
        if self._inflight:
            return False
        return (
            builder.polls or self.lower.busy or self._awaits_copies() or self.has_work(builder.now)
        )

    def _awaits_copies(self) -> bool:
        """True if a waiting request may depend on a copy on HOST that is not confirmed yet."""
        unconfirmed = self.config.copies_may_fail and bool(self._queues.waiting)
        return unconfirmed and self._last_out > self._store.completed.swap_out

    def _note_scored(self, plan: StepPlan, span_rows: list[RunningTurn]) -> None:
        """Notes which prompt tokens have their log probabilities, for the rows that still run."""
        for span, row in zip(plan.spans, span_rows, strict=True):
            if span.scores and row.id in self._queues.by_id:
                row.turn.scored = span.end

    def _begin_or_end_reply(
        self, row: RunningTurn, token: int, now: float, rows: dict[RequestId, RowResult]
    ) -> None:
        """Handles the reply's first token, its last allowed token, and stop ids (which count after
        `min_tokens` tokens). Writes what they say into `rows`."""
        turn = row.turn
        request = row.turn.request
        count = len(row.tokens)
        reply = count - len(request.prompt)
        begins = count == row.begin
        finish = None
        if token in request.stop_ids and reply >= request.min_tokens:
            finish = FinishReason.STOP
        elif count == row.end:
            finish = FinishReason.LENGTH
        chunks = written(row)
        truncated = self._truncated(turn, count)
        if finish is not None:
            self._reply_ends(row, reply, now)
            ending = RowResult(request.id, finish=finish, truncated=truncated)
            if self._write_behind.withhold(request, ending, chunks):
                finish = None
        if begins or finish is not None:
            usage, queued = (turn.usage, turn.queued) if begins else (None, None)
            row_result = rows.get(request.id, RowResult(request.id))
            rows[request.id] = row_result._replace(
                usage=usage, finish=finish, queued=queued, truncated=truncated
            )

    def _reply_ends(self, row: RunningTurn, reply: int, now: float) -> None:
        """Ends generation for the row. If the front end confirms the reply's length, the row is
        held until then."""
        self._queues.unseat(row)
        self._order.reply_ended(reply)
        if row.turn.request.confirm:
            self._held[row.id.request] = row
            self._write_later(written(row), now)
        else:
            self._end(row, reply, now)

    def _take_row(self, turn: Turn) -> RunningTurn:
        """Removes the turn's row from its seat and returns it."""
        held = self._held.pop(turn.request.id, None)
        if held is not None:
            return held
        queues = self._queues
        row = next(row for row in queues.joined() if row.turn is turn)
        if row.seat >= 0:
            queues.unseat(row)
        else:
            queues.swapping_in.remove(row)
        return row

    def _end(self, row: RunningTurn, reply: int, now: float) -> None:
        """Commits the turn, cut to `reply` tokens, and releases its chunks."""
        turn = row.turn
        if row.state is not None:
            self._committer.publish_last(row, reply)
        tail = self._committer.tail(row, reply)
        self._committer.commit(turn, row, reply, tail, now)
        self._write_later(written(row), now)
        self._queues.release_row(row, tail, self._store.stamp(now))
        self._close(turn)

    def _write_later(self, chunks: list[Chunk], now: float) -> None:
        """The turn of these chunks has ended."""
        self._write_behind.turn_ended(chunks, now)
        if self._sharing is not None:
            self._sharing.turn_ended(chunks, now)

    def _close(self, turn: Turn) -> None:
        """Forgets a turn that has ended or left."""
        del self._turns[turn.request.id]
        if self._states is not None:
            self._states.forget(turn)
        if turn.request.sampling.grammar is not None:
            self._ended_grammars.append(turn.request.id)

    def _truncated(self, turn: Turn, count: int) -> int:
        """Count of leading tokens that the last of the turn's first `count` tokens did not see."""
        return self._chunk_keys.first_seen(count - 1, turn.context_start)


def _move_tokens(
    requests: list[RequestId], tokens: list[int], rows: dict[RequestId, RowResult]
) -> None:
    """Moves the tokens of these rows into their results, out of the two lists."""
    own: dict[RequestId, list[int]] = {}
    for place in reversed(range(len(requests))):
        if requests[place] in rows:
            own.setdefault(requests.pop(place), []).insert(0, tokens.pop(place))
    for request, row_tokens in own.items():
        if len(rows[request].tokens) < len(row_tokens):
            rows[request] = rows[request]._replace(tokens=tuple(row_tokens))
