"""Some checkpoints have one tensor for all experts of a layer. Here each expert has tensors of its
own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .config import DecoderConfig
from .sources import StoredPart, check_shape

FUSED = re.compile(
    r"(?P<experts>.*\.mlp\.experts)\.(?P<projection>gate_up_proj|down_proj)(?P<bias>_bias)?"
)
PART = re.compile(
    r"(?P<experts>.*\.mlp\.experts)\.\d+\.(?P<projection>gate_proj|up_proj|down_proj)"
    r"\.(?P<kind>weight|bias)"
)
PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True, slots=True)
class ExpertTensor(StoredPart):
    """[outputs, inputs], or [outputs], of one expert: one of the `parts` projections that are fused
    in the stored tensor."""

    expert: int
    part: int
    parts: int

    @staticmethod
    def stored_shape(experts: int, outputs: int, inputs: int) -> tuple[int, ...]:
        """Of a stored tensor of weights."""
        raise NotImplementedError


class Alternating(ExpertTensor):
    """Of a tensor [experts, inputs, outputs] or a bias [experts, outputs], in which the outputs of
    the projections alternate: gpt-oss."""

    @staticmethod
    def stored_shape(experts: int, outputs: int, inputs: int) -> tuple[int, ...]:
        return experts, inputs, outputs

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

    @staticmethod
    def stored_shape(experts: int, outputs: int, inputs: int) -> tuple[int, ...]:
        return experts, outputs, inputs

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


def fused_name(name: str) -> str:
    """The name of the tensor of all experts in which the tensor of one is."""
    part = PART.fullmatch(name)
    if part is None:
        return name
    projection = "down_proj" if part["projection"] == "down_proj" else "gate_up_proj"
    return f"{part['experts']}.{projection}{'_bias' if part['kind'] == 'bias' else ''}"


def unfused(
    files: Mapping[str, Any], kind: type[Alternating] | type[Concatenated], config: DecoderConfig
) -> dict[str, Any]:
    """For each tensor name the file that contains it, as given, with the experts' tensors apart.
    Raises SettingError that names a tensor with a wrong shape."""
    apart: dict[str, Any] = {}
    for name, file in files.items():
        fused = FUSED.fullmatch(name)
        if fused is None:
            apart[name] = file
            continue
        is_down = fused["projection"] == "down_proj"
        outputs = config.hidden_size if is_down else 2 * config.mlp_size
        inputs = config.mlp_size if is_down else config.hidden_size
        weights = kind.stored_shape(config.experts, outputs, inputs)
        check_shape(files, name, (config.experts, outputs) if fused["bias"] else weights)
        stored = file.get_slice(name)
        suffix = "bias" if fused["bias"] else "weight"
        parts = PROJECTIONS[fused["projection"]]
        for expert in range(config.experts):
            for number, part in enumerate(parts):
                own = kind(name, file, stored, expert, number, len(parts))
                apart[f"{fused['experts']}.{expert}.{part}.{suffix}"] = own
    return apart
