"""Random operations with settings drawn at random: combinations of features that no list of cases
names."""

from __future__ import annotations

from collections import Counter
from math import inf
from random import Random

import pytest

from pensieve.scheduler.config import (
    BATCHING_MODES,
    EVICTION_POLICIES,
    PLAIN_POLICIES,
    QUEUE_ORDERS,
    SAVE_MODES,
)
from pensieve.scheduler.context_window import OVERFLOW_MODES
from pensieve.scheduler.planning import admission

from .draft_policy import decide_by_chance
from .driver import STATES, Driver
from .test_drafting import KeyedDriver

SEEDS = 240
FAST = 40  # seeds that every test run plays
OPERATIONS = 800


def drawn(seed):
    """Settings of a driver."""
    draw = Random(f"settings {seed}")
    pick = draw.choice
    size, length, reserve = (
        pick((4, 4, 4, 1, 8)),
        pick((64, 64, 48, 33, 30)),
        pick((0.0, 0.1, 0.25)),
    )
    needed = -(-length // size)
    gpu = next(
        n
        for n in range(pick((needed + 1, needed + 2, 2 * needed)), 999)
        if n - int(reserve * n) >= needed
    )
    host, seats, batching = (
        pick((0, 4, 16, 16, 60)),
        pick((1, 2, 3, 6, 6, 12, 20)),
        pick(BATCHING_MODES),
    )
    return {
        "chunk_tokens": size,
        "max_model_len": length,
        "gpu_kv_chunks": gpu,
        "host_kv_chunks": host,
        "disk_kv_chunks": pick((0, 8, 20, 90, 400)) if host else 0,
        "generation_reserve": reserve,
        "max_num_seqs": seats,
        "max_num_batched_tokens": max(seats, pick((7, 12, 24, 24, 60))),
        "max_queue": pick((8, 20)),
        "queue_timeout": pick((None, None, None, 4.0)),
        "queue_order": pick(QUEUE_ORDERS),
        "target_ms_per_token": pick((None, 4.5, 8.0)) if batching == "unified" else None,
        "batching": batching,
        "eviction": pick((*EVICTION_POLICIES, *PLAIN_POLICIES)),
        "swap_out_below": pick((0.0, 0.25, 0.9)),
        "reuse": draw.random() < 0.95,
        "overflow": pick(OVERFLOW_MODES),
        "overflow_ratio": pick((0.5, 0.25, 0.2, 0.8)),
        "truncates": pick((0.0, 0.3, 0.9)),
        "save": pick(SAVE_MODES),
        "prefetch": draw.random() < 0.7,
        "copies_may_fail": draw.random() < 0.4,
        "log_chunks": pick((inf, 60, 25)),
        "conversation_ttl": pick((inf, inf, inf, 3.0)),
        "owner_kv_chunks": pick((None, 6, 30)),
        "owners": pick((("",), ("x", "y"), ("x", "y", "z"))),
        "speculate": pick(("off", "lookup")),
        "vocabulary": pick((97, 2, 2)),  # with two words drafts often come true
    }


@pytest.fixture(scope="module")
def totals():
    return Counter()


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.slow] * (n >= FAST)) for n in range(SEEDS)]
)
def test_random_operations_with_random_settings(seed, totals, monkeypatch):
    if seed % 2:
        decide_by_chance(monkeypatch, seed)
    monkeypatch.setattr(admission, "MOST_TRIED", (1, 2, 4, 64)[seed % 4])
    settings = drawn(seed)
    driver = (KeyedDriver if settings["reuse"] else Driver)(seed, **settings)
    driver.play(OPERATIONS, totals)


@pytest.mark.parametrize(
    "event",
    [
        *(
            "overflows",
            "moved on",
            "suspensions",
            "drafted",
            "accepted",
            "scored",
            "stuck",
            "timed out",
            "expired",
        ),
        *(
            "erased wholly",
            "erased in part",
            "failed reads",
            "failed_copies",
            "early swap-ins",
            "restarts",
        ),
        *(f"aborted {state}" for state in STATES),
    ],
)
def test_everything_happened(event, totals):
    if totals["runs"] < FAST:
        pytest.skip("only some of the runs were selected")
    assert totals[event], sorted(totals.items())
