"""Packs steps faster while the same rows generate: only what differs from the last step is made
anew. numpy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ...scheduler.plan import StepPlan
from ...scheduler.types import InvariantError
from .inputs import StepInputs, StepPacker
from .sampling_inputs import NOTHING_FORBIDDEN, Mask


class _Rows(NamedTuple):
    """The last step, in which N rows generated and nothing else was computed.

    generate   the plan's seats, as bytes
    begins     [N] int32, the first position of each row
    shifts     [N] int32, from a coordinate of the row to the position that the model counts
    """

    generate: bytes
    begins: np.ndarray
    shifts: np.ndarray
    inputs: StepInputs


class ReusingPacker(StepPacker):
    """Packs as `StepPacker` does, to equal arrays. Steps share the arrays that they have in
    common."""

    _rows: _Rows | None = None  # None: the last step was of another kind

    def pack(
        self,
        plan: StepPlan,
        mask: Mask | None = None,
        forbidden: Mapping[int, Sequence[int]] = NOTHING_FORBIDDEN,
    ) -> StepInputs:
        generate = plan.generate.tobytes()
        if (
            self._rows is not None
            and self._rows.generate == generate
            and len(plan.generate) == len(plan.positions) == len(plan.samples)
            and not (plan.joins or plan.origins or plan.spans)
        ):
            return self._pack_again(self._rows, plan, mask, forbidden)
        self._rows = None
        inputs = super().pack(plan, mask, forbidden)
        if generate and not plan.spans:
            begins = self._starts[inputs.sample_seats]
            shifts = begins - self._zeros[inputs.sample_seats]
            self._rows = _Rows(generate, begins, shifts, inputs)
        return inputs

    def _pack_again(
        self,
        rows: _Rows,
        plan: StepPlan,
        mask: Mask | None,
        forbidden: Mapping[int, Sequence[int]],
    ) -> StepInputs:
        """Packs a step of the same rows. No seat has changed hands, and no row its begin."""
        cells, cell_slots = self._update_blocks(plan.blocks)
        last = rows.inputs
        seats = last.sample_seats
        first = np.array(plan.positions, np.int32)
        coordinates = first - rows.begins
        chunks, offsets = np.divmod(coordinates, np.int32(self._chunk_tokens))
        slots = self._table[seats, chunks]
        if slots.min() < 0:
            raise InvariantError(
                f"step {plan.step} computes in a chunk that its seat was never given"
            )
        segments = last.segments.copy()
        segments[:, 3] = coordinates + np.int32(1)
        state_in = last.state_in
        state_out = last.state_out
        if self._states is not None:
            state_in, state_out = self._states.follow(
                plan, seats, rows.begins, first, first + np.int32(1)
            )
        return StepInputs(
            generated=last.generated,
            token_ids=last.token_ids,
            positions=coordinates + rows.shifts,
            slots=slots * np.int32(self._chunk_tokens) + offsets,
            segments=segments,
            sharing=self._prefixes.order(seats, segments[:, 3]),
            sample_rows=last.sample_rows,
            state_in=state_in,
            state_out=state_out,
            sample_seats=seats,
            sampling=self._sampling.pack_again(
                last.sampling, seats, first + np.int32(1), mask, forbidden
            ),
            block_cells=cells,
            block_slots=cell_slots,
        )
