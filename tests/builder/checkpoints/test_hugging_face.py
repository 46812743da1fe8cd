"""Checkpoints as they are found on disk: sharded, old, incomplete, wrong."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, SiglipVisionConfig

from pensieve.builder.build import build_engine
from pensieve.builder.checkpoints.architectures import decoder_config
from pensieve.builder.checkpoints.hugging_face import read_json, read_weights
from pensieve.runtime.engine import open_engine
from pensieve.scheduler.types import SettingError
from tests.models import ScatteredRunner, save_random, tiny_checkpoint, tiny_config

LAYER = "model.layers.1.self_attn"


def read(directory):
    return read_weights(
        directory, decoder_config(read_json(directory / "config.json")), torch.float32
    )


@pytest.fixture
def checkpoint(tmp_path):
    tiny_checkpoint("llama", tmp_path)
    return tmp_path


def change(directory, alter):
    tensors = load_file(directory / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    alter(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_projections_are_fused_in_order(checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    weights = read(checkpoint)
    q, k, v = (tensors[f"{LAYER}.{x}_proj.weight"] for x in "qkv")
    assert torch.equal(weights["layers.1.attention.qkv.weight"], torch.cat((q, k, v)))
    gate, up = (tensors[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    assert torch.equal(weights["layers.0.mlp.up.weight"], torch.cat((gate, up)))


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_sharded_checkpoints_hold_the_same(kind, tmp_path):
    tiny_checkpoint(kind, tmp_path / "single")
    save_random(tiny_config(kind), tmp_path / "sharded", max_shard_size="60KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    single, sharded = read(tmp_path / "single"), read(tmp_path / "sharded")
    assert list(single) == list(sharded)
    assert all(torch.equal(single[name], sharded[name]) for name in single)


@pytest.mark.parametrize("kind", ["qwen3", "opt"])
def test_a_bare_model_without_prefix_is_read_too(kind, tmp_path):
    model = tiny_checkpoint(kind, tmp_path)
    expected = read(tmp_path)
    model.base_model.save_pretrained(tmp_path / "bare")
    config = decoder_config(read_json(tmp_path / "config.json"))
    weights = read_weights(tmp_path / "bare", config, torch.float32)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_the_experts_of_one_tensor_are_taken_apart(tmp_path):
    """Each rank reads its outputs of each expert's gate and values, which alternate, and all or its
    own inputs."""
    tiny_checkpoint("gpt-oss", tmp_path)  # 8 experts, 32 wide
    config = decoder_config(read_json(tmp_path / "config.json"))
    stored = load_file(tmp_path / "model.safetensors")
    layer, experts = "model.layers.1.mlp", "model.layers.1.mlp.experts"
    up, up_bias = stored[f"{experts}.gate_up_proj"], stored[f"{experts}.gate_up_proj_bias"]
    down, down_bias = stored[f"{experts}.down_proj"], stored[f"{experts}.down_proj_bias"]
    for rank in range(2):
        own = read_weights(tmp_path, config, torch.float32, rank, 2)
        assert all(tensor.is_contiguous() for tensor in own.values())
        wide = slice(16 * rank, 16 * rank + 16)
        parts = [part[:, wide].T for expert in up for part in (expert[:, ::2], expert[:, 1::2])]
        assert torch.equal(own["layers.1.mlp.up.weight"], torch.cat(parts))
        parts = [part[wide] for expert in up_bias for part in (expert[::2], expert[1::2])]
        assert torch.equal(own["layers.1.mlp.up.bias"], torch.cat(parts))
        assert torch.equal(
            own["layers.1.mlp.down.weight"], torch.cat([expert[wide].T for expert in down])
        )
        bias = down_bias.flatten()
        assert torch.equal(
            own["layers.1.mlp.down.bias"], bias if rank == 0 else torch.zeros_like(bias)
        )
        for kind in ("weight", "bias"):
            assert torch.equal(own[f"layers.1.mlp.router.{kind}"], stored[f"{layer}.router.{kind}"])
        sinks = stored["model.layers.1.self_attn.sinks"]
        assert torch.equal(own["layers.1.attention.sinks"], sinks[2 * rank : 2 * rank + 2])


@pytest.mark.parametrize(
    "name", ["gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"]
)
def test_wrong_experts_of_one_tensor_are_refused(name, tmp_path):
    tiny_checkpoint("gpt-oss", tmp_path)
    fused = f"model.layers.1.mlp.experts.{name}"
    change(tmp_path, lambda tensors: tensors.update({fused: tensors[fused][:, :30].contiguous()}))
    with pytest.raises(SettingError, match=f"tensor {fused} has the shape .* in model.safetensors"):
        read(tmp_path)
    change(tmp_path, lambda tensors: tensors.update({fused: tensors[fused][:7].contiguous()}))
    with pytest.raises(SettingError, match=rf"tensor {fused} has the shape \[7, .*\[8, "):
        read(tmp_path)
    change(tmp_path, lambda tensors: tensors.pop(fused))
    with pytest.raises(SettingError, match=f"missing tensors for GptOssForCausalLM: {fused}; "):
        read(tmp_path)


def test_the_weights_for_images_are_left_out(tmp_path):
    """And the part for text is a model of its own."""
    text = tiny_config("gemma3")
    images = SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        image_size=28,
        patch_size=14,
    )
    config = Gemma3Config(text_config=text, vision_config=images, mm_tokens_per_image=4)
    model = Gemma3ForConditionalGeneration(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "checkpoint")
    names = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert any(name.startswith("vision_tower.") for name in names)
    built = build_engine(tmp_path / "checkpoint", tmp_path / "engine")
    assert (built.manifest.architecture, built.manifest.stop_ids) == ("Gemma3ForCausalLM", (2,))
    engine = open_engine(tmp_path / "engine")
    prompt = torch.arange(3, 43)
    runner = ScatteredRunner(engine.forward, engine.kv_shape(16, 4), [prompt], engine.dtype)
    runner.step((0, 0, 40))
    expected = model(prompt.unsqueeze(0)).logits[0]
    torch.testing.assert_close(runner.all_logits(0), expected, atol=1e-4, rtol=1e-4)


def test_old_buffers_and_a_tied_head_saved_twice_are_ignored(tmp_path):
    tiny_checkpoint("qwen3", tmp_path)

    def alter(tensors):
        tensors[f"{LAYER}.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change(tmp_path, alter)
    assert "head.weight" not in read(tmp_path)


def test_a_tied_head_that_differs_is_refused(tmp_path):
    tiny_checkpoint("qwen3", tmp_path)
    change(
        tmp_path,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
        ),
    )
    with pytest.raises(SettingError, match=r"lm_head\.weight differs"):
        read(tmp_path)


@pytest.mark.parametrize(
    "alter, message",
    [
        (
            lambda t: t.pop(f"{LAYER}.k_proj.weight"),
            f"missing tensors for LlamaForCausalLM: {LAYER}.k_proj.weight",
        ),
        (
            lambda t: t.update({f"{LAYER}.q_proj.bias": torch.ones(64)}),
            f"unexpected tensors.*{LAYER}.q_proj.bias",
        ),
        (
            lambda t: t.update({f"{LAYER}.q_proj.weight": torch.ones(64, 32)}),
            r"q_proj.weight has the shape \[64, 32\]",
        ),
        (
            lambda t: t.update({f"{LAYER}.q_proj.weight": torch.ones(64, 64, dtype=torch.int8)}),
            "quantised weights",
        ),
        (
            lambda t: [t.pop(name) for name in list(t) if "layers.1." in name],
            "missing tensors.* and 4 more",
        ),
    ],
)
def test_wrong_tensors_are_refused_by_name(checkpoint, alter, message):
    change(checkpoint, alter)
    with pytest.raises(SettingError, match=message):
        read(checkpoint)


def test_files_that_are_missing_or_damaged_are_refused(checkpoint):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(
        SettingError, match=r"model\.safetensors cannot be read: .*download was cut short"
    ):
        read(checkpoint)
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(
        SettingError, match=r"model\.safetensors is a pointer of Git LFS; `git lfs pull` in "
    ):
        read(checkpoint)
    weights.unlink()
    weights.mkdir()
    with pytest.raises(SettingError, match=r"model\.safetensors cannot be read: .*Is a directory"):
        read(checkpoint)
    weights.rmdir()
    with pytest.raises(SettingError, match="holds neither"):
        read(checkpoint)
    (checkpoint / "pytorch_model.bin").touch()
    with pytest.raises(SettingError, match="save_pretrained"):
        read(checkpoint)
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}})
    )
    with pytest.raises(SettingError, match="model-00001-of-00002"):
        read(checkpoint)
    index.write_text("{}")
    with pytest.raises(SettingError, match="weight_map"):
        read(checkpoint)


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "does not exist"),
        ("{", "cannot be read"),
        ("[" * 10**5, "cannot be read"),
        ("[]", "JSON object"),
    ],
)
def test_config_json_must_be_there_and_be_an_object(text, message, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(SettingError, match=message):
        read(tmp_path)
