"""The layout of states of linear attention in memory.

A state is one contiguous record of bytes, all layers one after the other:

    | layer 0: matrices | columns | layer 1: matrices | columns | ...

    matrices  [value heads, key_dim, value_dim] float32
    columns   [conv_width - 1, channels] in the engine's dtype, the last inputs of the layer's
              convolution, oldest first

Each layer begins at a multiple of ALIGNMENT bytes of the record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .work_list import StateWork

ALIGNMENT = 16  # bytes


class StateShape(NamedTuple):
    """The sizes of a state of `layers` layers; the others are of one layer."""

    layers: int
    value_heads: int
    key_dim: int
    value_dim: int
    columns: int
    channels: int
    dtype: torch.dtype

    @property
    def matrix_bytes(self) -> int:
        return self.value_heads * self.key_dim * self.value_dim * torch.float32.itemsize

    @property
    def column_bytes(self) -> int:
        return self.columns * self.channels * self.dtype.itemsize

    @property
    def layer_bytes(self) -> int:
        return -(-(self.matrix_bytes + self.column_bytes) // ALIGNMENT) * ALIGNMENT

    @property
    def nbytes(self) -> int:
        return self.layers * self.layer_bytes


def state_chunks(shape: StateShape, chunk_bytes: int) -> int:
    """The chunks of KV whose memory one state takes."""
    return -(-shape.nbytes // chunk_bytes)


def last_states(pool: Tensor, slots: int, shape: StateShape) -> Tensor:
    """The memory of the last chunks of a KV pool [chunks, ...] uint8 as `slots` records of states,
    [slots, bytes]."""
    chunks = pool.view(len(pool), -1)
    count = state_chunks(shape, chunks.shape[1])
    return chunks[len(chunks) - slots * count :].view(slots, -1)


class StatePool:
    """States in numbered slots.

    matrices  of each layer, [slots, value_heads, key_dim, value_dim]
    columns   of each layer, [slots, columns, channels]
    work      a GPU's list of one step's work, None until `make_work`; the code that uploads a
              step's segments calls `list_work`, once, on the stream of the step and before its
              launch
    """

    work: StateWork | None = None

    def __init__(self, records: Tensor, shape: StateShape):
        """records: [slots, bytes] uint8, at least `shape.nbytes` of each slot. The caller still
        owns it."""
        if records.dtype != torch.uint8 or records.dim() != 2 or records.shape[1] < shape.nbytes:
            raise ValueError(
                f"a pool of states is [slots, {shape.nbytes} or more] uint8, not "
                f"{list(records.shape)} {records.dtype}"
            )
        self.shape = shape
        self.matrices: list[Tensor] = []
        self.columns: list[Tensor] = []
        for layer in range(shape.layers):
            first = layer * shape.layer_bytes
            matrices = records.narrow(1, first, shape.matrix_bytes).view(torch.float32)
            columns = records.narrow(1, first + shape.matrix_bytes, shape.column_bytes)
            self.matrices.append(
                matrices.unflatten(1, (shape.value_heads, shape.key_dim, shape.value_dim))
            )
            self.columns.append(
                columns.view(shape.dtype).unflatten(1, (shape.columns, shape.channels))
            )

    @classmethod
    def behind_kv(cls, pool: Tensor, slots: int, shape: StateShape) -> Self:
        """The last chunks of a KV pool of any dtype, as `last_states` takes them."""
        return cls(last_states(pool.view(torch.uint8), slots, shape), shape)

    def make_work(self, tokens: int, segments: int) -> None:
        """Makes `work`, for steps of at most so many tokens and segments."""
        # imported here because only CUDA installations have Triton
        from .work_list import StateWork

        self.work = StateWork(tokens, segments, self.matrices[0].device)

    def list_work(self, segments: Tensor, state_out: Tensor, longest: int | None) -> None:
        """Does what `StateWork.build` does."""
        assert self.work is not None
        self.work.build(segments, state_out, longest)
