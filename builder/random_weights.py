"""Weights for measuring: random, made where they are used, as large as any model's without a file."""

from __future__ import annotations

import torch
from torch import Tensor

from .checkpoint import parameter_shapes
from .config import DecoderConfig

INTO_THE_SUM = ("attention.out.weight", "mlp.down.weight")


def random_weights(config: DecoderConfig, dtype: torch.dtype, device: str, seed: int) -> dict[str, Tensor]:
    """All parameters of Decoder. The same for the same seed on the same kind of device.

    Norms are 1 and biases 0; projections keep the size of what they project, and those into the residual sum add as
    little as the number of layers asks for. So activations and logits are of the size of a trained model's in any
    shape, and finite in any dtype.
    """
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, shape in parameter_shapes(config).items():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if len(shape) == 1:
            tensor.fill_(1.0 if name.endswith("weight") else 0.0)
        else:
            summands = 2 * config.layers if name.endswith(INTO_THE_SUM) else 1
            tensor.normal_(std=(shape[1] * summands) ** -0.5, generator=generator)
        weights[name] = tensor
    return weights
