"""One step on all ranks: rank 0 sends its plans to the others before it executes them itself, and
uses the slowest rank's reports.

The report on step n is waited for with step n + 1, so no step waits for a report.
"""

from __future__ import annotations

import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, NamedTuple

from ...scheduler.plan import NO_TICKETS, Join, StepPlan, StepResult, Tickets, TierReport
from ...scheduler.types import GREEDY, RequestId, RowId, StoredRecord, Tier
from ..executor import Executor
from ..gc_control import GarbageCollector
from ..system import give_up_after
from .mpi import FAREWELL_SECONDS, OVERDUE_SECONDS, RankFailed, Ranks, pause, wait_until

SLOT_KINDS = ("spilled", "promoted", "failed", "erase_failed", "late")
"""Fields of a `TierReport` that list slots."""

NO_ROW = RowId(RequestId(0), 0)

# Rank 0 samples, so sampling settings are not sent. The rows with prompt log probabilities are
# sent, because all ranks compute their logits.
_SENT = tuple(
    field.name for field in fields(StepPlan) if field.name not in ("joins", "samples", "ended")
)
_sent = attrgetter(*_SENT)


def pack(plan: StepPlan) -> bytes:
    """Packs the parts of the plan that other ranks need."""
    joins = [(join.seat, join.prompt_logprobs) for join in plan.joins]
    return pickle.dumps((_sent(plan), joins, len(plan.samples)), pickle.HIGHEST_PROTOCOL)


def unpack(packed: bytes) -> StepPlan:
    values, joins, samples = pickle.loads(packed)
    return StepPlan(
        **dict(zip(_SENT, values, strict=True)),
        joins=tuple(Join(seat, NO_ROW, GREEDY, prompt_logprobs=wanted) for seat, wanted in joins),
        samples=(NO_ROW,) * samples,
    )


class RankReport(NamedTuple):
    """One rank's report on one step; fields as in `StepResult`, but for the last one."""

    step: int
    completed: Tickets
    lower: tuple[TierReport, ...]
    bad_copies: tuple[int, ...]
    host_slots: int = 0
    """As in `Executor`."""


def report_of(result: StepResult, host_slots: int) -> RankReport:
    values = (getattr(result, field) for field in RankReport._fields[:-1])
    return RankReport._make((*values, host_slots))


@dataclass(slots=True)
class _Answers:
    """The ranks' answers about one slot of a lower tier."""

    count: int = 0
    kind: str = ""
    failed: bool = False


class Reports:
    """The other ranks' reports, merged: the slowest rank's tickets, and work of lower tiers
    that all ranks have done."""

    def __init__(self, others: int):
        self._last = {rank: RankReport(0, NO_TICKETS, (), ()) for rank in range(1, others + 1)}
        self._answers: dict[tuple[Tier, int], _Answers] = {}
        # reported at once, by kind
        self._at_once: dict[tuple[Tier, str, int], None] = {}
        self._bad_copies: dict[int, None] = {}

    def take(self, rank: int, report: RankReport) -> None:
        self._last[rank] = report
        self._bad_copies.update(dict.fromkeys(report.bad_copies))
        for tier_report in report.lower:
            self._count(tier_report)

    @property
    def host_slots(self) -> int:
        """Slots of HOST that all the other ranks have; 0 before they have reported."""
        return min(report.host_slots for report in self._last.values())

    def late(self, step: int) -> list[int]:
        """The ranks that have not reported the step."""
        return [rank for rank, report in self._last.items() if report.step < step]

    def merged(self, own: StepResult) -> StepResult:
        """Returns rank 0's result, merged with the others'. A slot on which some ranks differ has
        failed, once all have answered."""
        for report in own.lower:
            self._count(report)
        completed = Tickets(
            *map(min, own.completed, *(report.completed for report in self._last.values()))
        )
        done: dict[Tier, dict[str, list[int]]] = {}
        for (tier, slot), answers in list(self._answers.items()):
            if answers.count > len(self._last):
                kind = "failed" if answers.failed else answers.kind
                done.setdefault(tier, {}).setdefault(kind, []).append(slot)
                del self._answers[tier, slot]
        for tier, kind, slot in self._at_once:
            done.setdefault(tier, {}).setdefault(kind, []).append(slot)
        bad_copies = tuple(dict.fromkeys((*own.bad_copies, *self._bad_copies)))
        self._at_once.clear()
        self._bad_copies.clear()
        # finds and removals are rank 0's, on behalf of all
        no_slots: dict[str, Any] = dict.fromkeys(SLOT_KINDS, ())
        reports = {
            report.tier: report._replace(**no_slots)
            for report in own.lower
            if report.looked_up or report.removed or report.read_seconds
        }
        for tier, kinds in done.items():
            slots: dict[str, Any] = {kind: tuple(of_kind) for kind, of_kind in kinds.items()}
            reports[tier] = reports.get(tier, TierReport(tier))._replace(**slots)
        lower = tuple(reports.values())
        return replace(own, completed=completed, lower=lower, bad_copies=bad_copies)

    def _count(self, report: TierReport) -> None:
        tier = report.tier
        for kind in ("erase_failed", "late"):
            self._at_once.update(((tier, kind, slot), None) for slot in getattr(report, kind))
        for kind in ("spilled", "promoted", "failed"):
            for slot in getattr(report, kind):
                answers = self._answers.setdefault((tier, slot), _Answers())
                answers.count += 1
                if kind == "failed":
                    answers.failed = True
                else:
                    answers.kind = kind


