"""Reads TensorRT-LLM's legacy checkpoints (config.json, rank0.safetensors, rank1.safetensors, ...)
like Hugging Face ones: translates config.json, and joins the ranks' tensors under Hugging Face
names.

A checkpoint for any number of ranks can be used with any other. Quantised ones, and those divided
by layers, are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .architectures import OPT, refusal
from .config import DecoderConfig, Shard
from .hugging_face import CheckpointWeights, _check_names, check_tensors, read_json, weight_sources

FIRST_RANK = "rank0.safetensors"
LLAMA = ("LlamaForCausalLM", "MistralForCausalLM")
POSITIONS = {OPT: "learned_absolute"} | dict.fromkeys(LLAMA, "rope_gpt_neox")
OPT_OFFSET = 2  # unused rows in front of the positions' table; only Hugging Face keeps them
OPT_EPSILON = 1e-5

COMMON_KEYS = {  # TensorRT-LLM's key: Hugging Face's
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "dtype": "dtype",
}
LLAMA_KEYS = COMMON_KEYS | {
    "num_key_value_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "intermediate_size": "intermediate_size",
    "hidden_act": "hidden_act",
    "norm_epsilon": "rms_norm_eps",
    "rotary_base": "rope_theta",
    "rotary_scaling": "rope_scaling",
    "attn_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
}
OPT_KEYS = COMMON_KEYS | {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"}
LEFT_OUT: dict[str, Any] = {"norm_epsilon": 1e-5, "hidden_act": "gelu"}  # TensorRT-LLM's defaults

HARMLESS = re.compile(r"(rotary_inv_freq|embed_positions|embed_positions_for_gpt_attention)$")
"""Tables that follow from config.json."""


def is_legacy(directory: Path) -> bool:
    return (directory / FIRST_RANK).exists()


def legacy_weight_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("rank*.safetensors"))


def legacy_config(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a legacy config.json with Hugging Face's keys. SettingError names an unsupported
    setting."""
    architecture = config.get("architecture")
    if architecture not in POSITIONS:
        raise refusal(
            f"legacy architecture {architecture!r} is not supported; known are "
            f"{', '.join(POSITIONS)}"
        )
    _refuse_unsupported(config, POSITIONS[architecture])
    opt = architecture == OPT
    keys = OPT_KEYS if opt else LLAMA_KEYS
    translated = {
        ours: config[theirs] for theirs, ours in keys.items() if config.get(theirs) is not None
    }
    translated = {
        keys[theirs]: value for theirs, value in LEFT_OUT.items() if theirs in keys
    } | translated
    if not opt:
        translated.setdefault("num_key_value_heads", translated.get("num_attention_heads"))
    translated["architectures"] = [architecture]
    # The files contain the head even if it equals the embeddings, unless the converter was told to
    # share it.
    translated["tie_word_embeddings"] = "lm_head.weight" not in _open(directory / FIRST_RANK)
    if opt:
        translated["do_layer_norm_before"] = bool(config.get("do_layer_norm_before", False))
        translated.setdefault("ffn_dim", 4 * int(config.get("hidden_size", 0)))
        if config.get("norm_epsilon", OPT_EPSILON) != OPT_EPSILON:
            raise refusal(
                f"config.json: norm_epsilon of OPT is {OPT_EPSILON}, not {config['norm_epsilon']}"
            )
    return translated


def _refuse_unsupported(config: Mapping[str, Any], positions: str) -> None:
    mapping = config.get("mapping") or {}
    quantization = config.get("quantization") or {}
    if mapping.get("pp_size", 1) != 1:
        raise refusal(
            "config.json: checkpoints divided by layers (mapping.pp_size) are not supported"
        )
    for key in ("quant_algo", "kv_cache_quant_algo", "use_weight_only"):
        if quantization.get(key):
            raise refusal(
                f"config.json: quantised checkpoints (quantization.{key}) are not supported"
            )
    kind = config.get("position_embedding_type", "learned_absolute")
    if kind != positions:
        raise refusal(
            f"config.json: position_embedding_type {kind!r} is not supported for this model, only "
            f"{positions}"
        )
    moe = config.get("moe") or {}
    if moe.get("num_experts", 0) > 1:
        raise refusal("config.json: mixtures of experts are not supported")


