"""The layout of states of linear attention in memory.

A state is one contiguous record of bytes, all layers one after the other:

    | layer 0: matrices | columns | layer 1: matrices | columns | ...

    matrices  [value heads, key_dim, value_dim] float32
    columns   [conv_width - 1, channels] in the engine's dtype, the last inputs of the layer's
              convolution, oldest first

Each layer begins at a multiple of ALIGNMENT bytes of the record.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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
    """

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
