"""What routers are told, against the scheduler's truth and a double of llm-d's rules."""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import count
from random import Random
from types import SimpleNamespace

import msgspec
import pytest

from pensieve.runtime.cache_salt import kv_salt
from pensieve.runtime.kv_events.blocks import Blocks
from pensieve.scheduler.config import SchedulerConfig, StateConfig
from pensieve.scheduler.kv.chunk_keys import NO_KEY, ChunkKeys
from pensieve.scheduler.kv.noted_store import (
    ContextRun,
    NotedChunkStore,
    NotedStores,
    ResidencyChanges,
)
from pensieve.scheduler.kv.piece_keys import KEY_BYTES
from pensieve.scheduler.planning.commit import Committer

from ...scheduler.stores import a_store
from .player import Player, StatePlayer
from .routers import MEDIA, LlmDDouble

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

    def __init__(self, has_states=False):
        self.blocks = Blocks(b"", SIZE, has_states)
        self.router = LlmDDouble()
        self._numbers = count()

    def apply(self, *tiers, names=(), states=()):
        self.blocks.apply(ResidencyChanges(tiers, names, states=states))

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


# -- recurrent states


def test_blocks_are_told_up_to_the_last_state():
    told = Told(has_states=True)
    run = run_of(range(24))
    told.apply(*((key, 0) for key in run.keys), names=[run])
    assert told.send() == []
    told.apply(states=[(run.keys[1], 8), (run.keys[3], 16)])
    (stored,) = told.send()
    assert stored["token_ids"] == list(range(16))
    told.apply(states=[(run.keys[3], 0)])
    (removed,) = told.send()
    assert removed["type"] == "BlockRemoved" and told.score(run) == (2, 2, 2)
    told.apply(states=[(run.keys[5], 24)])
    told.send()
    assert told.score(run) == (6, 6, 6)
    told.apply((run.keys[4], GONE))
    told.send()
    assert told.score(run) == (2, 2, 2)


def test_a_state_is_told_for_its_own_branch_and_what_leads_there():
    told = Told(has_states=True)
    first, second = run_of(range(16)), run_of([*range(8), *range(50, 58)])
    keys = dict.fromkeys((*first.keys, *second.keys), 0)
    told.apply(*keys.items(), names=[first, second], states=[(second.keys[3], 16)])
    told.send()
    assert told.score(first) == (2, 2, 2) and told.score(second) == (4, 4, 4)


def test_a_state_that_came_before_the_name_of_its_chunk_is_told_with_it():
    told = Told(has_states=True)
    run = run_of(range(12))
    told.apply(*((key, 2) for key in run.keys), states=[(run.keys[1], 8)])
    assert told.send() == []
    told.apply(names=[run])
    told.send()
    assert told.score(run) == (0, 0, 2)


def test_a_state_of_another_position_is_none():
    told = Told(has_states=True)
    run = run_of(range(12))
    told.apply(*((key, 0) for key in run.keys), names=[run], states=[(run.keys[1], 12)])
    assert told.send() == []


def test_lost_changes_of_states_are_made_up_for():
    told = Told(has_states=True)
    run = run_of(range(16))
    tiers = [(key, 0) for key in run.keys]
    told.apply(*tiers, names=[run], states=[(run.keys[3], 16)])
    told.send()
    told.blocks.replace(ResidencyChanges(tiers, states=[(run.keys[1], 8)]))
    told.send()
    assert told.score(run) == (2, 2, 2)


STATE = dict(chunks=3, slots=8, spacing=16, generated=8, multiple=8)
STATE_RUNS = [
    dict(seed=1, disk_kv_chunks=0, host_kv_chunks=40),
    dict(seed=2, disk_kv_chunks=40, host_kv_chunks=24),
    dict(seed=3, disk_kv_chunks=120, host_kv_chunks=60, eviction="retention"),
    dict(seed=4, disk_kv_chunks=0, host_kv_chunks=90, copies_may_fail=True, gpu_kv_chunks=40),
    dict(seed=5, disk_kv_chunks=40, host_kv_chunks=40, truncates=0.3),
]


def play_with_states(settings, steps):
    """Compares the router's view with the whole store after each step. Returns counts."""
    views = []

    def start(store):
        views.append(Told(has_states=True))

    player = StatePlayer(**settings, on_start=start, states=StateConfig(**STATE))
    counts = Counter()
    before = {}
    for _ in range(steps):
        player.step()
        view = views[-1]
        changes = player.store.take_changes()
        if changes is not None:
            assert all(len(key) <= KEY_BYTES for key, _ in changes.tiers)
            player.note(changes.names)
            view.blocks.apply(changes)
        view.send()
        expected = player.told()
        assert view.router.ended == Counter(
            {(path, MEDIA[tier]): 1 for path, tier in expected.items()}
        )
        counts["stored"] += len(expected.keys() - before.keys())
        counts["removed"] += len(before.keys() - expected.keys())
        counts["on disk"] += 2 in expected.values()
        before = expected
    resident = player.store.resident()
    kept = player.scheduler._states.kept
    assert dict(resident.states) == {key: state.end for key, state in kept.by_key.items()}
    assert len(resident.tiers) == len(view.blocks) + len(view.blocks._unnamed)
    view.blocks.replace(resident)
    assert view.send() == []
    return counts


@pytest.mark.parametrize("settings", STATE_RUNS, ids=lambda settings: str(settings["seed"]))
def test_what_is_told_of_states_is_what_the_whole_store_says(settings):
    counts = play_with_states(settings, 1500)
    assert min(counts["stored"], counts["removed"]) > 50, counts
    assert (counts["on disk"] > 0) == (settings["disk_kv_chunks"] > 0), counts


def state_that_is_lost_untold(monkeypatch):
    note_state = NotedChunkStore.note_state

    def note(self, key, end):
        if end:
            note_state(self, key, end)

    monkeypatch.setattr(NotedChunkStore, "note_state", note)


def chunks_behind_the_last_state(monkeypatch):
    monkeypatch.setattr(Blocks, "_is_usable", lambda self, block, states: bool(block.tiers))


def states_behind_a_hole(monkeypatch):
    is_usable = Blocks._is_usable

    def finds_one_behind(self, block, states):
        return block.usable_children > 0 or is_usable(self, block, states)

    monkeypatch.setattr(Blocks, "_is_usable", finds_one_behind)


@pytest.mark.parametrize(
    "mutate", [state_that_is_lost_untold, chunks_behind_the_last_state, states_behind_a_hole]
)
def test_an_error_in_what_is_told_is_found(mutate, monkeypatch):
    mutate(monkeypatch)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        for settings in STATE_RUNS:
            play_with_states(settings, 1500)
