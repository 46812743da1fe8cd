"""Shapes of the models whose steps and KV are simulated."""

from __future__ import annotations

from dataclasses import dataclass

ELEMENT_BYTES = 2  # bf16 weights and KV


@dataclass(frozen=True, slots=True)
class ModelShape:
    parameters: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128

    @property
    def token_bytes(self) -> int:
        """KV of one token."""
        return self.layers * 2 * self.kv_heads * self.head_dim * ELEMENT_BYTES


MODELS = {
    "llama-3-8b": ModelShape(8_030_000_000, 32, 32, 8),
    "llama-2-13b": ModelShape(13_020_000_000, 40, 40, 40),
    "llama-2-13b-gqa": ModelShape(11_440_000_000, 40, 40, 10),
    "opt-13b": ModelShape(12_850_000_000, 40, 40, 40),
}
