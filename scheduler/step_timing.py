"""When the next step is planned: as late as the device allows, so that requests that come meanwhile are in it.

A step that is planned the moment the one before it begins is closed for as long as that one runs: a request waits for
the rest of the step that runs, for a whole one that it missed, and for its own. Planned just before it is launched, the
one in the middle is spared.

    device   |--- step 7 ---|--- step 8 ---|--- step 9 ---|
    loop      .... plan, launch 8 | apply 7 .... plan, launch 9 | apply 8 ....        .... takes requests in

How long the running step takes is predicted from its plan, corrected by how steps with about as many tokens of prompts
turned out. Who is late all the same, and lets the device idle, leaves more time from then on: in the end at most one
step in a hundred or so is. Never to be late would close every plan by the host's longest pause before its step.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

from .cost import CostProfile
from .plan import StepPlan

LEARNED = 1 / 16  # of what is known of steps, by each
SPREADS = 3.0  # mean deviations that a step may be quicker than predicted
LEAST_MARGIN, MOST_MARGIN = 0.3e-3, 0.1  # seconds that the next step is ready before this one ends, on rank 0
RELAXED, RAISED = 0.998, 1.25  # what becomes of the margin with each step, and when one was late: 1 in 110 is


class _Running(NamedTuple):
    kind: int
    seconds: float  # predicted, uncorrected
    began: float | None  # None: not seen


class _Experience:
    """With steps of one kind: what real seconds are of predicted ones, and how far from it they are on average."""

    def __init__(self) -> None:
        self.ratio = self.spread = 1.0  # nothing is certain at first

    def add(self, ratio: float) -> None:
        self.spread += LEARNED * (abs(ratio - self.ratio) - self.spread)
        self.ratio += LEARNED * (ratio - self.ratio)

    @property
    def least(self) -> float:
        return self.ratio - SPREADS * self.spread


class StepTiming:
    """Told what the loop does and when, in seconds of one clock; answers how long it may wait. Of one thread."""

    def __init__(self, cost: CostProfile):
        self._cost = cost
        self._steps: deque[_Running] = deque()
        self._experience: defaultdict[int, _Experience] = defaultdict(_Experience)  # by kind
        self._lead: float | None = None  # from the beginning of planning until the step is launched, on average
        self._margin = LEAST_MARGIN
        self._waited = False

    def slack(self, now: float) -> float:
        """Seconds for which the next plan can wait; 0: none."""
        if len(self._steps) != 1:
            return 0.0
        kind, seconds, began = self._steps[0]
        if began is None or self._lead is None:
            return 0.0
        surely = seconds * self._experience[kind].least
        spare = max(0.0, began + surely - self._lead - self._margin - now)
        self._waited = self._waited or spare > 0
        return spare

    def launched(self, plan: StepPlan, planning_began: float, now: float, idle: bool) -> None:
        """The plan is handed to the device. idle: it had nothing left to do."""
        if idle and self._waited:
            self._margin = min(RAISED * self._margin, MOST_MARGIN)
        self._margin = max(RELAXED * self._margin, LEAST_MARGIN)  # else, once too large to wait, it would stay so
        lead = now - planning_began
        self._lead = lead if self._lead is None else self._lead + LEARNED * (lead - self._lead)
        self._waited = False
        kind = len(plan.token_ids).bit_length()
        self._steps.append(_Running(kind, self._cost.plan_seconds(plan), None if self._steps else now))

    def finished(self, now: float, seen: bool) -> None:
        """The oldest step's result is here. seen: the loop waited for it, so it ended now."""
        kind, seconds, began = self._steps.popleft()
        if seen and began is not None and seconds:
            self._experience[kind].add((now - began) / seconds)
        if self._steps:
            self._steps[0] = self._steps[0]._replace(began=now if seen else None)
