"""When the next step is planned: as late as the device allows, so that it includes requests that
arrive in the meantime.

If a step were planned the moment the previous one begins, a new request would wait for the rest of
the running step, for a whole step that it missed, and for its own. With planning just before the
launch it does not wait for the step in the middle.

    device   |--- step 7 ---|--- step 8 ---|--- step 9 ---|
    loop      .... plan, launch 8 | apply 7 .... plan, launch 9 | apply 8 ....        .... takes
              requests in

The running step's duration is predicted from its plan, corrected by the measured durations of steps
with about as many prompt tokens. When a step was late and the device idled, the margin grows;
otherwise it shrinks slowly. So about one step in a hundred is late. A margin that prevents every
late step would have to cover the host's longest pause.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

from .cost import CostProfile
from .plan import StepPlan

LEARNED = 1 / 16  # weight of each new step in the averages
SPREADS = 3.0  # mean deviations by which a step may be faster than predicted
# seconds between the next step's launch and this step's end, on rank 0
LEAST_MARGIN, MOST_MARGIN = 0.3e-3, 0.1
# factors of the margin: after each step, and after a late one; 1 step in 110 is late
RELAXED, RAISED = 0.998, 1.25


class _Running(NamedTuple):
    kind: int
    seconds: float  # predicted, uncorrected
    began: float | None  # None: its begin was not seen


class _Experience:
    """Steps of one kind: the ratio of measured to predicted seconds, and its mean deviation."""

    def __init__(self) -> None:
        self.ratio = self.spread = 1.0  # a cautious start: no step has been measured

    def add(self, ratio: float) -> None:
        self.spread += LEARNED * (abs(ratio - self.ratio) - self.spread)
        self.ratio += LEARNED * (ratio - self.ratio)

    @property
    def least(self) -> float:
        return self.ratio - SPREADS * self.spread


class StepTiming:
    """Receives the loop's times, in seconds of one clock; predicts how long the loop may wait. Used
    by one thread."""

    def __init__(self, cost: CostProfile):
        self._cost = cost
        self._steps: deque[_Running] = deque()
        self._experience: defaultdict[int, _Experience] = defaultdict(_Experience)  # by kind
        self._lead: float | None = None  # mean seconds from the start of planning to the launch
        self._margin = LEAST_MARGIN
        self._waited = False

    def slack(self, now: float) -> float:
        """Seconds until the next step must be planned; 0: now."""
        if len(self._steps) != 1:
            return 0.0
        kind, seconds, began = self._steps[0]
        if began is None or self._lead is None:
            return 0.0
        surely = seconds * self._experience[kind].least
        slack = max(0.0, began + surely - self._lead - self._margin - now)
        self._waited = self._waited or slack > 0
        return slack

    def launched(self, plan: StepPlan, planning_began: float, now: float, idle: bool) -> None:
        """Records that the plan was handed to the device. `idle`: the previous step had already
        ended, so the device waited for this one."""
        if idle and self._waited:
            self._margin = min(RAISED * self._margin, MOST_MARGIN)
        # otherwise a margin too large to wait at all would never shrink
        self._margin = max(RELAXED * self._margin, LEAST_MARGIN)
        lead = now - planning_began
        self._lead = lead if self._lead is None else self._lead + LEARNED * (lead - self._lead)
        self._waited = False
        kind = len(plan.token_ids).bit_length()
        self._steps.append(
            _Running(kind, self._cost.plan_seconds(plan), None if self._steps else now)
        )

    def finished(self, now: float, seen: bool) -> float | None:
        """Records that the oldest step's result has arrived. `seen`: the loop waited for it, so the
        step ended now. Returns the seconds that it took if its begin was seen too."""
        kind, seconds, began = self._steps.popleft()
        took = now - began if seen and began is not None and seconds else None
        if took is not None:
            self._experience[kind].add(took / seconds)
        if self._steps:
            self._steps[0] = self._steps[0]._replace(began=now if seen else None)
        return took
