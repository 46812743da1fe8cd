"""Engines of random weights: from a config.json alone, made when opened, sound numbers at any depth
and width."""

import json

import pytest
import torch

from pensieve.builder.build import build_random_engine
from pensieve.builder.checkpoints.architectures import decoder_config
from pensieve.builder.checkpoints.hugging_face import parameter_shapes
from pensieve.builder.manifest import Manifest
from pensieve.builder.random_weights import random_weights
from pensieve.runtime.engine import open_engine
from pensieve.scheduler.types import SettingError
from pensieve.scripts.build_engine import main
from tests.models import (
    GEMMA3_SHAPE,
    GPT_OSS_SHAPE,
    LLAMA_SHAPE,
    OPT_SHAPE,
    QWEN3_MOE_SHAPE,
    ScatteredRunner,
    tiny_checkpoint,
)

CONFIGS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"} | LLAMA_SHAPE,
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16", "head_dim": 32}
    | LLAMA_SHAPE,
    "qwen3-moe": {"architectures": ["Qwen3MoeForCausalLM"], "dtype": "bfloat16"} | QWEN3_MOE_SHAPE,
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "dtype": "bfloat16"} | GEMMA3_SHAPE,
    "gpt-oss": {"architectures": ["GptOssForCausalLM"], "dtype": "bfloat16"} | GPT_OSS_SHAPE,
    "opt": {"architectures": ["OPTForCausalLM"], "torch_dtype": "float16"} | OPT_SHAPE,
    "opt, post norm": {"architectures": ["OPTForCausalLM"], "do_layer_norm_before": False}
    | OPT_SHAPE,
}


def write(name, directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(CONFIGS[name] | changes))
    return path


def logits_of(engine, tokens=20):
    prompt = torch.arange(3, 3 + tokens)
    runner = ScatteredRunner(engine.forward, engine.kv_shape(16, 4), [prompt], engine.dtype)
    runner.step((0, 0, tokens - 5))
    runner.step((0, tokens - 5, tokens))
    return runner.all_logits(0)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_engine_without_a_checkpoint_runs(name, tmp_path):
    config = write(name, tmp_path)
    built = build_random_engine(config, tmp_path / "engine", seed=7)
    assert [path.name for path in (tmp_path / "engine").iterdir()] == ["manifest.json"]
    assert (
        not built.has_tokenizer
        and built.manifest.stop_ids == (2,)
        and built.manifest.random_seed == 7
    )
    engine = open_engine(tmp_path / "engine")
    assert engine.parameters * engine.dtype.itemsize == built.manifest.weight_bytes
    assert (engine.active_parameters < engine.parameters) == (name in ("qwen3-moe", "gpt-oss"))
    assert built.manifest.dtype == CONFIGS[name].get(
        "dtype", CONFIGS[name].get("torch_dtype", "float32")
    )
    logits = logits_of(engine)
    assert logits.isfinite().all() and 0.1 < logits.std() < 10
    assert torch.equal(logits_of(open_engine(tmp_path / "engine")), logits)


def test_the_seed_and_the_config_make_the_engine(tmp_path):
    config = write("llama", tmp_path)
    engine = tmp_path / "engine"
    first = build_random_engine(config, engine)
    weights = open_engine(engine)._decoder.state_dict()
    assert build_random_engine(config, engine).outcome == "reused"
    other = build_random_engine(config, engine, seed=1)
    assert other.outcome == "replaced" and other.manifest.fingerprint != first.manifest.fingerprint
    assert not torch.equal(
        open_engine(engine)._decoder.state_dict()["embed.weight"], weights["embed.weight"]
    )
    longer = build_random_engine(config, engine, {"max_position_embeddings": 4096}, seed=1)
    assert longer.manifest.max_model_len == 4096
    assert longer.manifest.fingerprint != other.manifest.fingerprint


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_eighty_layers_stay_finite(name, dtype, tmp_path):
    config = write(name, tmp_path, num_hidden_layers=80)
    built = build_random_engine(
        config, tmp_path / "engine", dtype=str(dtype).removeprefix("torch.")
    )
    assert built.manifest.layers == 80
    logits = logits_of(open_engine(tmp_path / "engine"))
    assert logits.isfinite().all() and 0.1 < logits.std() < 10


def test_weights_are_of_the_size_of_what_they_project():
    config = decoder_config(CONFIGS["opt"] | {"hidden_size": 512, "ffn_dim": 2048})
    weights = random_weights(config, torch.float32, "cpu", 0)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == parameter_shapes(
        config
    )
    assert (
        weights["layers.0.attention_norm.weight"].eq(1).all()
        and weights["layers.0.mlp.up.bias"].eq(0).all()
    )
    sizes = {
        "layers.1.attention.qkv": 512,
        "layers.1.mlp.down": 2048 * 4,
        "layers.0.attention.out": 512 * 4,
    }
    for name, inputs in sizes.items():
        assert weights[f"{name}.weight"].std().item() == pytest.approx(inputs**-0.5, rel=0.02)


