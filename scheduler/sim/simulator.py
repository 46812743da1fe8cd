"""Replays conversations against the scheduler on a virtual clock: hit rates and latencies without a
device.

The scheduler is the real one, and steps are planned as in the serving loop: plan n+1 is made while
step n runs. Only the device is simulated: each lane does its work in order, at the speed of the
cost profile, and a step waits where its plan requires it. The same sessions and settings always
give the same report.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from ..config import SchedulerConfig
from ..cost import CostProfile
from ..plan import (
    CopyBatch,
    KeyAnswer,
    Lane,
    StepPlan,
    StepResult,
    Tickets,
    TierReport,
    TierWork,
)
from ..types import Applied, ChunkKey, InvariantError, Request, RequestId, Tier, Usage

STEPS_IN_FLIGHT = 2
POLL_S = 2e-3


class SessionTurn(NamedTuple):
    """One request: tokens kept of the conversation, new in the prompt, and generated.

    think_s     seconds from the end of the previous reply to this request; unused in a first turn
    """

    history_tokens: int
    input_tokens: int
    output_tokens: int
    think_s: float = 0.0


class Session(NamedTuple):
    """One conversation: it starts at a time, and each turn follows the previous reply.

    system_tokens   leading tokens of the first input that all sessions with the same number share;
                    0: none
    owner           the owner whose share of seats and steps its requests use
    """

    name: str
    start_s: float
    turns: tuple[SessionTurn, ...]
    system_tokens: int = 0
    owner: str = ""


def longest_context(sessions: Sequence[Session]) -> int:
    """Tokens of the longest context, reply included: the least `max_model_len` that serves the
    sessions."""
    return max(sum(turn[:3]) for session in sessions for turn in session.turns)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a simulation.

    usage               sources of the prompts' tokens, over all requests
    full_hits           requests with a history of which nothing was computed again
    seconds             from the first session's start to the last reply's end
    busy_s              the part of it in which steps ran
    ttft_p50, ttft_p99  seconds from a request to its first token
    seconds_per_token   mean over requests of (end of the reply - request) / tokens of the reply
    swapped_in, swapped_out, spilled, promoted
                        chunks copied over the link, to lower tiers and from them
    """

    requests: int
    usage: Usage
    generated: int
    steps: int
    seconds: float
    busy_s: float
    ttft_p50: float
    ttft_p99: float
    seconds_per_token: float
    suspensions: int
    swapped_in: int
    swapped_out: int
    spilled: int = 0
    promoted: int = 0
    full_hits: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of previously computed prompt tokens that was not computed again."""
        computed_before = self.usage.cached + self.usage.recomputed
        return self.usage.cached / computed_before if computed_before else 0.0


@dataclass(slots=True)
class _TierMoves:
    """A lower tier's promotions and spills that are not reported yet, as (seconds at which it ends,
    slot), and the ends of the latest ones."""

    read: deque[tuple[float, int]] = field(default_factory=deque)
    written: deque[tuple[float, int]] = field(default_factory=deque)
    reads_end: float = 0.0
    writes_end: float = 0.0
    looked_up: list[KeyAnswer] = field(default_factory=list)
    removed: list[KeyAnswer] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SimulatedStore:
    """What servers share. It answers at once, keeps all records, and one server reads and writes so
    many bytes of it a second. Servers that share it are simulated one after the other."""

    bytes_per_s: float
    keys: set[ChunkKey] = field(default_factory=set)


class VirtualDevice:
    """Takes the time that a device would take, and computes nothing.

    Layers are pipelined: the swap-in that gates a step overlaps the step's compute, and only the
    excess adds time. A lower tier reads and writes at the same time, each in order; its finished
    work is reported with the next result. A plan without work waits for all work in progress,
    `poll_s` at most, or else for the first piece of it.
    """

    def __init__(
        self, cost: CostProfile, poll_s: float = POLL_S, store: SimulatedStore | None = None
    ):
        """store: of the shared tier, if the scheduler has one."""
        self._cost = cost
        self._poll_s = poll_s
        self._store = store
        self._free_at = [0.0 for _ in Lane]
        # by lane: seconds at which each ticket is complete
        self._ends: list[dict[int, float]] = [{} for _ in Lane]
        self._lower: dict[Tier, _TierMoves] = {}
        # (time, ticket)
        self._copies: tuple[deque[tuple[float, int]], ...] = tuple(deque() for _ in Lane)
        self._completed = [0 for _ in Lane]
        # by seat: the first position that its row sees, if it is not 0
        self._begins: dict[int, int] = {}
        self.busy_s = 0.0

    def launch(self, plan: StepPlan, now: float) -> float:
        """Issues the plan's work at `now`. Returns the time at which the step is complete; without
        tokens, its copies."""
        self._begin_moves(plan, now)
        self._move_windows(plan)
        copied = gate = now
        for batch in plan.copies:
            end = self._copy(batch, now)
            copied = max(copied, end)
            if batch.gated:
                gate = end
        if plan.tokens:
            start = self._start(Lane.COMPUTE, plan.after, now)
            end = max(start + self._cost.plan_seconds(plan, self._begins), gate)
            self.busy_s += end - start
        else:
            end = copied if plan.copies else self._news(now)
        self._complete(Lane.COMPUTE, plan.step, end)
        return end

    def unseen(self, seats: Sequence[int]) -> int:
        """Leading tokens that the rows in these seats no longer see, summed."""
        return sum(self._begins.get(seat, 0) for seat in seats)

    def generate(self, step: int, rows: int, context: int, now: float) -> float:
        """`launch` of a plan that only generates."""
        start = max(now, self._free_at[Lane.COMPUTE])
        end = start + self._cost.step(0, rows=rows, rows_context=context)
        self.busy_s += end - start
        self._complete(Lane.COMPUTE, step, end)
        return end

    def _move_windows(self, plan: StepPlan) -> None:
        for join in plan.joins:
            self._begins.pop(join.seat, None)
        for origin in plan.origins:
            self._begins[origin.seat] = origin.start

    def _begin_moves(self, plan: StepPlan, now: float) -> None:
        for work in plan.lower:
            moves = self._lower.setdefault(work.tier, _TierMoves())
            read_s = self._cost.read()
            write_s = self._cost.write()
            if work.tier is Tier.SHARED:
                read_s = write_s = self._use_store(work, moves)
            for promotion in work.promotions:
                moves.reads_end = max(moves.reads_end, now) + read_s
                moves.read.append((moves.reads_end, promotion.slot))
            for spill in work.spills:
                moves.writes_end = max(moves.writes_end, now) + write_s
                moves.written.append((moves.writes_end, spill.slot))

    def _use_store(self, work: TierWork, moves: _TierMoves) -> float:
        """Answers the questions. Records are there from the begin of their writes on. Returns the
        seconds of one record."""
        assert self._store is not None
        keys = self._store.keys
        keys.update(spill.key for spill in work.spills)
        for batch in work.finds:
            there = tuple(key in keys for key in batch.keys)
            moves.looked_up.append(KeyAnswer(batch.number, there))
        for batch in work.removals:
            keys.difference_update(batch.keys)
            moves.removed.append(KeyAnswer(batch.number, (True,) * len(batch.keys)))
        return self._cost.chunk_bytes / self._store.bytes_per_s

    def _news(self, now: float) -> float:
        """The time until which a plan without work waits for work in progress."""
        ends = [*self._copies]
        for moves in self._lower.values():
            ends += moves.read, moves.written
        under_way = [done for done in ends if done]
        first = min((done[0][0] for done in under_way), default=now)
        last = max((done[-1][0] for done in under_way), default=now)
        return max(now, first, min(last, now + self._poll_s))

    def reports(self, now: float) -> tuple[Tickets, tuple[TierReport, ...]]:
        """Returns the copies complete by now, and the moves that have ended since the last call."""
        for lane, copies in zip(Lane, self._copies, strict=True):
            self._completed[lane] = max([self._completed[lane], *_done(copies, now)])
        reports = []
        for tier, moves in self._lower.items():
            report = TierReport(
                tier, tuple(_done(moves.written, now)), tuple(_done(moves.read, now))
            )
            if tier is Tier.SHARED and self._store is not None:
                report = report._replace(
                    looked_up=tuple(moves.looked_up),
                    removed=tuple(moves.removed),
                    read_seconds=self._cost.chunk_bytes / self._store.bytes_per_s,
                )
                moves.looked_up.clear()
                moves.removed.clear()
            reports.append(report)
        return Tickets(*self._completed), tuple(reports)

    def _copy(self, batch: CopyBatch, now: float) -> float:
        seconds = self._cost.swap_in() if batch.lane is Lane.IN else self._cost.swap_out()
        end = self._start(batch.lane, batch.after, now) + len(batch.sources) * seconds
        self._complete(batch.lane, batch.ticket, end)
        self._copies[batch.lane].append((end, batch.ticket))
        return end

    def _start(self, lane: Lane, after: Tickets, now: float) -> float:
        waits = [ends[ticket] for ends, ticket in zip(self._ends, after, strict=True) if ticket]
        return max(now, self._free_at[lane], *waits)

    def _complete(self, lane: Lane, ticket: int, end: float) -> None:
        self._free_at[lane] = max(self._free_at[lane], end)
        self._ends[lane][ticket] = end


def _done(work: deque[tuple[float, int]], now: float) -> list[int]:
    """Removes and returns the work that is done by now."""
    done = []
    while work and work[0][0] <= now:
        done.append(work.popleft()[1])
    return done


class Open(NamedTuple):
    """A request in progress: turn number `turn` of its session, which arrived at `arrival`
    (seconds)."""

    session: Session
    turn: int
    arrival: float


class Content:
    """The token ids of simulated prompts: negative ones. Prompts share ids only where intended."""

    def __init__(self) -> None:
        self._id = 0
        self._systems: dict[int, array[int]] = {}

    def fresh(self, count: int) -> array[int]:
        """Returns `count` tokens that no other prompt has: one new id, repeated. Generated tokens
        have ids above 0."""
        self._id -= 1
        return array("i", [self._id]) * count

    def first_input(self, session: Session) -> array[int]:
        """The prompt of the session's first turn."""
        return self.system(session) + self.fresh(
            session.turns[0].input_tokens - session.system_tokens
        )

    def system(self, session: Session) -> array[int]:
        """The system prompt that it shares with other sessions, and that its contexts begin
        with."""
        shared = session.system_tokens
        if shared not in self._systems:
            self._systems[shared] = self.fresh(shared)
        return self._systems[shared]


