"""Checkpoints with FP8 projections: the layouts that are read, and the settings that are refused by
name."""

import json
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.architectures import decoder_config
from pensieve.builder.checkpoints.hugging_face import SINGLE, read_json, read_weights
from pensieve.builder.manifest import WEIGHTS
from pensieve.builder.model import Decoder
from pensieve.builder.parity import whole_weights
from pensieve.builder.quantised import dequantised, names_in_fp8, projections
from pensieve.plugins.linear.fp8 import rounded, row_scales
from pensieve.plugins.linear.fp8_format import FP8, widened
from pensieve.runtime.engine import open_engine
from pensieve.scheduler.types import SettingError
from tests.models import tiny_checkpoint

from .test_fp8 import logits
from .test_ranks import check_equal, logits_of, logits_of_ranks

GROUP = {
    "targets": ["Linear"],
    "weights": {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "channel",
        "dynamic": False,
    },
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "sparsity_config": {},
}
TENSOR = GROUP | {
    "weights": GROUP["weights"] | {"strategy": "tensor"},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
}
WEIGHTS_ONLY = GROUP | {"input_activations": None, "format": "naive-quantized"}
FBGEMM = {
    "quant_method": "fbgemm_fp8",
    "activation_scale_ub": 1200.0,
    "modules_to_not_convert": ["lm_head"],
}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
TRANSFORMERS = STATIC | {"weight_block_size": None, "modules_to_not_convert": ["lm_head"]}


class Layout(NamedTuple):
    """quantization_config, the shape of a scale for so many rows, its dtype, further tensors, the
    scale's name."""

    settings: dict
    shape: Callable[[int], tuple[int, ...]]
    dtype: torch.dtype
    more: tuple[str, ...] = ()
    scale: str = "weight_scale"


LAYOUTS = {
    "a scale an output": Layout(COMPRESSED, lambda rows: (rows, 1), torch.bfloat16),
    "compressed-tensors, a scale a tensor": Layout(
        COMPRESSED | {"config_groups": {"group_0": TENSOR}},
        lambda rows: (1,),
        torch.bfloat16,
        ("input_scale",),
    ),
    "compressed-tensors, weights only": Layout(
        COMPRESSED | {"format": "naive-quantized", "config_groups": {"group_0": WEIGHTS_ONLY}},
        lambda rows: (rows, 1),
        torch.bfloat16,
    ),
    "fbgemm": Layout(FBGEMM, lambda rows: (rows, 1), torch.float32, ("input_scale_ub",)),
    "a scale a tensor": Layout(STATIC, lambda rows: (), torch.float32, ("input_scale",)),
    "a scale a tensor, in one element": Layout(STATIC, lambda rows: (1,), torch.float32),
    "transformers": Layout(
        TRANSFORMERS, lambda rows: (), torch.float32, ("activation_scale",), "weight_scale_inv"
    ),
}
LAYER = "model.layers.1.self_attn.q_proj"


def quantised_checkpoint(directory, layout="a scale an output", keep=()):
    """A tiny Llama in FP8 except the modules in `keep`; returns the values of its tensors, by
    name."""
    tiny_checkpoint("llama", directory)
    settings, shape, dtype, more, scales = LAYOUTS[layout]
    tensors, meant = {}, {}
    for name, tensor in load_file(directory / SINGLE).items():
        tensors[name] = meant[name] = tensor
        module = name.removesuffix(".weight")
        if "_proj" not in name or module.endswith(keep):
            continue
        stored = shape(len(tensor))
        # the tensors that share one scale
        alike = tensor if len(stored) == 2 else tensor.view(1, -1)
        # none is too small, though the dtype rounds it
        scale = (1.01 * row_scales(alike)).to(dtype)
        each = scale.float().expand(len(tensor))
        tensors[name], tensors[f"{module}.{scales}"] = rounded(tensor, each), scale.reshape(stored)
        meant[name] = widened(tensors[name], each, torch.float32)
        tensors |= {f"{module}.{extra}": torch.ones(1) for extra in more}
    save_file(tensors, directory / SINGLE)
    alter_config(directory, settings)
    return meant


def alter_config(directory, settings):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))


