"""Some checkpoints have weights in FP8 with a scale for each block of outputs and inputs. Here each
output has scales of its own, one for each group of inputs, so that outputs can be divided and
joined anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .architectures import refusal
from .sources import StoredPart, in_file

END = ".weight_scale_inv"


@dataclass(frozen=True, slots=True)
class RowScales(StoredPart):
    """[outputs, groups of inputs]: row i is row i / `rows` of the stored tensor."""

    outputs: int
    rows: int

    def get_shape(self) -> list[int]:
        return [self.outputs, self.stored.get_shape()[1]]

    def __getitem__(self, index: Any) -> Tensor:
        outputs, groups = index
        first = outputs.start // self.rows
        blocks: Tensor = self.stored[first : -(-outputs.stop // self.rows), groups]
        start = outputs.start - first * self.rows
        repeated = blocks.to(torch.float32).repeat_interleave(self.rows, dim=0)
        return repeated[start : start + outputs.stop - outputs.start]


def with_row_scales(files: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """For each tensor name the file that contains it, as given, with the scales of blocks of `rows`
    outputs for each output."""
    scales: dict[str, Any] = dict(files)
    for name, file in files.items():
        weight = name.removesuffix("_scale_inv")
        if name.endswith(END) and weight in files:
            stored = file.get_slice(name)
            shape = stored.get_shape()
            if len(shape) == 2:
                outputs = files[weight].get_slice(weight).get_shape()[0]
                blocks = -(-outputs // rows)
                if shape[0] != blocks:
                    raise refusal(
                        f"tensor {name} has the shape {list(shape)}{in_file(files, name)}; "
                        f"{outputs} outputs in blocks of {rows} need {blocks} rows: take the "
                        "config.json that belongs to these weights"
                    )
                scales[name] = RowScales(name, file, stored, outputs, rows)
    return scales