class _Part(NamedTuple):
    """Some rows of a tensor of one rank."""

    stored: Any
    first: int
    rows: int


@dataclass(frozen=True)
class JoinedTensor:
    """Like a tensor that safetensors opened: its shape is known, and it is read when it is indexed.

    The parts are joined along `dim`; `in_front` rows of zeros come first, and rows from `most_rows`
    on are dropped.
    """

    parts: list[_Part]
    dim: int = 0
    in_front: int = 0
    most_rows: int | None = None

    def get_shape(self) -> list[int]:
        shapes = [[part.rows, *part.stored.get_shape()[1:]] for part in self.parts]
        shape = shapes[0]
        shape[self.dim] = sum(one[self.dim] for one in shapes)
        if self.most_rows is not None:
            shape[0] = min(shape[0], self.most_rows)
        shape[0] += self.in_front
        return shape

    def get_dtype(self) -> str:
        return str(self.parts[0].stored.get_dtype())

    def __getitem__(self, index: Any) -> Tensor:
        read = [part.stored[part.first : part.first + part.rows] for part in self.parts]
        joined = torch.cat(read, self.dim)[: self.most_rows]
        if self.in_front:
            joined = torch.cat((joined.new_zeros(self.in_front, *joined.shape[1:]), joined))
        return joined[index]


