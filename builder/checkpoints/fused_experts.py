"""gpt-oss' checkpoints have one tensor for all experts of a layer. Here each expert has tensors of
its own."""

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
"""A fused tensor is [experts, inputs, outputs], its bias [experts, outputs]. The outputs of several
projections alternate."""


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """Like a tensor that safetensors opened: its shape is known, and it is read when it is indexed.

    It is [outputs, inputs], or [outputs], of one expert. Of every `step` outputs of the stored
    tensor it has one, the first of them at `first`.
    """

    stored: Any
    expert: int
    first: int
    step: int

    def get_slice(self, name: str) -> ExpertTensor:
        return self

    def get_shape(self) -> list[int]:
        _, *inputs, outputs = self.stored.get_shape()
        return [outputs // self.step, *inputs]

    def get_dtype(self) -> str:
        return str(self.stored.get_dtype())

    def __getitem__(self, index: Any) -> Tensor:
        outputs, *inputs = index
        outputs = slice(outputs.start * self.step, outputs.stop * self.step)
        read: Tensor = self.stored[(self.expert, *inputs, outputs)]
        return read[..., self.first :: self.step].mT if inputs else read[self.first :: self.step]


def unfused(files: Mapping[str, Any]) -> dict[str, Any]:
    """For each tensor name the file that contains it, as given, with the experts' tensors apart."""
    apart: dict[str, Any] = {}
    for name, file in files.items():
        fused = FUSED.fullmatch(name)
        if fused is None:
            apart[name] = file
            continue
        stored = file.get_slice(name)
        kind = "bias" if fused["bias"] else "weight"
        parts = PROJECTIONS[fused["projection"]]
        for expert in range(stored.get_shape()[0]):
            for first, part in enumerate(parts):
                own = ExpertTensor(stored, expert, first, len(parts))
                apart[f"{fused['experts']}.{expert}.{part}.{kind}"] = own
    return apart
