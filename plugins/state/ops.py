"""The operations on states as torch operations: `torch.ops.pensieve.causal_conv` and
`.gated_delta`.

They take a pool's handle, as those in `torch_ops` do. The result of a layer's `causal_conv` is an
input of its `gated_delta`, so their order is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention.cpu import StepPlans
from ..torch_ops import KVPool, pool_of
from . import cpu
from .pool import StatePool

torch.library.define(
    "pensieve::causal_conv",
    "(Tensor x, Tensor weight, Tensor segments, Tensor state_in, Tensor state_out, SymInt pool, "
    "int layer) -> Tensor",
)
torch.library.define(
    "pensieve::gated_delta",
    "(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta, Tensor segments, Tensor state_in, "
    "Tensor state_out, SymInt pool, int layer) -> Tensor",
)


def _states_of(kv: KVPool) -> StatePool:
    if kv.states is None:
        raise ValueError("linear attention needs a pool with states")
    return kv.states


@torch.library.impl("pensieve::causal_conv", "cpu")
def _causal_conv(
    x: Tensor,
    weight: Tensor,
    segments: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    pool: int,
    layer: int,
) -> Tensor:
    kv = pool_of(pool)
    if layer == 0:
        kv.gate(0)
    columns = _states_of(kv).columns[layer]
    plans = kv.plans or StepPlans()
    return cpu.causal_conv(x, weight, segments, state_in, state_out, columns, plans)


@torch.library.impl("pensieve::gated_delta", "cpu")
def _gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    segments: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    pool: int,
    layer: int,
) -> Tensor:
    kv = pool_of(pool)
    matrices = _states_of(kv).matrices[layer]
    plans = kv.plans or StepPlans()
    return cpu.gated_delta(q, k, v, decay, beta, segments, state_in, state_out, matrices, plans)


@torch.library.impl("pensieve::causal_conv", "cuda")
def _causal_conv_cuda(
    x: Tensor,
    weight: Tensor,
    segments: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    pool: int,
    layer: int,
) -> Tensor:
    # imported here because only CUDA installations have Triton
    from . import kernel

    kv = pool_of(pool)
    if layer == 0:
        kv.gate(0)
    states = _states_of(kv)
    assert states.work is not None  # it lists the same segments
    columns = states.columns[layer]
    return kernel.causal_conv(x, weight, segments, state_in, state_out, columns, states.work)


@torch.library.impl("pensieve::gated_delta", "cuda")
def _gated_delta_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    segments: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    pool: int,
    layer: int,
) -> Tensor:
    from . import kernel

    states = _states_of(pool_of(pool))
    assert states.work is not None
    matrices = states.matrices[layer]
    return kernel.gated_delta(
        q, k, v, decay, beta, segments, state_in, state_out, matrices, states.work
    )


@torch.library.register_fake("pensieve::causal_conv")
def _(
    x: Tensor,
    weight: Tensor,
    segments: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    pool: int,
    layer: int,
) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("pensieve::gated_delta")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    segments: Tensor,
    state_in: Tensor,
    state_out: Tensor,
    pool: int,
    layer: int,
) -> Tensor:
    return v.new_empty(v.shape)
