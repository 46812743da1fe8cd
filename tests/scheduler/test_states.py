"""Recurrent states: kept, copied, found again and lost, on the device model."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from pensieve.scheduler.config import EVICTION_POLICIES, StateConfig
from pensieve.scheduler.kv.piece_keys import split_key
from pensieve.scheduler.kv.state_slots import StateSlots
from pensieve.scheduler.kv.states import KeptStates
from pensieve.scheduler.planning.live_states import LiveStates
from pensieve.scheduler.planning.plan_copies import StepCopies
from pensieve.scheduler.planning.state_lookup import StateLookup

from .device_model import disk_work
from .driver import STATES, Driver
from .harness import Harness

SEEDS = 60
FAST = 20
OPERATIONS = 800

STATE = StateConfig(chunks=3, slots=8, spacing=16, generated=8, multiple=8)


class StateDriver(Driver):
    """Prompts with marks."""

    def submit(self, prompt, *args, **fields):
        marks = sorted({self.random.randint(1, len(prompt)) for _ in range(2)})
        fields["marks"] = self.random.choice(((), tuple(marks)))
        return super().submit(prompt, *args, **fields)

    def lose_some(self):
        """Often only KV is lost: then states are loaded to compute it again."""
        if self.random.random() < 0.3:
            super().lose_some()
            return
        count = self.random.choice((1, 2, 3))

        def choose(idle):
            chunks = [chunk for chunk in idle if chunk.state is None]
            return self.random.sample(chunks, min(len(chunks), count))

        self.lose(choose)

    def launch(self):
        rows = self.scheduler._queues.joined()
        self.counts["inner holes"] += any(len(row.state.swap_ins) > 1 for row in rows)
        plan = super().launch()
        if plan is not None:
            work = disk_work(plan)
            pieces = [split_key(one.key)[1] is not None for one in work.promotions]
            self.counts["pieces read"] += sum(pieces)
            self.counts["pieces written"] += sum(
                split_key(one.key)[1] is not None for one in work.spills
            )
        return plan

    def restart(self, *args, **settings):
        super().restart(*args, **settings)
        states = self.scheduler._states.kept.by_key.values()
        self.counts["states adopted"] += len(states)
        for state in states:
            assert len({split_key(piece.key)[1].computation for piece in state.pieces}) == 1

    def drain(self):
        super().drain()
        kept = self.scheduler._states.kept
        for name in ("kept", "swapped_in", "lost"):
            self.counts[f"states {name}"] += getattr(kept, name)


def drawn(seed):
    draw = Random(f"states {seed}")
    pick = draw.choice
    seats = pick((1, 2, 3, 6, 6))
    size = pick((4, 4, 8, 2))
    reserve = pick((0.0, 0.1))
    host = pick((0, 4, 16, 40, 90))
    needed = 64 // size
    gpu = next(
        n for n in range(pick((needed + 1, needed + 4)), 999) if n - int(reserve * n) >= needed
    )
    return {
        "chunk_tokens": size,
        "gpu_kv_chunks": gpu,
        "host_kv_chunks": host,
        "max_num_seqs": seats,
        "max_num_batched_tokens": pick((7, 12, 24, 60)),
        "swap_out_below": pick((0.0, 0.25, 0.9)),
        "generation_reserve": reserve,
        "eviction": pick(EVICTION_POLICIES),
        "batching": pick(("unified", "unified", "separate")),
        "reuse": draw.random() < 0.95,
        "copies_may_fail": draw.random() < 0.3,
        "truncates": pick((0.0, 0.3)),
        "states": StateConfig(
            chunks=pick((1, 3, 5)),
            slots=seats + pick((1, 1, 2, 8)),
            spacing=pick((8, 16, 32)),
            generated=pick((8, 16)),
            multiple=8,
        ),
        "disk_kv_chunks": pick((0, 0, 8, 40, 200)) if host else 0,
        "save": pick(("async", "async", "sync", "off")),
        "prefetch": draw.random() < 0.7,
    }


@pytest.fixture(scope="module")
def totals():
    return Counter()


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.slow] * (n >= FAST)) for n in range(SEEDS)]
)
def test_random_operations(seed, totals):
    StateDriver(seed, **drawn(seed)).play(OPERATIONS, totals)


@pytest.mark.parametrize(
    "event",
    [
        *("states kept", "states swapped_in", "states lost", "suspensions", "branches", "forks"),
        *("lost", "failed_copies", "inner holes", "suppressed writes", "overflows", "scored"),
        *("pieces written", "pieces read", "states adopted", "restarts", "erased wholly"),
        *(f"aborted {state}" for state in STATES if state != "saving"),
    ],
)
def test_everything_happened(event, totals):
    if totals["runs"] < FAST:
        pytest.skip("only some of the runs were selected")
    assert totals[event], sorted(totals.items())


# -- mutants: each error is found


def off_by_one(monkeypatch):
    states = StateLookup._states
    monkeypatch.setattr(
        StateLookup,
        "_states",
        lambda *args: {end - 1: state for end, state in states(*args).items()},
    )


def stale_slot(monkeypatch):
    writable = LiveStates._writable

    def forgets_to_move(self, row):
        before = row.state.slot
        written = writable(self, row)
        row.state.slot = before
        return written

    monkeypatch.setattr(LiveStates, "_writable", forgets_to_move)


def zero_state(monkeypatch):
    compute = LiveStates.compute
    monkeypatch.setattr(LiveStates, "compute", lambda *args: (-1, compute(*args)[1]))


def last_token_twice(monkeypatch):
    leave = LiveStates.leave

    def earlier(self, row):
        leave(self, row)
        if row.turn.state is not None:
            row.turn.state.end -= 1

    monkeypatch.setattr(LiveStates, "leave", earlier)


def one_piece_missing(monkeypatch):
    monkeypatch.setattr(KeptStates, "_lose", lambda self, state: None)


def read_before_it_is_copied(monkeypatch):
    monkeypatch.setattr(StepCopies, "step_writes", lambda self, slot: None)


def slot_free_at_once(monkeypatch):
    def let_go(self, slot):
        self._holders[slot] -= 1
        if not self._holders[slot]:
            self._free.append(slot)

    monkeypatch.setattr(StateSlots, "let_go", let_go)


@pytest.mark.parametrize(
    "mutate",
    [
        off_by_one,
        stale_slot,
        zero_state,
        last_token_twice,
        one_piece_missing,
        read_before_it_is_copied,
        slot_free_at_once,
    ],
)
def test_an_error_is_found(mutate, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        for seed in range(FAST):
            StateDriver(seed, **drawn(seed)).play(OPERATIONS, Counter())


@pytest.mark.parametrize("ends", [False, True], ids=["queued again", "ended there"])
def test_a_context_that_moved_on_takes_no_state_of_the_old_one(monkeypatch, ends):
    """The request is suspended at its window's end and waits for a seat in its next context."""
    states = StateConfig(chunks=2, slots=4, spacing=16, generated=8, multiple=8)
    sizes = dict(gpu_kv_chunks=60, host_kv_chunks=60, max_model_len=64, max_num_seqs=2)
    served = Harness(states=states, **sizes)
    prompt = [*range(1, 41)]
    served.turn(prompt, 40, truncate=True)
    request = served.submit(prompt, 40, "c", truncate=True)
    queues = served.scheduler._queues
    while not (queues.rows and queues.rows[0].position == queues.rows[0].window_end):
        served.tick()
    queues.suspend(queues.rows[0])
    with monkeypatch.context() as patched:
        patched.setattr(LiveStates, "has_seat", property(lambda self: False))
        served.tick()
    if ends:
        served.finish(request, len(served.reply(request)))
        served.turn([*served.logs["c"], 5, 6, 7], 4, "c", truncate=True)
    else:
        row = queues.swapping_in.pop(0)
        queues.requeue(row, served.now)
        served.run(request)