def read(directory, rank=0, ranks=1):
    config = decoder_config(read_json(directory / "config.json"))
    return config, read_weights(directory, config, torch.float32, rank, ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read_as_it_stands(layout, tmp_path):
    meant = quantised_checkpoint(tmp_path, layout)
    config, weights = read(tmp_path)
    assert names_in_fp8(weights.keys()) == projections(config)
    assert {weights[f"{name}.weight"].dtype for name in projections(config)} == {FP8}
    wide = dequantised(weights)
    attention = [f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkv"]
    assert torch.equal(
        wide["layers.1.attention.qkv.weight"], torch.cat([meant[name] for name in attention])
    )
    assert torch.equal(
        wide["layers.0.mlp.down.weight"], meant["model.layers.0.mlp.down_proj.weight"]
    )
    assert torch.equal(wide["head.weight"], meant["lm_head.weight"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_read_their_scales(layout, ranks, tmp_path):
    quantised_checkpoint(tmp_path, layout)
    config, weights = read(tmp_path)
    whole = dequantised(weights)
    joined = whole_weights(config, [read(tmp_path, rank, ranks)[1] for rank in range(ranks)])
    assert all(torch.equal(joined[name], whole[name]) for name in whole)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_engine_of_it(layout, tmp_path):
    meant = quantised_checkpoint(tmp_path / "hf", layout)
    built = build_engine(tmp_path / "hf", tmp_path / "engine")
    assert (
        built.manifest.fp8
        and built.manifest.quantisation is None
        and built.manifest.dtype == "float32"
    )
    engine = open_engine(tmp_path / "engine")
    assert (
        sum(x.nbytes for x in load_file(tmp_path / "engine" / WEIGHTS).values())
        == engine.weight_bytes
    )
    save_file(meant, tmp_path / "hf" / SINGLE)
    alter_config(tmp_path / "hf", None)
    config, wide = read(tmp_path / "hf")
    shape = engine.kv_shape(16, 4)
    expected = logits(Decoder.from_weights(config, wide), shape)
    torch.testing.assert_close(logits(engine.forward, shape), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "layout", ["a scale an output", "compressed-tensors, a scale a tensor", "transformers"]
)
def test_an_engine_of_two_ranks_is_that_of_one(layout, tmp_path):
    quantised_checkpoint(tmp_path / "hf", layout)
    build_engine(tmp_path / "hf", tmp_path / "one")
    build_engine(tmp_path / "hf", tmp_path / "both", tensor_parallel=2)
    check_equal(logits_of_ranks(tmp_path / "both"), logits_of(open_engine(tmp_path / "one")))


def test_projections_that_were_left_out_stay_as_they_are(tmp_path):
    quantised_checkpoint(tmp_path / "hf", keep=("o_proj", "layers.0.mlp.down_proj"))
    config, weights = read(tmp_path / "hf")
    kept = {"layers.0.attention.out", "layers.1.attention.out", "layers.0.mlp.down"}
    assert names_in_fp8(weights.keys()) == projections(config) - kept
    built = build_engine(tmp_path / "hf", tmp_path / "engine", dtype="bfloat16")
    stored = load_file(tmp_path / "engine" / WEIGHTS)
    assert stored["layers.1.attention.out.weight"].dtype == torch.bfloat16
    assert open_engine(tmp_path / "engine").weight_bytes == built.manifest.weight_bytes


def test_rounding_it_again_is_refused(tmp_path):
    quantised_checkpoint(tmp_path / "hf")
    with pytest.raises(SettingError, match=r"--weights.*in FP8 already"):
        build_engine(tmp_path / "hf", tmp_path / "engine", weights="fp8")


def test_a_part_of_a_projection_that_was_left_out_is_refused(tmp_path):
    quantised_checkpoint(tmp_path, keep=("v_proj",))
    with pytest.raises(SettingError, match=r"q_proj\.weight is in FP8 and .*v_proj\.weight is not"):
        read(tmp_path)


@pytest.mark.parametrize(
    "alter, message",
    [
        (lambda t: t.pop(f"{LAYER}.weight_scale"), f"missing tensors.*{LAYER}.weight_scale"),
        (
            lambda t: t.update({f"{LAYER}.weight_scale": torch.ones(63, 1)}),
            r"weight_scale has the shape \[63, 1\]",
        ),
        (
            lambda t: t.update({f"{LAYER}.weight_scale": torch.ones(64, 1).to(FP8)}),
            "weight_scale is F8_E4M3",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(FP8)}),
            "lm_head.weight is F8_E4M3",
        ),
        (
            lambda t: t.update(
                {f"{LAYER}.weight": t[f"{LAYER}.weight"].float().to(torch.float8_e5m2)}
            ),
            "is in FP8 and .* is not",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}),
            "unexpected tensors.*k_scale",
        ),
    ],
)
def test_wrong_tensors_are_refused_by_name(alter, message, tmp_path):
    quantised_checkpoint(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    alter(tensors)
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(SettingError, match=message):
        read(tmp_path)


def group(**changes):
    return COMPRESSED | {
        "config_groups": {"group_0": GROUP | {"weights": GROUP["weights"] | changes}}
    }


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"quant_method": "hqq"}, "quant_method 'hqq'"),
        ({"bits": 8}, "quant_method None"),
        (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (COMPRESSED | {"format": "int-quantized"}, "format 'int-quantized' of group_0"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (COMPRESSED | {"transform_config": {"R1": {}}}, "transform_config"),
        (group(num_bits=4), "not symmetric floats of 8 bits"),
        (group(symmetric=False), "not symmetric floats of 8 bits"),
        (
            group(strategy="block"),
            "strategy 'block' of group_0 is not supported; take .* a weight_block_size, or the un",
        ),
        (
            group(strategy="group", group_size=128),
            "strategy 'group' of group_0 is not supported",
        ),
        (
            group(strategy=None),
            "strategy None of group_0 is not supported; known are channel, tensor",
        ),
        (COMPRESSED | {"config_groups": {"FP8": ["Linear"]}}, "group FP8 is a preset"),
    ],
)
def test_other_quantisations_are_refused_by_name(settings, named, tmp_path):
    tiny_checkpoint("llama", tmp_path)
    alter_config(tmp_path, settings)
    with pytest.raises(
        SettingError, match=f"--checkpoint: config.json: quantization_config.*{named}"
    ):
        read(tmp_path)
