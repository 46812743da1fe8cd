"""Cold = GPU hit = host reload = recomputed: replies are those of plain transformers with any state
of the cache.

Pools are so small that every event happens; the test counts the events.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from pensieve.builder.build import build_engine
from pensieve.runtime.engine import open_engine
from tests.compiled import compiled_engine
from tests.models import tiny_checkpoint

from .chatter import TIGHT, Chatter
from .sharing import SharingDevice

MODELS = ("llama", "qwen3", "qwen3-windows", "mixtral", "qwen3-moe", "gemma3", "gpt-oss", "opt")
POLICIES = ("retention", "lru", "lru-conversation", "lru-plain", "fifo-plain")
TURNS = 50
EVENTS = (
    "gpu",
    "host",
    "recomputed",
    "new",
    "disjoint",
    "suspended",
    "dropped",
    "aborted",
    "branched",
    "forked",
    "shared",
)


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """(engine, reference, counts of events so far)."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp(request.param)
    reference = tiny_checkpoint(request.param, directory / "checkpoint")
    build_engine(directory / "checkpoint", directory / "engine")
    return open_engine(directory / "engine"), reference, Counter()


@pytest.mark.parametrize("disturbed", [False, True], ids=["", "disturbed"])
@pytest.mark.parametrize("batching", ["unified", "separate"])
@pytest.mark.parametrize("eviction", POLICIES)
def test_replies_are_those_of_transformers(model, eviction, batching, disturbed):
    """With and without ids; disturbed: copies and steps are delayed at random and the copies of a
    batch are shuffled."""
    engine, reference, happened = model
    seed = 10 * POLICIES.index(eviction) + 2 * (batching == "separate") + disturbed
    chatter = Chatter(
        engine,
        reference,
        seed,
        disturbed=disturbed,
        eviction=eviction,
        batching=batching,
        gpu_kv_chunks=29,
    )
    happened.update(chatter.run(TURNS))


@pytest.mark.parametrize("ids", [0.0, 1.0], ids=["without-ids", "with-ids"])
@pytest.mark.parametrize("host", [0, 200])
def test_replies_at_other_pool_sizes(model, ids, host):
    """GPU cache only, and a host that holds everything."""
    engine, reference, happened = model
    chatter = Chatter(engine, reference, 7, ids=ids, host_kv_chunks=host, gpu_kv_chunks=29)
    counts = chatter.run(TURNS, events=["host"] if host else [])
    assert host or not counts["host"]
    happened.update(counts)


class GrowingDevice(SharingDevice):
    """Its HOST pool gains a slot now and then."""

    looks = 0

    @property
    def host_slots(self):
        self.looks += 1
        return min(5 + self.looks // 3, super().host_slots)


def test_replies_while_the_host_pool_grows(model):
    engine, reference, happened = model
    chatter = Chatter(
        engine,
        reference,
        8,
        disturbed=True,
        gpu_kv_chunks=29,
        host_kv_chunks=5,
        host_kv_growth=60,
        make_device=GrowingDevice,
    )
    counts = chatter.run(TURNS, events=["host"])
    assert counts["grown"] > 10
    happened.update(counts)


@pytest.mark.parametrize("disturbed", [False, True], ids=["", "disturbed"])
def test_replies_that_outgrow_the_pool(model, disturbed):
    engine, reference, happened = model
    chatter = Chatter(engine, reference, 9, disturbed=disturbed, gpu_kv_chunks=29, **TIGHT)
    happened.update(chatter.run(TURNS, events=["suspended"]))


def test_replies_without_reuse(model):
    engine, reference, _ = model
    counts = Chatter(engine, reference, 3, reuse=False, gpu_kv_chunks=60).run(TURNS)
    assert counts["gpu"] == counts["host"] == counts["recomputed"] == 0


@pytest.mark.parametrize("chunk_tokens", [1, 32])
def test_replies_at_other_chunk_sizes(model, chunk_tokens):
    engine, reference, happened = model
    chunks = 230 if chunk_tokens == 1 else 9
    chatter = Chatter(
        engine, reference, 5, chunk_tokens=chunk_tokens, gpu_kv_chunks=chunks, host_kv_chunks=chunks
    )
    happened.update(chatter.run(TURNS))


@pytest.mark.slow
@pytest.mark.parametrize("disturbed", [False, True], ids=["", "disturbed"])
@pytest.mark.parametrize(
    "kind", ["llama", "qwen3-windows", "mixtral", "qwen3-moe", "gemma3", "gpt-oss", "opt"]
)
def test_replies_of_compiled_engines(kind, disturbed, tmp_path_factory):
    torch.set_num_threads(1)
    directory, reference = compiled_engine(kind, tmp_path_factory)
    chatter = Chatter(
        open_engine(directory), reference, 11 + disturbed, disturbed=disturbed, gpu_kv_chunks=29
    )
    chatter.run(2 * TURNS, events=("gpu", "host", "recomputed", "new", "dropped"))


def test_everything_has_happened(model):
    """Hundreds of turns, and every event the tests above are about (runs last, once a model)."""
    _, _, happened = model
    print(dict(happened))
    assert happened["replies"] > 1000
    for event in EVENTS:
        assert happened[event] > 0, f"{event} never occurred"
