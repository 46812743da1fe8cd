"""The lengths of the contexts that a plan's tokens see."""

from __future__ import annotations

from collections.abc import Mapping

from .plan import StepPlan


def mean_contexts(plan: StepPlan, begins: Mapping[int, int] | None = None) -> tuple[int, int]:
    """Returns the mean context, tokens, of the plan's known tokens, and that of its generating
    rows. The first token of a span that checks drafts counts as a row's.

    `begins`: by seat, the first position that its row sees (default: 0).
    """
    first = begins or {}
    seen = rows_seen = checks = 0
    for seat, start, end, _, samples, _ in plan.spans:
        begin = first.get(seat, 0)
        if samples > 1:
            rows_seen += start - begin
            start += 1
            checks += 1
        seen += (end - start) * ((start + end + 1) // 2 - begin)
    unseen = sum(first.get(seat, 0) for seat in plan.generate) if first else 0
    rows_seen += sum(plan.positions) - unseen
    num_tokens = len(plan.token_ids) - checks
    rows = len(plan.positions) + checks
    return seen // num_tokens if num_tokens else 0, rows_seen // rows + 1 if rows else 0
