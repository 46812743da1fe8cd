"""From the seats' sampling settings to the arrays that a step's sampling takes: a mirror of the seats. numpy only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..scheduler.plan import Join

NOT_YET = -1e30
"""Is added to the logits of what must not be drawn. Finite: a grammar's minus infinity leaves nothing at all."""


class Draws(NamedTuple):
    """The sampled rows that are not greedy, D of them."""

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
    """[D] int64, of the token to be drawn: which draw of its seed it is"""


class PenaltyStart(NamedTuple):
    """A place in the table of penalty counts begins anew, with these tokens: prompt and reply so far, int64 each."""

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
    """What is added to logits, B entries, their places distinct."""

    rows: np.ndarray
    """[B] int64, into the R sampled rows"""
    tokens: np.ndarray
    """[B] int64"""
    values: np.ndarray
    """[B] float32"""


class Mask(NamedTuple):
    """The sampled rows that a grammar constrains, G of them."""

    rows: np.ndarray
    """[G] int64, into the R sampled rows"""
    bits: np.ndarray
    """[G, ceil(vocab / 32)] int32: bit i of word w is set if token 32 w + i is allowed"""


class ScoreRows(NamedTuple):
    """The rows of logits whose log probabilities are wanted: L of the sampled ones, then all K scored ones."""

    rows: np.ndarray
    """[L] int64, into the R sampled rows"""
    targets: np.ndarray
    """[K] int64, the known token behind each of the logits' last K rows"""
    tops: np.ndarray
    """[L + K] int64, how many of the likeliest tokens each wants"""

    @property
    def width(self) -> int:
        """The most that any wants."""
        return int(self.tops.max(initial=0))


@dataclass(frozen=True, slots=True, eq=False)
class SamplingInputs:
    """For R sampled rows and K scored ones; None where no row wants it."""

    draws: Draws
    starts: tuple[PenaltyStart, ...]
    penalties: Penalties | None
    biases: Biases | None
    mask: Mask | None
    scores: ScoreRows | None


class SeatSampling:
    """How each seat samples, as of the last `join`."""

    def __init__(self, seats: int):
        self._temperatures = np.zeros(seats)
        self._top_ks = np.zeros(seats, np.int64)
        self._top_ps = np.ones(seats)
        self._min_ps = np.zeros(seats)
        self._seeds = np.zeros(seats, np.int64)
        # Seats that want more than a draw, and the places of those with penalties. A row that has ended keeps both
        # until its seat is taken again.
        self._wanting: dict[int, Join] = {}
        self._places: dict[int, int] = {}
        self._free_places: list[int] = []

    def join(self, joins: Iterable[Join]) -> tuple[PenaltyStart, ...]:
        """Seats are taken; returns what the table of penalty counts begins with."""
        starts = []
        for join in joins:
            seat, sampling = join.seat, join.sampling
            self._temperatures[seat] = sampling.temperature
            self._top_ks[seat] = sampling.top_k
            self._top_ps[seat] = sampling.top_p
            self._min_ps[seat] = sampling.min_p
            self._seeds[seat] = sampling.seed
            self._wanting.pop(seat, None)
            if seat in self._places:
                self._free_places.append(self._places.pop(seat))
            reported = (sampling.logprobs, join.prompt_logprobs) != (None, None)
            if sampling.penalised or sampling.logit_bias or reported or join.stop_ids:
                self._wanting[seat] = join._replace(prompt=(), reply=())
            if sampling.penalised:
                self._places[seat] = self._free_places.pop() if self._free_places else len(self._places)
                starts.append(PenaltyStart(self._places[seat], _ids(join.prompt), _ids(join.reply)))
        return tuple(starts)

    def pack(
        self,
        starts: tuple[PenaltyStart, ...],
        seats: np.ndarray,
        positions: np.ndarray,
        scored_seats: Sequence[int],
        targets: Sequence[int],
        mask: Mask | None,
    ) -> SamplingInputs:
        """seats, positions [R]: who gets a token, and its position; scored_seats, targets [K] of the scored rows."""
        draws = self._draws(seats, positions)
        if not self._wanting:
            return SamplingInputs(draws, starts, None, None, mask, None)
        wanting = [(row, self._wanting[seat]) for row, seat in enumerate(seats.tolist()) if seat in self._wanting]
        return SamplingInputs(
            draws,
            starts,
            self._penalties(wanting),
            _biases(wanting, positions),
            mask,
            self._scores(wanting, scored_seats, targets),
        )

    def _draws(self, seats: np.ndarray, positions: np.ndarray) -> Draws:
        rows = np.flatnonzero(self._temperatures[seats])
        drawn = seats[rows]
        return Draws(
            rows,
            self._temperatures[drawn],
            self._top_ks[drawn],
            self._top_ps[drawn],
            self._min_ps[drawn],
            self._seeds[drawn],
            positions[rows].astype(np.int64),
        )

    def _penalties(self, wanting: Sequence[tuple[int, Join]]) -> Penalties | None:
        entries = [
            (
                row,
                self._places[seat],
                sampling.repetition_penalty,
                sampling.presence_penalty,
                sampling.frequency_penalty,
            )
            for row, (seat, _, sampling, *_) in wanting
            if seat in self._places
        ]
        if not entries:
            return None
        rows, places, *values = zip(*entries, strict=True)
        return Penalties(np.array(rows), np.array(places), *(np.array(value, np.float32) for value in values))

    def _scores(
        self, wanting: Sequence[tuple[int, Join]], scored_seats: Sequence[int], targets: Sequence[int]
    ) -> ScoreRows | None:
        rows = [(row, join.sampling.logprobs) for row, join in wanting if join.sampling.logprobs is not None]
        if not rows and not len(targets):
            return None
        tops = [*(top for _, top in rows), *(self._wanting[seat].prompt_logprobs for seat in scored_seats)]
        return ScoreRows(np.array([row for row, _ in rows], np.int64), _ids(targets), np.array(tops, np.int64))


def _biases(wanting: Sequence[tuple[int, Join]], positions: np.ndarray) -> Biases | None:
    entries = []
    for row, join in wanting:
        biases = join.sampling.logit_bias
        if join.stop_ids and positions[row] < join.may_end:
            biases = tuple((dict(biases) | dict.fromkeys(join.stop_ids, NOT_YET)).items())
        entries += [(row, token, value) for token, value in biases]
    if not entries:
        return None
    rows, tokens, values = zip(*entries, strict=True)
    return Biases(np.array(rows), np.array(tokens), np.array(values, np.float32))


def _ids(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, np.int64)
