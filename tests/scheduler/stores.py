"""Chunk stores made by hand, for tests of the code that uses them."""

from __future__ import annotations

from itertools import count

from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.invariants import check_store
from pensieve.scheduler.kv.chunk import Claims
from pensieve.scheduler.kv.chunk_store import ChunkStore
from pensieve.scheduler.kv.moves import report_moves
from pensieve.scheduler.kv.retention import eviction_policy
from pensieve.scheduler.plan import StepResult, TierReport
from pensieve.scheduler.planning.eviction import Evictor
from pensieve.scheduler.planning.plan_copies import StepCopies
from pensieve.scheduler.types import HOST, ChunkKey

from .harness import profile

SIZE = 4


def a_store(gpu=8, host=8, eviction="lru", disk=0, make=ChunkStore, **settings):
    config = SchedulerConfig(
        gpu,
        host,
        max_model_len=1,
        chunk_tokens=SIZE,
        generation_reserve=0.0,
        disk_kv_chunks=disk,
        **settings,
    )
    return make(config, eviction_policy(eviction, profile(SIZE)))


_keys = count()


def fresh_key():
    return ChunkKey(b"key %d" % next(_keys))


def in_use(store, end=SIZE, now=0.0, key=None):
    """A full keyed chunk that one row holds."""
    return store.publish(store.new(end, now), key or fresh_key())


def idle(store, end=SIZE, now=0.0, key=None, copied=False, on_gpu=True, claims=0):
    """A full keyed chunk that no row holds, last active at `now`; `copied`: also on HOST."""
    chunk = in_use(store, end, now, key)
    if copied or not on_gpu:
        chunk.slots[HOST] = store.host.take()
    store.unpin([chunk], 0, now)
    if not on_gpu:
        store.release_gpu(chunk)
    for _ in range(claims):
        store.claim(chunk)
    return chunk


def record(store, chunk):
    """The chunk, which is on HOST, has a record in the lower tier."""
    (lower,) = store.lower
    store.spill(chunk, lower)
    work = lower.hand_over(1)
    report = TierReport(lower.tier, spilled=tuple(spill.slot for spill in work.spills))
    report_moves(store, StepResult(1, (), (), lower=(report,)), 0.0)


def an_evictor(store, now, step=1):
    copies = StepCopies(step, store.gpu, store.host)
    return copies, Evictor(store, copies, now)


def check(store, held=(), claims=None):
    """Books of a store whose chunks in `held` are held by one row each."""
    store.end_plan()
    check_store(
        store,
        dict.fromkeys(held, 1),
        {chunk: Claims(count) for chunk, count in (claims or {}).items()},
    )
