"""What routers are told, against the scheduler's truth and a double of llm-d's rules."""

from __future__ import annotations

from array import array
from itertools import count
from random import Random
from types import SimpleNamespace

import msgspec
import pytest

from pensieve.runtime.cache_salt import kv_salt
from pensieve.runtime.kv_events.blocks import Blocks
from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.kv.chunk_keys import NO_KEY, ChunkKeys
from pensieve.scheduler.kv.noted_store import ContextRun, NotedStores, ResidencyChanges
from pensieve.scheduler.planning.commit import Committer

from ...scheduler.stores import a_store
from .player import Player
from .routers import LlmDDouble

SIZE = 4
KEYS = ChunkKeys(b"", SIZE, None)
GONE = -1


def run_of(tokens, salt=b""):
    """The context of these tokens."""
    log = array("i", tokens)
    keys = []
    KEYS.extend(keys, 0, salt, log, len(log) // SIZE * SIZE)
    return ContextRun(0, len(keys), keys, log, salt)


class Told:
    """Blocks, and a router that is told of them."""

    def __init__(self):
        self.blocks = Blocks(b"", SIZE)
        self.router = LlmDDouble()
        self._numbers = count()

    def apply(self, *tiers, names=()):
        self.blocks.apply(ResidencyChanges(tiers, names))

    def send(self):
        events = self.blocks.events()
        payload = msgspec.msgpack.encode([0.0, events, 0])
        self.router.take(next(self._numbers), payload)
        return events

    def score(self, run):
        salt = run.salt.removeprefix(b"given:").decode() if run.salt[:1] == b"g" else None
        return self.router.score(run.tokens.tolist(), SIZE, salt)


@pytest.fixture
def told():
    return Told()


def test_a_chain_is_one_event_and_moves_at_once_with_its_first_chunk(told):
    run = run_of(range(12))
    told.apply(*((key, 0) for key in run.keys), names=[run])
    (stored,) = told.send()
    assert stored["parent_block_hash"] is None and stored["token_ids"] == list(range(12))
    assert stored["block_hashes"] == [int.from_bytes(key[-8:], "big") for key in run.keys]
    assert told.score(run) == (3, 3, 3)
    told.apply((run.keys[0], 1))
    assert [event["type"] for event in told.send()] == ["BlockRemoved", "BlockStored"]
    assert told.score(run) == (0, 3, 3)
    told.apply((run.keys[0], 0))
    told.send()
    assert told.score(run) == (3, 3, 3)


def test_nothing_behind_a_hole_is_told_until_it_is_computed_again(told):
    run = run_of(range(16))
    told.apply(*((key, 0) for key in run.keys), names=[run])
    told.send()
    told.apply((run.keys[1], GONE))
    (removed,) = told.send()
    assert removed["block_hashes"] == [
        int.from_bytes(key[-8:], "big") for key in reversed(run.keys[1:])
    ]
    assert told.score(run) == (1, 1, 1)
    told.apply((run.keys[1], 0), names=[run])
    told.send()
    assert told.score(run) == (4, 4, 4)


def test_what_comes_and_goes_within_a_batch_is_not_told(told):
    run = run_of(range(8))
    told.apply(*((key, 0) for key in run.keys), names=[run])
    told.apply(*((key, GONE) for key in run.keys))
    assert told.send() == []
    assert len(told.blocks) == 0 and not told.blocks._roots


def test_chunks_of_an_earlier_process_are_told_when_a_prompt_names_them(told):
    run = run_of(range(12))
    told.apply((run.keys[0], 2), (run.keys[2], 2))
    assert told.send() == []
    told.apply(names=[run])
    told.send()
    assert told.score(run) == (0, 0, 1)
    told.apply((run.keys[1], 0), names=[run._replace(first=1, end=2)])
    told.send()
    assert told.score(run) == (0, 0, 3)


def test_a_context_without_its_first_tokens_is_not_told(told):
    """Its chunks have other KV than those of a prompt of the same tokens."""
    run = run_of(range(16))
    told.apply(*((key, 0) for key in run.keys[:2]), names=[run])
    later = ContextRun(0, 4, [NO_KEY, NO_KEY, b"k2" * 16, b"k3" * 16], run.tokens, b"")
    told.apply(*((key, 0) for key in later.keys[2:]), names=[later])
    told.apply(names=[later._replace(first=3)])
    told.send()
    assert told.score(run) == (2, 2, 2)


def test_given_salts_are_apart_and_owners_are_not(told):
    runs = [run_of(range(8), salt) for salt in (b"", kv_salt("s", "a"), kv_salt("t", "a"))]
    owned = [run_of(range(8), kv_salt(None, owner)) for owner in ("a", "b")]
    told.apply(*((key, 0) for key in runs[1].keys), names=runs[1:2])
    (stored,) = told.send()
    assert stored["cache_salt"] == "s" and stored["extra_keys"] == [["s"], None]
    assert [told.score(run) for run in runs] == [(0, 0, 0), (2, 2, 2), (0, 0, 0)]
    told.apply(*((key, 1) for run in owned for key in run.keys), names=owned)
    told.send()
    assert told.score(runs[0]) == (0, 2, 2)
    told.apply(*((key, GONE) for key in owned[0].keys))
    assert told.send() == []
    told.apply((owned[1].keys[0], GONE))
    told.send()
    assert told.score(runs[0]) == (0, 0, 0) and told.score(runs[1]) == (2, 2, 2)


def test_lost_changes_are_made_up_for(told):
    first, second = run_of(range(12)), run_of(range(40, 52))
    told.apply(*((key, 0) for key in (*first.keys, *second.keys)), names=[first, second])
    told.send()
    told.blocks.replace(ResidencyChanges([(first.keys[0], 1), (first.keys[1], 0)]))
    told.send()
    assert told.score(first) == (0, 2, 2) and told.score(second) == (0, 0, 0)


def test_everything_makes_a_new_router_equal(told):
    random = Random(1)
    runs = [run_of([*range(8), *(random.randrange(9) for _ in range(60))]) for _ in range(9)]
    tiers = [(key, random.choice((0, 0, 0, 1, 1, 2))) for run in runs for key in run.keys]
    told.apply(*tiers, names=runs)
    told.apply(*((key, GONE) for key, _ in random.sample(tiers, 5)))
    told.send()
    late = LlmDDouble()
    late.take(0, msgspec.msgpack.encode([0.0, told.blocks.everything(), 0]))
    assert late.stored == told.router.stored and late.ended == told.router.ended


def test_a_chunk_behind_twins_whose_owners_are_gone_is_named_with_them(told):
    """Twins: chunks without a key, of tokens that another row has computed first."""
    run = run_of(range(12))
    store = a_store(make=NotedStores())
    owners = [store.publish(store.new(SIZE, 0.0), key) for key in run.keys[:2]]
    request = SimpleNamespace(salt=b"")
    turn = SimpleNamespace(keys=run.keys, tokens=run.tokens, context_start=0, request=request)
    row = SimpleNamespace(
        turn=turn, first=0, pending={}, chunks=[store.new(SIZE, 0.0) for _ in range(3)]
    )
    committer = Committer(SchedulerConfig(8, 8, 12, chunk_tokens=SIZE), KEYS, store, None, None)
    for index in range(2):
        committer.publish_full(row, index)
    store.unpin(owners, 0, 1.0)
    for owner in owners:
        store.drop(owner)
    told.blocks.apply(store.take_changes())
    committer.publish_full(row, 2)
    told.blocks.apply(store.take_changes())
    told.apply(*((key, 0) for key in run.keys[:2]), names=[run._replace(end=2)])
    told.send()
    assert told.score(run) == (3, 3, 3)


RUNS = [
    dict(seed=1, disk_kv_chunks=0),
    dict(seed=2, disk_kv_chunks=30),
    dict(seed=3, disk_kv_chunks=30, eviction="retention", host_kv_chunks=6),
    dict(seed=4, disk_kv_chunks=12, save="sync", copies_may_fail=True),
    dict(seed=5, disk_kv_chunks=0, host_kv_chunks=0, eviction="lru-conversation"),
    dict(seed=6, disk_kv_chunks=20, batching="separate", speculate="lookup"),
]


@pytest.mark.parametrize("settings", RUNS, ids=lambda settings: str(settings["seed"]))
def test_scores_are_the_leading_runs_of_the_real_scheduler(settings):
    views = []
    player = Player(**settings, on_start=lambda store: views.append(Told()))
    random = Random(settings["seed"])
    compared = holes = 0
    for _ in range(1500):
        player.step()
        told = views[-1]
        changes = player.store.take_changes()
        if changes is not None:
            told.blocks.apply(changes)
        if random.random() < 0.4:
            told.send()
            for tokens, salt, runs in player.truth().values():
                assert told.router.score(tokens, SIZE, salt) == runs
                compared += 1
                holes += runs[-1] < len(tokens) // SIZE
    assert compared > 500 and holes > 20
    resident = player.store.resident().tiers
    assert len(resident) == len(told.blocks) + len(told.blocks._unnamed)
    if not settings["disk_kv_chunks"]:
        assert not told.blocks._unnamed


@pytest.mark.parametrize("overflow", ["keep", "recompute"])
def test_contexts_without_their_first_tokens_are_not_told(overflow):
    views = []
    settings = dict(truncates=0.6, disk_kv_chunks=20, overflow=overflow)
    player = Player(7, on_start=lambda store: views.append(Told()), **settings)
    begun_later = 0
    for _ in range(1500):
        player.step()
        told = views[-1]
        changes = player.store.take_changes()
        if changes is not None:
            told.blocks.apply(changes)
            told.send()
        for name, (tokens, salt, runs) in player.truth().items():
            assert told.router.score(tokens, SIZE, salt) == runs
            begun_later += player.scheduler.conversations.get(name).context_start > 0
    assert begun_later > 100
