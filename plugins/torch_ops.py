"""The operations on KV as torch operations: `torch.ops.pensieve.write_kv` and
`.multi_token_attention`.

A pool is named by a *handle*, an int: the compiler cannot see into the operations, and they change
none of their tensors. So no backend clones gigabytes or reorders around an alias. The attention of
a layer must follow its write: it takes the rotated query that `write_kv` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .attention import cpu as cpu_attention
from .attention.cpu import StepPlans
from .state.pool import StatePool

if TYPE_CHECKING:
    from .attention.work_list import WorkList


def _no_gate(layer: int) -> None:
    """A gate for pools without swap-ins."""


@dataclass(frozen=True, slots=True)
class KVPool:
    """tensor `[slot, layers, 2, kv_heads, chunk_tokens, head_dim]`, or as `attention.fp8_pool`
    says, which the operations know by its dtype.

    `gate(layer)` is called before a layer's KV is first used; it returns once that layer's swap-in
    is complete (or will be complete before later work on the same stream). `work` is a GPU's list
    of one step's attention: the code that uploads a step's segments builds it, once, on the stream
    of the step and before its launch. `plans` are a CPU's, cleared behind each step; without them
    each layer makes its own. `events` are the handles of the CUDA events behind the gates,
    by layer, for engines that run without Python. `states` are those of linear attention, which are
    swapped in before any KV: the first linear layer passes the gate of layer 0.
    """

    tensor: Tensor
    gate: Callable[[int], None] = _no_gate
    work: WorkList | None = None
    events: Mapping[int, int] = field(default_factory=dict)
    plans: StepPlans | None = None
    states: StatePool | None = None


_pools: dict[int, KVPool] = {}
_handles = count(1)  # never reused: a stale handle is an error, not another pool


def pool_of(handle: int) -> KVPool:
    """The pool of a handle. KeyError if it was released."""
    return _pools[handle]


def register_pool(
    tensor: Tensor,
    gate: Callable[[int], None] = _no_gate,
    work: WorkList | None = None,
    events: Mapping[int, int] | None = None,
    plans: StepPlans | None = None,
    states: StatePool | None = None,
) -> int:
    """Registers a pool for the operations. The caller still owns the tensors and releases the
    handle.

    A pool on a GPU needs `work` (`attention.kernel.make_work_list`); its states need theirs
    (`StatePool.make_work`).
    """
    if tensor.dim() != 6 or tensor.shape[2] != 2 or not tensor.is_contiguous():
        raise ValueError(
            "a KV pool is a contiguous [slot, layers, 2, kv_heads, chunk_tokens, head_dim] tensor, "
            f"not {list(tensor.shape)}"
        )
    if tensor.is_cuda and work is None:
        raise ValueError("a KV pool on a GPU needs a work list")
    handle = next(_handles)
    _pools[handle] = KVPool(tensor, gate, work, events or {}, plans, states)
    return handle


def release_pool(handle: int) -> None:
    """Removes the pool; using the handle again raises KeyError."""
    del _pools[handle]


torch.library.define(
    "pensieve::write_kv",
    "(Tensor q, Tensor k, Tensor v, Tensor rotary, Tensor slots, SymInt pool, int layer) -> Tensor",
)
torch.library.define(
    "pensieve::multi_token_attention",
    "(Tensor q, Tensor segments, Tensor block_table, SymInt pool, int layer, float scale, "
    "int window=0, Tensor? sinks=None) -> Tensor",
)


@torch.library.impl("pensieve::write_kv", "cpu")
def _write_kv(
    q: Tensor, k: Tensor, v: Tensor, rotary: Tensor, slots: Tensor, pool: int, layer: int
) -> Tensor:
    kv = _pools[pool]
    kv.gate(layer)
    return cpu_attention.write_kv(q, k, v, rotary, slots, kv.tensor, layer, kv.plans or StepPlans())


@torch.library.impl("pensieve::multi_token_attention", "cpu")
def _multi_token_attention(
    q: Tensor,
    segments: Tensor,
    block_table: Tensor,
    pool: int,
    layer: int,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    kv = _pools[pool]
    return cpu_attention.multi_token_attention(
        q,
        segments,
        block_table,
        kv.tensor,
        layer,
        scale,
        window,
        sinks,
        kv.plans or StepPlans(),
    )


@torch.library.impl("pensieve::write_kv", "cuda")
def _write_kv_cuda(
    q: Tensor, k: Tensor, v: Tensor, rotary: Tensor, slots: Tensor, pool: int, layer: int
) -> Tensor:
    # imported here because only CUDA installations have Triton
    from .attention import kv_write_kernel

    kv = _pools[pool]
    kv.gate(layer)
    return kv_write_kernel.write_kv(q, k, v, rotary, slots, kv.tensor, layer)


@torch.library.impl("pensieve::multi_token_attention", "cuda")
def _multi_token_attention_cuda(
    q: Tensor,
    segments: Tensor,
    block_table: Tensor,
    pool: int,
    layer: int,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    from .attention import kernel as attention_kernel

    kv = _pools[pool]
    assert kv.work is not None  # set by register_pool; it lists the same segments
    return attention_kernel.multi_token_attention(
        q, block_table, kv.tensor, layer, scale, kv.work, window, sinks
    )


@torch.library.register_fake("pensieve::write_kv")
@torch.library.register_fake("pensieve::multi_token_attention")
def _(q: Tensor, *others: Any) -> Tensor:
    return q.new_empty(q.shape)
