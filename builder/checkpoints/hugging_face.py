"""Reads Hugging Face checkpoint directories: safetensors, single or sharded, under the names of
Decoder's parameters.

Missing, unexpected and misshapen tensors are refused by name; ignored tensors are listed here. FP8
projections in the formats of `quantization` are read unchanged, with a scale for each output.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...scheduler.types import SettingError
from ..int4_formats import WORDS
from ..quantization import check_quantization, fp8_block
from . import delta_parts, fused_experts
from .architectures import GEMMA3, GPT_OSS, OPT, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, refusal
from .block_scales import with_row_scales
from .config import DecoderConfig, Shard
from .fused_experts import Alternating, Concatenated
from .int4_weights import Int4Weights, int4_projections, stored_tensors, without_ignored
from .sources import (
    SafetensorsFile,
    Source,
    SourcePart,
    Sources,
    StoredPart,
    check_shape,
    in_file,
    layer_projections,
    stored_name,
    tensor_of,
    whole,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# the start of the file that `git clone` leaves where Git LFS is missing
LFS_POINTER = b"version https://git-lfs."

HARMLESS = re.compile(r"(rotary_emb\.inv_freq|\.input_scale|\.input_scale_ub|\.activation_scale)$")
"""Ignored tensors. Old versions of transformers saved buffers that follow from config.json. The
others are activation scales of the checkpoint's FP8 projections; here each token gets its own
scale."""

PREFIXES = ("language_model.model.", "model.language_model.", "model.", "")
"""Beginnings of names in whole models, and in bare ones. The first two are of models that also take
images."""

UNUSED = {
    GEMMA3: re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\."),
    **dict.fromkeys((QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT), re.compile(r"(model\.)?visual\.|mtp\.")),
}
"""Ignored tensors, by architecture: of images, and of layers that predict further tokens."""

IN_FLOAT32 = (".a_log", ".dt_bias")
"""Ends of the parameters of linear attention that are in float32 in engines of any dtype: decays of
states are computed from them."""

DEMO_CHECKPOINT = Path(__file__).parents[1] / "demo_models" / "llama"
"""The trained demo model (docs/use/demo-model.md)."""


def read_json(path: Path, setting: str = "--checkpoint") -> dict[str, Any]:
    """Raises SettingError, of `setting`, if the file is missing or not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingError(setting, f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError(setting, f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise SettingError(setting, f"{path} must hold a JSON object")
    return value


FLOATS = ("F64", "F32", "BF16", "F16")
"""Names in safetensors of the dtypes that weights may have without a scale."""

IN_FP8 = "F8_E4M3"


def dtype_of(target: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of an unquantised parameter in an engine of `dtype`."""
    return torch.float32 if target.endswith(IN_FLOAT32) else dtype


def _linear(
    target: str, bias: bool, columns: SourcePart, parts: Mapping[str, SourcePart]
) -> Sources:
    """A projection fused from `parts`: name and rows of each.

    Ranks that divide the columns add their results, so all but the first have a bias of zeros.
    """
    sources: Sources = {
        f"{target}.weight": tuple(
            Source(f"{n}.weight", (rows, columns)) for n, rows in parts.items()
        )
    }
    if bias:
        held = {
            n: rows if columns.start == 0 else SourcePart(rows.full, rows.full, rows.size)
            for n, rows in parts.items()
        }
        sources[f"{target}.bias"] = tuple(
            Source(f"{name}.bias", (rows,)) for name, rows in held.items()
        )
    return sources


WEIGHT = ("weight",)
"""The parameters of an RMS norm."""


def _norm(target: str, name: str, size: int, kinds: tuple[str, ...]) -> Sources:
    return {f"{target}.{kind}": (Source(f"{name}.{kind}", (whole(size),)),) for kind in kinds}


class LayerNames(NamedTuple):
    """`{}` in a name is the number of an expert. The last two: of norms of results
    (`DecoderConfig.norm_results`)."""

    attention_norm: str
    mlp_norm: str
    out: str
    up: tuple[str, ...]
    down: str
    router: str = ""
    attention_result_norm: str = ""
    mlp_result_norm: str = ""


LLAMA_LAYER = LayerNames(
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.o_proj",
    ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj",
)
QWEN_EXPERTS = LLAMA_LAYER._replace(
    up=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    down="mlp.experts.{}.down_proj",
    router="mlp.gate",
)
LAYERS = {
    OPT: LayerNames(
        "self_attn_layer_norm", "final_layer_norm", "self_attn.out_proj", ("fc1",), "fc2"
    ),
    "MixtralForCausalLM": LLAMA_LAYER._replace(
        up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        down="block_sparse_moe.experts.{}.w2",
        router="block_sparse_moe.gate",
    ),
    **dict.fromkeys(("Qwen3MoeForCausalLM", QWEN3_5_MOE, QWEN3_NEXT), QWEN_EXPERTS),
    GEMMA3: LLAMA_LAYER._replace(
        mlp_norm="pre_feedforward_layernorm",
        attention_result_norm="post_attention_layernorm",
        mlp_result_norm="post_feedforward_layernorm",
    ),
    GPT_OSS: LLAMA_LAYER._replace(  # as `fused_experts` names the experts' tensors
        up=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
        down="mlp.experts.{}.down_proj",
        router="mlp.router",
    ),
}


def _layer_sources(shard: Shard, layer: int, target: str, name: str, names: LayerNames) -> Sources:
    config = shard.config
    hidden = config.hidden_size
    mlp = SourcePart(config.mlp_size, shard.rank * shard.mlp_size, shard.mlp_size)
    experts = range(config.experts or 1)
    up = {f"{name}.{part.format(i)}": mlp for i in experts for part in names.up}
    down = {f"{name}.{names.down.format(i)}": whole(hidden) for i in experts}
    kinds = _norm_kinds(config)
    attention = _delta_sources if config.is_linear(layer) else _attention_sources
    sources = {
        **_norm(f"{target}.attention_norm", f"{name}.{names.attention_norm}", hidden, kinds),
        **attention(shard, f"{target}.attention", name, names),
        **_norm(f"{target}.mlp_norm", f"{name}.{names.mlp_norm}", hidden, kinds),
        **_linear(f"{target}.mlp.up", config.mlp_bias, whole(hidden), up),
        **_linear(f"{target}.mlp.down", config.mlp_bias, mlp, down),
    }
    if config.experts:
        router = {f"{name}.{names.router}": whole(config.experts)}
        sources |= _linear(f"{target}.mlp.router", config.router_bias, whole(hidden), router)
    if config.shared_expert_size:
        sources |= _shared_expert_sources(shard, f"{target}.mlp", f"{name}.mlp")
    if config.norm_results:
        sources |= _norm(
            f"{target}.attention_result_norm",
            f"{name}.{names.attention_result_norm}",
            hidden,
            kinds,
        )
        sources |= _norm(
            f"{target}.mlp_result_norm", f"{name}.{names.mlp_result_norm}", hidden, kinds
        )
    return sources


def _shared_expert_sources(shard: Shard, target: str, name: str) -> Sources:
    hidden = whole(shard.config.hidden_size)
    size = shard.shared_expert_size
    width = SourcePart(shard.config.shared_expert_size, shard.rank * size, size)
    up = {f"{name}.shared_expert.{part}_proj": width for part in ("gate", "up")}
    down = {f"{name}.shared_expert.down_proj": hidden}
    return {
        **_linear(f"{target}.shared.up", False, hidden, up),
        **_linear(f"{target}.shared.down", False, width, down),
        **_linear(f"{target}.shared_gate", False, hidden, {f"{name}.shared_expert_gate": whole(1)}),
    }


def _attention_sources(shard: Shard, target: str, name: str, names: LayerNames) -> Sources:
    config = shard.config
    hidden, head_dim = config.hidden_size, config.head_dim
    q = _heads(head_dim, config.heads, shard.rank * shard.heads, shard.heads)
    kv = _heads(head_dim, config.kv_heads, shard.first_kv_head, shard.kv_heads)
    # each head's gate behind its query
    with_gates = SourcePart(*(2 * size for size in q)) if config.gated_attention else q
    qkv = {
        f"{name}.self_attn.{x}_proj": rows for x, rows in (("q", with_gates), ("k", kv), ("v", kv))
    }
    out = {f"{name}.{names.out}": whole(hidden)}
    sources = {
        **_linear(f"{target}.qkv", config.qkv_bias, whole(hidden), qkv),
        **_linear(f"{target}.out", config.attention_out_bias, q, out),
    }
    if config.qk_norm:
        for x in "qk":
            sources |= _norm(f"{target}.{x}_norm", f"{name}.self_attn.{x}_norm", head_dim, WEIGHT)
    if config.sinks:
        heads = SourcePart(config.heads, shard.rank * shard.heads, shard.heads)
        sources[f"{target}.sinks"] = (Source(f"{name}.self_attn.sinks", (heads,)),)
    return sources


def _delta_sources(shard: Shard, target: str, name: str, names: LayerNames) -> Sources:
    """With names as `delta_parts` gives them."""
    linear = shard.config.linear
    own = shard.linear
    assert linear is not None and own is not None  # the layer is linear
    stem = f"{name}.linear_attn"
    hidden = whole(shard.config.hidden_size)
    heads = SourcePart(linear.value_heads, shard.rank * own.value_heads, own.value_heads)
    values = SourcePart(*(size * linear.value_dim for size in heads))
    q, k, v = (
        SourcePart(size, shard.rank * held, held)
        for size, held in zip(linear.parts, own.parts, strict=True)
    )
    qkvz = {f"{stem}.in_proj_{x}": rows for x, rows in zip("qkvz", (q, k, v, values), strict=True)}
    ba = {f"{stem}.in_proj_{x}": heads for x in "ba"}
    taps = whole(1), whole(linear.conv_width)
    conv = tuple(
        Source(f"{stem}.conv1d_{x}.weight", (rows, *taps))
        for x, rows in zip("qkv", (q, k, v), strict=True)
    )
    return {
        **_linear(f"{target}.qkvz", False, hidden, qkvz),
        **_linear(f"{target}.ba", False, hidden, ba),
        f"{target}.conv": conv,
        f"{target}.a_log": (Source(f"{stem}.A_log", (heads,)),),
        f"{target}.dt_bias": (Source(f"{stem}.dt_bias", (heads,)),),
        **_norm(f"{target}.norm", f"{stem}.norm", linear.value_dim, WEIGHT),
        **_linear(f"{target}.out", False, values, {f"{stem}.out_proj": hidden}),
    }


def _heads(head_dim: int, count: int, first: int, held: int) -> SourcePart:
    """Rows or columns of whole heads, each head's next to each other."""
    return SourcePart(count * head_dim, first * head_dim, held * head_dim)


def _norm_kinds(config: DecoderConfig) -> tuple[str, ...]:
    if config.norm == "rms":
        return WEIGHT
    return ("weight", "bias") if config.norm_affine else ()


def weight_sources(shard: Shard, prefix: str = "model.") -> Sources:
    """`prefix`: the beginning of all names except the head's; checkpoints of the bare model have
    none."""
    config = shard.config
    opt = config.architecture == OPT
    stem = f"{prefix}decoder." if opt else prefix
    hidden = config.hidden_size
    embedding = whole(config.embedding_size)
    vocabulary = SourcePart(config.vocab_size, shard.rank * shard.vocab_rows, shard.vocab_rows)
    sources = _linear("embed", False, embedding, {f"{stem}embed_tokens": vocabulary})
    if config.rotary is None:
        positions = whole(config.max_positions + config.position_offset)
        sources |= _linear("positions", False, whole(hidden), {f"{stem}embed_positions": positions})
    if config.embedding_size != hidden:
        sources |= _linear("project_in", False, embedding, {f"{stem}project_in": whole(hidden)})
        sources |= _linear("project_out", False, whole(hidden), {f"{stem}project_out": embedding})
    names = LAYERS.get(config.architecture, LLAMA_LAYER)
    for i in range(config.layers):
        sources |= _layer_sources(shard, i, f"layers.{i}", f"{stem}layers.{i}", names)
    if config.final_norm:
        sources |= _norm(
            "norm", f"{stem}final_layer_norm" if opt else f"{stem}norm", hidden, _norm_kinds(config)
        )
    if not config.tied_embeddings:
        sources |= _linear("head", False, embedding, {"lm_head": vocabulary})
    return sources


def parameter_shapes(config: DecoderConfig, ranks: int = 1) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter of Decoder on any one of `ranks` ranks. Raises SettingError as
    Shard does."""
    return {
        target: (sum(source.cut_shape[0] for source in sources), *sources[0].cut_shape[1:])
        for target, sources in weight_sources(Shard(config, ranks)).items()
    }


def active_parameters(config: DecoderConfig, ranks: int = 1) -> int:
    """The parameters of any one rank that a token uses: without the experts that are not chosen for
    it."""
    count = 0
    for name, shape in parameter_shapes(config, ranks).items():
        in_experts = config.experts and (".mlp.up." in name or ".mlp.down." in name)
        count += (
            math.prod(shape) * config.experts_per_token // config.experts
            if in_experts
            else math.prod(shape)
        )
    return count


class CheckpointWeights(Mapping[str, Tensor]):
    """All parameters of one rank's Decoder in one dtype, on the CPU; FP8 projections stay in FP8
    and have a scale. `int4` has those of projections in int4.

    Each access reads, cuts and joins the parameter again.
    """

    def __init__(
        self,
        files: Mapping[str, Any],
        wanted: Sources,
        dtype: torch.dtype,
        int4: Mapping[str, Tensor] = {},
    ):
        self._files = files
        self._wanted = wanted
        self._dtype = dtype
        self._int4 = int4

    def __getitem__(self, target: str) -> Tensor:
        if target not in self._wanted:
            return self._int4[target]
        sources = self._wanted[target]
        if target.endswith(".scale"):
            parts = [source.cut(_scales(self._files, source), torch.float32) for source in sources]
        else:
            projection = target.removesuffix(".weight")
            own = dtype_of(target, self._dtype)
            dtype = torch.float8_e4m3fn if f"{projection}.scale" in self._wanted else own
            parts = [source.cut(_slice(self._files, source.name), dtype) for source in sources]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def __iter__(self) -> Iterator[str]:
        yield from self._wanted
        yield from self._int4

    def __len__(self) -> int:
        return len(self._wanted) + len(self._int4)


def read_weights(
    directory: Path, config: DecoderConfig, dtype: torch.dtype, rank: int = 0, ranks: int = 1
) -> CheckpointWeights:
    """Returns the part of one rank. Checks names, shapes and dtypes of all tensors.

    Raises SettingError that names the tensor at fault, or as Shard does.
    """
    files = _tensor_files(directory)
    if config.architecture == GPT_OSS:
        files = fused_experts.unfused(files, Alternating, config)
    if unused := UNUSED.get(config.architecture):
        files = {name: file for name, file in files.items() if not unused.match(name)}
    quantization = read_json(directory / "config.json").get("quantization_config")
    form = check_quantization(quantization)
    block = fp8_block(quantization)
    if block:
        files = with_row_scales(files, block[0])
    if config.linear is not None:
        files = delta_parts.with_delta_parts(files, config)
    if config.architecture == QWEN3_5_MOE:
        files = fused_experts.unfused(files, Concatenated, config)
    prefix = next(prefix for prefix in PREFIXES if any(name.startswith(prefix) for name in files))
    wanted = weight_sources(Shard(config, ranks, rank), prefix)
    int4: Mapping[str, Tensor] = {}
    stored: Sources = {}
    if form:
        projections = int4_projections(files, wanted, form)
        files = without_ignored(files, wanted, projections, form)
        wanted = {
            name: sources
            for name, sources in wanted.items()
            if name.removesuffix(".weight") not in projections
        }
        stored = stored_tensors(projections, form)
        int4 = Int4Weights(files, projections, form, dtype)
    wanted |= _scale_sources(files, wanted, block[1] if block else 0)
    _check_names(files, wanted | stored, config)
    check_tensors(files, wanted | stored)
    return CheckpointWeights(files, wanted, dtype, int4)


def weight_files(directory: Path) -> list[Path]:
    """The names of a checkpoint's safetensors files; not all may exist. SettingError if it has
    none."""
    if (directory / SINGLE).exists():
        return [directory / SINGLE]
    if (directory / INDEX).exists():
        shards = read_json(directory / INDEX).get("weight_map")
        if not isinstance(shards, dict):
            raise refusal(f"{directory / INDEX} has no weight_map")
        return [directory / shard for shard in sorted(set(shards.values()))]
    if any(directory.glob("*.bin")):
        raise refusal(
            f"{directory} holds .bin files, which can run code when read; load it with "
            "transformers and "
            "save it with save_pretrained, which writes safetensors"
        )
    raise refusal(f"{directory} holds neither {SINGLE} nor {INDEX}")


def _tensor_files(directory: Path) -> dict[str, Any]:
    """For each tensor name the file that contains it, open while it is referenced."""
    files: dict[str, Any] = {}
    for path in weight_files(directory):
        try:
            # safetensors reports every file that it cannot open as missing
            with path.open("rb") as head:
                pointer = head.read(len(LFS_POINTER)) == LFS_POINTER
            if pointer:
                raise refusal(
                    f"{path} is a pointer of Git LFS; `git lfs pull` in {directory} gets the "
                    "weights"
                )
            opened = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise refusal(
                f"{path} cannot be read: {error}; if its download was cut short, repeat it"
            ) from None
        except OSError as error:
            raise refusal(f"{path} cannot be read: {error}") from None
        files |= dict.fromkeys(opened.keys(), SafetensorsFile(path, opened))
    return files


def _check_names(files: Mapping[str, Any], wanted: Sources, config: DecoderConfig) -> None:
    names = {source.name for sources in wanted.values() for source in sources}
    missing = sorted(names - set(files))
    extra = sorted(name for name in set(files) - names if not HARMLESS.search(name))
    if config.tied_embeddings and "lm_head.weight" in extra:
        extra.remove("lm_head.weight")
        embedding = wanted["embed.weight"][0].name
        if embedding in files and not torch.equal(
            tensor_of(files, "lm_head.weight"), tensor_of(files, embedding)
        ):
            raise refusal(
                f"tie_word_embeddings is set, but lm_head.weight differs from {embedding}"
            )
    listed = {
        "missing": [*_own_names(missing, files, config)],
        "unexpected": [stored_name(files, name) + in_file(files, name) for name in extra],
    }
    cures = {
        "missing": "download the checkpoint again, or take the config.json that belongs to it",
        "unexpected": "take the config.json that belongs to these weights",
    }
    for kind, all_names in listed.items():
        if own := [*dict.fromkeys(all_names)]:
            more = f" and {len(own) - 5} more" if len(own) > 5 else ""
            raise refusal(
                f"{kind} tensors for {config.architecture}: {', '.join(own[:5])}{more}; "
                f"{cures[kind]}"
            )


def _own_names(
    names: Sequence[str], files: Mapping[str, Any], config: DecoderConfig
) -> Iterator[str]:
    """The names that missing tensors of experts and of parts of linear attention would have in this
    checkpoint."""
    fuses = config.architecture in (GPT_OSS, QWEN3_5_MOE) and not any(
        fused_experts.PART.fullmatch(name) and not isinstance(file, StoredPart)
        for name, file in files.items()
    )
    for name in names:
        if config.linear is not None:
            name = delta_parts.fused_name(name, config.architecture)
        yield fused_experts.fused_name(name) if fuses else name


def _slice(files: Mapping[str, Any], name: str) -> Any:
    """A tensor that is read when it is indexed."""
    return files[name].get_slice(name)


def _scale_sources(files: Mapping[str, Any], wanted: Sources, group: int) -> Sources:
    """The scales of the layers' projections with FP8 weights. Each has one tensor in a file for
    each part. `group`: inputs that share a scale; 0: all do."""
    scales: Sources = {}
    for projection, sources in layer_projections(wanted).items():
        dtypes = {  # a missing one is told later
            stored_name(files, source.name): _slice(files, source.name).get_dtype()
            for source in sources
            if source.name in files
        }
        in_fp8 = [name for name, dtype in dtypes.items() if dtype == IN_FP8]
        if in_fp8:
            others = [name for name in dtypes if name not in in_fp8]
            if others:
                raise refusal(
                    f"{in_fp8[0]} is in FP8 and {others[0]} is not, and they are one projection "
                    "here: take the unquantised checkpoint"
                )
            if projection.endswith((".router", ".shared_gate")):
                raise refusal(
                    f"{in_fp8[0]} is in FP8, in which routers and gates of experts do not run: "
                    "take a checkpoint that leaves them out, or the unquantised one"
                )
            scales[f"{projection}.scale"] = tuple(
                _scale_source(files, source, group) for source in sources
            )
    return scales


def _scale_name(files: Mapping[str, Any], weight: str) -> str:
    """Transformers' name for `fp8`, if it is there, else the common one; weights are multiplied by
    both."""
    inverse = f"{weight}_scale_inv"
    return inverse if inverse in files else f"{weight}_scale"


def _scale_source(files: Mapping[str, Any], weight: Source, group: int) -> Source:
    if not group:
        return Source(_scale_name(files, weight.name), weight.parts[:1])
    inputs = weight.parts[1]
    if any(size % group for size in inputs):
        name = stored_name(files, weight.name)
        if inputs.full % group:
            raise refusal(
                f"{name} has {inputs.full} inputs, no multiple of the {group} inputs of a block: "
                "take the unquantised checkpoint"
            )
        raise refusal(
            f"{name} has {inputs.full} inputs, of which a rank would hold {inputs.size}, no "
            f"multiple of the {group} inputs of a block: use other --tensor-parallel, or the "
            "unquantised checkpoint"
        )
    return Source(f"{weight.name}_scale_inv", weight.by_group(group).parts)


def _scales(files: Mapping[str, Any], source: Source) -> Any:
    """The scales of a whole tensor: [rows], for which the file may have one, or [rows, groups],
    read when they are indexed."""
    if len(source.parts) == 2:
        return _slice(files, source.name)
    return tensor_of(files, source.name).reshape(-1).expand(source.shape)


def check_tensors(files: Mapping[str, Any], wanted: Sources) -> None:
    """Raises SettingError that names a tensor with a wrong shape or dtype."""
    for target, sources in wanted.items():
        in_fp8 = target.endswith(".weight") and target.removesuffix(".weight") + ".scale" in wanted
        for source in sources:
            _check_tensor(files, target, source, in_fp8)


def _check_tensor(files: Mapping[str, Any], target: str, source: Source, in_fp8: bool) -> None:
    stored = _slice(files, source.name)
    dtype = stored.get_dtype()
    shapes = [source.shape]
    if target.endswith(".scale") and len(source.parts) == 1:
        shapes += [(*source.shape, 1), (1,), ()]
    check_shape(files, source.name, *shapes)
    own = stored_name(files, source.name)
    wrong = f"tensor {own} is {dtype}{in_file(files, source.name)}"
    if source.name.endswith(WORDS):
        if dtype != "I32":
            raise refusal(f"{wrong}; the words of weights in int4 must be I32")
    elif dtype not in FLOATS and not (in_fp8 and dtype == IN_FP8):
        raise refusal(
            f"{wrong}; of quantised weights only layers in FP8 (e4m3) or int4 are supported"
        )
