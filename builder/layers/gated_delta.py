"""Linear attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...plugins.state import ops as state_ops  # noqa: F401  register torch.ops.pensieve
from ..checkpoints.config import Shard
from .parts import LayerInputs, Norm, Projection, RowParallelProjection


class GatedDelta(nn.Module):
    """Linear attention: the gated delta rule behind a causal convolution."""

    def __init__(self, shard: Shard, layer: int):
        super().__init__()
        config = shard.config
        linear = shard.linear
        assert linear is not None  # the layer is linear
        self.place = config.place(layer)  # in a state
        self.parts = linear.parts
        self.key_dim, self.value_dim = linear.key_dim, linear.value_dim
        values = linear.value_heads * linear.value_dim
        self.split = (linear.channels, values)
        self.qkvz = Projection(config.hidden_size, sum(self.split), bias=False)
        self.ba = Projection(config.hidden_size, 2 * linear.value_heads, bias=False)
        self.conv = nn.Parameter(torch.empty(linear.channels, 1, linear.conv_width))
        # float32 in every model
        self.a_log = nn.Parameter(torch.empty(linear.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(linear.value_heads))
        self.norm = Norm(linear.value_dim, config.norm_eps, rms=True)
        self.out = RowParallelProjection(shard, values, bias=False)

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        batch, pool = inputs.batch, inputs.pool
        states = batch.segments, batch.state_in, batch.state_out, pool, self.place
        qkv, z = self.qkvz(x).split(self.split, dim=1)
        b, a = self.ba(x).float().chunk(2, dim=1)
        q, k, v = torch.ops.pensieve.causal_conv(qkv, self.conv, *states).split(self.parts, dim=1)
        decay = -self.a_log.exp() * F.softplus(a + self.dt_bias)
        o = torch.ops.pensieve.gated_delta(
            q.unflatten(1, (-1, self.key_dim)),
            k.unflatten(1, (-1, self.key_dim)),
            v.unflatten(1, (-1, self.value_dim)),
            decay,
            b.sigmoid(),
            *states,
        )
        gate = F.silu(z.unflatten(1, (-1, self.value_dim)).float())
        return self.out((self.norm(o) * gate).to(x.dtype).flatten(1))
