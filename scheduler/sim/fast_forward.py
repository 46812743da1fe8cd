"""Generation steps by the dozen, for the simulator: just what so many `next_plan` and `apply` would do.

Between two chunks' ends a batch of rows that only generate does nothing but count: with few rows that is most steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from ..plan import NO_TICKETS, StepPlan
from ..turns.turn import RunningTurn


def steady_steps(rows: Sequence[RunningTurn], plan: StepPlan) -> int:
    """How many steps behind `plan`, the only one in flight, are sure to be like it; `rows` are the batch.

    Such a step gives one token to each row. It takes no slot, and applying the one before it fills no chunk and begins
    or ends no reply.
    """
    if plan.spans or not rows or len(plan.generate) != len(rows):
        return 0
    steps = []
    for row in rows:
        if row.spans or row.leaving or row.constrained or row.stop_ids or len(row.tokens) < row.begin:
            return 0
        # With one step in flight the next position is that of the next token applied: slots end and chunks fill alike.
        steps.append(min(row.room, row.end - 1) - row.position)
    return max(0, min(steps))


def skip(rows: Sequence[RunningTurn], plan: StepPlan, steps: int) -> StepPlan:
    """The rows as if `steps` plans had been made and applied, `plan` the first of those applied; each sample is the
    number of its step. Returns the plan that is then in flight; `steps` is at least 1."""
    samples = array("i", range(plan.step, plan.step + steps))
    for row in rows:
        row.position += steps
        row.launched += steps
        row.tokens += samples
    positions = array("i", (row.position - 1 for row in rows))
    unchanged = replace(plan, copies=(), after=NO_TICKETS, joins=(), origins=(), blocks=(), ended=())
    return replace(unchanged, step=plan.step + steps, positions=positions)
