"""Keeps a step beside rows that generate within `target_ms_per_token`."""

from __future__ import annotations

from bisect import bisect_right

from ..cost import CostProfile
from .plan_builder import PlanBuilder


def limit_prompts(builder: PlanBuilder, cost: CostProfile, seconds: float, least: int) -> None:
    """Cuts the budget to the prompt tokens that are predicted to fit into a step of `seconds`
    seconds, and to no less than `least` tokens.

    The budget is the tokens without context that fit. A token with context takes longer. It counts
    as more than one if it takes longer than `seconds` divided by the budget. If a step's time grows
    at least in proportion to its tokens, as measured steps' times do, no mixture is predicted to
    take longer than `seconds`.
    """
    rows = max(1, builder.tokens)
    context = builder.rows_context() + 1
    fit = most_tokens(cost, seconds, builder.budget, rows, context)
    builder.least = least + len(builder.token_ids)
    builder.budget = min(builder.budget, max(fit, least))
    base = cost.step(0, 0, rows, context)
    if fit > least and seconds > base:
        filled = cost.step(fit, 0, rows, context) - base
        free = seconds - base
        builder.weigh = lambda context: max(
            1.0, (filled + fit * cost.token_attention(context)) / free
        )


def most_tokens(cost: CostProfile, seconds: float, most: int, rows: int, rows_context: int) -> int:
    """Returns how many known tokens without context, at most `most`, a step of `seconds` seconds
    has beside the rows that generate; -1 if the rows alone take longer."""

    def step(tokens: int) -> float:
        return cost.step(tokens, 0, rows, rows_context)

    return bisect_right(range(most + 1), seconds, key=step) - 1