@pytest.mark.parametrize(
    "setting, arguments, named",
    [
        ("--config", {"config": "nowhere.json"}, "does not exist"),
        ("--config", {"overrides": {"num_attention_heads": 3}}, "num_key_value_heads"),
        ("--config", {"overrides": {"architectures": ["Gemma"]}}, "Gemma"),
        ("--set", {"overrides": {"max_position_embedings": 64}}, "max_position_embedings"),
        ("--set", {"overrides": {"ffn_dim": 64, "vocab_size": 100}}, "ffn_dim"),
        ("--seed", {"seed": -1}, "-1"),
        ("--dtype", {"dtype": "int8"}, "bfloat16"),
        ("--device", {"device": "tpu"}, "cuda"),
        ("--tensor-parallel", {"tensor_parallel": 3}, "only among 1 or 2 or 4"),
    ],
)
def test_wrong_settings_are_named(setting, arguments, named, tmp_path):
    config = write("llama", tmp_path)
    with pytest.raises(SettingError, match=named) as error:
        build_random_engine(**{"config": config, "output": tmp_path / "engine"} | arguments)
    assert error.value.setting == setting and not (tmp_path / "engine").exists()
    assert str(error.value).startswith(f"{setting}: ") and "--checkpoint" not in str(error.value)


def test_a_random_engine_and_a_checkpoint_s_replace_each_other(tmp_path):
    tiny_checkpoint("llama", tmp_path / "checkpoint")
    checkpoint = [
        "--checkpoint",
        str(tmp_path / "checkpoint"),
        "--output",
        str(tmp_path / "engine"),
    ]
    config = str(tmp_path / "checkpoint" / "config.json")
    random = [
        "--random-weights",
        "--config",
        config,
        "--output",
        str(tmp_path / "engine"),
        "--seed",
        "3",
    ]
    for arguments in (checkpoint, random, checkpoint):
        assert main([*arguments, "--backend", "reference"]) == 0
        open_engine(tmp_path / "engine")
    assert Manifest.read(tmp_path / "engine").random_seed is None


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config, engine = str(write("opt", tmp_path)), str(tmp_path / "engine")
    arguments = [
        "--random-weights",
        "--config",
        config,
        "--output",
        engine,
        "--device",
        "cuda",
        "--dtype",
        "bfloat16",
    ]
    arguments += ["--backend", "reference"]
    assert (
        main(
            [
                *arguments,
                "--set",
                "max_position_embeddings=16384",
                "--set",
                'activation_function="gelu"',
            ]
        )
        == 0
    )
    output = capsys.readouterr().out
    assert (
        "built" in output
        and "cuda" in output
        and "random weights" in output
        and "16384 tokens" in output
    )
    manifest = Manifest.read(tmp_path / "engine")
    assert (manifest.device, manifest.decoder.activation, manifest.random_seed) == (
        "cuda",
        "gelu",
        0,
    )


@pytest.mark.parametrize(
    "arguments, setting",
    [
        ([], "--checkpoint"),
        (["--random-weights"], "--config"),
        (["--random-weights", "--config", "a.json", "--checkpoint", "b"], "--checkpoint"),
        (["--checkpoint", "b", "--config", "a.json"], "--config"),
        (["--checkpoint", "b", "--seed", "0"], "--seed"),
        (["--checkpoint", "b", "--set", "vocab_size=9"], "--set"),
        (["--random-weights", "--config", "a.json", "--set", "vocab_size"], "--set"),
        (["--random-weights", "--config", "a.json", "--set", "hidden_act=gelu"], "--set"),
        (["--random-weights", "--config", "a.json", "--set", "a=1", "--set", "a=2"], "--set"),
    ],
)
def test_flags_that_do_not_go_together(arguments, setting, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a.json", "b"):
        (tmp_path / name).write_text("{}")
    assert main([*arguments, "--output", str(tmp_path / "engine")]) == 2
    assert capsys.readouterr().err.startswith(f"build_engine: {setting}:")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_made_on_the_gpu(name, tmp_path):
    build_random_engine(write(name, tmp_path), tmp_path / "engine", device="cuda", dtype="bfloat16")
    engine = open_engine(tmp_path / "engine", "cuda")
    again = open_engine(tmp_path / "engine", "cuda")
    assert {tensor.device.type for tensor in engine._decoder.state_dict().values()} == {"cuda"}
    assert engine._decoder.frequencies.is_cuda
    for tensor, other in zip(
        engine._decoder.parameters(), again._decoder.parameters(), strict=True
    ):
        assert torch.equal(tensor, other)
