"""Words that replies must not contain: the tokens that may not follow those just drawn."""

from __future__ import annotations

from collections.abc import Sequence

from ...scheduler.plan import Join, StepPlan
from ...scheduler.types import RowId


class _Row:
    """The words of several tokens of one row, and the end of its reply."""

    def __init__(self, join: Join):
        words = [word for word in join.sampling.bad_words if len(word) > 1]
        # by the last but one token of a word: the tokens before the last, and the last
        self._words: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for *before, last in words:
            self._words.setdefault(before[-1], []).append((tuple(before), last))
        self._longest = max(map(len, words)) - 1
        self._end = tuple(join.reply[-self._longest :])

    def add(self, token: int) -> None:
        self._end = (*self._end, token)[-self._longest :]

    @property
    def forbidden(self) -> tuple[int, ...]:
        """The tokens that would complete a word."""
        if not self._end:
            return ()
        words = self._words.get(self._end[-1], ())
        return tuple(last for before, last in words if self._end[-len(before) :] == before)


class BadWords:
    """Called in the order of steps. Words of one token are not here: they are biases of their
    seats."""

    def __init__(self) -> None:
        self._rows: dict[RowId, _Row] = {}
        self._seated: dict[int, RowId] = {}  # the rows of `_rows`; a row that ended may stay

    def forbidden(self, plan: StepPlan) -> dict[int, tuple[int, ...]]:
        """Takes the plan's joins. Returns tokens that may not be drawn, by the index of the
        sample."""
        for join in plan.joins:
            if (before := self._seated.pop(join.seat, None)) is not None:
                del self._rows[before]
            if join.sampling.has_long_words:
                self._seated[join.seat] = join.row
                self._rows[join.row] = _Row(join)
        if not self._rows:
            return {}
        by_sample = {
            at: self._rows[row].forbidden
            for at, row in enumerate(plan.samples)
            if row in self._rows
        }
        return {at: tokens for at, tokens in by_sample.items() if tokens}

    def advance(self, samples: Sequence[RowId], tokens: Sequence[int]) -> None:
        """Takes the tokens of a step."""
        if not self._rows:
            return
        for row, token in zip(samples, tokens, strict=True):
            if (words := self._rows.get(row)) is not None:
                words.add(token)
