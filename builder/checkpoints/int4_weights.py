"""Projections in int4 of a Hugging Face checkpoint: finds, checks, cuts and joins them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...plugins.linear.int4 import packed, scales_and_zeros
from ...plugins.linear.int4_format import TILE_INPUTS, TILE_OUTPUTS
from ..int4_formats import Int4
from .architectures import refusal
from .sources import Source, SourcePart, Sources, layer_projections, tensor_of, whole


def int4_projections(files: Mapping[str, Any], wanted: Sources, form: Int4) -> Sources:
    """The sources of the projections whose weights the files have in int4, each named as its
    module.

    SettingError if a projection is in int4 in part, or cannot be cut or packed.
    """
    projections: Sources = {}
    for projection, sources in layer_projections(wanted).items():
        modules = tuple(
            Source(source.name.removesuffix(".weight"), source.parts) for source in sources
        )
        there = [f"{module.name}.{form.layout.weight}" in files for module in modules]
        if not any(there):
            continue
        if not all(there):
            names = ", ".join(module.name for module in modules)
            raise refusal(
                f"{names}: some are in int4 and some are not, and they are one projection here"
            )
        for module in modules:
            _check_sizes(module, form.group)
        projections[projection] = modules
    return projections


def _check_sizes(module: Source, group: int) -> None:
    for what, part, unit in misfits(module, group):
        raise refusal(
            f"{module.name} in int4 has {part.full} {what}, of which a rank holds {part.size}; "
            "both must be "
            f"multiples of {unit}: use other --tensor-parallel, or the unquantised checkpoint"
        )


def misfits(module: Source, group: int) -> list[tuple[str, SourcePart, int]]:
    """The dimensions of a projection that int4 does not take: "outputs" or "inputs", the rank's
    part, and the size of which all numbers must be multiples."""
    rows, columns = module.parts
    step = max(group, TILE_INPUTS)  # both are powers of 2
    return [
        (what, part, unit)
        for what, part, unit in (("outputs", rows, TILE_OUTPUTS), ("inputs", columns, step))
        if part.size % unit or part.start % unit or part.full % unit
    ]


def stored_tensors(projections: Sources, form: Int4) -> Sources:
    """The tensors that the files must have, for a check of names and shapes."""
    stored: Sources = {}
    for projection, modules in projections.items():
        for end in form.shapes(0, 0):
            shapes = [form.shapes(*module.shape)[end] for module in modules]
            stored[f"{projection}.{end}"] = tuple(
                Source(f"{module.name}.{end}", tuple(map(whole, shape)))
                for module, shape in zip(modules, shapes, strict=True)
            )
    return stored


def without_ignored(
    files: Mapping[str, Any], wanted: Sources, projections: Sources, form: Int4
) -> dict[str, Any]:
    """The files without those tensors of int4 projections that contain nothing: order, shape, and
    biases of zeros.

    SettingError if inputs are not in the order of their groups.
    """
    kept = dict(files)
    names = {source.name for sources in wanted.values() for source in sources}
    for module in (module for modules in projections.values() for module in modules):
        kept.pop(f"{module.name}.{form.layout.shape}", None)
        order = f"{module.name}.{form.layout.order}"
        if kept.pop(order, None) and not _in_order(tensor_of(files, order), form.group):
            raise refusal(
                f"{order}: inputs are not in the order of their groups, and that is not supported"
            )
        bias = f"{module.name}.bias"
        if bias in kept and bias not in names and not tensor_of(kept, bias).any():
            del kept[bias]
    return kept


def _in_order(groups: Tensor, size: int) -> bool:
    """Whether inputs, whose groups are given, are in the order of their groups: False after GPTQ
    with act-order."""
    return torch.equal(groups.long(), torch.arange(len(groups)) // size)


class PackedProjections(ABC, Mapping[str, Tensor]):
    """`weight` and `scales_zeros` of one rank's projections in int4, as `plugins/linear/int4.py`
    takes them."""

    def __init__(self, projections: Sources):
        self._projections = projections

    @abstractmethod
    def _numbers(self, module: Source) -> Tensor:
        """The rank's part [out, in] uint8."""

    @abstractmethod
    def _scales_zeros(self, module: Source) -> Tensor:
        """The rank's part [in / group, out, 2]."""

    def __getitem__(self, target: str) -> Tensor:
        projection, _, kind = target.rpartition(".")
        modules = self._projections[projection]
        if kind == "weight":
            return packed(torch.cat([self._numbers(module) for module in modules]))
        if kind != "scales_zeros":
            raise KeyError(target)
        return torch.cat([self._scales_zeros(module) for module in modules], dim=1)

    def __iter__(self) -> Iterator[str]:
        for projection in self._projections:
            yield from (f"{projection}.weight", f"{projection}.scales_zeros")

    def __len__(self) -> int:
        return 2 * len(self._projections)


class Int4Weights(PackedProjections):
    """The projections of a Hugging Face checkpoint."""

    def __init__(
        self, files: Mapping[str, Any], projections: Sources, form: Int4, dtype: torch.dtype
    ):
        super().__init__(projections)
        self._files = files
        self._form = form
        self._dtype = dtype

    def _numbers(self, module: Source) -> Tensor:
        return module.cut(self._form.numbers(self._read(module)), torch.uint8)

    def _read(self, module: Source) -> Callable[[str], Tensor]:
        return lambda end: tensor_of(self._files, f"{module.name}.{end}")

    def _scales_zeros(self, module: Source) -> Tensor:
        groups = module.by_group(self._form.group)
        scales = self._form.scales(self._read(module))
        zeros = self._form.zeros(self._read(module))
        return scales_and_zeros(
            groups.cut(scales, torch.float32), groups.cut(zeros, torch.float32), self._dtype
        )
