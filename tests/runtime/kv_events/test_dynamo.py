"""Dynamo's real router, fed by the real scheduler over ZeroMQ: every score is the leading run of
the scheduler's chunks, in every tier."""

from __future__ import annotations

import asyncio
import hashlib
import time
from array import array
from collections import Counter
from random import Random

import pytest

from pensieve.runtime.kv_events import publisher as publisher_module
from pensieve.runtime.kv_events.config import KVEventsConfig
from pensieve.runtime.kv_events.publisher import KVEventPublisher
from pensieve.scheduler.kv.chunk import NO_SLOT
from pensieve.scheduler.kv.noted_store import ContextRun, ResidencyChanges
from pensieve.scheduler.types import LOCAL_TIERS

from .player import Player
from .routers import FOLDER, DynamoRouter, LossyProxy

pytestmark = pytest.mark.skipif(
    not (FOLDER / "dynamo").exists(), reason=f"no Dynamo in {FOLDER}: run `make kv-events`"
)
SIZE = 4
PATIENCE = 60.0
DIRECT, LOSSY, LATE = 1, 2, 3  # workers: three views of one publisher


def marker_of(number):
    """Three chunks, one in each tier: the router applies the tiers' events apart."""
    tokens = array("i", [1_000_000 + number] * SIZE * len(LOCAL_TIERS))
    keys = tuple(hashlib.sha256(bytes([tier, *tokens.tobytes()])).digest() for tier in LOCAL_TIERS)
    return ContextRun(0, len(keys), keys, tokens, b"")


class MarkedStore:
    """A store that, with each report, has other chunks than before at the end of all changes."""

    def __init__(self, store):
        self._store = store
        self.markers = 0

    def take_changes(self):
        gone = [(key, NO_SLOT) for key in marker_of(self.markers).keys]
        self.markers += 1
        marker = marker_of(self.markers)
        there = list(zip(marker.keys, LOCAL_TIERS, strict=True))
        changes = self._store.take_changes() or ResidencyChanges(())
        return changes._replace(
            tiers=[*changes.tiers, *gone, *there], names=[*changes.names, marker]
        )


class Life:
    """One process: a store and its publisher, and the views that the router has of it."""

    def __init__(self, store):
        config = KVEventsConfig(
            True, endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0", buffer_steps=10
        )
        self.store = MarkedStore(store)
        self.publisher = KVEventPublisher(config, self.store, b"", SIZE)
        self.proxy = LossyProxy(self.publisher.endpoint, lambda number: number % 7 == 3)
        self.workers = set()

    async def join(self, router, worker):
        endpoint = self.proxy.endpoint if worker == LOSSY else self.publisher.endpoint
        await router.join(worker, endpoint, self.publisher.replay_endpoint)
        self.workers.add(worker)

    async def settle(self, router):
        """Returns when all views have all changes: when they know blocks that were stored behind
        them. If its batch is lost, a further one follows."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            self.publisher.report()
            marker = marker_of(self.store.markers)
            again = time.monotonic() + 0.05
            while time.monotonic() < again:
                scores = await router.scores(marker.tokens)
                if all(scores.get(worker) == (1, 2, 3) for worker in self.workers):
                    return
                await asyncio.sleep(0.001)
        raise AssertionError(f"the router does not follow: {scores}")

    async def leave(self, router):
        for worker in self.workers:
            await router.leave(worker)
        self.publisher.close()
        self.proxy.close()


async def play(player, lives, states, counts):
    router = DynamoRouter(SIZE)
    random = Random(0)
    life = None
    for _ in range(states):
        for _ in range(random.randint(1, 6)):
            player.step()
        if life is not lives[-1]:
            if life is not None:
                await life.leave(router)
                counts["lost batches"] += life.proxy.lost
                counts["restarts"] += 1
            life = lives[-1]
            began = counts["states"]
            await life.join(router, DIRECT)
            await life.join(router, LOSSY)
        if LATE not in life.workers and counts["states"] >= began + 15:
            await life.join(router, LATE)
            counts["late routers"] += 1
        await life.settle(router)
        counts["states"] += 1
        for name, (tokens, salt, runs) in player.truth().items():
            scores = await router.scores(tokens, salt)
            for worker in life.workers:
                assert scores.get(worker, (0, 0, 0)) == runs, (name, worker, counts)
                counts["scores"] += 1
            counts["holes"] += runs[-1] < len(tokens) // SIZE
            counts["salted"] += salt is not None
            counts["in lower tiers"] += runs[0] < runs[-1]
    counts["lost batches"] += life.proxy.lost
    await life.leave(router)
    router.close()


@pytest.mark.parametrize(
    ("states", "settings"),
    [
        (40, dict(seed=12, disk_kv_chunks=30)),
        pytest.param(500, dict(seed=1, disk_kv_chunks=30), marks=pytest.mark.slow),
        pytest.param(250, dict(seed=2, eviction="retention"), marks=pytest.mark.slow),
        pytest.param(
            250, dict(seed=3, disk_kv_chunks=12, host_kv_chunks=6), marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else f"seed {value['seed']}",
)
def test_every_score_is_the_leading_run(states, settings, monkeypatch):
    monkeypatch.setattr(publisher_module, "BATCH_MS", 2)
    lives = []
    counts = Counter()
    player = Player(**settings, on_start=lambda store: lives.append(Life(store)))
    asyncio.run(play(player, lives, states, counts))
    print(f"\n{dict(counts)}, {player.counts['deletes']} deletions")
    assert counts["states"] == states
    assert min(counts[kind] for kind in ("scores", "holes", "salted", "late routers")) > 0
