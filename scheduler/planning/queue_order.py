"""The order in which waiting requests join: owners with fewer seats first, then by response ratio,
with a bound on overtaking.

By response ratio (wait / predicted work of the prompt; Brinch Hansen 1971) a turn whose history is
cached joins before one that must be recomputed. If it waited behind that turn, the computed chunks
would evict its own, and it would need recomputing itself: once the conversations exceed the tiers,
arrival order ends with everything recomputed.

The ratio alone starves long prompts: cached turns pass them as long as such turns arrive. So each
request has an allowance. Let B be the predicted work of the requests that wait before request r
when r arrives, and w(r) its own:

    allowance(r) = k * (B + w(r))                                  k = OVERTAKING[queue_order]

A later arrival c that joins before r takes w(c) off it, and may join before r only if allowance(r)
>= w(c). So later arrivals with at most k * (B + w(r)) seconds of predicted work join before r; then
r joins before all others. Work is that of the prompt (the part in no tier) and of the reply,
predicted by the mean length of replies.

These do not count: arrivals of a more urgent priority, arrivals of an owner with fewer seats than
r's, suspended requests, and requests that join while r waits for a read or for a chunk that
another request computes.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import inf

from ..config import SchedulerConfig
from ..cost import CostProfile
from ..turns.turn import RunningTurn, Turn
from .lookup import CacheLookup

OVERTAKING = {"bounded-ratio": 1.0, "arrival": 0.0}
"""k, by `queue_order`."""

FIRST_REPLY_TOKENS = 128  # the mean length of replies before the first reply ends
REPLY_WEIGHT = 1 / 64  # weight of the latest reply in the mean length


class QueueOrder:
    """`waiting`: the queue by `Turn.order`. The creator of this object changes it."""

    def __init__(
        self,
        config: SchedulerConfig,
        cost: CostProfile,
        lookup: CacheLookup,
        waiting: Sequence[Turn],
    ):
        self._cost = cost
        self._lookup = lookup
        self._waiting = waiting
        self._overtaking = OVERTAKING[config.queue_order]
        self._seats = config.max_num_seqs
        self._reply_tokens = float(FIRST_REPLY_TOKENS)
        self._owner_seats: Counter[str] = Counter()  # rows of each owner

    def arrived(self, turn: Turn, there: int) -> None:
        """Predicts the turn's work and sets its allowance. Called before the turn is queued.
        `there`: how many of the chunks that its last position sees are in some tier."""
        turn.work = self._lookup.work(turn, there)
        reply_tokens = min(turn.request.max_tokens, self._reply_tokens)
        row_seconds = (
            self._cost.step(0, rows=self._seats, rows_context=len(turn.tokens)) / self._seats
        )
        turn.reply_work = reply_tokens * row_seconds
        before = sum(
            it.work + it.reply_work
            for it in self._waiting
            if it.order < turn.order and it.usage is None
        )
        turn.allowance = self._overtaking * (before + turn.total_work)

    def reply_ended(self, tokens: int) -> None:
        self._reply_tokens += REPLY_WEIGHT * (tokens - self._reply_tokens)

    def preferred(self, now: float) -> list[Turn]:
        """Returns the queue by priority, then suspended requests first, then response ratio; owners
        and the bound are left out."""
        if not self._overtaking or len(self._waiting) < 2:
            return list(self._waiting)
        # without calls and by single numbers, because a step sorts hundreds of turns
        by_ratio = sorted(self._waiting, key=lambda turn: (turn.arrived - now) / turn.work)
        return sorted(by_ratio, key=lambda turn: 2 * turn.order[0] + (turn.usage is None))

    def candidates(self, rows: Sequence[RunningTurn], now: float) -> Iterator[Turn]:
        """Yields each request that may join once, in the order in which they should. `rows`: all
        that have joined.

        The caller lets each one join (it calls `joins` and removes it from the queue), or leaves it
        waiting. The iteration ends at a suspended request that is not ready: no request behind it
        may join.
        """
        self._owner_seats = Counter(row.turn.request.owner for row in rows)
        tried: set[Turn] = set()
        for turn in self._by_owner(now):
            while turn not in tried:
                if not self._ready(turn):
                    if turn.resumes:
                        return
                    break
                first = self._overdue(turn, turn.total_work, tried) or turn
                tried.add(first)
                yield first

    def may_join(self, turn: Turn, work: float) -> bool:
        """True if the turn, whose prompt takes `work` seconds, exceeds no allowance."""
        return self._overdue(turn, work + turn.reply_work) is None

    def joins(self, turn: Turn, work: float) -> None:
        """Subtracts the work of the turn, which leaves the queue, from the allowances of the
        requests that it passes."""
        self._owner_seats[turn.request.owner] += 1
        if not turn.resumes:
            for other in self._passed(turn, inf):
                other.allowance -= work + turn.reply_work

    def _by_owner(self, now: float) -> Iterator[Turn]:
        """Orders like `preferred`, but requests of owners with fewer seats first. The number of
        seats may grow meanwhile."""
        owner_seats = self._owner_seats
        preferred = self.preferred(now)
        places = defaultdict[str, deque[int]](deque)
        for place, turn in enumerate(preferred):
            places[turn.request.owner].append(place)
        heap = [(owner_seats[owner], own[0], owner) for owner, own in places.items()]
        heapify(heap)
        while heap:
            seats, _, owner = heappop(heap)
            if seats == owner_seats[owner]:
                yield preferred[places[owner].popleft()]
            if own := places[owner]:
                heappush(heap, (owner_seats[owner], own[0], owner))

    def _overdue(
        self, turn: Turn, work: float, tried: set[Turn] | frozenset[Turn] = frozenset()
    ) -> Turn | None:
        """Returns the earliest request that must join before `turn`, whose work is `work` seconds;
        None if there is none."""
        overdue = None
        while not turn.resumes:
            earlier = next(
                (other for other in self._passed(turn, work) if other not in tried), None
            )
            if earlier is None:
                break
            overdue = turn = earlier
            work = turn.total_work
        return overdue

    def _passed(self, turn: Turn, below: float) -> Iterator[Turn]:
        """Yields the requests that `turn` would pass and whose allowances are below `below`
        seconds."""
        owner_seats = self._owner_seats
        priority = turn.order[0]
        most_seats = owner_seats[turn.request.owner]
        for other in self._waiting:
            if other.order >= turn.order:
                return
            if other.allowance >= below or other.resumes or other.order[0] != priority:
                continue
            if owner_seats[other.request.owner] <= most_seats and self._ready(other):
                yield other

    def _ready(self, turn: Turn) -> bool:
        return turn.waiting_for is None or not self._lookup.must_wait(turn.waiting_for)
