"""Checkpoints with int4 projections: the formats that are read, the engines of them, and what is
refused by name.

The words are packed here from the published descriptions, number by number.
"""

import json
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from pensieve.builder.build import build_engine, build_random_engine
from pensieve.builder.checkpoints.architectures import decoder_config
from pensieve.builder.checkpoints.hugging_face import SINGLE
from pensieve.builder.engine_cache import engine_for
from pensieve.builder.inductor.compile import Compilable, export
from pensieve.builder.inductor.package import laid_out
from pensieve.builder.manifest import WEIGHTS, Manifest
from pensieve.builder.model import Decoder
from pensieve.builder.parity import random_batches, whole_weights
from pensieve.builder.quantised import dequantised, names_in_int4, projections
from pensieve.builder.random_weights import random_weights
from pensieve.runtime.engine import open_engine
from pensieve.scheduler.types import SettingError
from tests.compiled import needs_compiler
from tests.models import LLAMA_SHAPE, ScatteredRunner, save_random

from .inductor.test_compile import captured, logits_and_kv
from .test_fp8 import logits
from .test_fp8_checkpoint import alter_config, read
from .test_ranks import check_equal, logits_of, logits_of_ranks

# two ranks have whole tiles and groups
WIDE = LLAMA_SHAPE | {"hidden_size": 256, "intermediate_size": 512}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
INTS = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 128,
    "actorder": None,
}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": INTS, "input_activations": None}
    },
    "ignore": ["lm_head"],
}


def packed_with(**changes):
    group = PACKED["config_groups"]["group_0"]
    return PACKED | {"config_groups": {"group_0": group | {"weights": INTS | changes}}}


class Format(NamedTuple):
    """A quantization_config, the size of its groups, whether zero points are all 8, the number
    missing in the stored ones."""

    settings: dict
    group: int = 128
    symmetric: bool = False
    missing: int = 0


FORMATS = {
    "awq": Format(AWQ),
    "awq of AutoAWQ, without zero points of its own": Format(
        AWQ | {"version": "GEMM", "group_size": 64, "zero_point": False}, 64, symmetric=True
    ),
    "gptq": Format(GPTQ, symmetric=True, missing=1),
    "gptq, not symmetric": Format(GPTQ | {"sym": False, "group_size": 32}, 32, missing=1),
    "gptq_v2": Format(GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}),
    "pack-quantized": Format(PACKED, symmetric=True),
    "pack-quantized, not symmetric": Format(
        packed_with(symmetric=False, group_size=64, actorder="weight"), 64
    ),
}
EACH = pytest.mark.parametrize("form", FORMATS)
LAYER = "model.layers.1.self_attn.q_proj"


def words(numbers, dim, order=range(8)):
    """int32 words of eight neighbours along a dimension; bits 4i to 4i + 3 hold neighbour
    order[i]."""
    numbers = numbers.long().movedim(dim, -1).unflatten(-1, (-1, 8))
    packed = torch.zeros(numbers.shape[:-1], dtype=torch.int64)
    for i, neighbour in enumerate(order):
        packed += numbers[..., neighbour] * 16**i
    return torch.where(packed >= 2**31, packed - 2**32, packed).int().movedim(-1, dim).contiguous()


def tensors_of(method, numbers, scales, stored_zeros):
    """A projection's tensors, by the end of the name."""
    if method == "compressed-tensors":
        shape = torch.tensor(numbers.shape)
        tensors = {
            "weight_packed": words(numbers, 1),
            "weight_scale": scales,
            "weight_shape": shape,
        }
        return (
            tensors
            if stored_zeros is None
            else tensors | {"weight_zero_point": words(stored_zeros, 0)}
        )
    tensors = {"scales": scales.t().contiguous()}
    if method == "awq":
        interleaved = (0, 2, 4, 6, 1, 3, 5, 7)
        zeros = words(stored_zeros.t(), 1, interleaved)
        return tensors | {"qweight": words(numbers.t(), 1, interleaved), "qzeros": zeros}
    order = torch.arange(numbers.shape[1]) // (numbers.shape[1] // scales.shape[1])
    return tensors | {
        "qweight": words(numbers.t(), 0),
        "qzeros": words(stored_zeros.t(), 1),
        "g_idx": order.int(),
    }


