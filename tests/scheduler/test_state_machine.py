"""The same operations as the driver's, chosen and shrunk by Hypothesis: a failure comes as the
shortest story."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pensieve.scheduler.config import BATCHING_MODES, EVICTION_POLICIES, PLAIN_POLICIES, SAVE_MODES
from pensieve.scheduler.context_window import OVERFLOW_MODES
from pensieve.scheduler.kv import lower_tiers
from pensieve.scheduler.kv.disk_tier import DiskTier
from pensieve.scheduler.types import ErrorKind, RequestError

from .driver import MOST_IN_FLIGHT
from .harness import Harness
from .memory_tier import MemoryTier

NAMES = ("a", "b", "c", "d")
OPENINGS = (range(14), range(20, 34), [*range(8), *range(60, 66)])
pick = st.integers(min_value=0, max_value=10**6)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        eviction=st.sampled_from((*EVICTION_POLICIES, *PLAIN_POLICIES)),
        batching=st.sampled_from(BATCHING_MODES),
        host=st.sampled_from((0, 6, 16)),
        chunks_a_step=st.sampled_from((0.85, 1, 4)),
        tokens_a_step=st.sampled_from((6, 24)),
        swap_out_below=st.sampled_from((0.0, 0.5)),
        reuse=st.sampled_from((True, True, True, False)),
        disk=st.sampled_from((0, 12, 60)),
        save=st.sampled_from(SAVE_MODES),
        prefetch=st.booleans(),
        copies_may_fail=st.booleans(),
        log_chunks=st.sampled_from((inf, 20)),
        lower_tier=st.sampled_from((DiskTier, MemoryTier)),
        overflow=st.sampled_from(OVERFLOW_MODES),
        overflow_ratio=st.sampled_from((0.5, 0.2)),
    )
    def start(self, host, disk, tokens_a_step, lower_tier, **settings):
        self.remembered = {}
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(lower_tiers, "DiskTier", lower_tier)
        self.harness = SlowDisk(
            gpu_kv_chunks=14,
            max_model_len=48,
            host_kv_chunks=host,
            host_kv_growth=20 if host else 0,
            disk_kv_chunks=disk if host else 0,
            max_num_batched_tokens=tokens_a_step,
            **settings,
        )

    @rule(
        name=st.sampled_from((None, *NAMES)),
        opening=st.sampled_from(OPENINGS),
        kept=st.integers(0, 48) | st.just(48),
        new=st.lists(st.integers(0, 3), max_size=6),
        max_tokens=st.sampled_from((1, 5, 16)),
        salt=st.sampled_from((b"", b"", b"", b"other")),
        stop=st.booleans(),
        confirm=st.booleans(),
        priority=st.sampled_from((0, 0, 0, -1, 2)),
        truncate=st.booleans(),
    )
    def submit(self, name, opening, kept, new, max_tokens, salt, stop, confirm, priority, truncate):
        log = self.harness.logs.get(name, self.remembered.get(name, opening))
        start = log[: None if truncate else kept] or opening
        stop_ids = frozenset(range(0, 97, 8)) if stop else frozenset()
        try:
            fields = {"salt": salt, "stop_ids": stop_ids, "confirm": confirm, "priority": priority}
            self.harness.submit(
                [*start, *new], max_tokens, name, min_tokens=1, truncate=truncate, **fields
            )
        except RequestError as refusal:
            assert refusal.kind in (ErrorKind.INVALID, ErrorKind.TOO_MANY)

    @precondition(lambda self: len(self.harness.results) < MOST_IN_FLIGHT)
    @rule(seconds=st.sampled_from((0.0, 0.001, 1.0)), steps=st.integers(1, MOST_IN_FLIGHT))
    def launch(self, seconds, steps):
        self.harness.now += seconds
        for _ in range(min(steps, MOST_IN_FLIGHT - len(self.harness.results))):
            self.harness.launch()

    @precondition(lambda self: self.harness.results)
    @rule(results=st.integers(1, MOST_IN_FLIGHT))
    def apply(self, results):
        for _ in range(results):
            self.harness.apply()

    @rule(steps=st.integers(1, 12))
    def run_a_while(self, steps):
        for _ in range(steps):
            self.harness.tick()

    @rule(slots=st.integers(1, 20))
    def grow(self, slots):
        harness = self.harness
        slots += harness.scheduler._store.host.count
        harness.grow_host(min(slots, harness.config.most_host_kv_chunks))

    @precondition(lambda self: self.harness.open)
    @rule(pick=pick)
    def abort(self, pick):
        self.harness.abort(chosen(pick, self.harness.open))

    @precondition(lambda self: self.endable())
    @rule(pick=pick, cut=st.integers(0, 15))
    def finish(self, pick, cut):
        request = chosen(pick, self.endable())
        self.harness.finish(request, max(1, len(self.harness.reply(request)) - cut))

    def endable(self):
        return [i for i, (request, reply) in self.harness.open.items() if request.confirm and reply]

    @precondition(lambda self: self.harness.logs)
    @rule(pick=pick, new=st.sampled_from(("x", "y")))
    def fork(self, pick, new):
        if new not in self.harness.logs:
            self.harness.fork(chosen(pick, self.harness.logs), new)

    @precondition(lambda self: self.harness.logs)
    @rule(pick=pick)
    def delete(self, pick):
        self.harness.delete(chosen(pick, self.harness.logs))

    @precondition(lambda self: self.harness.logs)
    @rule(pick=pick, ttl=st.sampled_from((None, 0.5, 3.0)), pinned=st.sampled_from((0.0, 0.5, 9.0)))
    def keep(self, pick, ttl, pinned):
        self.harness.keep(chosen(pick, self.harness.logs), ttl, self.harness.now + pinned)

    @precondition(lambda self: self.harness.device.work)
    @rule(pick=pick, succeeds=st.sampled_from((True, True, True, False)))
    def disk_work_ends(self, pick, succeeds):
        self.harness.done[chosen(pick, self.harness.device.work)] = succeeds

    @precondition(lambda self: self.harness.config.disk_kv_chunks)
    @rule(written=st.booleans())
    def restart(self, written):
        self.remembered |= self.harness.logs
        self.harness.done.clear()
        self.harness.restart(list(self.harness.device.work) if written else [])

    @precondition(lambda self: set(self.remembered) - set(self.harness.logs))
    @rule(pick=pick)
    def erase(self, pick):
        """A conversation of an earlier life is deleted."""
        name = chosen(pick, [name for name in self.remembered if name not in self.harness.logs])
        scheduler = self.harness.scheduler
        scheduler.lower.erase(scheduler.lower.keys(self.remembered.pop(name), b""))

    @rule(pick=pick)
    def lose_a_chunk(self, pick):
        self.harness.lose(lambda idle: idle[pick % len(idle) :][:1])

    @invariant()
    def the_books_agree(self):
        if hasattr(self, "harness"):
            self.harness.check()

    def teardown(self):
        if hasattr(self, "harness"):
            self.harness.in_time = True
            self.harness.drain()
            self.patch.undo()


class SlowDisk(Harness):
    """done   the next reports of disk work: DISK slot -> whether it succeeded
    in_time   all work is done at once
    """

    def __init__(self, **settings):
        self.done = {}
        self.in_time = False
        super().__init__(**settings)

    def reports(self):
        if self.in_time:
            return super().reports()
        outcomes = [
            (slot, succeeds) for slot, succeeds in self.done.items() if slot in self.device.work
        ]
        self.done.clear()
        return self.report(outcomes)


def chosen(pick, candidates):
    return list(candidates)[pick % len(candidates)]


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=120,
    stateful_step_count=50,
    deadline=None,
    # by the wall clock: of the machine, not of the test
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    print_blob=False,
)
