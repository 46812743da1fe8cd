"""A model of the paper's server: one queue in the order of arrival, and a cache of whole
conversations behind it.

It explains a part of CachedAttention's hit rates (docs/measured/cachedattention.md). The simulation
of Pensieve, in cachedattention.py, has the scheduler itself; here a turn takes a time for its reply
and a time for each token of its prompt that is not cached, one turn after the other. Both times
follow from the paper's figures 16 and 25.

    python -m benchmarks.paper.sessions
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from pensieve.scheduler.sim.simulator import Session
from pensieve.scripts.command import result_line, title_line
from pensieve.scripts.simulation.traces import synthetic

from .cachedattention import CHAT, HOST_BYTES, MODELS, RATE, SESSIONS, TB, THINK_S, WARM_UP

REPLY_S, TOKEN_S = 0.21, 0.46e-3
"""Llama-13B on two GPUs. Figure 16: recomputation takes four times the GPU time, which is 6.25 GPU
hours for 42,000 turns (figure 25). So a turn takes 0.27 s with its KV and 1.07 without, and the
difference is its history's prefill."""


class PlayOutcome(NamedTuple):
    """Of the counted turns.

    hit          the share whose KV was found; `hit_of_later`: of the turns that are not the first
                 of their session
    first        the share that is the first of its session
    wait_s       seconds that the median turn waited
    busy_hours   hours in which the GPUs were busy
    """

    hit: float
    hit_of_later: float
    first: float
    wait_s: float
    busy_hours: float


class Cache:
    """Conversations by policy, `ca`, `lru` or `fifo`, within so many bytes."""

    def __init__(self, policy: str, capacity: float):
        self._policy = policy
        self._capacity = capacity
        self._sizes: dict[int, float] = {}
        self._used = 0.0
        self._idle: OrderedDict[int, None] = OrderedDict()  # in the order of eviction
        # in the queue's order; evicted last, from its tail
        self._awaited: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self._sizes

    def arrived(self, key: int) -> None:
        """The conversation's next turn waits."""
        if self._policy == "ca" and key in self:
            del self._idle[key]
            self._awaited[key] = None

    def keep(self, key: int, size: float) -> None:
        """The conversation has grown to `size` bytes. Evicts others, or itself if it does not
        fit."""
        self._used += size - self._sizes.get(key, 0.0)
        self._sizes[key] = size
        self._awaited.pop(key, None)
        self._idle.setdefault(key)
        if self._policy != "fifo":
            self._idle.move_to_end(key)
        while self._used > self._capacity:
            victim, _ = self._idle.popitem(last=False) if self._idle else self._awaited.popitem()
            self._used -= self._sizes.pop(victim)


def play(
    sessions: Sequence[Session],
    policy: str,
    capacity: float,
    *,
    token_bytes: int,
    window: int,
    warm_up: int,
    slower: float = 1.0,
    longer: float = 1.0,
) -> PlayOutcome:
    """All turns, of which the first `warm_up` are not counted. `slower`: of the server's times;
    `longer`: bytes of a conversation over what its tokens take."""
    arrivals = [(session.start_s, key, 0) for key, session in enumerate(sessions)]
    heapq.heapify(arrivals)
    waiting: OrderedDict[int, float] = OrderedDict()
    turns, contexts = [0] * len(sessions), [0] * len(sessions)
    cache = Cache(policy, capacity)
    now = 0.0
    served = 0
    hits = 0
    first = 0
    busy = 0.0
    waits = []
    while arrivals or waiting:
        while arrivals and (arrivals[0][0] <= now or not waiting):
            at, key, turns[key] = heapq.heappop(arrivals)
            waiting[key], now = at, max(now, at)
            cache.arrived(key)
        key, at = waiting.popitem(last=False)
        turn = sessions[key].turns[turns[key]]
        number = turns[key]
        hit = number > 0 and key in cache
        seconds = slower * (REPLY_S + TOKEN_S * (turn.input_tokens + (0 if hit else contexts[key])))
        if served >= warm_up:
            hits = hits + hit
            first = first + (number == 0)
            busy = busy + seconds
            waits.append(now - at)
        served = served + 1
        now = now + seconds
        context = contexts[key] + turn.input_tokens + turn.output_tokens
        while context > window:
            context -= window // 2
        contexts[key] = context
        cache.keep(key, longer * context * token_bytes)
        if number + 1 < len(sessions[key].turns):
            heapq.heappush(
                arrivals, (now + sessions[key].turns[number + 1].think_s, key, number + 1)
            )
    counted = len(waits)
    return PlayOutcome(
        hits / counted,
        hits / max(1, counted - first),
        first / counted,
        sorted(waits)[counted // 2],
        busy / 3600,
    )


COLUMNS = {
    "model": ("model", "<11"),
    "policy": ("policy", "<6"),
    "disk": ("disk TB", "<7.3g"),
    "longer": ("longer", "<6g"),
    "slower": ("slower", "<6g"),
    "hit": ("hit %", "5.1f"),
    "hit_of_later": ("of later turns", "14.1f"),
    "first": ("first turns %", "13.1f"),
    "wait_s": ("wait s", "6.0f"),
    "busy_hours": ("busy h", "6.2f"),
}


def main() -> None:
    """Figure 21 and 24 for Llama-13B, with the synthetic sessions, and with larger ones on a slower
    server. Without a disk also for Falcon-40B, with Llama-13B's times."""
    rows = [
        ("llama-13b", "ca", 0),
        *(("llama-13b", name, disk) for disk in (2, 10) for name in ("ca", "lru", "fifo")),
    ]
    sessions = synthetic(CHAT, conversations=SESSIONS, sessions_per_s=RATE, think_s=THINK_S, seed=0)
    print(title_line(COLUMNS))
    for longer, slower in ((1.0, 1.0), (1.3, 1.4), (1.6, 2.0)):
        for name, policy, disk in (*rows, ("falcon-40b", "ca", 0)):
            model = MODELS[name]
            outcome = play(
                sessions,
                policy,
                HOST_BYTES + disk * TB,
                token_bytes=model.shape.token_bytes,
                window=model.window,
                warm_up=WARM_UP,
                slower=slower,
                longer=longer,
            )
            shares = {
                share: 100 * getattr(outcome, share) for share in ("hit", "hit_of_later", "first")
            }
            setting = {
                "model": name,
                "policy": policy,
                "disk": disk,
                "longer": longer,
                "slower": slower,
            }
            print(result_line(COLUMNS, {**outcome._asdict(), **shares, **setting}), flush=True)


if __name__ == "__main__":
    main()
