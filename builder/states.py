"""The sizes of a model's states."""

from __future__ import annotations

import torch

from ..plugins.state.pool import StateShape
from .checkpoints.config import Shard


def state_shape(shard: Shard, dtype: torch.dtype) -> StateShape | None:
    """The sizes of a rank's states; None if no layer has linear attention."""
    linear = shard.linear
    if linear is None:
        return None
    return StateShape(
        shard.config.linear_layers,
        linear.value_heads,
        linear.key_dim,
        linear.value_dim,
        linear.conv_width - 1,
        linear.channels,
        dtype,
    )
