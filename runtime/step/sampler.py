"""Draws tokens from logits: greedy, or with temperature, top-k, min-p and top-p and a counter-based
uniform number per row.

    logits -> (log probabilities) -> bias -> penalties -> grammar -> temperature -> top-k, min-p,
    top-p -> token

The number of a draw is a pure function of (seed, position), made with integer operations that wrap
equally on every device. So a suspended request resumes exactly, and there is no generator state. A
row's token does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...plugins.collectives.protocol import TENSOR_PARALLEL, Group, registered_group
from ...scheduler.types import TokenLogprobs
from .filters import lowest_kept, lowest_kept_of_few, weights_of
from .sampling_inputs import MOST_LIMITED, PenaltyStart, SamplingInputs

# splitmix64 as signed 64-bit numbers: the step between two states, and the two multipliers of its
# mixing function.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


class Scores(NamedTuple):
    """Log probabilities of N tokens, and the W likeliest tokens at their positions; natural
    logarithms."""

    logprobs: Tensor
    """[N] float32"""
    ranks: Tensor
    """[N] int64, 1 for the likeliest"""
    top_ids: Tensor
    """[N, W] int64, the likeliest first"""
    top_logprobs: Tensor
    """[N, W] float32"""

    @classmethod
    def empty(cls, count: int, width: int, pinned: bool = False) -> Scores:
        """Empty columns in host memory, to be filled."""

        def column(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, pin_memory=pinned)

        one = (count,)
        wide = (count, width)
        return cls(
            column(one, torch.float32),
            column(one, torch.int64),
            column(wide, torch.int64),
            column(wide, torch.float32),
        )

    def entries(self, tops: Sequence[int]) -> list[TokenLogprobs]:
        """Returns the scores of each row in plain data, each with the number of likeliest tokens
        given in `tops` [N]."""
        columns = (column.tolist() for column in self)
        return [
            TokenLogprobs(logprob, rank, tuple(ids[:top]), tuple(logprobs[:top]))
            for logprob, rank, ids, logprobs, top in zip(*columns, tops, strict=True)
        ]


class Sampler:
    """Samples tokens from a step's logits. Holds the penalty counts, which are allocated at first
    use."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str = "cpu",
        place: Callable[[np.ndarray], Tensor] = torch.from_numpy,
    ):
        """place: turns an array of a step's inputs into a tensor on `device`, without waiting for
        the device."""
        self._place = place
        # [places, vocab] int32: twice the occurrences in the reply, plus one if the token is in the
        # prompt.
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)

    def start(self, starts: tuple[PenaltyStart, ...]) -> None:
        """Starts the penalty counts with the tokens so far."""
        for place, prompt, reply in starts:
            if place >= len(self._counts):
                grown = self._counts.new_zeros(
                    max(2 * len(self._counts), place + 1), self._counts.shape[1]
                )
                grown[: len(self._counts)] = self._counts
                self._counts = grown
            counts = self._counts[place].zero_()
            counts[self._place(prompt)] = 1
            replied = self._place(reply)
            counts.scatter_add_(0, replied, torch.full_like(replied, 2, dtype=torch.int32))

    def sample(self, logits: Tensor, inputs: SamplingInputs) -> tuple[Tensor, Scores | None]:
        """Returns tokens [R] int64, and the scores of the L + K rows of `inputs.scores`.

        logits [R + K, vocab] float32, sampled rows first; those with a bias, penalties or a mask
        are overwritten.
        """
        if inputs.scores is None:
            return self._draw(logits, inputs), None
        rows, targets = self._tensors((inputs.scores.rows, inputs.scores.targets))
        sampled, scored = logits.split((len(logits) - len(targets), len(targets)))
        raw = torch.cat((sampled[rows], scored))
        tokens = self._draw(sampled, inputs)
        return tokens, score(raw, torch.cat((tokens[rows], targets)), inputs.scores.width)

    def _draw(self, logits: Tensor, inputs: SamplingInputs) -> Tensor:
        """Returns tokens [R]; changes the logits in place. The drawn tokens count for the next
        draw's penalties."""
        if inputs.biases is not None:
            add_biases(logits, *self._tensors(inputs.biases))
        if inputs.penalties is None:
            self._forbid(logits, inputs)
            return self._sample(logits, inputs)
        rows, places, *factors = self._tensors(inputs.penalties)
        logits[rows] = penalise(logits[rows], self._counts[places], *factors)
        self._forbid(logits, inputs)
        tokens = self._sample(logits, inputs)
        self._counts[places, tokens[rows]] += 2
        return tokens

    def _sample(self, logits: Tensor, inputs: SamplingInputs) -> Tensor:
        """Among equal logits, greedy rows take the lowest id."""
        tokens = logits.argmax(dim=-1)
        if inputs.draws is not None:
            rows, temperatures, seeds, positions = self._tensors(inputs.draws)
            tokens[rows] = draw(logits[rows], temperatures, uniform(seeds, positions))
        for filtered, most in ((inputs.limited, MOST_LIMITED), (inputs.filtered, logits.shape[1])):
            if filtered is not None:
                rows, *settings, seeds, positions = self._tensors(filtered)
                temperatures, top_ks, top_ps, min_ps = settings
                uniforms = uniform(seeds, positions)
                tokens[rows] = draw_filtered(
                    logits[rows], temperatures, top_ks, top_ps, min_ps, uniforms, most
                )
        return tokens

    def _forbid(self, logits: Tensor, inputs: SamplingInputs) -> None:
        if inputs.mask is not None:
            forbid(logits, *self._tensors(inputs.mask))

    def _tensors(self, arrays: Iterable[np.ndarray]) -> list[Tensor]:
        return [self._place(array) for array in arrays]