class _Sent(NamedTuple):
    step: int
    erases: bool


def on_all(records: Sequence[Sequence[StoredRecord]]) -> list[StoredRecord]:
    """Returns rank 0's records that every rank has: parts of the same chunk in the same slot."""
    others = [
        {(record.slot, record.key, record.end) for record in of_rank} for of_rank in records[1:]
    ]
    return [
        record
        for record in records[0]
        if all((record.slot, record.key, record.end) in there for there in others)
    ]


def agreed_records(ranks: Ranks, executor: Executor) -> dict[Tier, list[StoredRecord]]:
    """Returns the records of an earlier process that all ranks have. All ranks call it and erase
    records that only some have, because a later deletion would miss them."""
    agreed = {}
    for tier, own in Executor.stored_records(executor).items():
        agreed[tier] = on_all(ranks.gather(own))
        kept = {record.slot for record in agreed[tier]}
        executor.erase_records(tier, [record.slot for record in own if record.slot not in kept])
    return agreed


class RankedExecutor(Executor):
    """Rank 0's executor. A failure on another rank is raised by the next `wait`, as RankFailed."""

    def __init__(self, ranks: Ranks, *arguments: Any, **settings: Any):
        """Further arguments as for `Executor`."""
        super().__init__(*arguments, **settings)
        self._ranks = ranks
        self._reports = Reports(ranks.size - 1)
        self._records = agreed_records(ranks, self)
        # in flight, after the last one waited for
        self._plans: deque[_Sent] = deque([_Sent(0, False)])
        self._broken = False

    def stored_records(self) -> dict[Tier, list[StoredRecord]]:
        """The records that all ranks have."""
        return self._records

    @property
    def host_slots(self) -> int:
        """Slots of HOST that all ranks have reported."""
        return min(super().host_slots, self._reports.host_slots)

    def launch(self, plan: StepPlan) -> None:
        with self._noting_failure():
            self._ranks.send(pack(plan))
            self._plans.append(_Sent(plan.step, any(work.erased for work in plan.lower)))
            super().launch(plan)

    def wait(self) -> StepResult:
        with self._noting_failure():
            before = self._plans[0].step
            plan = self._plans[1]
            self._poll_until(self.done, lambda: f"step {plan.step} is not complete")
            result = super().wait()
            self._plans.popleft()
            # Erased slots must be erased on all ranks before any rank writes there again.
            due = plan.step if plan.erases else before
            self._poll_until(
                lambda: not self._reports.late(due),
                lambda: f"ranks {self._reports.late(due)} have not reported step {due}",
            )
            return self._reports.merged(result)

    def close(self) -> None:
        """Ends the other ranks' loops too. After a failure it does nothing: lanes may wait for a
        rank that is gone, and `Ranks.fail` ends them all."""
        if not self._broken:
            self._broken = True
            with give_up_after(OVERDUE_SECONDS):  # lanes finish work that other ranks take part in
                super().close()
            self._ranks.stop()

    def _poll_until(self, condition: Callable[[], bool], what_is_late: Callable[[], str]) -> None:
        """Takes reports until the condition holds. Raises RankFailed for a failure report, or if it
        takes too long."""

        def reached() -> bool:
            for rank, report in self._ranks.reports():
                self._reports.take(rank, report)
            return condition()

        wait_until(reached, what_is_late, OVERDUE_SECONDS)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._broken = True
            raise


def follow(ranks: Ranks, executor: Executor) -> None:
    """Another rank's loop: executes plans and reports until rank 0 ends it, then closes the
    executor. Raises any failure.

    Begins when rank 0 makes its executor. The next plan may be any time away; a step in flight ends
    unless a rank hangs.
    """
    agreed_records(ranks, executor)
    with GarbageCollector() as garbage:
        moved = time.monotonic()
        while True:
            if executor.done():
                ranks.report(report_of(executor.wait(), executor.host_slots))
                moved = time.monotonic()
            elif (packed := ranks.receive()) is None:
                if not executor.in_flight:
                    moved = time.monotonic()
                elif time.monotonic() - moved > OVERDUE_SECONDS + FAREWELL_SECONDS:
                    # rank 0 has not ended this one
                    late = (
                        f"no step is complete after {OVERDUE_SECONDS + FAREWELL_SECONDS:g} s: rank "
                        "0 hangs"
                    )
                    raise RankFailed(late)
                pause(busy=executor.in_flight > 0)
            elif packed:
                executor.launch(unpack(packed))
                if garbage.due(math.inf):  # the most time for it is while a step begins
                    garbage.collect_new()
            else:
                break
    executor.close()
