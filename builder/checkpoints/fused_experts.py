"""Some checkpoints have one tensor for all experts of a layer. Here each expert has tensors of its
own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

FUSED = re.compile(
    r"(?P<experts>.*\.mlp\.experts)\.(?P<projection>gate_up_proj|down_proj)(?P<bias>_bias)?"
)
PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """Like a tensor that safetensors opened: its shape is known, and it is read when it is indexed.

    It is [outputs, inputs], or [outputs], of one expert: one of the `parts` projections that are
    fused in the stored tensor.
    """

    stored: Any
    expert: int
    part: int
    parts: int

    def get_slice(self, name: str) -> ExpertTensor:
        return self

    def get_dtype(self) -> str:
        return str(self.stored.get_dtype())


class Alternating(ExpertTensor):
    """Of a tensor [experts, inputs, outputs] or a bias [experts, outputs], in which the outputs of
    the projections alternate: gpt-oss."""

    def get_shape(self) -> list[int]:
        _, *inputs, outputs = self.stored.get_shape()
        return [outputs // self.parts, *inputs]

    def __getitem__(self, index: Any) -> Tensor:
        outputs, *inputs = index
        outputs = slice(outputs.start * self.parts, outputs.stop * self.parts)
        read: Tensor = self.stored[(self.expert, *inputs, outputs)]
        own = read[..., self.part :: self.parts]
        return own.mT if inputs else own


class Concatenated(ExpertTensor):
    """Of a tensor [experts, outputs, inputs], in which the outputs of the projections follow each
    other: Qwen3.5."""

    def get_shape(self) -> list[int]:
        _, outputs, inputs = self.stored.get_shape()
        return [outputs // self.parts, inputs]

    def __getitem__(self, index: Any) -> Tensor:
        outputs, inputs = index
        first = self.part * self.get_shape()[0]
        read: Tensor = self.stored[
            self.expert, slice(first + outputs.start, first + outputs.stop), inputs
        ]
        return read


def unfused(
    files: Mapping[str, Any], kind: type[Alternating] | type[Concatenated]
) -> dict[str, Any]:
    """For each tensor name the file that contains it, as given, with the experts' tensors apart."""
    apart: dict[str, Any] = {}
    for name, file in files.items():
        fused = FUSED.fullmatch(name)
        if fused is None:
            apart[name] = file
            continue
        stored = file.get_slice(name)
        suffix = "bias" if fused["bias"] else "weight"
        parts = PROJECTIONS[fused["projection"]]
        for expert in range(stored.get_shape()[0]):
            for number, part in enumerate(parts):
                own = kind(stored, expert, number, len(parts))
                apart[f"{fused['experts']}.{expert}.{part}.{suffix}"] = own
    return apart
