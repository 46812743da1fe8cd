"""Turns plans into the arrays of steps: keeps a mirror of the seats and lays batches out. numpy
only.

The batch is laid out as in the plan: one token for each seat that generates, then the spans.

    token      g0  g1  g2 | s0 s0 s0 s0 | s1 s1
    segment     0   1   2 |      3      |   4
    sampled     ^   ^   ^ |           ^ |    (a piece of a longer prompt samples nothing)

No array is changed after a step has it, because a step in flight may still read it. The mirror is
changed at once and never passed on; changes travel with their step, in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...builder.forward_batch import NO_STATE, NOT_WRITTEN, PackedBatch
from ...scheduler.plan import BlockUpdate, StepPlan
from ...scheduler.types import InvariantError
from .prefixes import SharedPrefixes
from .sampling_inputs import NOTHING_FORBIDDEN, Mask, SamplingInputs, SeatSampling, scored
from .state_check import StateCheck

LAST_SAMPLE = -1  # as a token id: the last sample of the token's seat, which only the device knows


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs(PackedBatch[np.ndarray]):
    """The inputs of one step's forward pass and of its sampling, and U changed entries of the block
    table.

    `sample_rows` has first the D sampled rows, then the scored rows.

    generated     the number of first tokens that are LAST_SAMPLE; segment i < `generated` is that
                  of token i
    sharing       [generated, 2] int32, or None if no generating rows share keys: see
                  `SharedPrefixes.order`; its indices are of segments
    sample_seats  [D] int32, the seats of the sampled rows
    sampling      the sampler's inputs
    block_cells   [U] int32, into the flattened block table
    block_slots   [U] int32, the slots to put there
    """

    generated: int
    sharing: np.ndarray | None
    sample_seats: np.ndarray
    sampling: SamplingInputs
    block_cells: np.ndarray
    block_slots: np.ndarray


class StepPacker:
    """The seats after the last packed plan. Each plan is packed once, in order."""

    def __init__(self, seats: int, blocks: int, chunk_tokens: int, state_slots: int = 0):
        """seats, blocks: shape of the block table; blocks is the most chunks that a request can
        have. state_slots: 0 if the model has no recurrent states."""
        self._chunk_tokens = chunk_tokens
        self._table = np.full((seats, blocks), NOT_WRITTEN, np.int32)
        self._chunks = [0] * seats  # by seat, that its row was given
        # By seat: the first position of its row, and the position that the model counts as 0.
        self._starts, self._zeros = np.zeros(seats, np.int32), np.zeros(seats, np.int32)
        self._states = StateCheck(state_slots) if state_slots else None
        self._prefixes = SharedPrefixes(self._table, chunk_tokens)
        self._sampling = SeatSampling(seats)

    def pack(
        self,
        plan: StepPlan,
        mask: Mask | None = None,
        forbidden: Mapping[int, Sequence[int]] = NOTHING_FORBIDDEN,
    ) -> StepInputs:
        """Packs the plan. InvariantError if the plan contradicts itself or uses a chunk that its
        seat was never given.

        `mask`: the tokens that grammars allow for the plan's samples. `forbidden`: tokens that bad
        words end with, by the index of the sample.
        """
        joined = [(join.seat, 0, 0) for join in plan.joins]
        for seat, start, zero in (*joined, *plan.origins):
            self._table[seat] = NOT_WRITTEN
            self._chunks[seat] = 0
            self._prefixes.cleared(seat)
            self._starts[seat], self._zeros[seat] = start, zero
        counts = self._sampling.join(plan.joins)
        cells, cell_slots = self._update_blocks(plan.blocks)

        generated = len(plan.generate)
        # seat, start, end, write_from, samples, scores
        spans = np.array(plan.spans, np.int32).reshape(-1, 6)
        first = np.array(plan.positions, np.int32)
        starts = np.concatenate((first, spans[:, 1]))
        ends = np.concatenate((first + 1, spans[:, 2]))
        seats = np.concatenate((np.array(plan.generate, np.int32), spans[:, 0]))
        write_from = np.concatenate((first, spans[:, 3]))
        samples = np.concatenate((np.ones(generated, np.int32), spans[:, 4]))

        lengths = ends - starts
        q_ends = lengths.cumsum(dtype=np.int32)
        q_starts = q_ends - lengths
        begins = self._starts[seats]
        self._check(plan, seats, ends - begins, lengths, samples)
        coordinates = (starts - begins - q_starts).repeat(lengths)
        coordinates += np.arange(plan.tokens, dtype=np.int32)
        state_in = state_out = np.full(len(seats), NO_STATE, np.int32)
        if self._states is not None:
            state_in, state_out = self._states.follow(plan, seats, begins, starts, ends, samples)
        segments = np.zeros((len(seats), 5), np.int32)
        for column, values in enumerate((q_starts, lengths, 0, ends - begins, seats)):
            segments[:, column] = values
        token_ids = np.empty(plan.tokens, np.int32)
        token_ids[:generated] = LAST_SAMPLE
        token_ids[generated:] = plan.token_ids
        # Of each sampled row, its distance from the end of its segment: 1, or n to 1 for a segment
        # with n.
        from_end = samples.cumsum(dtype=np.int32).repeat(samples) - np.arange(
            len(plan.samples), dtype=np.int32
        )
        sample_seats = seats.repeat(samples)
        sample_rows = q_ends.repeat(samples) - from_end
        # the positions of the tokens to be drawn
        drawn = ends.repeat(samples) - from_end + np.int32(1)
        scored_seats: Sequence[int] = ()
        if plan.scored:
            scored_rows, scored_seats = scored(spans, q_ends[generated:])
            sample_rows = np.concatenate((sample_rows, scored_rows))
        return StepInputs(
            generated=generated,
            token_ids=token_ids,
            positions=coordinates + (begins - self._zeros[seats]).repeat(lengths),
            slots=self._places(
                seats.repeat(lengths), coordinates, (write_from - begins).repeat(lengths)
            ),
            segments=segments,
            sharing=self._prefixes.order(seats[:generated], segments[:generated, 3]),
            sample_rows=sample_rows,
            state_in=state_in,
            state_out=state_out,
            sample_seats=sample_seats,
            sampling=self._sampling.pack(
                counts, sample_seats, drawn, scored_seats, plan.scored, mask, forbidden
            ),
            block_cells=cells,
            block_slots=cell_slots,
        )

    def _update_blocks(self, updates: Sequence[BlockUpdate]) -> tuple[np.ndarray, np.ndarray]:
        """Applies the updates to the mirror. Returns them as (cells, slots) of the flattened
        table."""
        blocks = self._table.shape[1]
        cells: list[int] = []
        slots: list[int] = []
        for seat, first, given in updates:
            end = first + len(given)
            if end > blocks:
                raise InvariantError(f"seat {seat} is given chunk {end - 1}, beyond its {blocks}")
            if first > self._chunks[seat]:
                raise InvariantError(f"seat {seat} is given chunk {first} before chunk {first - 1}")
            self._chunks[seat] = max(self._chunks[seat], end)
            cells += range(seat * blocks + first, seat * blocks + end)
            slots += given
        changed = np.array(cells, np.int32), np.array(slots, np.int32)
        self._table.reshape(-1)[changed[0]] = changed[1]
        for seat, first, given in updates:
            self._prefixes.changed(seat, first, len(given))
        return changed

    def _check(
        self,
        plan: StepPlan,
        seats: np.ndarray,
        ends: np.ndarray,
        lengths: np.ndarray,
        samples: np.ndarray,
    ) -> None:
        """Checks that each batch is complete, and that each segment's chunks were given. They are
        given in order, so the check of the last one is enough.

        ends: [S], coordinates after each segment's last query.
        """
        if len(plan.positions) != len(plan.generate) or len(plan.samples) != samples.sum():
            raise InvariantError(
                f"step {plan.step} has rows without a position, or samples without a row"
            )
        if not len(seats):
            return
        if lengths.min() < 1 or lengths.sum() != plan.tokens:
            raise InvariantError(
                f"the spans of step {plan.step} are empty or differ from its {plan.tokens} token "
                "ids"
            )
        if self._table[seats, (ends - 1) // self._chunk_tokens].min() < 0:
            raise InvariantError(
                f"step {plan.step} computes in a chunk that its seat was never given"
            )

    def _places(
        self, seats: np.ndarray, coordinates: np.ndarray, write_from: np.ndarray
    ) -> np.ndarray:
        """The place of each token's KV (see `StepInputs.slots`). All arguments are [T], the last
        two in coordinates."""
        chunks, offsets = np.divmod(coordinates, np.int32(self._chunk_tokens))
        places: np.ndarray = self._table[seats, chunks] * np.int32(self._chunk_tokens) + offsets
        places[coordinates < write_from] = NOT_WRITTEN
        return places
