"""Writes the model of a GGUF file as a Hugging Face checkpoint in bfloat16, for a comparison in
which all servers read the same weights.

    python -m benchmarks.small_checkpoint --gguf SmolLM2-135M-Instruct.gguf --output DIR

DIR then has config.json, model.safetensors, tokenizer.json, tokenizer_config.json with the chat
template, and generation_config.json. The weights are the file's, dequantised and rounded to
bfloat16.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pensieve.builder.checkpoints.architectures import decoder_config
from pensieve.builder.checkpoints.gguf_config import gguf_config
from pensieve.builder.checkpoints.gguf_file import GgufFile, open_gguf
from pensieve.builder.checkpoints.gguf_tokenizer import PREFIX, tokenizer_files
from pensieve.builder.checkpoints.gguf_weights import gguf_tensors
from pensieve.scheduler.types import SettingError
from pensieve.scripts.command import exit_status

LLAMA = "LlamaForCausalLM"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.small_checkpoint", description=__doc__.partition("\n\n")[0]
    )
    option = parser.add_argument
    option(
        "--gguf", type=Path, required=True, metavar="FILE", help="a Llama model with a tokenizer"
    )
    option("--output", type=Path, required=True, metavar="DIR", help="new, or written over")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0; 2 for a file that cannot be read."""
    args = parser().parse_args(argv)
    return exit_status("benchmarks.small_checkpoint", lambda: convert(args.gguf, args.output))


def convert(gguf: Path, output: Path) -> None:
    """SettingError if the file cannot be read, has no tokenizer, or is no Llama model."""
    if not gguf.is_file():
        raise SettingError("--gguf", f"there is no file {gguf}")
    file = open_gguf(gguf)
    config = llama_config(file)
    texts = tokenizer_files(file.fields)
    if not texts:
        raise SettingError("--gguf", f"{gguf} has no tokenizer")
    slices = gguf_tensors(file, decoder_config(config))
    weights = {
        name: each.get_tensor(name).to(torch.bfloat16).contiguous() for name, each in slices.items()
    }
    output.mkdir(parents=True, exist_ok=True)
    (output / "config.json").write_text(json.dumps(config, indent=1))
    for name, text in texts.items():
        (output / name).write_text(text, encoding="utf-8")
    save_file(weights, output / "model.safetensors", {"format": "pt"})
    size = sum(weight.nbytes for weight in weights.values())
    print(f"{output}: {len(weights)} tensors in bfloat16, {size / 1e6:.0f} MB")


def llama_config(file: GgufFile) -> dict[str, Any]:
    """A config.json that older and newer libraries read alike. SettingError unless it is of a
    Llama model."""
    config = gguf_config(file)
    if config["architectures"] != [LLAMA]:
        raise SettingError("--gguf", f"{file.path} is {config['architectures'][0]}, not {LLAMA}")
    return config | {
        "model_type": "llama",
        "hidden_act": "silu",
        "bos_token_id": file.fields.get(f"{PREFIX}bos_token_id"),
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",  # its name before transformers 4.56
    }


if __name__ == "__main__":
    sys.exit(main())
