"""How many chunks the link copies while a step runs."""

from __future__ import annotations

from ..cost import CostProfile
from .plan_builder import PlanBuilder

LINK_PIECE_S = 2e-3  # the least link time, seconds, that copies of one direction may use in a step


def link_chunks(builder: PlanBuilder, cost: CostProfile) -> int:
    """Returns the number of chunks that the link copies in one direction while the step runs."""
    step = cost.step(
        len(builder.token_ids), rows=len(builder.generate), rows_context=builder.rows_context()
    )
    return max(1, int(max(step, LINK_PIECE_S) / cost.swap_in()))
