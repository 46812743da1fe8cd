"""Random weights for measurements, made where they are used, so models of any size need no file."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..plugins.linear.fp8 import rounded, row_scales
from ..plugins.linear.int4 import packed, scales_and_zeros
from ..plugins.linear.int4_format import MIDDLE
from .checkpoints.config import DecoderConfig, Shard
from .checkpoints.hugging_face import dtype_of, parameter_shapes, weight_sources
from .checkpoints.sources import Source
from .quantised import projections

INTO_THE_SUM = ("attention.out.weight", "mlp.down.weight", "mlp.shared.down.weight")
DECAYS = (-7.0, 0.0)
"""Of a state, as logarithms: half of it is gone after about one to a thousand tokens."""


def random_weights(
    config: DecoderConfig,
    dtype: torch.dtype,
    device: str,
    seed: int,
    rank: int = 0,
    ranks: int = 1,
    fp8: bool = False,
    int4: int = 0,
) -> dict[str, Tensor]:
    """All parameters of one rank's Decoder. Equal for equal seeds on the same kind of device. With
    `fp8` they are then rounded like those of a checkpoint. With `int4`, the size of a group, they
    are rounded to the nearest of 15 numbers.

    With any number of ranks, together they hold the same model: each rank makes one whole tensor
    after the other and cuts it.

    Norms multiply by 1, and biases are 0. States decay at many speeds. Projections preserve the
    magnitude of their input; those into the residual sum are scaled down by the number of layers.
    So activations and logits have a trained model's magnitude in any shape, and are finite in any
    dtype.
    """
    sources = weight_sources(Shard(config, ranks, rank))
    generator = torch.Generator(device).manual_seed(seed)
    quantised = projections(config) if fp8 or int4 else frozenset()
    weights = {}
    for name, shape in parameter_shapes(config).items():
        tensor = torch.empty(shape, dtype=dtype_of(name, dtype), device=device)
        if name.endswith(".a_log"):
            tensor.uniform_(*DECAYS, generator=generator)
        elif len(shape) == 1:
            # norms of linear attention multiply by the weight in every model
            is_one = name.endswith("attention.norm.weight") or not config.norm_plus_one
            tensor.fill_(1.0 if name.endswith("weight") and is_one else 0.0)
        else:
            summands = 2 * config.layers if name.endswith(INTO_THE_SUM) else 1
            tensor.normal_(std=(math.prod(shape[1:]) * summands) ** -0.5, generator=generator)
        own = _cut(tensor, sources[name]) if ranks > 1 else tensor
        projection = name.removesuffix(".weight")
        if projection not in quantised:
            weights[name] = own
        elif int4:
            weights[name], weights[f"{projection}.scales_zeros"] = _in_int4(
                tensor, int4, sources[name]
            )
        else:
            scales = _cut(
                row_scales(tensor), [Source("", source.parts[:1]) for source in sources[name]]
            )
            weights[name], weights[f"{projection}.scale"] = rounded(own, scales), scales
    return weights


def _in_int4(tensor: Tensor, group: int, sources: Sequence[Source]) -> tuple[Tensor, Tensor]:
    """One rank's part of a weight as packed numbers, scales and zeros."""
    values = tensor.float().unflatten(1, (-1, group))
    scales = values.abs().amax(dim=-1) / (MIDDLE - 1)
    numbers = (values / scales.unsqueeze(-1)).round_().add_(MIDDLE).to(torch.uint8).flatten(1)
    own = _cut(scales, [source.by_group(group) for source in sources])
    return packed(_cut(numbers, sources)), scales_and_zeros(
        own, torch.full_like(own, MIDDLE), tensor.dtype
    )


def _cut(tensor: Tensor, sources: Sequence[Source]) -> Tensor:
    """One rank's part of a parameter that is joined from whole sources; shares no memory with
    it."""
    parts = tensor.split([source.shape[0] for source in sources])
    return torch.cat(
        [source.cut(part, tensor.dtype) for source, part in zip(sources, parts, strict=True)]
    )
