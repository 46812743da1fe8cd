"""Checkpoints with FP8 weights and a scale for each block, as Qwen publishes its models, against
engines of the same values in float32."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.architectures import decoder_config
from pensieve.builder.checkpoints.hugging_face import SINGLE, read_json, read_weights
from pensieve.builder.parity import whole_weights
from pensieve.plugins.linear.fp8 import rounded, row_scales
from pensieve.plugins.linear.fp8_format import FP8, MOST, widened
from pensieve.runtime.engine import open_engine
from pensieve.scheduler.types import SettingError
from tests.compiled import needs_compiler
from tests.models import ScatteredRunner, tiny_checkpoint

from .test_fp8_checkpoint import COMPRESSED, alter_config
from .test_hybrid import NOT_KEPT, ZERO, new_states, span

BLOCK = [24, 8]  # rows of a block go on in the next projection, or end in it
CONVERTED = re.compile(
    r".*\.(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_(qkvz?|z)|out_proj)"
    r"|mlp\.(shared_expert\.|experts\.\d+\.)?(gate|up|down)_proj)\.weight"
)
"""As published: without the small projections of linear attention, routers and shared gates."""


def of_blocks(blocks, shape):
    """The number of each weight's block."""
    rows, columns = BLOCK
    wide = blocks.float().repeat_interleave(rows, dim=0).repeat_interleave(columns, dim=1)
    return wide[: shape[0], : shape[1]]


def quantised_checkpoint(kind, directory, block=BLOCK):
    """A tiny model in FP8; returns the values of its tensors, by name."""
    tiny_checkpoint(kind, directory)
    tensors, meant = {}, {}
    for name, weight in load_file(directory / SINGLE).items():
        tensors[name] = meant[name] = weight
        if not CONVERTED.fullmatch(name):
            continue
        rows, columns = BLOCK
        most = torch.zeros(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        for i in range(most.shape[0]):
            for j in range(most.shape[1]):
                most[i, j] = (
                    weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns].abs().max()
                )
        scales = (1.01 * most / MOST).bfloat16()
        tensors[name] = (weight / of_blocks(scales, weight.shape)).to(FP8)
        tensors[f"{name}_scale_inv"] = scales
        meant[name] = tensors[name].float() * of_blocks(scales, weight.shape)
    save_file(tensors, directory / SINGLE)
    settings = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head", "model.layers.0.linear_attn.in_proj_a"],
        "quant_method": "fp8",
        "weight_block_size": block,
    }
    alter_config(directory, settings)
    return meant


def quantised_by_rows(kind, directory, left_out=".linear_attn.", shape=(-1, 1)):
    """With a scale for each output, and linear attention left out, as llm-compressor writes it;
    or with a scale for each tensor. `shape`: of the stored scales."""
    tiny_checkpoint(kind, directory)
    tensors, meant = {}, {}
    for name, weight in load_file(directory / SINGLE).items():
        tensors[name] = meant[name] = weight
        if CONVERTED.fullmatch(name) and left_out not in name:
            scale = row_scales(weight if -1 in shape else weight.view(1, -1))
            each = scale.expand(len(weight))
            tensors[name], tensors[f"{name}_scale"] = rounded(weight, each), scale.reshape(shape)
            meant[name] = widened(tensors[name], each, torch.float32)
    save_file(tensors, directory / SINGLE)
    alter_config(directory, COMPRESSED)
    return meant


def twin_of(directory, meant, twin):
    """A checkpoint of the values in float32."""
    twin.mkdir()
    save_file(meant, twin / SINGLE)
    config = read_json(directory / "config.json")
    del config["quantization_config"]
    (twin / "config.json").write_text(json.dumps(config))


def read(directory, rank=0, ranks=1):
    config = decoder_config(read_json(directory / "config.json"))
    return config, read_weights(directory, config, torch.float32, rank, ranks)


KINDS = ["llama", "qwen3-5", "qwen3-5-moe", "qwen3-next", "qwen3-moe"]
by_kind_and_layout = pytest.mark.parametrize(
    ("kind", "quantise"),
    [
        *((kind, quantised_checkpoint) for kind in KINDS),
        *((kind, quantised_by_rows) for kind in KINDS[1:]),
    ],
)


@by_kind_and_layout
def test_ranks_read_the_values_of_the_checkpoint(kind, quantise, tmp_path):
    meant = quantise(kind, tmp_path / "fp8")
    twin_of(tmp_path / "fp8", meant, tmp_path / "twin")
    config, expected = read(tmp_path / "twin")
    for ranks in (1, 2):
        parts = [read(tmp_path / "fp8", rank, ranks)[1] for rank in range(ranks)]
        assert any(name.endswith(".scale") for name in parts[0])
        whole = whole_weights(config, parts)
        assert whole.keys() == set(expected)
        assert all(torch.equal(whole[name], expected[name]) for name in whole)


