"""Weights in FP8 or int4: which weights of a decoder can be in them, rounding to FP8, and their
values.

The projections of the layers, which are nearly all of the weights, are rounded to e4m3 with a
float32 scale for each output; embeddings, head, norms and biases are unchanged. A projection `p` in
FP8 is two tensors, `p.weight` and `p.scale`; that of a checkpoint may have scales for groups of
inputs. Ranks that divide a projection's columns share the scales of whole rows, so together they
hold the same model.

In int4 (`plugins/linear/int4.py`) it is `p.weight`, whose numbers are packed, and `p.scales_zeros`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from ..plugins.linear.fp8 import rounded, row_scales
from ..plugins.linear.fp8_format import FP8, widened
from ..plugins.linear.int4 import widened as int4_widened
from ..plugins.linear.int4_format import TILE_INPUTS, TILE_OUTPUTS, packed_shape
from ..scheduler.types import SettingError
from .checkpoints.config import DecoderConfig
from .checkpoints.hugging_face import dtype_of, parameter_shapes
from .layers.parts import Projection
from .weights import Stored

PROJECTIONS = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")


def projections(config: DecoderConfig) -> frozenset[str]:
    """The names of the projections that can be in FP8 or int4."""
    return frozenset(f"layers.{i}.{name}" for i in range(config.layers) for name in PROJECTIONS)


def stored_as(
    config: DecoderConfig,
    dtype: torch.dtype,
    ranks: int = 1,
    in_fp8: Collection[str] = (),
    in_int4: Collection[str] = (),
    group: int = 0,
) -> dict[str, Stored]:
    """The stored form of each parameter of one rank's Decoder. `in_fp8`, `in_int4`: the names of
    projections; `group`: inputs that share a scale, 0: all do."""
    stored = {}
    for name, shape in parameter_shapes(config, ranks).items():
        projection = name.removesuffix(".weight")
        if projection in in_fp8:
            stored[name] = Stored(shape, FP8)
            scales = (shape[0], shape[1] // group) if group else shape[:1]
            stored[f"{projection}.scale"] = Stored(scales, torch.float32)
        elif projection in in_int4:
            if shape[0] % TILE_OUTPUTS or shape[1] % max(group, TILE_INPUTS):
                raise SettingError(
                    "--weights",
                    f"{projection} has {shape[0]} outputs and {shape[1]} inputs on a rank; int4 "
                    "takes multiples of "
                    f"{TILE_OUTPUTS} and of {max(group, TILE_INPUTS)}",
                )
            stored[name] = Stored(packed_shape(*shape), torch.int32)
            stored[f"{projection}.scales_zeros"] = Stored((shape[1] // group, shape[0], 2), dtype)
        else:
            stored[name] = Stored(shape, dtype_of(name, dtype))
    return stored


def names_in_fp8(names: Collection[str]) -> frozenset[str]:
    """The projections in FP8, derived from all parameters' names."""
    return frozenset(name.removesuffix(".scale") for name in names if name.endswith(".scale"))


def names_in_int4(names: Collection[str]) -> frozenset[str]:
    """The projections in int4, derived from all parameters' names."""
    return frozenset(
        name.removesuffix(".scales_zeros") for name in names if name.endswith(".scales_zeros")
    )


class QuantisedWeights(Mapping[str, Tensor]):
    """One rank's weights with all projections in FP8. Each access rounds the unquantised projection
    again.

    own     the rank's unquantised weights
    whole   the undivided weights: the scale of a projection with divided columns needs its whole
            rows
    """

    def __init__(
        self, config: DecoderConfig, own: Mapping[str, Tensor], whole: Mapping[str, Tensor]
    ):
        self._own = own
        self._whole = whole
        self._projections = projections(config)
        self._names = [*own, *(f"{name}.scale" for name in sorted(self._projections))]

    def __getitem__(self, name: str) -> Tensor:
        projection, _, kind = name.rpartition(".")
        if projection not in self._projections or kind == "bias":
            return self._own[name]
        weight = self._own[f"{projection}.weight"]
        divided = projection.endswith((".out", ".down"))
        scales = row_scales(self._whole[f"{projection}.weight"] if divided else weight)
        return scales if kind == "scale" else rounded(weight, scales)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def dequantised(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values of the weights in float32, without scales."""
    in_fp8 = names_in_fp8(weights.keys())
    in_int4 = names_in_int4(weights.keys())
    wide = {}
    for name, tensor in weights.items():
        projection, _, kind = name.rpartition(".")
        if projection in in_fp8 and kind == "weight":
            wide[name] = widened(tensor, weights[f"{projection}.scale"], torch.float32)
        elif projection in in_int4 and kind == "weight":
            wide[name] = int4_widened(tensor, weights[f"{projection}.scales_zeros"], torch.float32)
        elif kind not in ("scale", "scales_zeros"):
            wide[name] = tensor.float()
    return wide


def expect_quantised(decoder: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Puts parameters on the meta device into the decoder's projections, in the form of one rank's
    weights: FP8 where a weight has a scale, int4 where it has scales and zeros."""
    for name, tensor in weights.items():
        module, _, kind = name.rpartition(".")
        if kind not in ("scale", "scales_zeros"):
            continue
        projection = decoder.get_submodule(module)
        setattr(projection, kind, nn.Parameter(torch.empty_like(tensor, device="meta"), False))
        if kind == "scales_zeros":
            assert isinstance(projection, Projection)
            shape = packed_shape(projection.out_features, projection.in_features)
            form = torch.empty(shape, dtype=torch.int32, device="meta")
            projection.weight = nn.Parameter(form, requires_grad=False)
