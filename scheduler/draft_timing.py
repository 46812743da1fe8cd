"""What a step with drafts costs: the profile's seconds, corrected by those of steps that ran."""

from __future__ import annotations

from .cost import CostProfile
from .plan import StepPlan

LEARNED = 1 / 16  # weight of each new step in the averages
FIRST_TURNAROUND = 1.5e-3
# A step or a pause may be measured beside something else, such as a kernel's compilation: none
# counts as more than this many times what was expected.
MOST_TIMES = 2.0
# With each step without drafts, the correction of steps with drafts goes this part of the way to
# that of the others. So a mistaken one is tried again.
FORGOTTEN = 1 / 256


class DraftTiming:
    """turnaround   seconds that the device idles if a plan waits for the result of the step before
    it: the loop applies the result, plans and launches
    """

    def __init__(self, cost: CostProfile):
        self._cost = cost
        self.turnaround = FIRST_TURNAROUND
        self._apply_seconds = 0.0  # of the last result
        # when the result came for which the next plan waits, and the device with it
        self._awaited: float | None = None
        # measured to predicted seconds of steps that only generate, and of those with drafts
        self._plain = self._drafted = 1.0

    def applied(self, came: float, now: float, awaited: bool) -> None:
        """Records that a result came and was applied. `awaited`: the next plan waited for it."""
        self._apply_seconds = now - came
        self._awaited = came if awaited else None

    def launched(self, began: float, now: float) -> None:
        """Records that a plan, begun at `began`, was launched. If it waited for a result, that was
        a turnaround. Otherwise the device did not idle, and the loop's parts of one count."""
        if self._awaited is None:
            self.turned_round(now - began + self._apply_seconds)
        else:
            self.turned_round(now - self._awaited)
            self._awaited = None

    def turned_round(self, seconds: float) -> None:
        """Records a turnaround, seconds."""
        most = MOST_TIMES * self.turnaround + 1e-4
        self.turnaround += LEARNED * (min(seconds, most) - self.turnaround)

    def took(self, plan: StepPlan, seconds: float) -> None:
        """Records how long the plan's step took. Steps with prompts are left out."""
        drafts = any(span.samples > 1 for span in plan.spans)
        # a span of a reply computes again only what lies before its samples
        prompts = any(
            not span.samples or span.end - span.write_from != span.samples for span in plan.spans
        )
        if not plan.samples or prompts:
            return
        ratio = seconds / self._cost.plan_seconds(plan)
        if drafts:
            self._drafted += LEARNED * (min(ratio, MOST_TIMES * self._drafted) - self._drafted)
        else:
            self._plain += LEARNED * (min(ratio, MOST_TIMES * self._plain) - self._plain)
            self._drafted += FORGOTTEN * (self._plain - self._drafted)

    def step(self, prompt: int, rows: int, context: int, drafts: int = 0) -> float:
        """Predicted seconds of a step with `prompt` tokens of prompts, `rows` rows that generate,
        with mean context `context`, and drafts of these rows."""
        if not prompt + rows + drafts:
            return 0.0
        tokens = prompt + drafts
        seen = context * drafts // tokens if tokens else 0
        predicted = self._cost.step(tokens, seen, rows, context)
        return predicted * (self._drafted if drafts else self._plain)
