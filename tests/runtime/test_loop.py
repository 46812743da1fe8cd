"""The loop's two steps in flight, and that it has no copies."""

from __future__ import annotations

from array import array

from benchmarks.check.house import SHIPPED, planners
from pensieve.runtime.loop import EngineLoop
from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.cost import CostProfile
from pensieve.scheduler.plan import StepResult
from pensieve.scheduler.scheduler import Scheduler
from pensieve.scheduler.types import Request, RequestId


class Notes:
    """An executor that samples token 7 and records its calls."""

    def __init__(self):
        self.launched, self.calls = [], []

    def launch(self, plan):
        self.launched.append(plan)
        self.calls.append(f"launch {plan.step}")

    def wait(self):
        plan = self.launched.pop(0)
        self.calls.append(f"wait {plan.step}")
        return StepResult(plan.step, plan.samples, (7,) * len(plan.samples))

    def done(self):
        return False


def make_loop():
    config = SchedulerConfig(
        gpu_kv_chunks=8, host_kv_chunks=0, max_model_len=64, max_num_seqs=2, chunk_tokens=8
    )
    cost = CostProfile(8, 0.0, ((1, 1e-3), (64, 1e-2)), 0.0, chunk_bytes=1, link_bytes_per_s=1.0)
    executor = Notes()
    return EngineLoop(Scheduler(config, cost), executor), executor


def test_the_next_step_is_launched_before_the_last_one_is_awaited():
    loop, executor = make_loop()
    loop.scheduler.add(Request(RequestId(1), array("i", [1, 2, 3]), 3), loop.clock())
    assert loop.step() is None and not loop.idle
    tokens = []
    while not loop.scheduler.idle:
        if (applied := loop.step()) is not None:
            tokens += [token for row in applied.results() for token in row.tokens]
    assert tokens == [7, 7, 7]
    first, second, third = executor.calls[:3]
    assert (first.split()[0], second.split()[0], third) == (
        "launch",
        "launch",
        first.replace("launch", "wait"),
    )


def test_without_requests_nothing_is_launched():
    loop, executor = make_loop()
    assert loop.step() is None
    assert loop.idle and executor.calls == []


def test_only_the_loop_plans_steps():
    """Elsewhere only the simulator and tests of the scheduler do."""
    assert planners(*SHIPPED, "benchmarks", "tests") == {"runtime/loop.py"}


def test_the_loop_measures_the_pause_of_the_device_in_which_a_plan_waits(monkeypatch):
    """From the arrival of the result to the launch behind it: apply, what the caller does, plan,
    launch. Otherwise no pause is seen, and it is taken to be the loop's own parts of it."""
    loop, _ = make_loop()
    ticks = iter(range(1000))
    loop.clock = lambda: float(next(ticks))
    turnarounds = []
    scheduler = loop.scheduler
    monkeypatch.setattr(scheduler.draft_timing, "turned_round", turnarounds.append)
    scheduler.add(Request(RequestId(1), array("i", [1, 2, 3]), 5), 0.0)
    loop.step()  # plan at 0, launched at 1
    assert turnarounds == [1.0]
    next_plan = scheduler.next_plan

    def waits(now):
        scheduler.awaits_result = True

    monkeypatch.setattr(scheduler, "next_plan", waits)
    assert loop.step() is not None  # plan at 2; the result came at 3, applied at 4
    monkeypatch.setattr(scheduler, "next_plan", next_plan)
    loop.clock()  # the caller is busy until 5
    loop.step()  # plan at 6, launched at 7
    assert turnarounds == [1.0, 4.0]
    loop.step()  # plan at 8, launched at 9, result at 10, applied at 11
    assert turnarounds == [1.0, 4.0, 2.0], "one for the plan and launch, one for the last apply"