@dataclass
class LegacyTensors:
    """Each rank's tensors, and each whole tensor by its Hugging Face name; used in place of a
    safetensors file."""

    ranks: list[dict[str, Any]]
    _joined: dict[str, JoinedTensor] = field(default_factory=dict)
    _used: set[str] = field(default_factory=set)

    def get_slice(self, name: str) -> JoinedTensor:
        return self._joined[name]

    def get_tensor(self, name: str) -> Tensor:
        return self._joined[name][:]

    def names(self) -> Iterator[str]:
        """The whole tensors, and the unused ones under their own names: these are then refused as
        unexpected."""
        yield from self._joined
        yield from (
            name for name in self.ranks[0] if name not in self._used and not HARMLESS.search(name)
        )

    def take(self, name: str, legacy: str, split: int | None, **how: Any) -> None:
        """split: the dimension that ranks divide; None: all ranks have the whole tensor."""
        owners = self.ranks[:1] if split is None else self.ranks
        if tensors := self._of_ranks(legacy, owners):
            self._joined[name] = JoinedTensor(
                [_Part(x, 0, x.get_shape()[0]) for x in tensors], dim=split or 0, **how
            )

    def take_linear(self, name: str, legacy: str, split: int) -> None:
        """A bias is divided like the rows of its weight."""
        self.take(f"{name}.weight", f"{legacy}.weight", split)
        self.take(f"{name}.bias", f"{legacy}.bias", 0 if split == 0 else None)

    def take_qkv(self, name: str, legacy: str, heads: int, kv_heads: int, head_dim: int) -> None:
        """Takes the rows of queries, keys and values from each rank; ranks that share a key head
        each have a copy of it."""
        count = len(self.ranks)
        held = max(1, kv_heads // count)
        all_different = self.ranks[:: max(1, count // kv_heads)]
        first = 0
        for x, rows, owners in (
            ("q", heads // count * head_dim, self.ranks),
            ("k", held * head_dim, all_different),
            ("v", held * head_dim, all_different),
        ):
            for kind in ("weight", "bias"):
                if tensors := self._of_ranks(f"{legacy}.{kind}", owners):
                    self._joined[f"{name}.{x}_proj.{kind}"] = JoinedTensor(
                        [_Part(y, first, rows) for y in tensors]
                    )
            first += rows

    def _of_ranks(self, legacy: str, owners: list[dict[str, Any]]) -> list[Any]:
        """A tensor's parts; none if the first rank has none."""
        if legacy not in self.ranks[0]:
            return []
        self._used.add(legacy)
        if not all(legacy in tensors for tensors in owners):
            raise refusal(f"tensor {legacy} is in {FIRST_RANK}, but missing in another rank's file")
        return [tensors[legacy] for tensors in owners]


def legacy_files(directory: Path, config: Mapping[str, Any]) -> dict[str, LegacyTensors]:
    """For each tensor's Hugging Face name the object that contains it. config: the legacy
    config.json."""
    ranks = (config.get("mapping") or {}).get("tp_size", 1)
    count = len(legacy_weight_files(directory))
    if count != ranks:
        raise refusal(
            f"config.json: mapping.tp_size is {ranks}, but {directory} holds the files of {count} "
            "ranks"
        )
    tensors = LegacyTensors([_open(directory / f"rank{rank}.safetensors") for rank in range(ranks)])
    opt = config["architecture"] == OPT
    stem = "model.decoder" if opt else "model"
    vocabulary = config["vocab_size"]
    embedded = (
        config.get("embedding_sharding_dim", 0)
        if config.get("use_parallel_embedding", False)
        else None
    )
    for generation in ("transformer.embedding", "transformer"):  # OPT's names differ
        tensors.take(
            f"{stem}.embed_tokens.weight",
            f"{generation}.vocab_embedding.weight",
            embedded,
            most_rows=vocabulary,
        )
        tensors.take(
            f"{stem}.embed_positions.weight",
            f"{generation}.position_embedding.weight",
            None,
            in_front=OPT_OFFSET,
        )
    tensors.take("lm_head.weight", "lm_head.weight", 0, most_rows=vocabulary)
    for kind in ("weight", "bias"):
        tensors.take(
            f"{stem}.{'final_layer_norm' if opt else 'norm'}.{kind}",
            f"transformer.ln_f.{kind}",
            None,
        )
    for i in range(config["num_hidden_layers"]):
        _take_layer(tensors, f"{stem}.layers.{i}", f"transformer.layers.{i}", config, opt)
    return dict.fromkeys(tensors.names(), tensors)


def _take_layer(
    tensors: LegacyTensors, name: str, legacy: str, config: Mapping[str, Any], opt: bool
) -> None:
    heads = config["num_attention_heads"]
    kv_heads = heads if opt else config.get("num_key_value_heads") or heads
    head_dim = config.get("head_size") or config["hidden_size"] // heads
    tensors.take_qkv(f"{name}.self_attn", f"{legacy}.attention.qkv", heads, kv_heads, head_dim)
    if opt:
        norms = ("self_attn_layer_norm", "final_layer_norm")
        tensors.take_linear(f"{name}.self_attn.out_proj", f"{legacy}.attention.dense", 1)
        tensors.take_linear(f"{name}.fc1", f"{legacy}.mlp.fc", 0)
        tensors.take_linear(f"{name}.fc2", f"{legacy}.mlp.proj", 1)
    else:
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors.take_linear(f"{name}.self_attn.o_proj", f"{legacy}.attention.dense", 1)
        # TensorRT-LLM's name for it is not gate
        tensors.take_linear(f"{name}.mlp.gate_proj", f"{legacy}.mlp.fc", 0)
        tensors.take_linear(f"{name}.mlp.up_proj", f"{legacy}.mlp.gate", 0)
        tensors.take_linear(f"{name}.mlp.down_proj", f"{legacy}.mlp.proj", 1)
    for norm, theirs in zip(norms, ("input_layernorm", "post_layernorm"), strict=True):
        for kind in ("weight", "bias"):
            tensors.take(f"{name}.{norm}.{kind}", f"{legacy}.{theirs}.{kind}", None)


def _open(path: Path) -> dict[str, Any]:
    """Each tensor of a file by name, read when it is indexed."""
    try:
        path.open("rb").close()  # safetensors reports every file that it cannot open as missing
        file = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise refusal(f"{path} cannot be read: {error}") from None
    names = file.keys()
    return {name: file.get_slice(name) for name in names}


def read_legacy_weights(
    directory: Path, config: DecoderConfig, dtype: torch.dtype, rank: int = 0, ranks: int = 1
) -> CheckpointWeights:
    """Reads weights like `hugging_face.read_weights`, for one of any number of ranks."""
    files = legacy_files(directory, read_json(directory / "config.json"))
    wanted = weight_sources(Shard(config, ranks, rank))
    _check_names(files, wanted, config)
    check_tensors(files, wanted)
    return CheckpointWeights(files, wanted, dtype)
