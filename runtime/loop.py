"""The engine's loop: plan a step, launch it, and apply the previous step's result while the new
step runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ..scheduler.plan import StepPlan, StepResult
from ..scheduler.scheduler import Scheduler
from ..scheduler.step_timing import StepTiming
from ..scheduler.types import Applied
from .observe.loop_stats import LoopCounters

STEPS_IN_FLIGHT = 2  # one runs, the next is launched behind it


class StepExecutor(Protocol):
    """The methods of an `Executor` that the loop calls."""

    def launch(self, plan: StepPlan) -> None: ...

    def wait(self) -> StepResult: ...

    def done(self) -> bool: ...


class EngineLoop:
    """Scheduler and executor with two steps in flight. One thread; knows no messages and no
    clients."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: StepExecutor,
        counters: LoopCounters | None = None,
        timing: StepTiming | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """counters    times the parts of each step (default: new counters)
        timing      receives the times at which steps are planned, launched and finished; predicts
                    when the next plan is due (default: one of its own)
        clock       returns seconds; the scheduler gets the same times
        """
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.counters = LoopCounters() if counters is None else counters
        self._timing = StepTiming(scheduler.cost) if timing is None else timing

    def step(self) -> Applied | None:
        """Makes one pass. Returns None if no result was due: a step was launched, or nothing is in
        flight and there is nothing to do. Raises the error that ended the device, and
        InvariantError."""
        began = self.clock()
        with self.counters.plan:
            plan = self.scheduler.next_plan(began)
        if plan is not None:
            self._launch(plan, began)
        # If a plan was launched, the step before it is waited for; else the only one in flight.
        if self.scheduler.in_flight < (STEPS_IN_FLIGHT if plan is not None else 1):
            return None
        return self._finish()

    @property
    def idle(self) -> bool:
        """True if nothing is in flight. If `step` just returned None, there was nothing to do."""
        return not self.scheduler.in_flight

    def _launch(self, plan: StepPlan, began: float) -> None:
        """`began`: when planning began, seconds."""
        self.counters.launching(plan)
        with self.counters.launch:
            self.executor.launch(plan)
        self.counters.launched(plan)
        device_idled = self.scheduler.in_flight > 1 and self.executor.done()
        now = self.clock()
        self._timing.launched(plan, began, now, device_idled)
        self.scheduler.draft_timing.launched(began, now)

    def _finish(self) -> Applied:
        """Waits for the oldest step in flight and applies its result."""
        running = not self.executor.done()
        with self.counters.wait:
            result = self.executor.wait()
        self.counters.finished()
        came = self.clock()
        took = self._timing.finished(came, running)
        scheduler = self.scheduler
        with self.counters.apply:
            applied = scheduler.apply(result, came, took)
        scheduler.draft_timing.applied(came, self.clock(), scheduler.awaits_result)
        return applied
