"""The loop's counts of its steps, and the devices' measurements of copies."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from pensieve.runtime.counters import NO_WAITS, PowerCounts, Waits
from pensieve.runtime.device.cpu import CpuDevice
from pensieve.runtime.device.protocol import TransferSeconds
from pensieve.runtime.device.timing import TransferTimes, exposed_seconds
from pensieve.runtime.observe.loop_stats import LoopCounters
from pensieve.runtime.step.inputs import StepPacker
from pensieve.scheduler.plan import BlockUpdate, Lane
from pensieve.scheduler.types import Tier

from ..device.test_cpu import hold
from ..fake_engine import FakeEngine, join, plan, span

COPY_S = 0.05


def test_sizes_are_counted_by_powers_of_two() -> None:
    counters = LoopCounters()
    for number, tokens in enumerate((1, 2, 3, 4, 5), start=1):
        counters.launched(
            plan(number, spans=[span(0, 0, tokens)], token_ids=array("i", range(tokens)))
        )
    counters.launched(plan(6))  # counts as no step: it waits for the disk
    stats = counters.read(TransferSeconds())
    assert stats.tokens == PowerCounts((1, 1, 2, 1), 15)  # 1 | 2 | 3, 4 | 5
    assert stats.requests == PowerCounts((5,), 5)
    assert stats.steps == 5


def test_the_device_is_busy_while_anything_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    counters = LoopCounters()
    with counters.plan:
        now += 1
    counters.launched(plan(1, generate={0: 5}))
    now += 2
    counters.launched(plan(2, generate={0: 6}))
    counters.finished()
    counters.launched(plan(3))  # waits for the disk only
    with counters.wait:
        now += 3
    assert counters.read(TransferSeconds()).busy == 5  # it still is
    counters.finished()
    now += 10
    counters.finished()
    stats = counters.read(TransferSeconds(1, 2, 3))
    assert stats.busy == 5
    assert stats.parts == {"plan": 1, "launch": 0, "wait": 3, "apply": 0, "send": 0}
    assert (stats.swap_in, stats.swap_out, stats.exposed) == (1, 2, 3)


# -- transfers


@pytest.mark.parametrize("hidden", [True, False])
def test_the_cpu_device_measures_what_a_step_waits_for(hidden: bool) -> None:
    """A slow swap-in before a step that waits for it is exposed; one that no step waits for is
    hidden."""
    device = CpuDevice(disturb=lambda lane: COPY_S if lane is Lane.IN else 0.0)
    engine = FakeEngine(3)
    for tier in (Tier.GPU, Tier.HOST):
        device.allocate_pool(tier, engine.kv_shape(8, 4), engine.dtype)
    device.load(engine, seats=2, blocks=4, gates=(0,), most_tokens=16)
    step = plan(
        1,
        joins=[join(0)],
        blocks=[BlockUpdate(0, 0, (1,))],
        spans=[span(0, 0, 2)],
        token_ids=[1, 2],
    )
    go_on = hold(device, Lane.IN)
    device.copy(Lane.IN, np.array([1], np.int32), np.array([1], np.int32), range(3))
    ticket = device.mark(Lane.IN, gate=None if hidden else 0)
    device.upload(StepPacker(2, 4, 4).pack(step, None))
    device.run()
    go_on.set()
    device.synchronize(device.sample()[0])
    device.synchronize(ticket)
    measured = device.transfer_seconds()
    device.close()
    assert measured.swap_in >= COPY_S and measured.swap_out == 0
    assert measured.exposed < COPY_S / 2 if hidden else measured.exposed > COPY_S / 2


def test_the_cpu_device_measures_what_copies_wait_for_their_lane() -> None:
    """The second copy of a lane begins after the first; the other lane has its own."""
    device = CpuDevice(disturb=lambda lane: COPY_S if lane is Lane.OUT else 0.0)
    engine = FakeEngine(3)
    for tier in (Tier.GPU, Tier.HOST):
        device.allocate_pool(tier, engine.kv_shape(8, 4), engine.dtype)
    go_on = hold(device, Lane.OUT)
    for slot in (1, 2):
        device.copy(Lane.OUT, np.array([slot], np.int32), np.array([slot], np.int32), range(3))
    go_on.set()
    device.synchronize(device.mark(Lane.OUT))
    measured = device.transfer_seconds()
    device.close()
    assert measured.queued_out.copies == 2 and measured.queued_out.seconds >= COPY_S
    assert measured.queued_in == NO_WAITS


@pytest.mark.parametrize(
    ("total", "opened", "exposed"),
    [
        (4.0, [], 0.0),
        (4.0, [(0, -1.0), (2, 1.0)], 0.0),  # both open before they are reached
        (5.0, [(0, 1.0)], 1.0),  # the whole step waits 1 s
        (6.0, [(0, 0.0), (2, 4.0)], 2.0),  # layers 0 and 1 take 2 s, and then wait 2 s
        (7.0, [(0, 1.0), (2, 5.0)], 3.0),  # 1 s ahead, 2 s in the middle
    ],
)
def test_exposed_time_is_what_layers_of_equal_length_leave_over(
    total: float, opened: list[tuple[int, float]], exposed: float
) -> None:
    """Four layers of a second each."""
    assert exposed_seconds(total, 4, opened) == pytest.approx(exposed)


class Clock:
    """Streams are names; an event is complete when the test has set its time, milliseconds."""

    def __init__(self) -> None:
        self.events: list[FakeEvent] = []

    def event(self) -> FakeEvent:
        self.events.append(FakeEvent())
        return self.events[-1]


class FakeEvent:
    def __init__(self, at: float | None = None) -> None:
        self.at = at

    def record(self, stream: str) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.at is not None and end.at is not None
        return end.at - self.at


def test_events_time_copies_and_the_steps_behind_them() -> None:
    clock = Clock()
    issued = []
    times = TransferTimes(
        clock.event, {Lane.COMPUTE: "compute", Lane.IN: "in", Lane.OUT: "out"}, "idle"
    )
    times.loaded(4)
    gate = FakeEvent(7000.0)
    times.copy(Lane.IN, 64, lambda: issued.append("copy"))
    times.gated(2, gate)
    times.step(8, lambda: issued.append("step"))
    times.step(8, lambda: issued.append("step that waits for nothing"))
    assert issued == ["copy", "step", "step that waits for nothing"]
    assert [event.stream for event in clock.events] == ["idle", "in", "in", "compute", "compute"]
    assert times.read() == TransferSeconds()
    copy_issued, copy_start, copy_end, step_start, step_end = clock.events
    copy_start.at, copy_end.at = 1000.0, 6500.0
    assert times.read() == TransferSeconds(), "when it was issued is not known yet"
    copy_issued.at = 750.0
    copied = TransferSeconds(swap_in=5.5, queued_in=Waits(0.25, 1))
    assert times.read() == copied
    step_start.at, step_end.at = 3000.0, 9000.0  # the gate opens after 4 s of its 6
    assert times.read() == copied._replace(exposed=2.0) == times.read()


def test_a_copy_on_an_idle_lane_has_not_waited() -> None:
    """Of two events recorded one after the other on two idle streams either may happen first."""
    clock = Clock()
    times = TransferTimes(
        clock.event, {Lane.COMPUTE: "compute", Lane.IN: "in", Lane.OUT: "out"}, "idle"
    )
    for at in (0.0, 8.0):
        times.copy(Lane.OUT, 64, lambda: None)
        for event, then in zip(clock.events[-3:], (at + 0.004, at, at + 5.0), strict=True):
            event.at = then
    assert times.read().queued_out == Waits(0.0, 2)


def test_a_step_that_is_held_is_timed_from_before_the_wait() -> None:
    clock = Clock()
    times = TransferTimes(
        clock.event, {Lane.COMPUTE: "compute", Lane.IN: "in", Lane.OUT: "out"}, "idle"
    )
    times.loaded(4)
    times.held(FakeEvent(3000.0))
    times.held(FakeEvent(2000.0))
    times.step(8, lambda: None)
    start, end = clock.events
    start.at, end.at = 1000.0, 7000.0
    assert times.read().exposed == 2.0
