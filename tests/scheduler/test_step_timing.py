"""The time of the next plan, with a simulated clock: late enough to be useful, early enough for the
device."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

from pensieve.scheduler.cost import CostProfile
from pensieve.scheduler.step_timing import StepTiming
from tests.runtime.fake_engine import plan, span

# 5 ms and 20 us a token
COST = CostProfile(32, 0.0, ((32, 0.0),), 0.0, 1, 1.0, steps=((1, 0.005), (1001, 0.025)))
HOST_S = 0.001  # to plan and launch a step


class Loop:
    """A loop and its device: `real` gives a plan's seconds. A request waits at all times."""

    def __init__(self, real: Callable[[float], float], host: Callable[[], float] = lambda: HOST_S):
        self.pace = StepTiming(COST)
        self.real = real
        self.host = host
        self.now = self.free = self.idle = 0.0
        self.ends: list[float] = []
        self.closed: list[float] = []  # from the beginning of each step's plan until it began

    def step(self, tokens: int = 0) -> None:
        """Plans, launches and, if two are in flight, finishes one."""
        while (spare := self.pace.slack(self.now)) > 0:
            self.now += spare
        began = self.now
        prompt = dict(spans=[span(0, 0, tokens)], token_ids=array("i", range(tokens)))
        step_plan = plan(1, **(prompt if tokens else dict(generate={0: 5})))
        self.now += self.host()
        idle = bool(self.ends) and self.ends[-1] <= self.now
        start = max(self.free, self.now)
        self.idle += start - self.free if self.ends else 0.0
        self.free = start + self.real(COST.plan_seconds(step_plan))
        self.closed.append(start - began)
        self.pace.launched(step_plan, began, self.now, idle)
        self.ends.append(self.free)
        if len(self.ends) > 1:
            end = self.ends.pop(0)
            self.pace.finished(max(self.now, end), seen=end > self.now)
            self.now = max(self.now, end)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_a_step_is_open_until_shortly_before_it_begins() -> None:
    loop = Loop(lambda seconds: 2 * seconds)  # slower than in the profile
    for _ in range(400):
        loop.step()
    before = loop.idle
    for _ in range(1000):
        loop.step()
    # planned with the one before it running: 10 ms
    assert HOST_S < mean(loop.closed[400:]) < HOST_S + 0.0015
    assert loop.idle - before < 1e-3


def test_at_first_nothing_is_known_and_nothing_is_risked() -> None:
    loop = Loop(lambda seconds: 0.5 * seconds)
    for _ in range(20):
        loop.step()
    assert loop.idle == 0


def test_steps_that_vary_leave_the_device_busy() -> None:
    """Also if the profile's cost of tokens is wrong by half."""
    dice = random.Random(1)
    loop = Loop(
        lambda seconds: (seconds + 0.005) / 2 * dice.uniform(0.95, 1.05),
        lambda: HOST_S * dice.uniform(0.5, 2),
    )
    for _ in range(4000):
        loop.step(dice.choice([0, 0, 0, 40, 300]))
    assert loop.idle < 1e-3 * loop.now
    assert mean(loop.closed[400:]) < 0.7 * loop.now / 4000


def test_a_host_that_hesitates_now_and_then_is_given_more_time() -> None:
    dice = random.Random(2)
    loop = Loop(lambda seconds: seconds, lambda: 0.004 if dice.random() < 0.02 else 0.0005)
    for _ in range(2000):
        loop.step()
    idle, began = loop.idle, loop.now
    assert idle < 6e-3 * began, "while it learns"
    for _ in range(4000):
        loop.step()
    assert loop.idle - idle < 1e-3 * (loop.now - began)


def test_rare_pauses_of_the_host_do_not_close_every_plan_early() -> None:
    """One in 200 is late: that costs less than if all plans waited for the longest pause."""
    dice = random.Random(3)
    loop = Loop(
        lambda seconds: 2 * seconds, lambda: HOST_S + (0.005 if dice.random() < 0.005 else 0.0)
    )
    for _ in range(10_000):
        loop.step()
    assert mean(loop.closed[2000:]) < 0.003, (
        "it was 0.0060 with the longest pause as the time to allow for"
    )
    assert loop.idle < 5e-3 * loop.now


def test_steps_that_become_quicker_are_noticed() -> None:
    speed = 2.0
    loop = Loop(lambda seconds: speed * seconds)
    for _ in range(400):
        loop.step()
    before = loop.idle
    speed = 1.0
    for _ in range(400):
        loop.step()
    assert 0 < loop.idle - before < 0.05
    loop.idle = 0.0
    for _ in range(2000):
        loop.step()
    assert loop.idle == 0 and mean(loop.closed[-500:]) < 0.0035


def test_work_without_tokens_is_not_waited_for() -> None:
    pace = StepTiming(COST)
    pace.launched(plan(1), 0.0, 0.0, idle=False)
    assert pace.slack(0.0) == 0
    pace.finished(1.0, seen=True)
    assert pace.slack(1.0) == 0
