"""Many generation steps at once, for the simulator, with the same result as that many `next_plan`
and `apply` calls.

While no chunk fills up, a batch of rows that only generate changes nothing but counters: with few
rows that is most steps.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

from ..plan import NO_TICKETS, StepPlan
from ..scheduler import Scheduler
from ..types import GPU


class FastForwardScheduler(Scheduler):
    """A scheduler that can skip steps in which every row generates one token and nothing else
    happens."""

    def steady_steps(self) -> int:
        """How many steps after the only one in flight are sure to be like it, if no request arrives
        or leaves.

        Such a step gives one token to each row. It takes no slot. Applying the step before it fills
        no chunk and begins or ends no reply.
        """
        busy = bool(self._queues.waiting or self._queues.swapping_in or self._has_begun_work)
        busy = busy or self.conversations.mortal or self.lower.busy
        busy = busy or self.config.states is not None  # a step may move one
        if (
            busy
            or self.in_flight != 1
            or (self._store.available < self._mark() and self._store.only[GPU])
        ):
            return 0
        rows = self._queues.rows
        plan = self._inflight[0][0]
        if plan.spans or not rows or len(plan.generate) != len(rows):
            return 0
        steps = []
        for row in rows:
            if (
                row.spans
                or row.leaving
                or row.constrained
                or row.stop_ids
                or len(row.tokens) < row.begin
            ):
                return 0
            # With one step in flight the next position is that of the next token applied: slots end
            # and chunks fill alike.
            steps.append(min(row.first_without_slot, row.end - 1) - row.position)
        return max(0, min(steps))

    def skip(self, steps: int) -> StepPlan:
        """Has the effect of `steps` pairs of `next_plan` and `apply`: at least 1, at most
        `steady_steps()`.

        Each sample is the number of its step. Returns the plan that is then in flight.
        """
        plan, span_rows = self._inflight.pop()
        samples = array("i", range(plan.step, plan.step + steps))
        rows = self._queues.rows
        for row in rows:
            row.position += steps
            row.launched += steps
            row.reply += samples
        positions = array("i", (row.position - 1 for row in rows))
        unchanged = replace(
            plan, copies=(), after=NO_TICKETS, joins=(), origins=(), blocks=(), ended=()
        )
        plan = replace(unchanged, step=plan.step + steps, positions=positions)
        self._inflight.append((plan, span_rows))
        self._step = plan.step
        self._applied = plan.step - 1
        return plan
