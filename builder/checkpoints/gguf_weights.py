"""Reads the tensors of a GGUF file under Hugging Face names, dequantised when they are used.

llama.cpp's converter changes some tensors, and that is undone here. It orders the rows of queries
and keys of its architecture `llama` for another rotary embedding: pairs are neighbours there, and
half a head apart here. It adds 1 to the weights of Gemma's norms.

Projections in Q4_0 and Q4_1 can stay in int4 (`plugins/linear/int4.py`): their blocks are 32 inputs
of a row, with a scale in float16, and in Q4_1 with the value of the number 0.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...plugins.linear.int4_format import MIDDLE
from .architectures import GEMMA3, GPT_OSS, refusal
from .config import DecoderConfig, Shard
from .gguf_config import ARCHITECTURES, EMBEDDINGS, FREQUENCY_FACTORS, MIXTRAL
from .gguf_file import GgufFile, GgufTensor
from .hugging_face import (
    LAYERS,
    LLAMA_LAYER,
    CheckpointWeights,
    _check_names,
    check_tensors,
    weight_sources,
)
from .int4_weights import PackedProjections, misfits
from .sources import Source, SourcePart, Sources, layer_projections

BLOCK = 32  # inputs of a row that share a scale in Q4_0 and Q4_1
PACKABLE = ("Q4_0", "Q4_1")
PERMUTED = (ARCHITECTURES["llama"], MIXTRAL)
"""The architectures whose rows of queries and keys the converter orders."""

IN_LAYER = re.compile(r"blk\.(?P<layer>\d+)\.(?P<module>\w+)\.(?P<kind>weight|bias)")
WHOLE = {
    EMBEDDINGS: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
FLOATS = ("F32", "F16", "BF16")
GIB = 2**30

log = logging.getLogger("pensieve")


@dataclass(frozen=True, slots=True)
class GgufSlice:
    """Like a tensor that safetensors opened: its shape is known, and it is read when it is indexed.
    Its values are float32.

    order   the rows of the stored tensor, in Hugging Face's order; None: as they are
    expert  of a tensor of all experts, the one that this is
    added   what the converter added to all values
    """

    tensor: GgufTensor
    order: np.ndarray[Any, np.dtype[np.int64]] | None = None
    expert: int | None = None
    added: float = 0.0

    def get_slice(self, name: str) -> GgufSlice:
        return self

    def get_tensor(self, name: str) -> Tensor:
        return self[tuple(map(slice, self.get_shape()))]

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape if self.expert is None else self.tensor.shape[1:])

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        *rows, last = index
        stored = self.tensor.values(self._place(*rows))
        if self.order is not None and not rows:  # a bias
            stored = stored[self.order]
        return torch.from_numpy(np.subtract(stored[..., last], self.added, dtype=np.float32))

    def blocks(self, rows: slice) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The stored bytes of rows: [rows, blocks, bytes of a block]."""
        stored = self.tensor.stored[self._place(rows)]
        blocks: np.ndarray[Any, np.dtype[np.uint8]]
        blocks = stored.reshape(len(stored), self.get_shape()[1] // BLOCK, -1)
        return blocks

    def _place(self, *rows: slice) -> tuple[Any, ...]:
        """Indexes the stored tensor's dimensions but the last."""
        ordered = [part if self.order is None else self.order[part] for part in rows]
        return (*ordered,) if self.expert is None else (self.expert, *ordered)


def gguf_tensors(file: GgufFile, config: DecoderConfig) -> dict[str, GgufSlice]:
    """For each Hugging Face name its tensor. Tensors without such a name keep their own: they are
    then refused as unexpected.

    SettingError names a tensor in a type that the package `gguf` cannot dequantise.
    """
    _check_types(file)
    modules = _layer_modules(config)
    tensors: dict[str, GgufSlice] = {}
    for name, tensor in file.tensors.items():
        place = IN_LAYER.fullmatch(name)
        if place is None or place["module"] not in modules:
            if name != FREQUENCY_FACTORS:  # gguf_config reads these
                tensors[WHOLE.get(name, name)] = _undone(tensor, name, config)
            continue
        module = f"model.layers.{place['layer']}.{modules[place['module']]}"
        end = "" if module.endswith(".sinks") else f".{place['kind']}"
        if "{}" not in module:
            tensors[f"{module}{end}"] = _undone(tensor, place["module"], config)
            continue
        for expert in range(tensor.shape[0]):
            tensors[f"{module.format(expert)}{end}"] = GgufSlice(tensor, expert=expert)
    return tensors


def _layer_modules(config: DecoderConfig) -> dict[str, str]:
    """The names of a layer's modules: the file's, and Hugging Face's."""
    names = LAYERS.get(config.architecture, LLAMA_LAYER)
    experts = "_exps" if config.experts else ""
    gate, up = names.up
    modules = {
        "attn_norm": names.attention_norm,
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_sinks": "self_attn.sinks",
        "attn_output": names.out,
        f"ffn_gate{experts}": gate,
        f"ffn_up{experts}": up,
        f"ffn_down{experts}": names.down,
        "ffn_norm": names.mlp_norm,
    }
    if config.experts:
        modules["ffn_gate_inp"] = names.router
    if config.norm_results:
        modules["post_attention_norm"] = names.attention_result_norm
        modules["post_ffw_norm"] = names.mlp_result_norm
    if config.architecture == GPT_OSS:
        modules["post_attention_norm"] = names.mlp_norm
    return modules


def _check_types(file: GgufFile) -> None:
    """Tries one row of each type."""
    one_of_each = {tensor.kind: tensor for tensor in file.tensors.values()}
    for kind, tensor in one_of_each.items():
        try:
            tensor.values((0,) * (len(tensor.shape) - 1))
        except NotImplementedError:
            raise refusal(
                f"{file.path}: tensor {tensor.name} is in {kind.name}, which the package gguf "
                "cannot dequantise; take a file in another quantisation"
            ) from None


def _undone(tensor: GgufTensor, module: str, config: DecoderConfig) -> GgufSlice:
    """The tensor before the converter changed it."""
    if config.architecture == GEMMA3 and "norm" in module:
        return GgufSlice(tensor, added=1.0)
    if config.architecture in PERMUTED and module in ("attn_q", "attn_k"):
        rows = np.arange(np.prod(tensor.shape[:-1] or tensor.shape, dtype=int))
        pairs = rows.reshape(-1, config.head_dim // 2, 2)
        return GgufSlice(tensor, order=pairs.swapaxes(1, 2).reshape(-1))
    return GgufSlice(tensor)


class BlockProjections(PackedProjections):
    """Projections in Q4_0 and Q4_1. The middle number means 0 in Q4_0, and the stored value of the
    number 0 and 8 scales in Q4_1."""

    def __init__(self, tensors: Mapping[str, GgufSlice], projections: Sources, dtype: torch.dtype):
        super().__init__(projections)
        self._tensors = tensors
        self._dtype = dtype

    def _numbers(self, module: Source) -> Tensor:
        _, columns = module.parts
        packed = self._blocks(module)[..., -BLOCK // 2 :]
        # the low halves of the bytes are the first inputs of a block
        numbers = np.concatenate((packed & 15, packed >> 4), axis=-1)
        return torch.from_numpy(numbers).flatten(1)[:, _held(columns)]

    def _scales_zeros(self, module: Source) -> Tensor:
        _, groups = module.by_group(BLOCK).parts
        heads = np.ascontiguousarray(self._blocks(module)[..., : -BLOCK // 2])
        numbers = torch.from_numpy(heads.view(np.float16)).float()[:, _held(groups)]
        scales = numbers[..., 0]
        in_q4_1 = numbers.shape[-1] == 2
        zeros = numbers[..., 1] + MIDDLE * scales if in_q4_1 else torch.zeros_like(scales)
        both = torch.stack((scales, zeros), dim=-1).to(self._dtype)
        return both.transpose(0, 1).contiguous()

    def _blocks(self, module: Source) -> np.ndarray[Any, np.dtype[np.uint8]]:
        rows, _ = module.parts
        return self._tensors[f"{module.name}.weight"].blocks(_held(rows))


def _held(part: SourcePart) -> slice:
    return slice(part.start, part.start + part.size)


def read_gguf_weights(
    file: GgufFile,
    config: DecoderConfig,
    dtype: torch.dtype,
    rank: int = 0,
    ranks: int = 1,
    packed: bool = False,
) -> CheckpointWeights:
    """Reads weights like `hugging_face.read_weights`. `packed`: projections in Q4_0 and Q4_1 stay
    in int4 where their sizes fit."""
    tensors = gguf_tensors(file, config)
    wanted = weight_sources(Shard(config, ranks, rank))
    _check_names(tensors, wanted, config)
    check_tensors(tensors, wanted)
    projections = _packable(tensors, wanted) if packed else {}
    unpacked = {
        target: sources
        for target, sources in wanted.items()
        if target.removesuffix(".weight") not in projections
    }
    if rank == 0:
        _report(tensors, unpacked, projections, dtype)
    return CheckpointWeights(
        tensors, unpacked, dtype, BlockProjections(tensors, projections, dtype)
    )


def _packable(tensors: Mapping[str, GgufSlice], wanted: Sources) -> Sources:
    """The sources of the projections that can stay in int4, each named as its module."""
    projections = {}
    for projection, sources in layer_projections(wanted).items():
        modules = tuple(
            Source(source.name.removesuffix(".weight"), source.parts) for source in sources
        )
        kinds = {tensors[source.name].tensor.kind.name for source in sources}
        if kinds <= set(PACKABLE) and not any(misfits(module, BLOCK) for module in modules):
            projections[projection] = modules
    return projections


def _report(
    tensors: Mapping[str, GgufSlice], unpacked: Sources, packed: Sources, dtype: torch.dtype
) -> None:
    """Writes to the log what is dequantised, and what rounding the scales costs."""
    stored = 0
    needed = 0
    count = 0
    for source in (source for sources in unpacked.values() for source in sources):
        tensor = tensors[source.name].tensor
        if tensor.kind.name in FLOATS:
            continue
        count += 1
        size = int(np.prod(source.shape))
        needed += size * dtype.itemsize
        stored += tensor.stored.nbytes * size // int(np.prod(tensor.shape))
    if count:
        log.info(
            "dequantised %d tensors, %.2f GiB instead of %.2f", count, needed / GIB, stored / GIB
        )
    if packed:
        kinds = {
            tensors[f"{module.name}.weight"].tensor.kind.name
            for modules in packed.values()
            for module in modules
        }
        exact = dtype == torch.float32 or (dtype == torch.float16 and "Q4_1" not in kinds)
        log.info(
            "%d projections stay in int4; their scales are %s",
            len(packed),
            "exact" if exact else f"rounded to {str(dtype).removeprefix('torch.')}",
        )
