"""The eight-bit format of weights and activations: e4m3, with a scale for each row, or for each row
and group of columns."""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
MOST = 448.0  # the largest number of e4m3
LEAST_SCALE = 1e-30  # of a row of zeros


def widened(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the FP8 weights' values in `dtype`; scale [out], or [out, groups of
    inputs]."""
    if scale.dim() == 1:
        return weight.to(dtype).mul_(scale.unsqueeze(1))
    groups = weight.to(dtype).unflatten(1, (scale.shape[1], -1))
    return groups.mul_(scale.unsqueeze(2)).flatten(1)
