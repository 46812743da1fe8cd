"""The checkpoint that all servers of a comparison read, of tiny GGUF files."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from benchmarks import small_checkpoint
from benchmarks.small_checkpoint import main
from tests.gguf_files import write_gguf
from tests.models import LLAMA_SHAPE, save_random


@pytest.fixture
def gguf(tmp_path):
    """Writes a GGUF file without a tokenizer."""

    def write(config):
        save_random(config, tmp_path / "original")
        write_gguf(tmp_path / "original", tmp_path / "model.gguf")
        return tmp_path / "model.gguf"

    return write


def test_transformers_reads_the_same_model_in_bfloat16(gguf, tmp_path, monkeypatch, capsys):
    texts = {"tokenizer.json": "{}", "generation_config.json": '{"eos_token_id": 2}'}
    monkeypatch.setattr(small_checkpoint, "tokenizer_files", lambda fields: texts)
    file = gguf(LlamaConfig(**LLAMA_SHAPE, tie_word_embeddings=True))
    output = tmp_path / "written"
    assert main(["--gguf", str(file), "--output", str(output)]) == 0
    assert "in bfloat16" in capsys.readouterr().out
    assert {path.name for path in output.iterdir()} == {
        "config.json",
        "model.safetensors",
        *texts,
    }
    config = json.loads((output / "config.json").read_text())
    assert config["model_type"] == "llama" and config["tie_word_embeddings"] is True
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    written = AutoModelForCausalLM.from_pretrained(output)
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "original", dtype=torch.bfloat16)
    assert written.dtype is torch.bfloat16
    prompt = torch.arange(20)[None]
    assert torch.equal(written(prompt).logits, original(prompt).logits)


def test_other_files_are_refused(gguf, tmp_path, capsys):
    output = tmp_path / "written"
    for config, words in (
        (Qwen2Config(**LLAMA_SHAPE), "is Qwen2ForCausalLM, not LlamaForCausalLM"),
        (LlamaConfig(**LLAMA_SHAPE), "has no tokenizer"),
    ):
        assert main(["--gguf", str(gguf(config)), "--output", str(output)]) == 2
        assert words in capsys.readouterr().err
    assert main(["--gguf", str(tmp_path / "none.gguf"), "--output", str(output)]) == 2
    assert "--gguf: there is no file" in capsys.readouterr().err
    assert not output.exists()