def rounded(weight, form):
    """(Numbers, scales in float16, zero points) of a weight [out, in], and its rounded values."""
    values = weight.unflatten(1, (-1, form.group))
    if form.symmetric:
        scales = (values.abs().amax(-1) / 7).half()
        zeros = torch.full(scales.shape, 8)
    else:
        least = values.amin(-1)
        most = values.amax(-1)
        scales = ((most - least) / 15).half()
        zeros = (-least / scales.float()).round().clamp(form.missing, 15 + form.missing)
    steps = scales.float().unsqueeze(-1)
    numbers = (values / steps + zeros.unsqueeze(-1)).round().clamp(0, 15)
    return numbers.flatten(1), scales, zeros, ((numbers - zeros.unsqueeze(-1)) * steps).flatten(1)


def quantised_checkpoint(directory, form, keep=(), config=None):
    """A small model in int4 except the modules in `keep`; returns the values of its tensors, by
    name."""
    save_random(config or LlamaConfig(**WIDE), directory)
    form = FORMATS[form]
    tensors, meant = {}, {}
    for name, tensor in load_file(directory / SINGLE).items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj") or module.endswith(keep):
            tensors[name] = meant[name] = tensor
            continue
        numbers, scales, zeros, meant[name] = rounded(tensor, form)
        method = form.settings["quant_method"]
        stored = None if form.symmetric and method == "compressed-tensors" else zeros - form.missing
        layer_tensors = tensors_of(method, numbers, scales, stored)
        tensors |= {f"{module}.{end}": each for end, each in layer_tensors.items()}
    save_file(tensors, directory / SINGLE)
    alter_config(directory, form.settings)
    return meant


def meant_decoder(directory, meant):
    """The decoder of the values themselves; from then on the checkpoint is the one of these
    values."""
    save_file(meant, directory / SINGLE)
    alter_config(directory, None)
    return Decoder.from_weights(*read(directory))


