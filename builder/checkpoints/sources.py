"""The origin of a rank's parameters: tensors of a checkpoint, and the part of each that the rank
holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class SourcePart(NamedTuple):
    """The `size` rows or columns from `start` on, of `full`; beyond the end they are zeros."""

    full: int
    start: int
    size: int


def whole(size: int) -> SourcePart:
    return SourcePart(size, 0, size)


class Source(NamedTuple):
    """One tensor of a checkpoint, with the part of each dimension that a rank holds."""

    name: str
    parts: tuple[SourcePart, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(part.full for part in self.parts)

    @property
    def cut_shape(self) -> tuple[int, ...]:
        return tuple(part.size for part in self.parts)

    def by_group(self, group: int) -> Source:
        """The same part of a tensor [rows, columns / group]."""
        rows, columns = self.parts
        return Source(self.name, (rows, SourcePart(*(size // group for size in columns))))

    def cut(self, tensor: Any, dtype: torch.dtype) -> Tensor:
        """Returns the rank's part of a tensor. From a slice that safetensors opened, only this part
        is read."""
        bounds = [(min(start, full), min(start + size, full)) for full, start, size in self.parts]
        kept: Tensor = tensor[tuple(slice(*bound) for bound in bounds)].to(dtype).contiguous()
        if kept.shape == self.cut_shape:
            return kept
        filled = kept.new_zeros(self.cut_shape)
        filled[tuple(slice(size) for size in kept.shape)] = kept
        return filled


Sources = dict[str, tuple[Source, ...]]
"""For each parameter of Decoder, the tensors that are joined along their first dimension to make
it."""


def layer_projections(wanted: Sources) -> Sources:
    """The sources of the weights of the layers' projections, by the name of the projection."""
    return {
        target.removesuffix(".weight"): sources
        for target, sources in wanted.items()
        if target.startswith("layers.")
        and target.endswith(".weight")
        and len(sources[0].parts) == 2
    }


def tensor_of(files: Mapping[str, Any], name: str) -> Tensor:
    tensor: Tensor = files[name].get_tensor(name)
    return tensor
