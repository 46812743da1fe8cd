"""Recurrent states: kept, copied, found again and lost, on the device model."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from pensieve.scheduler.config import EVICTION_POLICIES, StateConfig

from .driver import STATES, Driver

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
        self.counts["inner holes"] += any(len(row.state.loads) > 1 for row in rows)
        return super().launch()

    def drain(self):
        super().drain()
        slots = self.scheduler._store.states
        for name in ("kept", "loaded", "lost"):
            self.counts[f"states {name}"] += getattr(slots, name)


def drawn(seed):
    draw = Random(f"states {seed}")
    pick = draw.choice
    seats = pick((1, 2, 3, 6, 6))
    size = pick((4, 4, 8, 2))
    reserve = pick((0.0, 0.1))
    needed = 64 // size
    gpu = next(
        n for n in range(pick((needed + 1, needed + 4)), 999) if n - int(reserve * n) >= needed
    )
    return {
        "chunk_tokens": size,
        "gpu_kv_chunks": gpu,
        "host_kv_chunks": pick((0, 4, 16, 40, 90)),
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
        *("states kept", "states loaded", "states lost", "suspensions", "branches", "forks"),
        *("lost", "failed_copies", "inner holes", "suppressed writes", "overflows", "scored"),
        *(f"aborted {state}" for state in STATES if state != "saving"),
    ],
)
def test_everything_happened(event, totals):
    if totals["runs"] < FAST:
        pytest.skip("only some of the runs were selected")
    assert totals[event], sorted(totals.items())
