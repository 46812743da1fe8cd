"""Which changes of residency are noted, one by one. `tests/runtime/kv_events` compares the whole
with the truth."""

from __future__ import annotations

import pytest

from pensieve.scheduler.kv.chunk import NO_SLOT
from pensieve.scheduler.kv.deletion import Deletions
from pensieve.scheduler.kv.noted_store import NotedStores
from pensieve.scheduler.types import DISK, GPU, HOST
from pensieve.scheduler.work import Backlog, WorkBudget

from ..stores import SIZE, a_store, fresh_key, idle, in_use


@pytest.fixture
def store():
    return a_store(make=NotedStores())


def changes(store):
    return [(key, tier) for key, tier in (store.take_changes() or ((), ()))[0]]


def test_a_chunk_is_noted_once_it_has_a_key(store):
    private = store.new(SIZE, 0.0)
    assert store.take_changes() is None
    chunk = store.publish(private, fresh_key())
    assert changes(store) == [(chunk.key, GPU)]
    store.unpin([chunk], 0, 1.0)
    store.pin([chunk])
    assert store.take_changes() is None


def test_the_way_down_and_out(store):
    chunk = idle(store, copied=True)
    assert changes(store) == [(chunk.key, GPU)]
    store.reclaim_gpu([chunk])
    assert changes(store) == [(chunk.key, HOST)]
    key = chunk.key
    store.drop_from_host([chunk])
    assert changes(store) == [(key, NO_SLOT)]


def test_a_reserved_slot_counts_until_it_is_given_up(store):
    chunk = idle(store, on_gpu=False)
    assert changes(store) == [(chunk.key, HOST)]
    store.pin([chunk])
    store.reserve_swap_ins([chunk])
    assert changes(store) == [(chunk.key, GPU)]
    store.cancel_swap_ins([chunk])
    assert changes(store) == [(chunk.key, HOST)]


def test_a_forgotten_chunk_says_nothing_of_the_next_one_with_its_key(store):
    first = idle(store)
    changes(store)
    store.drop(first)
    again = in_use(store, key=first.key)
    assert again is not first and changes(store) == [(first.key, GPU)]
    store.unpin([again], 0, 1.0)
    store.drop(again)
    assert changes(store) == [(first.key, NO_SLOT)]


def test_a_key_that_comes_back_in_the_shared_tier_alone_is_told_as_gone():
    store = a_store(make=NotedStores(), shared_min_tokens=SIZE)
    first = idle(store)
    changes(store)
    store.drop(first)
    again = store.learn(first.key, SIZE, 1.0)
    assert again is not first and changes(store) == [(first.key, NO_SLOT)]


def test_the_end_of_a_lifetime_is_noted_when_its_chunks_are_dropped(store):
    backlog = Backlog(WorkBudget(SIZE))
    pieces = iter([SIZE, 1])
    Deletions(store, backlog).begin_unanswered(pieces)
    assert store.take_changes() is None and backlog
    backlog._budget.renew()
    backlog.go_on()
    assert store.take_changes().deleted and store.take_changes() is None


def test_what_is_resident(store):
    chunks = [idle(store), idle(store, on_gpu=False), in_use(store)]
    store.drop(idle(store))
    expected = {chunk.key: tier for chunk, tier in zip(chunks, (GPU, HOST, GPU), strict=True)}
    assert dict(store.resident().tiers) == expected


def test_a_chunk_that_is_only_on_disk_is_noted():
    store = a_store(make=NotedStores(), disk=4)
    (lower,) = store.lower
    chunk = idle(store)
    chunk.slots[DISK] = lower.take()
    store.release_gpu(chunk)
    assert changes(store) == [(chunk.key, DISK)]
