"""Writes GGUF files of tiny Hugging Face checkpoints, as llama.cpp's converter does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Gemma3ForCausalLM": "gemma3",
    "GptOssForCausalLM": "gpt-oss",
}
EXPERT = re.compile(r"(?P<layer>model\.layers\.\d+)\.\w+\.experts\.(?P<number>\d+)\.(?P<name>\w+)")
MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
SCALES = {  # where a block has the float16 numbers that multiply all its others
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ4_XS: (0,),
}


class Stored(NamedTuple):
    """A tensor of the file.

    views  numpy views of the checkpoint's tensors, which become it when they are stacked
    shape  of each view without the dimensions that only order it
    added  what the converter adds
    """

    name: str
    views: list[np.ndarray]
    shape: tuple[int, ...]
    added: float = 0.0


def write_gguf(checkpoint: Path, path: Path, kind: Kind = Kind.F32, **changes) -> dict[str, object]:
    """Writes the GGUF file of a checkpoint with its matrices in `kind`, and rounds the checkpoint's
    own tensors to the values that the file has. Returns the metadata.

    `kind` may be a function of the name of a tensor of the file. `changes` replaces metadata behind
    the name of the architecture, "__" standing for "."; None leaves it out.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = load_file(checkpoint / "model.safetensors")
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    arch = ARCHITECTURES[config["architectures"][0]]
    fields = metadata(config, arch)
    fields |= {f"{arch}.{key.replace('__', '.')}": value for key, value in changes.items()}
    writer = gguf.GGUFWriter(path, arch)
    for key, value in fields.items():
        add(writer, key, value)
    writer.add_tokenizer_model("none")
    writer.add_eos_token_id(2)
    random = np.random.default_rng(0)
    for stored in converted(arrays, config, arch):
        array = np.stack([np.array(view).reshape(stored.shape) for view in stored.views])
        array = array.squeeze(0) if len(stored.views) == 1 else array
        array = array + stored.added
        wanted = kind if isinstance(kind, Kind) else kind(stored.name)
        blocks, values, kept = encoded(array.astype(np.float32), wanted, random)
        writer.add_tensor(stored.name, blocks, raw_dtype=kept)
        values = values.reshape(len(stored.views), *stored.views[0].shape) - stored.added
        for view, value in zip(stored.views, values, strict=True):
            view[...] = value
    if factors := frequency_factors(config):
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    close(writer)
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return fields


