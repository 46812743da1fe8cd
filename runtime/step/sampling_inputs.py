"""Turns the seats' sampling settings into the arrays of a step's sampling: a mirror of the seats.
numpy only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...scheduler.plan import Join

FORBIDDEN = -1e30
"""Added to the logits of tokens that must not be drawn. Finite, so that such a token can still be
drawn if a grammar, with minus infinity, allows no other."""

MOST_LIMITED = 256
"""The largest top_k of rows for which only so many logits are ordered. On a CPU so many are tried
first for other rows."""

NOTHING_FORBIDDEN: Mapping[int, Sequence[int]] = {}


class Draws(NamedTuple):
    """The sampled rows that are drawn with a temperature from all tokens, D of them."""

    rows: np.ndarray
    """[D] int64, into the R sampled rows"""
    temperatures: np.ndarray
    """[D] float64, above 0"""
    seeds: np.ndarray
    """[D] int64"""
    positions: np.ndarray
    """[D] int64, of the token to be drawn: the number of the draw with its seed"""


class FilteredDraws(NamedTuple):
    """The sampled rows that are drawn with a temperature from the likeliest tokens, D of them."""

    rows: np.ndarray
    """[D] int64, into the R sampled rows"""
    temperatures: np.ndarray
    """[D] float64, above 0"""
    top_ks: np.ndarray
    """[D] int64, 0 for off"""
    top_ps: np.ndarray
    """[D] float64, 1 for off"""
    min_ps: np.ndarray
    """[D] float64, 0 for off"""
    seeds: np.ndarray
    """[D] int64"""
    positions: np.ndarray
    """[D] int64, of the token to be drawn: the number of the draw with its seed"""


class PenaltyStart(NamedTuple):
    """Resets a place in the table of penalty counts to these tokens: prompt and reply so far, int64
    each."""

    place: int
    prompt: np.ndarray
    reply: np.ndarray


class Penalties(NamedTuple):
    """The sampled rows with penalties, P of them, each with its place in the table of counts."""

    rows: np.ndarray
    """[P] int64, into the R sampled rows"""
    places: np.ndarray
    """[P] int64, distinct"""
    repetition: np.ndarray
    """[P] float32, as the next two"""
    presence: np.ndarray
    frequency: np.ndarray


class Biases(NamedTuple):
    """Biases added to logits, B entries, their places distinct."""

    rows: np.ndarray
    """[B] int64, into the R sampled rows"""
    tokens: np.ndarray
    """[B] int64"""
    values: np.ndarray
    """[B] float32"""


class Mask(NamedTuple):
    """The sampled rows with a grammar, G of them."""

    rows: np.ndarray
    """[G] int64, into the R sampled rows"""
    bits: np.ndarray
    """[G, ceil(vocab / 32)] int32: bit i of word w is set if token 32 w + i is allowed"""


class ScoreRows(NamedTuple):
    """The rows of logits whose log probabilities are reported: L of the sampled ones, then all K
    scored ones."""

    rows: np.ndarray
    """[L] int64, into the R sampled rows"""
    targets: np.ndarray
    """[K] int64, the known next token of each of the logits' last K rows"""
    tops: np.ndarray
    """[L + K] int64, the number of likeliest tokens to report for each"""

    @property
    def width(self) -> int:
        """The largest number of `tops`."""
        return int(self.tops.max(initial=0))


@dataclass(frozen=True, slots=True, eq=False)
class SamplingInputs:
    """For R sampled rows and K scored ones; a field is None if no row needs it.

    draws       rows without filters
    limited     rows with filters that keep at most MOST_LIMITED tokens each
    filtered    rows with other filters
    """

    draws: Draws | None
    limited: FilteredDraws | None
    filtered: FilteredDraws | None
    starts: tuple[PenaltyStart, ...]
    penalties: Penalties | None
    biases: Biases | None
    mask: Mask | None
    scores: ScoreRows | None


@dataclass(frozen=True, slots=True, eq=False)
class _Additions:
    """One row's additions to logits: `tokens` [B] int64, distinct, and `values` [B] float32."""

    tokens: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, values: dict[int, float]) -> _Additions:
        count = len(values)
        return cls(
            np.fromiter(values.keys(), np.int64, count),
            np.fromiter(values.values(), np.float32, count),
        )

    def without(self, tokens: Sequence[int]) -> _Additions:
        """The same, with these tokens forbidden."""
        values = dict(zip(self.tokens.tolist(), self.values.tolist(), strict=True))
        return self.of(values | dict.fromkeys(tokens, FORBIDDEN))


