"""Two hundred thousand random operations over every setting; the books are checked after each of
them."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import inf

import pytest

from pensieve.scheduler.config import BATCHING_MODES, EVICTION_POLICIES, PLAIN_POLICIES
from pensieve.scheduler.context_window import OVERFLOW_MODES
from pensieve.scheduler.kv import lower_tiers

from .driver import STATES, Driver
from .memory_tier import MemoryTier

OPERATIONS = 200_000
SEEDS = 4
GPU_CHUNKS = (18, 24, 20, 72)  # by seed: room for one context of 64 tokens and a little more


def runs():
    """Policies x batching x host sizes x seeds; the other settings take turns."""
    for number, (eviction, batching, host, seed) in enumerate(
        product((*EVICTION_POLICIES, *PLAIN_POLICIES), BATCHING_MODES, (0, 16, 60), range(SEEDS))
    ):
        yield {
            "seed": number,
            "eviction": eviction,
            "batching": batching,
            "host_kv_chunks": host,
            "swap_out_below": (0.0, 0.25, 0.9)[(number + seed) % 3],
            "generation_reserve": (0.0, 0.1)[(number // SEEDS) % 2],
            "chunk_tokens": 1 if seed == 3 else 4,
            "gpu_kv_chunks": GPU_CHUNKS[seed],
            "max_num_batched_tokens": (24, 7, 12, 7)[seed],
            "target_ms_per_token": (None, 4.5, 8.0)[number // 2 % 3]
            if batching == "unified"
            else None,
            "reuse": number % 11 != 0,
            "overflow": OVERFLOW_MODES[number % 2],
            "overflow_ratio": (0.5, 0.5, 0.25, 0.8)[(number // 3) % 4],
            "disk_kv_chunks": (0, 20, 90, 400)[number * 7 // 3 % 4] if host else 0,
            "save": ("async", "off", "sync", "async")[number // 3 % 4],
            "prefetch": number % 5 != 0,
            "copies_may_fail": number % 4 == number // 4 % 4,
            "host_kv_growth": (0, 3, 40)[number // 5 % 3] if host else 0,
            "log_chunks": (inf, 60)[number // 2 % 2],
        }


RUNS = list(runs())


def name(run):
    return "-".join(
        f"{value}" if key == "eviction" else f"{key.split('_')[0]}={value}"
        for key, value in run.items()
    )


@pytest.fixture(scope="module")
def totals():
    return Counter()


@pytest.mark.parametrize(
    "run",
    [pytest.param(run, marks=[pytest.mark.slow] * (run["seed"] % 4 in (1, 2))) for run in RUNS],
    ids=name,
)
def test_random_operations(run, totals, monkeypatch):
    if run["seed"] % 8 < 4:  # these run with a dict in the place of DISK's own tier
        monkeypatch.setattr(lower_tiers, "DiskTier", MemoryTier)
    Driver(**run).play(-(-OPERATIONS // len(RUNS)), totals)


@pytest.mark.parametrize(
    "event",
    [
        *("gpu tokens", "host tokens", "recomputed tokens", "new tokens", "tokens"),
        *("disjoint", "suppressed writes", "waits for keys", "suspensions", "drops"),
        *("gated swap-ins", "early swap-ins", "evictions", "saves"),
        *("overflows", "moved on", "begun anew", "prompts in time", "least prompts"),
        *(
            "disk tokens",
            "spilled",
            "promoted",
            "failed reads",
            "failed writes",
            "erased",
            "erased keys",
            "restarts",
            "failed_copies",
        ),
        *(
            "branches",
            "forks",
            "deletes",
            "pins",
            "expired",
            "growths",
            "forgotten",
            "refused too many",
            "refused invalid",
        ),
        *(f"aborted {state}" for state in STATES),
        # a waiting turn has no reply yet
        *(f"finished {state}" for state in STATES if state != "waiting"),
    ],
)
def test_everything_happened(event, totals):
    """A driver that never reaches a state proves nothing about it."""
    if totals["runs"] < len(RUNS):
        pytest.skip("only some of the runs were selected")
    assert totals[event], sorted(totals.items())
