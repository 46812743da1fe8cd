"""Log probabilities of a step as results of its rows."""

from __future__ import annotations

from collections.abc import Sequence

from ...scheduler.plan import StepPlan
from ...scheduler.types import RowId, RowResult
from .sampler import Scores
from .sampling_inputs import SamplingInputs


def rows_with_logprobs(
    plan: StepPlan,
    inputs: SamplingInputs,
    scored_rows: Sequence[RowId],
    tokens: Sequence[int],
    scores: Scores,
) -> dict[RowId, RowResult]:
    """The results of rows with log probabilities. The scores are those of samples, then those of
    prompts, span by span.

    scored_rows     the row of each span that scores
    tokens          the samples of `plan.samples`
    """
    wanted = inputs.scores
    assert wanted is not None
    entries = scores.entries(wanted.tops.tolist())
    rows: dict[RowId, RowResult] = {}
    for at, entry in zip(wanted.rows.tolist(), entries, strict=False):
        row = plan.samples[at]
        rows[row] = RowResult(row.request, (tokens[at],), logprobs=(entry,))
    begin = len(wanted.rows)
    # A prompt's last piece may be its last token, which has no next prompt token to score.
    spans = [span for span in plan.spans if span.scores] if plan.scored else []
    for span, row in zip(spans, scored_rows, strict=True):
        end = begin + span.end - span.start - span.samples
        row_result = rows.get(row, RowResult(row.request))
        prompt_logprobs = (*row_result.prompt_logprobs, *entries[begin:end])
        rows[row] = row_result._replace(prompt_logprobs=prompt_logprobs)
        begin = end
    return rows