@EACH
def test_a_format_is_read_as_it_stands(form, tmp_path):
    meant = quantised_checkpoint(tmp_path, form)
    config, weights = read(tmp_path)
    assert names_in_int4(weights.keys()) == projections(config)
    wide = dequantised(weights)
    attention = [f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkv"]
    expected = torch.cat([meant[name] for name in attention])
    torch.testing.assert_close(
        wide["layers.1.attention.qkv.weight"], expected, atol=1e-6, rtol=1e-5
    )
    expected = meant["model.layers.0.mlp.down_proj.weight"]
    torch.testing.assert_close(wide["layers.0.mlp.down.weight"], expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(wide["head.weight"], meant["lm_head.weight"])


@EACH
def test_ranks_read_their_parts(form, tmp_path):
    quantised_checkpoint(tmp_path, form)
    config, weights = read(tmp_path)
    whole = dequantised(weights)
    joined = whole_weights(config, [read(tmp_path, rank, 2)[1] for rank in range(2)])
    assert all(torch.equal(joined[name], whole[name]) for name in whole)


@EACH
def test_an_engine_of_it(form, tmp_path):
    meant = quantised_checkpoint(tmp_path / "hf", form)
    built = build_engine(tmp_path / "hf", tmp_path / "engine")
    assert built.manifest.int4 == FORMATS[form].group and not built.manifest.fp8
    assert built.manifest.dtype == "float32" and built.manifest.quantisation is None
    engine = open_engine(tmp_path / "engine")
    stored = load_file(tmp_path / "engine" / WEIGHTS)
    assert sum(x.nbytes for x in stored.values()) == engine.weight_bytes
    assert stored["layers.0.mlp.up.weight"].nbytes == 2 * 512 * 256 / 2
    shape = engine.kv_shape(16, 4)
    expected = logits(meant_decoder(tmp_path / "hf", meant), shape)
    torch.testing.assert_close(logits(engine.forward, shape), expected, atol=1e-4, rtol=1e-4)


def check_greedy_replies(directory, engine):
    """Each token of transformers' greedy replies, from the checkpoint's values, is the engine's own
    choice."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompts = [torch.arange(3, 20), torch.arange(60, 69)]
    ids = [
        model.generate(prompt[None], max_new_tokens=12, do_sample=False, eos_token_id=None)[0]
        for prompt in prompts
    ]
    runner = ScatteredRunner(engine.forward, engine.kv_shape(32, 4), ids, engine.dtype)
    runner.step(*((seat, 0, len(prompt)) for seat, prompt in enumerate(prompts)))
    for generated in range(11):
        spans = [(seat, len(prompt) + generated) for seat, prompt in enumerate(prompts)]
        runner.step(*((seat, start, start + 1) for seat, start in spans))
    for seat, prompt in enumerate(prompts):
        reply = [
            runner.logits[seat][position].argmax()
            for position in range(len(prompt) - 1, len(ids[seat]) - 1)
        ]
        assert reply == ids[seat][len(prompt) :].tolist()


@pytest.mark.parametrize("form", ["awq", "gptq, not symmetric", "pack-quantized"])
def test_greedy_replies_are_those_of_the_values(form, tmp_path):
    meant = quantised_checkpoint(tmp_path / "hf", form)
    build_engine(tmp_path / "hf", tmp_path / "engine")
    meant_decoder(tmp_path / "hf", meant)
    check_greedy_replies(tmp_path / "hf", open_engine(tmp_path / "engine"))


@pytest.mark.parametrize("form", ["awq", "gptq"])
def test_an_engine_of_two_ranks_is_that_of_one(form, tmp_path):
    quantised_checkpoint(tmp_path / "hf", form)
    build_engine(tmp_path / "hf", tmp_path / "one")
    build_engine(tmp_path / "hf", tmp_path / "both", tensor_parallel=2)
    check_equal(logits_of_ranks(tmp_path / "both"), logits_of(open_engine(tmp_path / "one")))


def test_biases_are_those_of_the_model(tmp_path):
    """Qwen2's q, k and v have biases."""
    meant = quantised_checkpoint(tmp_path / "hf", "awq", config=Qwen2Config(**WIDE))
    build_engine(tmp_path / "hf", tmp_path / "engine")
    engine = open_engine(tmp_path / "engine")
    shape = engine.kv_shape(16, 4)
    expected = logits(meant_decoder(tmp_path / "hf", meant), shape)
    torch.testing.assert_close(logits(engine.forward, shape), expected, atol=1e-4, rtol=1e-4)


def test_the_exported_graph_keeps_the_operation():
    config = decoder_config({"architectures": ["LlamaForCausalLM"]} | WIDE)
    weights = laid_out(random_weights(config, torch.bfloat16, "cpu", 0, int4=128))
    program = export(Compilable.from_weights(config, weights))
    calls = [str(node.target) for node in program.graph.nodes]
    assert calls.count("pensieve.int4_linear.default") == 4 * config.layers
    assert set(program.state_dict) == set(weights)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("form, ranks", [("awq", 1), ("gptq, not symmetric", 2)])
def test_a_compiled_engine_is_the_reference(form, ranks, tmp_path):
    quantised_checkpoint(tmp_path / "hf", form)
    build_engine(tmp_path / "hf", tmp_path / "reference")
    built = build_engine(tmp_path / "hf", tmp_path / "inductor", "inductor", tensor_parallel=ranks)
    assert built.manifest.compiled.parity.logits < 1e-5 and built.manifest.int4
    expected = logits_of(open_engine(tmp_path / "reference"))
    outputs = (
        logits_of_ranks(tmp_path / "inductor")
        if ranks > 1
        else [logits_of(open_engine(tmp_path / "inductor"))]
    )
    check_equal(outputs, expected)


def test_a_float16_checkpoint_becomes_a_bfloat16_engine(tmp_path):
    quantised_checkpoint(tmp_path / "hf", "awq")
    path = tmp_path / "hf" / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"dtype": "float16", "torch_dtype": "float16"})
    )
    assert build_engine(tmp_path / "hf", tmp_path / "own").manifest.dtype == "bfloat16"
    assert (
        build_engine(tmp_path / "hf", tmp_path / "half", dtype="float16").manifest.dtype
        == "float16"
    )
    ours, half = (logits_of(open_engine(tmp_path / name)).float() for name in ("own", "half"))
    assert (ours - half).norm() < 0.05 * half.norm()


