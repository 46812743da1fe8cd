"""Shared by the tests of operations on states: random inputs, a pool, and batches of spans."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pensieve.plugins.state.pool import StatePool, StateShape

SHAPE = StateShape(
    layers=2,
    value_heads=6,
    key_dim=8,
    value_dim=24,
    columns=3,
    channels=2 * 3 * 8 + 6 * 24,  # a multiple of 64, as in real models
    dtype=torch.float32,
)
KEY_HEADS = 3
SLOTS = 9
ZERO = NOT_KEPT = -1

SPANS = {
    "a prompt from zeros": [(0, 150, ZERO, 4)],
    "a piece, in = out": [(0, 64, 2, 2)],
    "in differs from out": [(0, 65, 2, 5)],
    "not kept": [(0, 7, 2, NOT_KEPT)],
    "one token from zeros": [(0, 1, ZERO, 0)],
    "two tokens": [(0, 2, 3, 3)],
    "rows that generate": [(i, i + 1, i, i) for i in range(8)],
    "rows of one state": [(i, i + 1, 8, i) for i in range(8)],
    "a mixed step": [
        (0, 1, 0, 0),
        (1, 2, ZERO, 1),
        (2, 3, 2, 7),
        (3, 70, ZERO, NOT_KEPT),
        (70, 70, 5, NOT_KEPT),  # padding
        (71, 73, 4, 4),  # behind a token of no segment
        (73, 201, 8, 3),
        (201, 202, 8, NOT_KEPT),
    ],
    "nothing": [],
}


class Tokens:
    """Random inputs of T tokens, for both operations."""

    def __init__(
        self,
        count: int,
        dtype: torch.dtype = torch.float32,
        shape: StateShape = SHAPE,
        key_heads: int = KEY_HEADS,
        device: str = "cpu",
    ):
        torch.manual_seed(count)
        self.x = torch.randn(count, shape.channels).to(device, dtype)
        self.weight = torch.randn(shape.channels, 1, shape.columns + 1).to(device, dtype)
        self.q, self.k = torch.randn(2, count, key_heads, shape.key_dim).to(device, dtype)
        self.v = torch.randn(count, shape.value_heads, shape.value_dim).to(device, dtype)
        self.decay = -torch.rand(count, shape.value_heads).mul(6.0).sub(5.0).exp().to(device)
        self.beta = torch.rand(count, shape.value_heads).to(device)


def new_pool(
    dtype: torch.dtype = torch.float32, shape: StateShape = SHAPE, device: str = "cpu"
) -> StatePool:
    """Random numbers in all slots."""
    shape = shape._replace(dtype=dtype)
    pool = StatePool(torch.zeros(SLOTS, shape.nbytes, dtype=torch.uint8, device=device), shape)
    torch.manual_seed(1)
    for part in (*pool.matrices, *pool.columns):
        part.copy_(torch.randn(part.shape))
    return pool


def batch_of_spans(
    spans: Sequence[tuple[int, int, int, int]], device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Segments, state_in and state_out of (start, end, state_in, state_out) each."""
    rows = torch.tensor(spans, dtype=torch.int32, device=device).view(-1, 4)
    segments = torch.zeros(len(rows), 5, dtype=torch.int32, device=device)
    segments[:, 0] = rows[:, 0]
    segments[:, 1] = rows[:, 1] - rows[:, 0]
    return segments, rows[:, 2].contiguous(), rows[:, 3].contiguous()