@pytest.mark.parametrize("shape", [(), (1,), (-1,), (-1, 1)], ids=str)
@pytest.mark.parametrize("kind", ["qwen3-5", "qwen3-next"])
def test_parts_of_linear_attention_have_the_scales_of_their_fused_tensor(kind, shape, tmp_path):
    meant = quantised_by_rows(kind, tmp_path / "fp8", "nothing", shape)
    twin_of(tmp_path / "fp8", meant, tmp_path / "twin")
    config, expected = read(tmp_path / "twin")
    for ranks in (1, 2):
        parts = [read(tmp_path / "fp8", rank, ranks)[1] for rank in range(ranks)]
        whole = whole_weights(config, parts)
        assert all(torch.equal(whole[name], expected[name]) for name in expected)


@pytest.mark.parametrize("gate", ["gate", "shared_expert_gate"])
def test_routers_and_gates_in_fp8_are_refused(gate, tmp_path):
    quantised_by_rows("qwen3-5-moe", tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    name = next(name for name in tensors if name.endswith(f".mlp.{gate}.weight"))
    scale = row_scales(tensors[name])
    tensors |= {name: rounded(tensors[name], scale), f"{name}_scale": scale.unsqueeze(1)}
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(SettingError, match=rf"{re.escape(name)} is in FP8, in which routers"):
        read(tmp_path)


def test_a_missing_expert_in_fp8_is_told_as_missing(tmp_path):
    quantised_by_rows("qwen3-moe", tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    name = next(name for name in tensors if name.endswith(".experts.2.up_proj.weight"))
    save_file(
        {each: tensor for each, tensor in tensors.items() if name not in each}, tmp_path / SINGLE
    )
    with pytest.raises(SettingError, match=rf"missing tensors for \w+: {re.escape(name)}"):
        read(tmp_path)


def test_blocks_of_a_checkpoint_without_fp8_are_no_groups(tmp_path):
    """An unquantised checkpoint whose config.json still has the blocks."""
    tiny_checkpoint("llama", tmp_path / "hf")
    alter_config(tmp_path / "hf", {"quant_method": "fp8", "weight_block_size": BLOCK})
    manifest = build_engine(tmp_path / "hf", tmp_path / "engine").manifest
    assert (manifest.fp8, manifest.group, manifest.int4) == (False, 0, 0)


@by_kind_and_layout
def test_an_engine_computes_what_its_twin_in_float32_does(kind, quantise, tmp_path):
    meant = quantise(kind, tmp_path / "fp8")
    twin_of(tmp_path / "fp8", meant, tmp_path / "twin")
    prompt = torch.randint(3, 160, (90,), generator=torch.Generator().manual_seed(3))
    logits = []
    for name in ("fp8", "twin"):
        built = build_engine(tmp_path / name, tmp_path / f"{name}-engine")
        assert built.manifest.fp8 == (name == "fp8")
        engine = open_engine(tmp_path / f"{name}-engine")
        states = None if engine.state_shape is None else new_states(engine)
        runner = ScatteredRunner(
            engine.forward, engine.kv_shape(64, 4), [prompt], torch.float32, states
        )
        runner.step(span(0, 0, 64, ZERO, 2))
        runner.step(span(0, 64, 89, 2, 2))
        runner.step(span(0, 89, 90, 2, NOT_KEPT))
        logits.append(runner.all_logits(0).log_softmax(dim=-1))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)


def test_blocks_that_ranks_would_divide_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.BLOCK", [24, 32])
    quantised_checkpoint("qwen3-5-moe", tmp_path, [24, 32])
    with pytest.raises(
        SettingError, match=r"has 96 inputs, of which a rank would hold 48.*32 inputs of"
    ):
        read(tmp_path, 0, 2)


@pytest.mark.parametrize("block", [[128], [0, 128], 128, ["a", "b"]])
def test_other_blocks_are_refused(block, tmp_path):
    quantised_checkpoint("qwen3-5", tmp_path, block)
    with pytest.raises(SettingError, match="weight_block_size must be two sizes"):
        read(tmp_path)


def test_a_damaged_scale_is_named_as_in_the_checkpoint(tmp_path):
    quantised_checkpoint("qwen3-5", tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    name = "model.layers.1.linear_attn.in_proj_qkv.weight_scale_inv"
    scale = tensors.pop(name)
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(SettingError, match=f"missing tensors for [^ ]*: {name}; "):
        read(tmp_path)
    for damaged in (scale[:-1], scale[:, :-1], scale[0, 0]):
        save_file(tensors | {name: damaged.clone()}, tmp_path / SINGLE)
        with pytest.raises(SettingError, match=f"tensor {name} has the shape"):
            read(tmp_path)


def test_rounding_it_again_is_refused(tmp_path):
    quantised_checkpoint("qwen3-5", tmp_path / "fp8")
    with pytest.raises(SettingError, match="--weights"):
        build_engine(tmp_path / "fp8", tmp_path / "engine", weights="fp8")


@needs_compiler
def test_experts_in_fp8_need_the_reference_backend(tmp_path):
    quantised_checkpoint("qwen3-moe", tmp_path / "fp8")
    with pytest.raises(SettingError, match=r"--backend.*FP8 weights of experts.*take reference"):
        build_engine(tmp_path / "fp8", tmp_path / "engine", backend="inductor")