def test_projections_that_were_left_out_stay_as_they_are(tmp_path):
    quantised_checkpoint(tmp_path / "hf", "awq", keep=("o_proj", "layers.0.mlp.down_proj"))
    config, weights = read(tmp_path / "hf")
    kept = {"layers.0.attention.out", "layers.1.attention.out", "layers.0.mlp.down"}
    assert names_in_int4(weights.keys()) == projections(config) - kept
    build_engine(tmp_path / "hf", tmp_path / "engine", dtype="bfloat16")
    assert (
        load_file(tmp_path / "engine" / WEIGHTS)["layers.1.attention.out.weight"].dtype
        == torch.bfloat16
    )
    open_engine(tmp_path / "engine")


def test_random_weights_in_int4(tmp_path):
    """Their engines are for measurements; ranks hold one model."""
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"} | WIDE)
    )
    built = build_random_engine(config, tmp_path / "one", weights="int4", dtype="float32")
    build_random_engine(
        config, tmp_path / "both", weights="int4", dtype="float32", tensor_parallel=2
    )
    assert built.manifest.int4 == 128 and Manifest.read(tmp_path / "one") == built.manifest
    one = logits_of(open_engine(tmp_path / "one"))
    check_equal(logits_of_ranks(tmp_path / "both"), one)
    decoder = built.manifest.decoder
    wide = [random_weights(decoder, torch.float32, "cpu", 0, int4=size) for size in (0, 128)]
    error = dequantised(wide[1])["layers.0.mlp.up.weight"] - wide[0]["layers.0.mlp.up.weight"]
    assert error.norm() < 0.15 * wide[0]["layers.0.mlp.up.weight"].norm()
    with pytest.raises(
        SettingError, match=r"--weights: layers.0.* has .* int4 takes multiples of 8 and of 128"
    ):
        build_random_engine(config, tmp_path / "narrow", {"hidden_size": 192}, weights="int4")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@torch.inference_mode()
def test_on_a_gpu_captured_steps_compute_with_the_values(tmp_path):
    """And the weights are there once."""
    meant = quantised_checkpoint(tmp_path / "hf", "awq")
    outputs = {}
    for backend in ("reference", "inductor"):
        built = build_engine(
            tmp_path / "hf", tmp_path / backend, backend, "bfloat16", device="cuda"
        )
        before = torch.cuda.memory_allocated()
        engine = open_engine(tmp_path / backend, "cuda")
        assert torch.cuda.memory_allocated() - before < 1.2 * engine.weight_bytes + 50_000
        config = built.manifest.decoder
        outputs[backend] = logits_and_kv(
            engine.forward, config, random_batches(config, "cuda"), torch.bfloat16, captured
        )
    decoder = meant_decoder(tmp_path / "hf", meant).cuda()
    exact = logits_and_kv(decoder, config, random_batches(config, "cuda"), torch.float32)
    for outcome in outputs.values():
        for ours, expected in zip(outcome, exact, strict=True):
            assert (ours - expected).norm() < 0.1 * expected.norm()


def test_tensors_that_say_nothing_are_ignored(tmp_path):
    """Biases of zeros, which AutoGPTQ writes where the model has none."""
    quantised_checkpoint(tmp_path, "gptq")
    tensors = load_file(tmp_path / SINGLE)
    save_file(tensors | {f"{LAYER}.bias": torch.zeros(256)}, tmp_path / SINGLE)
    read(tmp_path)
    save_file(tensors | {f"{LAYER}.bias": torch.ones(256)}, tmp_path / SINGLE)
    with pytest.raises(SettingError, match=f"unexpected tensors.*{LAYER}.bias"):
        read(tmp_path)


def test_what_else_an_engine_cannot_do_is_refused(tmp_path):
    quantised_checkpoint(tmp_path / "hf", "awq")
    with pytest.raises(SettingError, match=r"--weights.*in int4 already"):
        build_engine(tmp_path / "hf", tmp_path / "engine", weights="fp8")
    with pytest.raises(SettingError, match=r"--weights.*int4 is of random weights only"):
        build_engine(tmp_path / "hf", tmp_path / "engine", weights="int4")
    with pytest.raises(SettingError, match=r"--quantization: 'fp8' .* possible is awq"):
        engine_for(tmp_path / "hf", quantization="fp8")
    build_engine(tmp_path / "hf", tmp_path / "engine")
    assert engine_for(tmp_path / "engine", quantization="awq") == tmp_path / "engine"
    with pytest.raises(SettingError, match=r"--quantization: .* was built with weights in int4"):
        engine_for(tmp_path / "engine", quantization="fp8")
    with pytest.raises(
        SettingError, match=r"mlp.gate_proj in int4 .* a rank holds 128|o_proj in int4 .* holds 64"
    ):
        read(tmp_path / "hf", 0, 4)


