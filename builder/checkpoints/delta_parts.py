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

from .architectures import QWEN3_NEXT
from .config import DecoderConfig, LinearAttention
from .sources import StoredPart, check_shape

PART = re.compile(
    r"(?P<stem>.*\.linear_attn)\.(?P<module>in_proj|conv1d)_(?P<part>[qkvzba])\.(?P<kind>weight\w*)"
)
FUSED = re.compile(
    r"(?P<stem>.*\.linear_attn)\.(?P<fused>in_proj_(qkvz?|ba)|conv1d)\.(?P<kind>weight\w*)"
)


@dataclass(frozen=True, slots=True)
class PartRows(StoredPart):
    """`size` of every `period` rows of the stored tensor, the first of them at `first`."""

    periods: int
    period: int
    first: int
    size: int

    def get_shape(self) -> list[int]:
        return [self.periods * self.size, *self.stored.get_shape()[1:]]

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


@dataclass(frozen=True, slots=True)
class OfAll(StoredPart):
    """A scale of the whole stored tensor, which all its parts have."""

    def get_shape(self) -> list[int]:
        return list(self.stored.get_shape())

    def get_tensor(self, name: str) -> Tensor:
        scale: Tensor = self.file.get_tensor(self.name)
        return scale


def with_delta_parts(files: Mapping[str, Any], config: DecoderConfig) -> dict[str, Any]:
    """For each tensor name the file that contains it, as given, with the parts of fused tensors
    apart. Raises SettingError that names a tensor with a wrong shape."""
    linear = config.linear
    assert linear is not None
    parts: dict[str, Any] = {}
    for name, file in files.items():
        fused = FUSED.fullmatch(name)
        if fused is None:
            parts[name] = file
            continue
        periods, sizes = _layout(fused["fused"], linear)
        period = sum(sizes.values())
        stored = file.get_slice(name)
        columns = (1, linear.conv_width) if fused["fused"] == "conv1d" else (config.hidden_size,)
        if fused["kind"] != "weight":  # scales, whose columns are checked with those of others
            shape = tuple(stored.get_shape())
            if shape in ((), (1,)):  # one for all parts
                for part in sizes:
                    parts[f"{fused['stem']}.{part}.{fused['kind']}"] = OfAll(name, file, stored)
                continue
            columns = shape[1:]
        check_shape(files, name, (periods * period, *columns))
        first = 0
        for part, size in sizes.items():
            own = PartRows(name, file, stored, periods, period, first, size)
            parts[f"{fused['stem']}.{part}.{fused['kind']}"] = own
            first += size
    return parts


def fused_name(name: str, architecture: str) -> str:
    """The name of the tensor in which the architecture's checkpoints have the part of this name."""
    part = PART.fullmatch(name)
    if part is None:
        return name
    names = ("qkvz", "ba") if architecture == QWEN3_NEXT else ("qkv", "z", "b", "a")
    fused = next(fused for fused in names if part["part"] in fused)
    module = "conv1d" if part["module"] == "conv1d" else f"in_proj_{fused}"
    return f"{part['stem']}.{module}.{part['kind']}"


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
