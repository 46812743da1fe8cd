"""Weights of an engine: one safetensors file under Decoder's parameter names, and the digest that names its content."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def save_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path)
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets only the owner read it


def load_weights(path: Path) -> dict[str, Tensor]:
    return load_file(path)
