"""Keeps a step beside rows that generate within `target_ms_per_token`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from ..cost import CostProfile
from .plan_builder import PlanBuilder


def limit_prompts(builder: PlanBuilder, cost: CostProfile, seconds: float, least: int) -> None:
    """Cuts the budget to the prompt tokens that are predicted to fit into a step of `seconds`
    seconds, and to no less than `least` tokens. The plan has no prompts yet.

    The budget is the tokens without context that fit. A token with context takes longer. It counts
    as more than one if it takes longer than `seconds` divided by the budget. If a step's time grows
    at least in proportion to its tokens, as measured steps' times do, no mixture is predicted to
    take longer than `seconds`.
    """
    positions = [*builder.positions, *(span.end - 1 for span in builder.spans)]
    context = sum(positions) // max(1, len(positions)) + 1
    rows = max(1, len(builder.samples))
    again = builder.tokens - len(builder.samples)  # of drafts that came true, with states

    def step(tokens: int) -> float:
        computed = again + tokens
        return cost.step(computed, context * again // max(1, computed), rows, context)

    fit = most_tokens(step, seconds, builder.budget)
    builder.least = least + len(builder.token_ids)
    builder.budget = min(builder.budget, max(fit, least))
    base = step(0)
    if fit > least and seconds > base:
        filled = step(fit) - base
        free = seconds - base
        builder.weigh = lambda context: max(
            1.0, (filled + fit * cost.token_attention(context)) / free
        )


def most_tokens(step: Callable[[int], float], seconds: float, most: int) -> int:
    """Returns how many tokens without context, at most `most`, a step of `seconds` seconds takes
    beside what it has; -1 if that alone takes longer. `step`: seconds by tokens, ascending."""
    return bisect_right(range(most + 1), seconds, key=step) - 1
