"""Free memory, the check that a pool fits, and the division of a GPU's memory."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ...builder.checkpoints.config import Shard
from ...scheduler.types import SettingError, Tier
from .protocol import Memory

POOL_SETTINGS = {Tier.GPU: "--gpu-kv-chunks", Tier.HOST: "--host-kv-chunks"}
GIB = 2**30

CUDA_ALLOWANCE = 2 * GIB
"""Bytes of a GPU for its context, the libraries' work spaces, compiled kernels, the captured graphs
themselves, and the staging buffers of copies in eight bits (`compressed_copies.HALF_BYTES`, four
times)."""

# Bytes for each logit, on top of the engine's own output. While its row is drawn: three float32
# (gathered, sorted, the sort's work space), two ids, and the float64 arrays of `sampler.draw`
# (weights, their sums, comparisons). While its row is scored: two float32 (gathered,
# exponentiated).
_DRAWN_LOGIT = 3 * 4 + 2 * 8 + 6 * 8
_SCORED_LOGIT = 2 * 4
_MOST_SPLITS = 16  # of a context, by the attention kernel's work list
_SMALLEST_SPLIT = 1024  # tokens


def host_memory() -> Memory:
    """Memory that the host, or the container, may still use."""
    fields = _read_fields(Path("/proc/meminfo"))
    free, total = fields["MemAvailable:"] * 1024, fields["MemTotal:"] * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        used = int(limit.with_name("memory.current").read_text())
        # given up under memory pressure
        cached = _read_fields(limit.with_name("memory.stat"))["inactive_file"]
        free, total = min(free, max(int(most) - used + cached, 0)), min(total, int(most))
    return Memory(free, total)


def _read_fields(path: Path) -> dict[str, int]:
    """Reads a file with a name and a number in each line."""
    return {line.split()[0]: int(line.split()[1]) for line in path.read_text().splitlines()}


def check_pool_fits(setting: str, chunks: int, size: int, free: int) -> None:
    """Raises SettingError, of `setting`, if a pool of `chunks` chunks and `size` bytes does not fit
    in `free` bytes."""
    if size > free:
        raise SettingError(
            setting,
            f"{chunks} chunks need {size / GIB:.2f} GiB and {free / GIB:.2f} GiB are free: enough "
            "for "
            f"{max(free, 0) * chunks // size} chunks",
        )


def activation_bytes(
    shard: Shard, itemsize: int, *, tokens: int, sampled: int, scored: int, context: int
) -> int:
    """Returns the most bytes that a rank's step of so many tokens, sampled and scored rows needs
    besides weights and KV.

    itemsize: bytes of a number in the engine's dtype; context: the longest, in tokens.
    """
    decoder = shard.config
    several = shard.ranks > 1
    heads = shard.heads
    kv_heads = shard.kv_heads
    head_dim = decoder.head_dim
    # Residual stream, its sum, the normed copy, a rank's share of a sum, and a normed result; some
    # norms compute in float32.
    stream = decoder.hidden_size * ((3 + several + decoder.norm_results) * itemsize + 2 * 4)
    attention = (3 * heads + 2 * kv_heads) * head_dim * itemsize  # q, k, v, rotated q, result
    # projections, activation, product
    mlp = (4 if decoder.gated else 2) * shard.mlp_size * itemsize
    # for each expert of a token: input, projections, product, result in two orders, in float32
    if decoder.experts:
        sizes = (3 + decoder.mlp_bias) * decoder.hidden_size + 3 * shard.mlp_size
        mlp = decoder.experts_per_token * (sizes * itemsize + decoder.hidden_size * 4)
    splits = min(_MOST_SPLITS, -(-context // _SMALLEST_SPLIT))
    partial = splits * heads * (head_dim + 1) * 4 if splits > 1 else 0
    # Logits by the last product, gathered from all ranks, without the last rank's padding, in
    # float32, and copied out of a graph.
    per_logit = (3 if several else 1) * itemsize + 4 + 4
    logits = decoder.vocab_size * (
        sampled * (per_logit + _DRAWN_LOGIT) + scored * (per_logit + _SCORED_LOGIT)
    )
    return tokens * (stream + max(attention, mlp) + partial) + logits


class Division(NamedTuple):
    """The parts of a GPU's memory, bytes."""

    weights: int
    activations: int
    allowance: int
    kv: int


def divide(memory: Memory, share: float, weights: int, activations: int) -> Division:
    """Returns the division that leaves the rest for KV if this process may use `share` of the GPU's
    memory. The weights are already loaded.

    SettingError if nothing is left for KV, or if the memory is not free.
    """
    setting = "--gpu-memory-utilization"
    if not 0.0 < share <= 1.0:
        raise SettingError(setting, f"must be more than 0 and at most 1, not {share}")
    kv = int(share * memory.total) - weights - activations - CUDA_ALLOWANCE
    if kv <= 0:
        raise SettingError(
            setting,
            f"{share:g} of {memory.total / GIB:.1f} GiB leaves nothing for KV: weights take "
            f"{weights / GIB:.1f} GiB, "
            f"activations {activations / GIB:.1f}, CUDA itself {CUDA_ALLOWANCE / GIB:.1f}; raise "
            "it, or lower "
            "--max-num-batched-tokens or --max-num-seqs",
        )
    if kv + activations > memory.free:
        raise SettingError(
            setting,
            f"{share:g} of {memory.total / GIB:.1f} GiB means {kv / GIB:.1f} GiB of KV and "
            f"{activations / GIB:.1f} of "
            f"activations, but {memory.free / GIB:.1f} GiB are free: lower it, or end what else "
            "uses the GPU",
        )
    return Division(weights, activations, CUDA_ALLOWANCE, kv)