class Simulator:
    """One run over `sessions`; used once.

    Without `skips`, every step is planned and applied on its own. The same holds with `watch`,
    which gets the clock, each step's results, and the requests in progress. `content` makes the
    prompts.

    The first `warm_up` requests are served but not reported, nor is the time in which they arrive.
    The scheduler decides with `cost`; a `device` with other costs takes other times. With
    `truncate` contexts may outgrow `max_model_len`. Raises RequestError if the configuration cannot
    serve a request (too long, queue full).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cost: CostProfile,
        sessions: Sequence[Session],
        warm_up: int = 0,
        device: VirtualDevice | None = None,
        truncate: bool = False,
        watch: Callable[[float, Applied, Mapping[RequestId, Open]], None] | None = None,
        content: Content | None = None,
    ):
        # loads the scheduler, which `simulate --help` need not wait for
        from .fast_forward import FastForwardScheduler

        self.scheduler = FastForwardScheduler(config, cost)
        self.now = min((session.start_s for session in sessions), default=0.0)
        self._started = self.now
        self._device = device or VirtualDevice(cost)
        self._arrivals = [(session.start_s, order, 0) for order, session in enumerate(sessions)]
        heapq.heapify(self._arrivals)
        self._sessions = sessions
        self._launched: deque[tuple[StepPlan, float]] = deque()
        self._open: dict[RequestId, Open] = {}
        self._order = {session.name: order for order, session in enumerate(sessions)}
        self._content = content or Content()
        # of sessions with thinking users: the scheduler's logs may expire meanwhile
        self._logs: dict[int, array[int]] = {}
        self._requests = self._steps = self._generated = 0
        self._warm_up = warm_up
        self._busy_before = 0.0
        self._full_hits = 0
        self._truncate = truncate
        self._usage = [0 for _ in fields(Usage)]
        self._ttft: list[float] = []
        self._per_token: list[float] = []
        self._watch = watch
        self.skips = watch is None

    def run(self) -> Report:
        """Runs until every turn of every session has its reply."""
        self.play(math.inf)
        return self._report()

    @property
    def in_progress(self) -> Mapping[RequestId, Open]:
        return self._open

    def play(self, until: float) -> None:
        """Runs until every turn has its reply or the clock has reached `until`, seconds."""
        scheduler = self.scheduler
        while self.now < until and (self._arrivals or not scheduler.idle):
            if len(self._launched) == 1 and self.skips:
                self._fast_forward(scheduler.steady_steps(), until)
                if self.now >= until:
                    break
            while self._arrivals and self._arrivals[0][0] <= self.now:
                self._add(*heapq.heappop(self._arrivals))
            plan = scheduler.next_plan(self.now)
            if plan is not None:
                self._launched.append((plan, self._device.launch(plan, self.now)))
            if len(self._launched) >= (STEPS_IN_FLIGHT if plan is not None else 1):
                self._finish_step()
            elif plan is None:
                if not self._arrivals:
                    raise InvariantError(
                        "requests wait, but nothing runs and nothing is planned: "
                        f"{scheduler.stats()}"
                    )
                self.now = self._arrivals[0][0]

    # -- requests

    def _add(self, arrival: float, order: int, index: int) -> None:
        session = self._sessions[order]
        turn = session.turns[index]
        if index:
            prompt = self._logs.pop(order)[: turn.history_tokens] + self._content.fresh(
                turn.input_tokens
            )
        else:
            prompt = self._content.first_input(session)
        self.send(Open(session, index, arrival), prompt)

    def send(self, turn: Open, prompt: array[int]) -> None:
        """Adds one request to the scheduler's queue now."""
        session = turn.session
        if self._requests == self._warm_up:
            self._started = self.now
            self._busy_before = self._device.busy_s
            self._steps = self._generated = 0
        self._requests += 1
        request = RequestId(self._requests)
        # The user of a single turn does not return, and its client gave no conversation id.
        conversation = session.name if len(session.turns) > 1 else None
        self._open[request] = turn
        tokens = session.turns[turn.turn].output_tokens
        message = Request(
            request, prompt, tokens, conversation, truncate=self._truncate, owner=session.owner
        )
        self.scheduler.add(message, self.now)

    # -- results

    def _fast_forward(self, steps: int, until: float) -> None:
        """Makes at most `steps` passes of the loop, begun before `until`, in which only the clock
        and the tokens change."""
        if not steps:
            return
        plan, end = self._launched.pop()
        rows = plan.tokens
        seen = sum(plan.positions) - self._device.unseen(plan.generate)
        arrival = min(self._arrivals[0][0], until) if self._arrivals else until
        done = 0
        while done < steps and arrival > self.now:
            done += 1
            seen += rows
            launched = self._device.generate(plan.step + done, rows, seen // rows + 1, self.now)
            self.now = max(self.now, end)
            end = launched
        self._steps += done
        self._generated += done * rows
        self._launched.append((self.scheduler.skip(done) if done else plan, end))

    def _finish_step(self) -> None:
        plan, end = self._launched.popleft()
        self.now = max(self.now, end)
        self._steps += 1
        completed, lower = self._device.reports(self.now)
        tokens = (plan.step,) * len(plan.samples)
        result = StepResult(plan.step, plan.samples, tokens, completed, lower)
        self._take(self.scheduler.apply(result, self.now))

    def _take(self, applied: Applied) -> None:
        if self._watch is not None:
            self._watch(self.now, applied, self._open)
        self._generated += len(applied.tokens)
        for row in applied.rows:
            self._generated += len(row.tokens)
            served = self._open[row.request]
            counts = row.request > self._warm_up
            if row.usage is not None and counts:
                self._ttft.append(self.now - served.arrival)
                self._full_hits += row.usage.cached > 0 and not row.usage.recomputed
                for index, field in enumerate(fields(Usage)):
                    self._usage[index] += getattr(row.usage, field.name)
            if row.finish is not None:
                del self._open[row.request]
                self._reply_ended(served, counts)

    def _reply_ended(self, served: Open, counts: bool) -> None:
        turns = served.session.turns
        following = served.turn + 1
        if counts:
            self._per_token.append((self.now - served.arrival) / turns[served.turn].output_tokens)
        if following < len(turns):
            order = self._order[served.session.name]
            self._logs[order] = self.scheduler.conversations.tokens(served.session.name)
            heapq.heappush(self._arrivals, (self.now + turns[following].think_s, order, following))

    def _report(self) -> Report:
        stats = self.scheduler.stats()
        return Report(
            requests=self._requests - self._warm_up,
            usage=Usage(*self._usage),
            generated=self._generated,
            steps=self._steps,
            seconds=self.now - self._started,
            busy_s=self._device.busy_s - self._busy_before,
            ttft_p50=percentile(self._ttft, 0.50),
            ttft_p99=percentile(self._ttft, 0.99),
            seconds_per_token=sum(self._per_token) / len(self._per_token),
            suspensions=stats.suspensions,
            swapped_in=stats.swapped_in,
            swapped_out=stats.swapped_out,
            spilled=stats.spilled,
            promoted=stats.promoted,
            full_hits=self._full_hits,
        )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def simulate(
    config: SchedulerConfig, cost: CostProfile, sessions: Sequence[Session], warm_up: int = 0
) -> Report:
    """One run; see `Simulator`."""
    return Simulator(config, cost, sessions, warm_up).run()
