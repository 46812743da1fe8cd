"""What a start reckons with: the costs of an engine that has not been measured, and the speed from
which a disk is worth its reads."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from .cost import CostProfile


def analytic_profile(
    *,
    chunk_tokens: int,
    parameters: int,
    layers: int,
    attention_width: int,
    chunk_bytes: int,
    max_context: int,
    flops_per_s: float,
    link_bytes_per_s: float,
    step_base_seconds: float,
    windows: Sequence[int] = (),
) -> CostProfile:
    """An estimate from the model's shape: two operations for each parameter and token, four for
    each context token and channel.

    `attention_width` is query heads x head size; `chunk_bytes` one chunk's KV; `windows` each
    layer's most context tokens, 0: all. Empty: no layer has a window.
    """
    contexts = [chunk_tokens]
    while contexts[-1] < max_context:
        contexts.append(2 * contexts[-1])
    contexts = sorted(
        {*contexts, *(window for window in windows if chunk_tokens < window < contexts[-1])}
    )
    per_context = 4 * attention_width * chunk_tokens / flops_per_s

    def read(context: int) -> int:
        """The context tokens of all layers."""
        return sum(min(context, window or context) for window in windows or [0] * layers)

    return CostProfile(
        chunk_tokens=chunk_tokens,
        chunk_seconds=2 * parameters * chunk_tokens / flops_per_s,
        attention=tuple((context, per_context * read(context)) for context in contexts),
        step_base_seconds=step_base_seconds,
        chunk_bytes=chunk_bytes,
        link_bytes_per_s=link_bytes_per_s,
    )


def break_even_disk(cost: CostProfile, tokens: int) -> float:
    """Bytes/s from which reading a history of `tokens` tokens from disk and copying it in is
    faster than computing it, on an idle GPU; infinity: never."""
    ends = range(cost.chunk_tokens, tokens + 1, cost.chunk_tokens)
    spared = sum(map(cost.recompute, ends)) - len(ends) * cost.swap_in()
    return len(ends) * cost.chunk_bytes / spared if spared > 0 else inf
