"""The origin of a rank's parameters: tensors of a checkpoint, and the part of each that the rank
holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from .architectures import refusal


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


class SafetensorsFile(NamedTuple):
    """A file that safetensors opened."""

    path: Path
    opened: Any

    def get_slice(self, name: str) -> Any:
        return self.opened.get_slice(name)

    def get_tensor(self, name: str) -> Tensor:
        tensor: Tensor = self.opened.get_tensor(name)
        return tensor


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A tensor of its own here, and a part of the tensor `name` in `file`. It is used like both a
    file and a tensor that safetensors opened: its shape is known, and it is read when it is
    indexed."""

    name: str
    file: Any
    stored: Any

    def get_slice(self, name: str) -> Self:
        return self

    def get_dtype(self) -> str:
        return str(self.stored.get_dtype())

    def get_shape(self) -> list[int]:
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Tensor:
        raise NotImplementedError

    def get_tensor(self, name: str) -> Tensor:
        return self[tuple(slice(0, size) for size in self.get_shape())]


def stored_name(files: Mapping[str, Any], name: str) -> str:
    """The checkpoint's own name of a tensor."""
    part = files[name]
    return part.name if isinstance(part, StoredPart) else name


def in_file(files: Mapping[str, Any], name: str) -> str:
    """ " in FILE", if the tensor is in one of several files that a checkpoint may have."""
    file = files[name]
    if isinstance(file, StoredPart):
        file = file.file
    return f" in {file.path.name}" if isinstance(file, SafetensorsFile) else ""


def check_shape(files: Mapping[str, Any], name: str, *shapes: tuple[int, ...]) -> None:
    """SettingError that names the tensor and its file unless it has one of the shapes."""
    shape = tuple(files[name].get_slice(name).get_shape())
    if shape not in shapes:
        raise refusal(
            f"tensor {stored_name(files, name)} has the shape {list(shape)}{in_file(files, name)}; "
            f"config.json asks for {list(shapes[0])}: take the config.json that belongs to these "
            "weights"
        )


def tensor_of(files: Mapping[str, Any], name: str) -> Tensor:
    tensor: Tensor = files[name].get_tensor(name)
    return tensor
