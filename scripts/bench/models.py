"""Shapes of the models whose steps and KV are simulated, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass

from ...scheduler.cost import CostProfile, analytic_profile

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

    def cost(
        self,
        chunk_tokens: int,
        max_context: int,
        flops_per_s: float,
        memory_bytes_per_s: float,
        link_bytes_per_s: float,
    ) -> CostProfile:
        """Every step reads the weights once; arithmetic comes on top."""
        return analytic_profile(
            chunk_tokens=chunk_tokens,
            parameters=self.parameters,
            layers=self.layers,
            attention_width=self.heads * self.head_dim,
            chunk_bytes=self.token_bytes * chunk_tokens,
            max_context=max_context,
            flops_per_s=flops_per_s,
            link_bytes_per_s=link_bytes_per_s,
            step_base_seconds=self.parameters * ELEMENT_BYTES / memory_bytes_per_s,
        )


MODELS = {
    "llama-3-8b": ModelShape(8_030_000_000, 32, 32, 8),
    "llama-2-13b": ModelShape(13_020_000_000, 40, 40, 40),
    "llama-2-13b-gqa": ModelShape(11_440_000_000, 40, 40, 10),
    "opt-13b": ModelShape(12_850_000_000, 40, 40, 40),
}
