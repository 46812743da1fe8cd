"""Checkpoints fuse tensors of linear attention. Here queries, keys, values and the others have
tensors of their own, so that each can be divided by heads.

| stored       | rows                                                         | of              |
|--------------|--------------------------------------------------------------|-----------------|
| in_proj_qkv  | all queries, all keys, all values                            | Qwen3.5         |
| in_proj_qkvz | of each key head: its queries, keys, values and their gates  | Qwen3-Next      |
| in_proj_ba   | of each key head: the two numbers of each of its value heads | Qwen3-Next      |
| conv1d       | all queries, all keys, all values                            | both            |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .architectures import refusal
from .config import LinearAttention

FUSED = re.compile(r"(?P<stem>.*\.linear_attn)\.(?P<fused>in_proj_(qkvz?|ba)|conv1d)\.weight")


@dataclass(frozen=True, slots=True)
class PartRows:
    """Like a tensor that safetensors opened: its shape is known, and it is read when it is indexed.

    It has `size` of every `period` rows of the stored tensor, the first of them at `first`.
    """

    stored: Any
    periods: int
    period: int
    first: int
    size: int

    def get_slice(self, name: str) -> PartRows:
        return self

    def get_shape(self) -> list[int]:
        return [self.periods * self.size, *self.stored.get_shape()[1:]]

    def get_dtype(self) -> str:
        return str(self.stored.get_dtype())

    def __getitem__(self, index: Any) -> Tensor:
        rows, *others = index
        pieces = []
        for at in range(self.periods):
            start, end = (
                min(max(row - at * self.size, 0), self.size) for row in (rows.start, rows.stop)
            )
            if start < end:
                begin = at * self.period + self.first
                pieces.append(self.stored[(slice(begin + start, begin + end), *others)])
        return torch.cat(pieces)


def with_delta_parts(files: Mapping[str, Any], linear: LinearAttention) -> dict[str, Any]:
    """For each tensor name the file that contains it, as given, with the parts of fused tensors
    apart. Raises SettingError that names a tensor with a wrong number of rows."""
    parts: dict[str, Any] = {}
    for name, file in files.items():
        fused = FUSED.fullmatch(name)
        if fused is None:
            parts[name] = file
            continue
        stored = file.get_slice(name)
        periods, sizes = _layout(fused["fused"], linear)
        period = sum(sizes.values())
        rows, *_ = shape = stored.get_shape()
        if rows != periods * period:
            raise refusal(
                f"tensor {name} has the shape {list(shape)}; config.json asks for "
                f"{periods * period} rows"
            )
        first = 0
        for part, size in sizes.items():
            own = PartRows(stored, periods, period, first, size)
            parts[f"{fused['stem']}.{part}.weight"] = own
            first += size
    return parts


def _layout(fused: str, linear: LinearAttention) -> tuple[int, dict[str, int]]:
    """How often the rows of all parts follow each other, and the rows of each part at a time."""
    share = linear.value_heads // linear.key_heads
    values = share * linear.value_dim
    stem = "conv1d" if fused == "conv1d" else "in_proj"
    periods, sizes = {
        "in_proj_qkvz": (linear.key_heads, (linear.key_dim, linear.key_dim, values, values)),
        "in_proj_ba": (linear.key_heads, (share, share)),
    }.get(fused, (1, linear.parts))
    names = "ba" if fused == "in_proj_ba" else "qkvz"[: len(sizes)]
    return periods, {f"{stem}_{x}": size for x, size in zip(names, sizes, strict=True)}
