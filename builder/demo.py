"""A small chat model made on the spot, so that everything can be tried without downloading one.

It is an ordinary checkpoint and goes the ordinary road through build_engine. Its weights are random: it speaks
nonsense, but always the same.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .architectures import decoder_config
from .checkpoint import weight_sources

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def demo_tokenizer() -> Tokenizer:
    """One token a byte, then the three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (END_OF_TEXT, TURN_START, TURN_END)])
    return tokenizer


def write_demo_checkpoint(directory: str | Path) -> None:
    """A Llama of about 2.4 million parameters with grouped-query attention and a context of 4096 tokens."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = demo_tokenizer()
    stop = [tokenizer.token_to_id(text) for text in (TURN_END, END_OF_TEXT)]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": stop,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    generation_config = {"eos_token_id": stop, "pad_token_id": tokenizer.token_to_id(END_OF_TEXT)}
    for name, value in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation_config),
    ):
        (directory / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(directory / "tokenizer.json"))

    generator = torch.Generator().manual_seed(2025)
    weights = {
        source.name: _random(source.shape, generator)
        for sources in weight_sources(decoder_config(config)).values()
        for source in sources
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Ones for a norm, else entries that keep the size of what is multiplied."""
    return torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * shape[1] ** -0.5
