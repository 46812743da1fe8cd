"""A device without a GPU that checks which prefixes generating rows are said to share."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from pensieve.runtime.device.cpu import CpuDevice
from pensieve.runtime.step import prefixes
from pensieve.runtime.step.buffers import Shapes
from pensieve.scheduler.types import Tier


class SharingDevice(CpuDevice):
    """Checks each step's `sharing` against the slots that were given.

    shared_rows   how many times a generating row shared keys with another
    """

    shared_rows = 0

    def load(self, engine, seats, blocks, gates, most_tokens):
        super().load(engine, seats, blocks, gates, most_tokens)
        self._given = np.full((seats, blocks), -1, np.int32)
        self._shapes = Shapes(most_tokens, seats, self._pools[Tier.GPU].shape[4])

    def upload(self, inputs):
        self._given.flat[inputs.block_cells] = inputs.block_slots
        chunk_tokens = self._pools[Tier.GPU].shape[4]
        seats, lengths = (
            inputs.segments[: inputs.generated, 4],
            inputs.segments[: inputs.generated, 3],
        )
        if inputs.sharing is None:
            chunks = (
                prefixes.SHARED_KEYS // chunk_tokens
                if prefixes.SHARED_KEYS % chunk_tokens == 0
                else 0
            )
            whole = seats[lengths >= prefixes.SHARED_KEYS]
            assert not chunks or not any(
                self._equal(one, other, chunks) for one, other in combinations(whole, 2)
            )
        else:
            order, shared = inputs.sharing.T
            assert (
                sorted(order) == list(range(inputs.generated)) and shared[0] == 0 and shared.any()
            )
            for before, row, keys in zip(order[:-1], order[1:], shared[1:], strict=True):
                assert self._equal(seats[before], seats[row], keys // chunk_tokens)
            self.shared_rows += np.count_nonzero(shared) + np.count_nonzero(
                (shared[:-1] == 0) & (shared[1:] > 0)
            )
        super().upload(inputs)

    def _equal(self, one, other, chunks):
        return (self._given[one, :chunks] == self._given[other, :chunks]).all()