_NO_ADDITIONS = _Additions.of({})


class _SeatBiases(NamedTuple):
    """`early`: for positions before `may_end`, including the stop ids that may not be drawn
    there."""

    may_end: int
    early: _Additions
    late: _Additions


# as a number of log probabilities: none; as a place in the table of penalty counts: no place
NOTHING = -1


class SeatSampling:
    """The sampling settings of each seat after the last `join`. An ended row's settings stay until
    its seat is taken again."""

    def __init__(self, seats: int):
        self._temperatures = np.zeros(seats)
        self._top_ks = np.zeros(seats, np.int64)
        self._top_ps = np.ones(seats)
        self._min_ps = np.zeros(seats)
        self._filters = np.zeros(seats, bool)  # whether one of the last three is on
        self._seeds = np.zeros(seats, np.int64)
        self._repetition = np.ones(seats, np.float32)
        self._presence, self._frequency = np.zeros(seats, np.float32), np.zeros(seats, np.float32)
        self._places = np.full(seats, NOTHING, np.int64)
        self._free_places = list(range(seats))[::-1]  # the lowest is taken first
        self._logprobs = np.full(seats, NOTHING, np.int64)
        self._prompt_logprobs = np.full(seats, NOTHING, np.int64)
        self._biases: dict[int, _SeatBiases] = {}
        # of the last step with biases, each with its row
        self._added: list[tuple[int, _Additions]] = []
        self._together: Biases | None = None  # the same as arrays

    def join(self, joins: Iterable[Join]) -> tuple[PenaltyStart, ...]:
        """Takes the seats. Returns the starts of their penalty counts."""
        starts = []
        for join in joins:
            seat, sampling = join.seat, join.sampling
            self._temperatures[seat] = sampling.temperature
            self._top_ks[seat] = sampling.top_k
            self._top_ps[seat] = sampling.top_p
            self._min_ps[seat] = sampling.min_p
            self._filters[seat] = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
            self._seeds[seat] = sampling.seed
            self._logprobs[seat] = NOTHING if sampling.logprobs is None else sampling.logprobs
            self._prompt_logprobs[seat] = (
                NOTHING if join.prompt_logprobs is None else join.prompt_logprobs
            )
            self._take_biases(join)
            if self._places[seat] != NOTHING:
                self._free_places.append(int(self._places[seat]))
                self._places[seat] = NOTHING
            if sampling.penalised:
                place = self._places[seat] = self._free_places.pop()
                self._repetition[seat] = sampling.repetition_penalty
                self._presence[seat] = sampling.presence_penalty
                self._frequency[seat] = sampling.frequency_penalty
                starts.append(PenaltyStart(place, _ids(join.prompt), _ids(join.reply)))
        return tuple(starts)

    def _take_biases(self, join: Join) -> None:
        """Makes the arrays for all of the row's steps: Python takes 0.2 s for a thousand biases of
        each of 256 rows."""
        self._biases.pop(join.seat, None)
        never = [word[0] for word in join.sampling.bad_words if len(word) == 1]
        if join.sampling.logit_bias or join.stop_ids or never:
            biases = dict(join.sampling.logit_bias) | dict.fromkeys(never, FORBIDDEN)
            late = _Additions.of(biases)
            early = (
                _Additions.of(biases | dict.fromkeys(join.stop_ids, FORBIDDEN))
                if join.stop_ids
                else late
            )
            self._biases[join.seat] = _SeatBiases(join.may_end, early, late)

    def pack(
        self,
        starts: tuple[PenaltyStart, ...],
        seats: np.ndarray,
        positions: np.ndarray,
        scored_seats: Sequence[int],
        targets: Sequence[int],
        mask: Mask | None,
        forbidden: Mapping[int, Sequence[int]] = NOTHING_FORBIDDEN,
    ) -> SamplingInputs:
        """seats, positions [R]: of the tokens to be drawn; scored_seats, targets [K]: of the scored
        rows; `forbidden`: tokens that must not be drawn, by row."""
        return SamplingInputs(
            *self._draws(seats, positions),
            starts,
            self._penalties(seats),
            self._step_biases(seats, positions, forbidden) if self._biases or forbidden else None,
            mask,
            self._scores(seats, scored_seats, targets),
        )

    def pack_again(
        self,
        last: SamplingInputs,
        seats: np.ndarray,
        positions: np.ndarray,
        mask: Mask | None,
        forbidden: Mapping[int, Sequence[int]],
    ) -> SamplingInputs:
        """Packs a step of the same rows as `last`, none of them scored. No seat was taken in
        between."""
        draws, limited, filtered = last.draws, last.limited, last.filtered
        return SamplingInputs(
            draws and draws._replace(positions=positions[draws.rows].astype(np.int64)),
            limited and limited._replace(positions=positions[limited.rows].astype(np.int64)),
            filtered and filtered._replace(positions=positions[filtered.rows].astype(np.int64)),
            (),
            last.penalties,
            self._step_biases(seats, positions, forbidden) if self._biases or forbidden else None,
            mask,
            last.scores,
        )

    def _draws(
        self, seats: np.ndarray, positions: np.ndarray
    ) -> tuple[Draws | None, FilteredDraws | None, FilteredDraws | None]:
        """The first three fields of `SamplingInputs`."""
        hot = self._temperatures[seats] > 0.0
        if not hot.any():
            return None, None, None
        filters = self._filters[seats]
        draws = None
        (rows,) = (hot & ~filters).nonzero()
        if len(rows):
            drawn = seats[rows]
            draws = Draws(
                rows,
                self._temperatures[drawn],
                self._seeds[drawn],
                positions[rows].astype(np.int64),
            )
        filters &= hot
        top_ks = self._top_ks[seats]
        limited = (top_ks > 0) & (top_ks <= MOST_LIMITED)
        return (
            draws,
            self._filtered(filters & limited, seats, positions),
            self._filtered(filters & ~limited, seats, positions),
        )

    def _filtered(
        self, which: np.ndarray, seats: np.ndarray, positions: np.ndarray
    ) -> FilteredDraws | None:
        (rows,) = which.nonzero()
        if not len(rows):
            return None
        drawn = seats[rows]
        return FilteredDraws(
            rows,
            self._temperatures[drawn],
            self._top_ks[drawn],
            self._top_ps[drawn],
            self._min_ps[drawn],
            self._seeds[drawn],
            positions[rows].astype(np.int64),
        )

    def _penalties(self, seats: np.ndarray) -> Penalties | None:
        places = self._places[seats]
        (rows,) = (places != NOTHING).nonzero()
        if not len(rows):
            return None
        penalised = seats[rows]
        factors = self._repetition[penalised], self._presence[penalised], self._frequency[penalised]
        return Penalties(rows, places[rows], *factors)

    def _step_biases(
        self,
        seats: np.ndarray,
        positions: np.ndarray,
        forbidden: Mapping[int, Sequence[int]],
    ) -> Biases | None:
        """Successive steps with the same biases for the same rows share their arrays."""
        added = []
        for row, (seat, position) in enumerate(
            zip(seats.tolist(), positions.tolist(), strict=True)
        ):
            additions = None
            if (biases := self._biases.get(seat)) is not None:
                additions = biases.early if position < biases.may_end else biases.late
            if (tokens := forbidden.get(row)) is not None:
                additions = (additions or _NO_ADDITIONS).without(tokens)
            if additions is not None:
                added.append((row, additions))
        if added != self._added:
            self._added = added
            self._together = _put_together(added)
        return self._together

    def _scores(
        self, seats: np.ndarray, scored_seats: Sequence[int], targets: Sequence[int]
    ) -> ScoreRows | None:
        tops = self._logprobs[seats]
        (rows,) = (tops != NOTHING).nonzero()
        if not len(rows) and not len(targets):
            return None
        prompt_tops = self._prompt_logprobs[_ids(scored_seats)]
        return ScoreRows(rows, _ids(targets), np.concatenate((tops[rows], prompt_tops)))


def _put_together(added: Sequence[tuple[int, _Additions]]) -> Biases | None:
    """`added`: additions, each with its row."""
    rows = [row for row, _ in added]
    lengths = [len(additions.tokens) for _, additions in added]
    if not sum(lengths):
        return None
    return Biases(
        np.repeat(np.array(rows), lengths),
        np.concatenate([additions.tokens for _, additions in added]),
        np.concatenate([additions.values for _, additions in added]),
    )


def _ids(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, np.int64)


def scored(spans: np.ndarray, q_ends: np.ndarray) -> tuple[np.ndarray, Sequence[int]]:
    """Rows of the batch [K] int32 whose next, known tokens are scored, and their seats. spans [.,
    6], q_ends [.]."""
    rows: list[int] = []
    seats: list[int] = []
    for (seat, start, end, _, samples, scores), q_end in zip(
        spans.tolist(), q_ends.tolist(), strict=True
    ):
        if scores:
            rows += range(q_end - (end - start), q_end - samples)
            seats += [seat] * (end - start - samples)
    return np.array(rows, np.int32), seats
