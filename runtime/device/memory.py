"""Free memory, the check that a pool fits, and the division of a GPU's memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ...builder.checkpoints.config import LinearAttention, Shard
from ...scheduler.types import SettingError, Tier
from .protocol import Memory

POOL_SETTINGS = {Tier.GPU: "--gpu-kv-chunks", Tier.HOST: "--host-kv-chunks"}
GIB = 2**30

HOST_SHARE = 0.7
"""Share of the host's memory that may be in use, by this and all other programs, while the HOST
pool grows (`--host-kv-bytes` by default)."""

MOST_HOST_TO_GPU = 16
"""Bytes that the HOST pool grows to at most, for each byte of the GPU's pool."""

CUDA_ALLOWANCE = 2 * GIB
"""Bytes of a GPU for its context, the libraries' work spaces, compiled kernels, the captured graphs
themselves, and the staging buffers of copies in eight bits (`compressed_copies.HALF_BYTES`, four
times)."""

# Bytes for each logit, on top of the engine's own output. While its row is drawn: three float32
# (gathered, sorted, the sort's work space), two ids, and the float64 arrays of
# `sampler.draw_filtered` (weights, their sums, comparisons). While its row is scored: two float32
# (gathered, exponentiated).
_DRAWN_LOGIT = 3 * 4 + 2 * 8 + 6 * 8
_SCORED_LOGIT = 2 * 4
_FREE_ON_NODE = ("MemFree:", "Active(file):", "Inactive(file):", "SReclaimable:")
_MOST_SPLITS = 16  # of a context, by the attention kernel's work list
_SMALLEST_SPLIT = 1024  # tokens
_STATE_PIECE = 64  # tokens, of `plugins.state.work_list`


def host_memory(root: Path = Path("/")) -> Memory:
    """Memory that this process may still use: of the machine, of the NUMA nodes that it is confined
    to, and within the limits of its control groups and of strict overcommit.

    Sandboxes such as gVisor leave some of these files out or forbid them: then they limit nothing.
    """
    fields = _read_fields(root / "proc/meminfo")
    free, total = fields["MemAvailable:"] * 1024, fields["MemTotal:"] * 1024
    if _limit(root / "proc/sys/vm/overcommit_memory") == 2 and "CommitLimit:" in fields:
        free = min(free, (fields["CommitLimit:"] - fields["Committed_AS:"]) * 1024)
    for part in (*_nodes(root), *_groups(root)):
        free, total = min(free, part.free), min(total, part.total)
    return Memory(max(0, free), total)


def host_room(memory: Memory) -> int:
    """Bytes that the HOST pool may still take of that memory (HOST_SHARE)."""
    return memory.free - int((1 - HOST_SHARE) * memory.total)


def host_pool_bytes(memory: Memory, gpu_pool: int, sharing: int = 1) -> int:
    """Bytes that the HOST pool of one GPU grows to by default, if `sharing` GPUs share the memory
    and the GPU's pool has `gpu_pool` bytes."""
    return min(host_room(memory) // sharing, MOST_HOST_TO_GPU * gpu_pool)


def _nodes(root: Path) -> Iterator[Memory]:
    """The memory of the NUMA nodes that the process may use, together."""
    nodes = root / "sys/devices/system/node"
    lines = (line.partition(":") for line in _read(root / "proc/self/status").splitlines())
    allowed = next((value.strip() for name, _, value in lines if name == "Mems_allowed_list"), "")
    free = total = 0
    for part in filter(None, allowed.split(",")):
        first, _, last = part.partition("-")
        for node in range(int(first), int(last or first) + 1):
            fields = _read_fields(nodes / f"node{node}/meminfo", skipped=2)  # "Node 0"
            free += sum(fields.get(name, 0) for name in _FREE_ON_NODE)
            total += fields.get("MemTotal:", 0)
    if total:
        yield Memory(free * 1024, total * 1024)


def _groups(root: Path) -> Iterator[Memory]:
    """The memory of each control group of the process that has a limit, the groups around it
    included. A container may see its own group only, as the outermost one."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        inner = top / name.strip("/")
        for group in (inner, *inner.parents):
            limits = ("limit_in_bytes",) if controllers else ("max", "high")
            limit = min(_limit(group / f"memory.{name}") for name in limits)
            if limit < math.inf:
                used = group / f"memory.{'usage_in_bytes' if controllers else 'current'}"
                fields = _read_fields(group / "memory.stat")
                cached = sum(  # given up under memory pressure
                    fields.get(f"{'total_' * bool(controllers)}{kind}_file", 0)
                    for kind in ("inactive", "active")
                )
                yield Memory(int(limit) - int(_read(used) or 0) + cached, int(limit))
            if group == top:
                break


def _limit(path: Path) -> float:
    """The number in the file; infinity if it says "max", or cannot be read."""
    return float(_read(path).strip().replace("max", "inf") or math.inf)


def _read(path: Path) -> str:
    """The file's text; "" if it is not there, or cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_fields(path: Path, skipped: int = 0) -> dict[str, int]:
    """Reads a file with a name and a number in each line, behind some words that are skipped."""
    words = (line.split()[skipped:] for line in _read(path).splitlines())
    return {name: int(number) for name, number, *_ in words}


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
        # at its end the experts' sum is there too
        shared = 4 * shard.shared_expert_size + 2 * decoder.hidden_size
        mlp = max(mlp, shared * itemsize if decoder.shared_expert_size else 0)
    linear = 0 if shard.linear is None else linear_bytes(shard.linear, itemsize)
    splits = min(_MOST_SPLITS, -(-context // _SMALLEST_SPLIT))
    partial = splits * heads * (head_dim + 1) * 4 if splits > 1 else 0
    # Logits by the last product, gathered from all ranks, without the last rank's padding, in
    # float32, and copied out of a graph.
    per_logit = (3 if several else 1) * itemsize + 4 + 4
    logits = decoder.vocab_size * (
        sampled * (per_logit + _DRAWN_LOGIT) + scored * (per_logit + _SCORED_LOGIT)
    )
    return tokens * (stream + max(attention, mlp, linear) + partial) + logits


def linear_bytes(linear: LinearAttention, itemsize: int) -> int:
    """The most bytes that a token needs in a layer of linear attention, besides the residual
    stream."""
    values = linear.value_heads * linear.value_dim
    # Projections, the convolution's result; the two squares of `plugins.state.kernel` for each
    # head; result and normed result. Then in float32 the gate twice and the gated result, decay
    # and beta in a few steps, and the kernel's factors.
    narrow = 2 * linear.channels + 3 * values + 2 * linear.value_heads * _STATE_PIECE
    return narrow * itemsize + (3 * values + 12 * linear.value_heads) * 4


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