class SharedSampler:
    """The sampler of one of several ranks: rank 0 draws and broadcasts the tokens, on the stream of
    the step.

    All ranks have equal logits, but only rank 0 has all inputs of a draw (grammars, penalties). A
    cumulative sum on a GPU does not guarantee equal bits either: two ranks that differ once would
    then compute different KV unnoticed.
    """

    def __init__(self, sampler: Sampler, group: Group):
        self._sampler = sampler
        self._group = group

    def start(self, starts: tuple[PenaltyStart, ...]) -> None:
        """Starts like `Sampler.start`; only rank 0 has penalties."""
        self._sampler.start(starts)

    def sample(self, logits: Tensor, inputs: SamplingInputs) -> tuple[Tensor, Scores | None]:
        """Samples like `Sampler.sample`; only rank 0 returns scores."""
        if self._group.rank == 0:
            tokens, scores = self._sampler.sample(logits, inputs)
        else:
            scored = 0 if inputs.scores is None else len(inputs.scores.targets)
            tokens = torch.empty(len(logits) - scored, dtype=torch.int64, device=logits.device)
            scores = None
        return self._group.broadcast(tokens) if len(tokens) else tokens, scores


def make_sampler(
    vocab_size: int,
    device: torch.device | str = "cpu",
    place: Callable[[np.ndarray], Tensor] = torch.from_numpy,
) -> Sampler | SharedSampler:
    """Returns a device's sampler; the arguments are those of `Sampler`."""
    sampler = Sampler(vocab_size, device, place)
    group = registered_group(TENSOR_PARALLEL)
    return sampler if group is None else SharedSampler(sampler, group)


def add_biases(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> None:
    """Adds biases in place on [R, vocab]; the arguments are those of `Biases`."""
    logits[rows, tokens] += values


def penalise(
    logits: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Returns logits [P, vocab] after penalties [P] each; counts [P, vocab] as in `Sampler`."""
    repetition, presence, frequency = (
        factor.unsqueeze(1) for factor in (repetition, presence, frequency)
    )
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    replied = counts >> 1
    return (
        torch.where(counts > 0, repeated, logits) - frequency * replied - presence * (replied > 0)
    )


def forbid(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Sets the logits of tokens that the bits do not allow to minus infinity, in place on [R,
    vocab]; the arguments are those of `Mask`."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = ((bits.unsqueeze(2) >> shifts) & 1).flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill(allowed == 0, -torch.inf)


def score(logits: Tensor, tokens: Tensor, width: int) -> Scores:
    """Scores of tokens [N] under logits [N, vocab] float32, with the `width` likeliest."""
    own = logits.gather(1, tokens.unsqueeze(1))
    total = logits.logsumexp(dim=-1, keepdim=True)
    top, ids = logits.topk(width, dim=-1)
    return Scores((own - total).squeeze(1), (logits > own).sum(dim=-1) + 1, ids, top - total)


def draw(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
    """Returns tokens [D] int64 from logits [D, vocab] float32 by inverse CDF, in the order of ids,
    in float64. It sorts nothing.

    temperatures [D] float64, above 0. uniforms [D] float64 in [0, 1).
    """
    highest, likeliest = logits.max(dim=-1, keepdim=True)
    return _invert(weights_of(logits, highest, temperatures), likeliest, uniforms)


def _invert(weights: Tensor, likeliest: Tensor, uniforms: Tensor) -> Tensor:
    """Returns the tokens [D] at which the sums of weights [D, vocab] pass `uniforms`. likeliest
    [D, 1]."""
    reached = weights.cumsum(dim=-1)
    target = uniforms.unsqueeze(1) * reached[:, -1:]
    token = torch.searchsorted(reached, target, right=True).clamp(max=weights.shape[1] - 1)
    # Sums are rounded, so once in a very long while this is a token that must not be drawn.
    return torch.where(weights.gather(1, token) > 0.0, token, likeliest).squeeze(1)


def draw_filtered(
    logits: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    uniforms: Tensor,
    most: int,
) -> Tensor:
    """Draws as `draw` does from what the filters leave. A token that is as likely as the least
    likely one of these stays too.

    top_ks [D] int64: the k likeliest tokens stay; 0 is off. min_ps [D] float64: tokens whose
    probability is below this share of the likeliest one's are removed. top_ps [D] float64: of the
    rest, the smallest set of likeliest tokens whose probability reaches p stays, at least one.
    most: no row keeps more tokens.
    """
    highest, likeliest = logits.max(dim=-1, keepdim=True)
    settings = top_ks, top_ps, min_ps
    if logits.is_cuda or most < logits.shape[1]:
        lowest = lowest_kept(logits, temperatures, *settings, min(most, logits.shape[1]))
        weights = weights_of(logits, highest, temperatures)
    else:
        weights = weights_of(logits, highest, temperatures)
        lowest = lowest_kept_of_few(logits, weights, temperatures, *settings)
    return _invert(weights.where(logits >= lowest, 0.0), likeliest, uniforms)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw number `positions` [D] int64 of `seeds` [D] int64: [D] float64 in [0, 1), 53 random bits
    each."""
    state = _mix(seeds + _STEP) + (positions + 1) * _STEP
    return _shift_right(_mix(state), 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """splitmix64's mixing function; int64 products wrap."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shifts zeros in from the left, where `>>` would repeat the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
