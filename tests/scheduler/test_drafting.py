"""Rows that check drafts: what a step computes for them, what counts of it, and that nothing else changes."""

from __future__ import annotations

from collections import Counter

import pytest

from pensieve.scheduler.context_window import OVERFLOW_MODES
from pensieve.scheduler.turns import drafts

from .driver import Driver

OPERATIONS = 1500
EVENTS = (
    *("gpu tokens", "host tokens", "disk tokens", "recomputed tokens", "drafts", "accepted", "suspensions", "drops"),
    *("overflows", "moved on", "begun anew", "branches", "forks", "restarts", "aborted running", "finished running"),
)


class KeyedDriver(Driver):
    """Checks that a chunk has a key only if it holds that key's tokens: none that was drafted and has not come true."""

    def check(self):
        super().check()
        size, queues, store = self.config.chunk_tokens, self.scheduler._queues, self.scheduler._store
        for turn in (*queues.waiting, *(row.turn for row in queues.joined())):
            made = []
            self.scheduler._chunk_keys.extend(
                made, turn.context_start, turn.request.salt, turn.tokens, len(turn.keys) * size
            )
            assert len(turn.keys) * size <= len(turn.tokens) and turn.keys == made
            for index in range(turn.context_start // size, len(turn.keys)):
                chunk = store.find(turn.keys[index])
                if chunk is not None and chunk.gpu >= 0 and not chunk.loading:
                    held = self.device.pools["gpu"][chunk.gpu]
                    tokens = [held[offset][0] for offset in range(size)]
                    assert tokens == turn.tokens[index * size : (index + 1) * size].tolist()


@pytest.fixture
def always(monkeypatch):
    """Every match is drafted, however little has come true so far."""
    monkeypatch.setattr(drafts, "FIRST_MEAN", 1e9)


@pytest.fixture(scope="module")
def totals():
    return Counter()


@pytest.mark.parametrize("overflow", OVERFLOW_MODES)
@pytest.mark.parametrize("batching", ["unified", "separate"])
@pytest.mark.parametrize("seed", range(4))
def test_random_operations_with_drafts(seed, batching, overflow, always, totals):
    """The model has two words, so matches are frequent, and each draft comes true half of the time."""
    driver = KeyedDriver(
        seed,
        vocabulary=2,
        speculate="lookup",
        overflow=overflow,
        batching=batching,
        gpu_kv_chunks=(18, 24, 20, 72)[seed],
        chunk_tokens=1 if seed == 3 else 4,
        host_kv_chunks=(16, 60, 16, 16)[seed],
        disk_kv_chunks=(0, 90, 20, 0)[seed],
        max_num_batched_tokens=(24, 12, 20, 24)[seed],
        max_num_seqs=(12, 6, 20, 12)[seed],
        target_ms_per_token=8.0 if batching == "unified" and seed == 1 else None,
        copies_may_fail=seed == 2,
    )
    for _ in range(OPERATIONS):
        driver.step()
    driver.drain()
    totals.update(driver.counts)
    totals["runs"] += 1


@pytest.mark.parametrize("event", EVENTS)
def test_everything_happened(event, totals):
    if totals["runs"] < 24:
        pytest.skip("only some of the runs were selected")
    assert totals[event], sorted(totals.items())