def test_experts_are_refused_by_name(tmp_path):
    config = tmp_path / "config.json"
    experts = {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    config.write_text(json.dumps(WIDE | experts))
    with pytest.raises(
        SettingError, match=r"--weights: int4 weights of experts \(MixtralForCausalLM\)"
    ):
        build_random_engine(config, tmp_path / "engine", weights="int4")


def test_a_part_of_a_projection_that_was_left_out_is_refused(tmp_path):
    quantised_checkpoint(tmp_path, "awq", keep=("v_proj",))
    with pytest.raises(SettingError, match=r"q_proj.*some are in int4 and some are not"):
        read(tmp_path)


def test_a_width_that_the_product_does_not_take_is_refused(tmp_path):
    config = LlamaConfig(**WIDE | {"intermediate_size": 320})
    quantised_checkpoint(tmp_path, "gptq, not symmetric", config=config)
    with pytest.raises(SettingError, match=r"down_proj in int4 has 320 inputs.* multiples of 128"):
        read(tmp_path)


@pytest.mark.parametrize(
    "alter, message",
    [
        (lambda t: t.pop(f"{LAYER}.scales"), f"missing tensors.*{LAYER}.scales"),
        (lambda t: t.pop(f"{LAYER}.qzeros"), f"missing tensors.*{LAYER}.qzeros"),
        (
            lambda t: t.update({f"{LAYER}.scales": torch.ones(4, 256)}),
            r"q_proj.scales has the shape \[4, 256\]",
        ),
        (
            lambda t: t.update({f"{LAYER}.qzeros": t[f"{LAYER}.qzeros"].float()}),
            "qzeros is F32.*must be I32",
        ),
        (
            lambda t: t.update({f"{LAYER}.g_idx": t[f"{LAYER}.g_idx"].flip(0)}),
            "g_idx.*order of their groups",
        ),
    ],
)
def test_wrong_tensors_are_refused_by_name(alter, message, tmp_path):
    quantised_checkpoint(tmp_path, "gptq")
    tensors = load_file(tmp_path / SINGLE)
    alter(tensors)
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(SettingError, match=message):
        read(tmp_path)


GROUPS = PACKED["config_groups"]["group_0"]
REFUSED = [
    (AWQ | {"bits": 8}, "bits 8 is not supported"),
    (AWQ | {"version": "gemv"}, "version 'gemv' of awq"),
    (
        AWQ | {"group_size": -1},
        "group_size -1 is not supported: the int4 product takes groups of 32, 64, 128, 256",
    ),
    (GPTQ | {"bits": 3}, "bits 3 is not supported"),
    (GPTQ | {"desc_act": True}, "desc_act true is not supported.*without act-order"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    (GPTQ | {"group_size": 1024}, "group_size 1024"),
    (GPTQ | {"dynamic": {"-:.*down.*": {}}}, "dynamic"),
    (packed_with(num_bits=8), "num_bits 8 is not supported"),
    (packed_with(type="float"), "of type 'float'"),
    (packed_with(strategy="channel"), "strategy 'channel' of group_0, in pack-quantized"),
    (packed_with(actorder="group"), "actorder 'group' of group_0.*act-order"),
    (packed_with(group_size=16), "group_size 16"),
    (
        PACKED | {"config_groups": {"group_0": GROUPS | {"input_activations": {"num_bits": 8}}}},
        "input_activations of group_0",
    ),
    (
        PACKED
        | {"config_groups": {"a": GROUPS, "b": GROUPS | {"weights": INTS | {"group_size": 64}}}},
        "differ in group_size or symmetric",
    ),
]


@pytest.mark.parametrize("settings, named", REFUSED)
def test_other_variants_are_refused_by_name(settings, named, tmp_path):
    with pytest.raises(
        SettingError, match=f"--checkpoint: config.json: quantization_config.*{named}"
    ):
        decoder_config(
            {"architectures": ["LlamaForCausalLM"], "quantization_config": settings} | WIDE
        )
