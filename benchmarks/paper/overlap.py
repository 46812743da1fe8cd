"""CachedAttention's figures 18 to 20 by arithmetic: copies of KV beside compute, from the speeds of
one GPU alone.

Llama-13B on one GPU, 16 prompts at a time (section 4.3.2). Layers have equal times. On a device
`benchmarks.tiers --parts preload,saving` measures the same subjects with Pensieve.
"""

from __future__ import annotations

from typing import NamedTuple

from pensieve.scripts.simulation.models import ELEMENT_BYTES, ModelShape

LLAMA_13B = ModelShape(13_020_000_000, 40, 40, 40)
BATCH = 16
BUFFERS = (0, 5, 10, 15)  # layers
DECODE_STEPS = 20


class Machine(NamedTuple):
    """Arithmetic of large steps in FLOP/s, memory and host link in bytes/s."""

    flops: float
    memory: float
    link: float


A100 = Machine(156e12, 1.6e12, 26e9)
"""Half of its bf16 peak in large steps, four fifths of its memory's speed in small ones."""
H200 = Machine(624e12, 4.25e12, 54.4e9)
"""Measured: docs/measured/steps.md."""
MEMORY = {"A100": A100.memory, "H200": H200.memory}
"""By a word of a GPU's name."""


def prefill_s(machine: Machine, tokens: int) -> float:
    """Of a batch, each prompt with so many tokens to compute; without attention."""
    return 2 * LLAMA_13B.parameters * BATCH * tokens / machine.flops


def copy_s(machine: Machine, tokens: int) -> float:
    return LLAMA_13B.token_bytes * BATCH * tokens / machine.link


def pipelined_s(load: float, compute: float, buffer: int, layers: int = LLAMA_13B.layers) -> float:
    """Seconds of a prefill whose layers wait for their KV, with the first `buffer` layers loaded
    before it begins."""
    loaded = computed = 0.0
    for layer in range(layers):
        if layer >= buffer:
            loaded += load / layers
        computed = max(computed, loaded) + compute / layers
    return computed


def values() -> dict[str, dict[str, float]]:
    """By figure and claim, as claims.json names them."""
    figures: dict[str, dict[str, float]] = {"18": {}, "19": {}, "20": {}}
    for machine, suffix in ((A100, ""), (H200, ", H200's costs")):
        for new in (500, 400, 300, 200, 100):
            load = copy_s(machine, 1000 - new)
            compute = prefill_s(machine, new)
            ratio = prefill_s(machine, 1000) / pipelined_s(load, compute, 0)
            figures["18"][f"speedup at {1000 - new}/{new}{suffix}"] = ratio
        load = copy_s(machine, 1000)
        compute = prefill_s(machine, 100)
        for buffer in BUFFERS:
            saved = 1 - pipelined_s(load, compute, buffer) / (load + compute)
            figures["19"][f"PL-B{buffer} over NO-PL{suffix}"] = 100 * saved
        for prompt in (1000, 1600):
            weights = LLAMA_13B.parameters * ELEMENT_BYTES
            decode = (
                DECODE_STEPS * (weights + LLAMA_13B.token_bytes * BATCH * prompt) / machine.memory
            )
            work = prefill_s(machine, prompt) + decode
            save = copy_s(machine, prompt)
            figures["20"][f"saved at {prompt} tokens{suffix}"] = 100 * save / (work + save)
    return figures
