"""Several replicas of a server behind a router, each with its own scheduler and virtual device.

Replicas share only the clock. The router picks a replica for each request; a conversation that
moves is recomputed there. Replicas fail, drain and return with empty caches. One replica gives the
same report as `Simulator`.

With more replicas than can be simulated in reasonable time, some of them stand for all
(`Cluster.simulated`). A reply on another one begins together with that to the next request of a
simulated one. It leaves nothing in any cache.
"""

from __future__ import annotations

import bisect
import heapq
import math
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, NamedTuple

from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.cost import CostProfile
from pensieve.scheduler.sim.ring import place, ring
from pensieve.scheduler.sim.simulator import Content, Open, Session, Simulator, percentile
from pensieve.scheduler.types import Applied, Usage

Routing = Literal["random", "least-loaded", "session", "session-then-load"]
ROUTINGS: tuple[Routing, ...] = ("random", "least-loaded", "session", "session-then-load")

CROWDED, FEW = 1.5, 4
"""`session-then-load` leaves a replica with more open requests than CROWDED times the mean and
FEW."""
DETECTION_S = 6.0
"""Seconds from a failure until requests go elsewhere: three health checks, two seconds apart."""


class ReplicaEvent(NamedTuple):
    """A replica's event at a time, seconds.

    fail    its requests and its KV are lost; the router learns of it DETECTION_S later
    drain   it gets no new requests and finishes the ones it has
    back    it serves again, with empty caches
    """

    at: float
    replica: int
    kind: Literal["fail", "drain", "back"]


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """The result of a simulation of several replicas.

    usage           sources of the prompts' tokens, over all measured requests
    moved           measured requests that another replica served than the previous turn
    retried         requests that a failure cut off and that were sent again
    ttft_*          seconds from a request to its first token; for a request sent again, from its
                    first sending
    seconds_per_token
                    mean over requests of (end of the reply - request) / tokens of the reply
    busiest         seconds of steps on the busiest replica, divided by the mean of all
    """

    requests: int
    usage: Usage
    moved: int
    retried: int
    ttft_p50: float
    ttft_p95: float
    ttft_p99: float
    seconds_per_token: float
    busiest: float

    @property
    def hit_rate(self) -> float:
        """The share of previously computed prompt tokens that was not computed again."""
        return (
            self.usage.cached / computed_before
            if (computed_before := self.usage.cached + self.usage.recomputed)
            else 0.0
        )


class Replica(Simulator):
    """One server: it takes requests one by one, and reports first tokens and ends to the
    cluster."""

    def __init__(
        self,
        config: SchedulerConfig,
        cost: CostProfile,
        began: Callable[[Open, Usage, float], None],
        ended: Callable[[Replica, Open, float], None],
    ):
        super().__init__(config, cost, ())
        self._began = began
        self._ended = ended

    @property
    def working(self) -> bool:
        """True if requests or steps are open."""
        return not self.scheduler.idle

    @property
    def open(self) -> int:
        """Requests that are running or waiting here."""
        return len(self._open)

    @property
    def busy_s(self) -> float:
        """Seconds in which steps ran."""
        return self._device.busy_s

    def log(self, session: Session) -> array[int]:
        """Tokens of the conversation, replies included."""
        return self.scheduler.conversations.tokens(session.name)

    def receive(self, turn: Open, prompt: array[int], now: float) -> None:
        """One request arrives."""
        self.now = max(self.now, now)
        self.send(turn, prompt)

    def unfinished(self) -> list[Open]:
        """The requests that are cut off if the replica fails."""
        return list(self._open.values())

    def _take(self, applied: Applied) -> None:
        for row in applied.rows:
            turn = self._open[row.request]
            if row.usage is not None:
                self._began(turn, row.usage, self.now)
            if row.finish is not None:
                del self._open[row.request]
                self._ended(self, turn, self.now)


@dataclass(slots=True)
class _Life:
    """A session in progress.

    replica     the replica that served its last turn, None before the first
    log         tokens of the conversation as its client knows them; None: no simulated replica has
                seen it
    prompt      of the turn that is being served
    began       when its first token came
    followers   turns on replicas that are not simulated; their replies begin together with this
                one's
    """

    session: Session
    replica: tuple[int, int] | None = None
    log: array[int] | None = None
    prompt: array[int] | None = None
    began: float = 0.0
    followers: list[Open] = field(default_factory=list)