def close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def altered(file: Path, target: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a copy of a file of the architecture llama with more tensors."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(target, "llama")
    copy_metadata(reader, writer)
    for stored in reader.tensors:
        writer.add_tensor(stored.name, stored.data, raw_dtype=stored.tensor_type)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    close(writer)


def split(file: Path, folder: Path, parts: int = 3) -> list[Path]:
    """Writes the parts that llama-gguf-split makes of a file of the architecture llama."""
    reader = gguf.GGUFReader(file)
    names = [folder / f"big-{number + 1:05}-of-{parts:05}.gguf" for number in range(parts)]
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(name, "llama")
        if number == 0:
            copy_metadata(reader, writer)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", parts)
        for tensor in reader.tensors[number::parts]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        close(writer)
    return names


def copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":  # the writer has these
            add(writer, key, field.contents())


def add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def metadata(config: dict, arch: str) -> dict[str, object]:
    rope = config.get("rope_parameters") or {}
    window_rope = rope.get("sliding_attention") or {}
    rope = rope.get("full_attention") or rope
    values = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "rope.freq_base": rope["rope_theta"],
        "rope.freq_base_swa": window_rope.get("rope_theta"),
        "expert_count": config.get("num_local_experts") or config.get("num_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
    }
    if arch == "llama":
        values["vocab_size"] = config["vocab_size"]
        values["rope.dimension_count"] = config.get("head_dim")
    if arch == "gpt-oss":
        values["expert_feed_forward_length"] = config["intermediate_size"]
    if arch in ("gemma3", "gpt-oss"):
        values["attention.sliding_window"] = config["sliding_window"]
    if arch == "gemma3":
        kinds = config["layer_types"]
        values["attention.sliding_window_pattern"] = [kind != "full_attention" for kind in kinds]
    if rope["rope_type"] in ("linear", "yarn"):
        values["rope.scaling.type"] = rope["rope_type"]
        values["rope.scaling.factor"] = rope["factor"]
        values["rope.scaling.original_context_length"] = rope.get(
            "original_max_position_embeddings"
        )
        values["rope.scaling.yarn_beta_fast"] = rope.get("beta_fast")
    return {f"{arch}.{key}": value for key, value in values.items()}


def frequency_factors(config: dict) -> list[float]:
    """llama.cpp's, of Llama 3's scaling."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return []
    dims = config["head_dim"]
    original = rope["original_max_position_embeddings"]
    low_wave = original / rope["low_freq_factor"]
    high_wave = original / rope["high_freq_factor"]
    factors = []
    for i in range(dims // 2):
        wave = 2 * np.pi * rope["rope_theta"] ** (2 * i / dims)
        smooth = (original / wave - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"]
        )
        if wave < high_wave:
            factors.append(1.0)
        elif wave > low_wave:
            factors.append(rope["factor"])
        else:
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return factors


def converted(arrays: dict[str, np.ndarray], config: dict, arch: str) -> Iterator[Stored]:
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[arch], config["num_hidden_layers"])

    def named(module: str, end: str) -> str:
        name = names.get_name(module)
        assert name is not None, module
        return f"{name}.{end}"

    experts: dict[tuple[str, str], dict[int, np.ndarray]] = {}
    for name, array in arrays.items():
        module, _, end = name.rpartition(".")
        if module.endswith("mlp.experts"):  # gpt-oss
            yield from fused_experts(named, module, end, array)
        elif module.endswith("self_attn") and end == "sinks":
            yield Stored(named(name, "weight"), [array], array.shape)
        elif expert := EXPERT.fullmatch(module):
            part = MIXTRAL.get(expert["name"], expert["name"])
            key = (f"{expert['layer']}.mlp.experts.{part}", end)
            experts.setdefault(key, {})[int(expert["number"])] = array
        elif arch == "llama" and module.endswith(("q_proj", "k_proj")):
            heads = config[f"num_{'attention' if module.endswith('q_proj') else 'key_value'}_heads"]
            pairs = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2)
            yield Stored(named(module, end), [pairs], array.shape)
        else:
            added = 1.0 if arch == "gemma3" and module.endswith("norm") else 0.0
            yield Stored(named(module, end), [array], array.shape, added)
    for (module, end), numbered in experts.items():
        ordered = [numbered[i] for i in range(len(numbered))]
        yield Stored(named(module, end), ordered, ordered[0].shape)


def fused_experts(named, module: str, end: str, array: np.ndarray) -> Iterator[Stored]:
    part = end.removesuffix("_bias")
    kind = "bias" if end.endswith("_bias") else "weight"
    outputs_first = array if kind == "bias" else array.swapaxes(1, 2)
    parts = {part: outputs_first}
    if part == "gate_up_proj":
        parts = {"gate_proj": outputs_first[:, ::2], "up_proj": outputs_first[:, 1::2]}
    for name, of_experts in parts.items():
        yield Stored(named(f"{module}.{name}", kind), list(of_experts), of_experts.shape[1:])


def encoded(
    array: np.ndarray, kind: Kind, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, Kind]:
    """Returns what is stored, its values, and its type. Vectors stay in float32, as do rows that
    are not made of whole blocks. Types that `gguf` cannot write get random blocks."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if kind == Kind.F32 or array.ndim == 1 or array.shape[-1] % block:
        return array, array, Kind.F32
    if kind in SCALES:
        count = array.size // block
        blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
        for scale in (1.0, None):
            if scale is None:  # as large as the values that are replaced
                scale = float(array.std() / gguf.dequantize(blocks, kind).std())
            for at in SCALES[kind]:
                blocks[:, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
        stored = blocks.reshape(*array.shape[:-1], -1)
    else:
        stored = gguf.quantize(array, kind)
    return stored, gguf.dequantize(stored, kind), kind
