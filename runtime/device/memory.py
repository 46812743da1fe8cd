"""How much memory there is, whether a pool fits, and how a GPU's memory is divided."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ...builder.checkpoints.config import Shard
from ...scheduler.types import SettingError, Tier
from .protocol import Memory

POOL_SETTINGS = {Tier.GPU: "--gpu-kv-chunks", Tier.HOST: "--host-kv-chunks"}
GIB = 2**30

CUDA_ALLOWANCE = 2 * GIB
"""Of a GPU: its context, the libraries' work spaces, compiled kernels, the captured graphs themselves, and what copies
in eight bits pass through (`coded_copies.HALF_BYTES`, four times)."""

# Bytes of a logit beside those that the engine makes. While its row is drawn: float32 gathered, sorted and again for
# the sort, ids twice, and in float64 what `sampler.draw` makes of it (weights, their sums, what is compared). While
# its row is scored: float32 gathered and exponentiated.
_DRAWN_LOGIT = 3 * 4 + 2 * 8 + 6 * 8
_SCORED_LOGIT = 2 * 4
_MOST_SPLITS = 16  # of a context, by the attention kernel's work list
_SMALLEST_SPLIT = 1024  # tokens


def host_memory() -> Memory:
    """What the host, or the container, may still use."""
    fields = _read_fields(Path("/proc/meminfo"))
    free, total = fields["MemAvailable:"] * 1024, fields["MemTotal:"] * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        used = int(limit.with_name("memory.current").read_text())
        cached = _read_fields(limit.with_name("memory.stat"))["inactive_file"]  # given up under pressure
        free, total = min(free, max(int(most) - used + cached, 0)), min(total, int(most))
    return Memory(free, total)


def _read_fields(path: Path) -> dict[str, int]:
    """Of a file with a name and a number in each line."""
    return {line.split()[0]: int(line.split()[1]) for line in path.read_text().splitlines()}


def check_pool_fits(setting: str, chunks: int, size: int, free: int) -> None:
    """SettingError, of `setting`, if a pool of so many chunks and bytes is more than the bytes free."""
    if size > free:
        raise SettingError(
            setting,
            f"{chunks} chunks need {size / GIB:.2f} GiB and {free / GIB:.2f} GiB are free: enough for "
            f"{max(free, 0) * chunks // size} chunks",
        )


def activation_bytes(shard: Shard, itemsize: int, *, tokens: int, sampled: int, scored: int, context: int) -> int:
    """The most that a rank's step of so many tokens, sampled and scored rows needs beside weights and KV.

    itemsize: bytes of a number in the engine's dtype; context: the longest, in tokens.
    """
    decoder, several = shard.config, shard.ranks > 1
    heads, kv_heads, head_dim = shard.heads, shard.kv_heads, decoder.head_dim
    # Residual stream, its sum, the normed copy, and a rank's share of a sum; the norm itself may be taken in float32.
    stream = decoder.hidden_size * ((4 if several else 3) * itemsize + 2 * 4)
    attention = (3 * heads + 2 * kv_heads) * head_dim * itemsize  # q, k, v, rotated q, result
    mlp = (4 if decoder.gated else 2) * shard.mlp_size * itemsize  # projections, activation, product
    splits = min(_MOST_SPLITS, -(-context // _SMALLEST_SPLIT))
    partial = splits * heads * (head_dim + 1) * 4 if splits > 1 else 0
    # By the last product, gathered of all ranks, without what fills up the last one's, in float32, and carried out of
    # a graph.
    made = (3 if several else 1) * itemsize + 4 + 4
    logits = decoder.vocab_size * (sampled * (made + _DRAWN_LOGIT) + scored * (made + _SCORED_LOGIT))
    return tokens * (stream + max(attention, mlp) + partial) + logits


class Division(NamedTuple):
    """Of a GPU's memory, bytes."""

    weights: int
    activations: int
    allowance: int
    kv: int


def divide(memory: Memory, share: float, weights: int, activations: int) -> Division:
    """What is left for KV if all that this process uses is `share` of the GPU's memory, weights being loaded already.

    SettingError if nothing is left, or if it is not free.
    """
    setting = "--gpu-memory-utilization"
    if not 0.0 < share <= 1.0:
        raise SettingError(setting, f"must be more than 0 and at most 1, not {share}")
    kv = int(share * memory.total) - weights - activations - CUDA_ALLOWANCE
    if kv <= 0:
        raise SettingError(
            setting,
            f"{share:g} of {memory.total / GIB:.1f} GiB leaves nothing for KV: weights take {weights / GIB:.1f} GiB, "
            f"activations {activations / GIB:.1f}, CUDA itself {CUDA_ALLOWANCE / GIB:.1f}; raise it, or lower "
            "--max-num-batched-tokens or --max-num-seqs",
        )
    if kv + activations > memory.free:
        raise SettingError(
            setting,
            f"{share:g} of {memory.total / GIB:.1f} GiB means {kv / GIB:.1f} GiB of KV and {activations / GIB:.1f} of "
            f"activations, but {memory.free / GIB:.1f} GiB are free: lower it, or end what else uses the GPU",
        )
    return Division(weights, activations, CUDA_ALLOWANCE, kv)