class Cluster:
    """One run over `sessions` with `replicas` servers of the same `config` and `cost`; used once.

    `simulated`: number of replicas that are simulated, the first ones; None: all. `warm_up_s`:
    requests that arrive earlier are served, but not reported. The same arguments give the same
    report.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cost: CostProfile,
        sessions: Sequence[Session],
        replicas: int,
        routing: Routing,
        *,
        events: Sequence[ReplicaEvent] = (),
        simulated: int | None = None,
        warm_up_s: float = 0.0,
        seed: int = 0,
    ):
        self._config = config
        self._cost = cost
        self._routing = routing
        self._total = replicas
        self._simulated = min(simulated or replicas, replicas)
        self._warm_up_s = warm_up_s
        self._draw = random.Random(seed)
        self._lives = {session.name: _Life(session) for session in sessions}
        # Events of one time are sorted by kind: a replica is back before a request of that time is
        # routed.
        self._due: list[tuple[float, int, int]] = [
            (event.at, 0, at) for at, event in enumerate(events)
        ]
        self._events = list(events)
        self._turns: list[Open] = []
        for session in sessions:
            self._arrive(session.start_s, Open(session, 0, session.start_s))
        heapq.heapify(self._due)
        self._think_s = min(
            (turn.think_s for session in sessions for turn in session.turns[1:]), default=math.inf
        )
        self._content = Content()
        self._generation = [0 for _ in range(replicas)]
        self._out: set[int] = set()  # replicas that get no requests
        self._failed: dict[int, float] = {}  # by replica: time of its failure
        self._ring = self._places()
        self._replicas = {number: self._new() for number in range(self._simulated)}
        self._busy_s = [0.0 for _ in range(self._simulated)]
        self._usage: list[Usage] = []
        self._ttft: list[float] = []
        self._per_token: list[float] = []
        # turns on other replicas, before they follow a simulated one
        self._elsewhere: list[Open] = []
        self._generating_s, self._generated = 0.0, 0  # of all replies that have ended
        self._moved = self._retried = 0

    def run(self, until: float = math.inf) -> ClusterReport:
        """Runs until every turn of every session has its reply, or the clock has reached `until`,
        seconds.

        Raises RequestError if no replica can serve a request.
        """
        while True:
            due = min(self._due[0][0] if self._due else math.inf, until)
            late = [
                replica
                for replica in self._replicas.values()
                if replica.working and replica.now < due
            ]
            if late:
                first, *others = sorted(replica.now for replica in late)
                replica = next(replica for replica in late if replica.now == first)
                # A reply on another replica leads to a request only after its user's thinking time.
                reached = min(due, others[0] + self._think_s) if others else due
                replica.play(max(reached, math.nextafter(first, math.inf)))
            elif due < until:
                at, kind, number = heapq.heappop(self._due)
                if kind == 0:
                    self._happen(self._events[number])
                else:
                    self._route(at, self._turns[number])
            else:
                return self._report()

    # -- requests

    def _arrive(self, at: float, turn: Open) -> None:
        self._turns.append(turn)
        heapq.heappush(self._due, (at, 1, len(self._turns) - 1))

    def _route(self, now: float, turn: Open) -> None:
        life = self._lives[turn.session.name]
        number = self._choose(life)
        if number is None:  # no replica is there: the client tries again
            self._arrive(now + DETECTION_S, turn)
            return
        place = (number, self._generation[number])
        if (
            number < self._simulated
            and turn.arrival >= self._warm_up_s
            and life.replica not in (None, place)
        ):
            self._moved += 1
        life.replica = place
        if number >= self._simulated:
            self._serve_elsewhere(turn, life)
            return
        if life.prompt is None:
            life.prompt = self._prompt(turn, life)
        if number in self._failed:  # the router does not know of the failure yet
            self._retried += 1
            self._arrive(self._failed[number] + DETECTION_S, turn)
        else:
            life.followers = life.followers + self._elsewhere
            self._elsewhere = []
            self._replicas[number].receive(turn, life.prompt, now)

    def _prompt(self, turn: Open, life: _Life) -> array[int]:
        step = turn.session.turns[turn.turn]
        if turn.turn == 0:
            return self._content.first_input(turn.session)
        history = (life.log or self._content.system(turn.session))[: step.history_tokens]
        return history + self._content.fresh(step.history_tokens - len(history) + step.input_tokens)

    def _serve_elsewhere(self, turn: Open, life: _Life) -> None:
        """Serves the turn on a replica that is not simulated. Its reply begins together with that
        to the next request that a simulated one receives."""
        life.prompt = None
        self._elsewhere.append(turn)

    def _next_turn(self, turn: Open, now: float) -> None:
        turns = turn.session.turns
        following = turn.turn + 1
        if following < len(turns):
            at = now + turns[following].think_s
            self._arrive(at, Open(turn.session, following, at))
        else:
            del self._lives[turn.session.name]

    def _began(self, turn: Open, usage: Usage, now: float) -> None:
        """Corrects the usage: a replica knows only what it has computed itself, so tokens computed
        elsewhere are counted as recomputed."""
        life = self._lives[turn.session.name]
        life.began = now
        per_token = (
            self._generating_s / self._generated if self._generated else self._cost.step(0, 1, 0)
        )
        for other in life.followers:
            self._next_turn(other, now + per_token * other.session.turns[other.turn].output_tokens)
        life.followers = []
        if turn.arrival >= self._warm_up_s:
            # a reply's last token has no KV yet
            computed_before = turn.session.turns[turn.turn].history_tokens - 1
            again = max(
                usage.recomputed,
                min(computed_before - usage.cached, usage.recomputed + usage.new),
                0,
            )
            self._usage.append(
                replace(usage, recomputed=again, new=usage.recomputed + usage.new - again)
            )
            self._ttft.append(now - turn.arrival)

    def _ended(self, replica: Replica, turn: Open, now: float) -> None:
        life = self._lives[turn.session.name]
        tokens = turn.session.turns[turn.turn].output_tokens
        self._generating_s = self._generating_s + now - life.began
        self._generated = self._generated + tokens
        if turn.arrival >= self._warm_up_s:
            self._per_token.append((now - turn.arrival) / tokens)
        life.prompt = None
        if len(turn.session.turns) > 1:
            life.log = replica.log(turn.session)
        self._next_turn(turn, now)

    # -- routing

    def _choose(self, life: _Life) -> int | None:
        """Returns the replica for the next turn, None if there is none."""
        if not self._ring:
            return None
        if self._routing in ("random", "least-loaded"):
            number = self._draw.choice(self._live)
            if self._routing == "random" or number >= self._simulated:
                return number
            return self._with_fewest_open()
        home = self._home(life)
        if self._routing == "session" or home >= self._simulated:
            return home
        open_requests = [
            self._replicas[number].open for number in self._replicas if number not in self._out
        ]
        if self._replicas[home].open > CROWDED * sum(open_requests) / len(open_requests) + FEW:
            return self._with_fewest_open()
        return home

    def home(self, name: str) -> int:
        """Returns the replica at the session's place on the ring."""
        return self._ring[bisect.bisect(self._ring, (place(name), 0)) % len(self._ring)][1]

    def _home(self, life: _Life) -> int:
        """With `session-then-load` the replica that served the session last, as long as it is
        there."""
        if self._routing == "session-then-load" and life.replica is not None:
            number, generation = life.replica
            if number not in self._out and generation == self._generation[number]:
                return number
        return self.home(life.session.name)

    def _places(self) -> list[tuple[int, int]]:
        """The consistent-hash ring: many sorted places for each live replica. When one fails, only
        its sessions move."""
        self._live = [number for number in range(self._total) if number not in self._out]
        return ring((number, self._generation[number]) for number in self._live)

    def _with_fewest_open(self) -> int:
        live = [number for number in self._replicas if number not in self._out]
        least = min(self._replicas[number].open for number in live)
        return self._draw.choice(
            [number for number in live if self._replicas[number].open == least]
        )

    # -- replicas

    def _new(self) -> Replica:
        return Replica(self._config, self._cost, self._began, self._ended)

    def _happen(self, event: ReplicaEvent) -> None:
        number = event.replica
        if event.kind == "drain":
            self._out.add(number)
        elif event.kind == "back":
            self._out.discard(number)
            self._failed.pop(number, None)
            self._generation[number] += 1
            self._restart(number)
        else:
            self._failed[number] = event.at
            for turn in self._restart(number):
                self._retried += 1
                self._arrive(event.at + DETECTION_S, turn)
            self._due_event(ReplicaEvent(event.at + DETECTION_S, number, "drain"))
        self._ring = self._places()

    def _restart(self, number: int) -> list[Open]:
        """Replaces the replica by one with empty caches. Returns the requests that were open."""
        if number >= self._simulated:
            return []
        before = self._replicas[number]
        self._busy_s[number] += before.busy_s
        self._replicas[number] = self._new()
        return before.unfinished()

    def _due_event(self, event: ReplicaEvent) -> None:
        self._events.append(event)
        heapq.heappush(self._due, (event.at, 0, len(self._events) - 1))

    def _report(self) -> ClusterReport:
        busy = [spent + self._replicas[number].busy_s for number, spent in enumerate(self._busy_s)]
        return ClusterReport(
            requests=len(self._per_token),
            usage=Usage(
                *(sum(getattr(usage, each.name) for usage in self._usage) for each in fields(Usage))
            ),
            moved=self._moved,
            retried=self._retried,
            ttft_p50=percentile(self._ttft, 0.50),
            ttft_p95=percentile(self._ttft, 0.95),
            ttft_p99=percentile(self._ttft, 0.99),
            seconds_per_token=sum(self._per_token) / len(self._per_token),
            busiest=max(busy) * len(busy) / sum(busy),
        )
