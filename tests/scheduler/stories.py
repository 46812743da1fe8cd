"""Starting states of the hazard tests: small pools, histories that were moved away, requests in
progress."""

from __future__ import annotations

from pensieve.scheduler.kv.chunk import NO_SLOT
from pensieve.scheduler.plan import Lane
from pensieve.scheduler.types import GPU, HOST

TIGHT = {"gpu_kv_chunks": 16, "max_num_seqs": 2, "generation_reserve": 0.0, "swap_out_below": 0.0}
FLUSH = range(100, 160)  # a prompt of 15 chunks; with its reply it fills a pool of 16


def off_gpu(harness, name="a", tokens=18):
    """A conversation of `tokens` and two more tokens; another request's long prompt has moved all
    its chunks away."""
    harness.turn(range(tokens), 2, name)
    harness.turn(FLUSH, 4)
    tail = harness.scheduler.conversations.get(name).tail
    if tail is not None and harness.config.host_kv_chunks:
        assert tail.slots[GPU] == NO_SLOT and tail.slots[HOST] != NO_SLOT
    return [*harness.logs[name], 7, 8]


def loading_early(harness):
    """A running request, and one whose swap-in (5 chunks, one or two in a step) has begun before it
    has a seat."""
    prompt = off_gpu(harness)
    running = harness.submit([50, 51], 40)
    harness.tick()
    loading = harness.submit(prompt, 4, "a")
    plan = harness.launch()
    while harness.state(loading) == "waiting":  # for room
        harness.apply()
        plan = harness.launch()
    assert harness.state(loading) == "loading"
    early = [batch for batch in plan.copies if batch.lane == Lane.IN]
    assert len(early) == 1 and not early[0].gated
    return running, loading, early[0]


def suspended(harness, tokens=20, **fields):
    """Two requests that outgrow the pool: the younger one, suspended."""
    harness.submit(range(20), 40, "old")
    younger = harness.submit(range(40, 40 + tokens), 30, "young", **fields)
    harness.run_until(lambda: harness.state(younger) == "suspended")
    return younger
