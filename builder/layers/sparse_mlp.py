"""The MLP of a model with experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...plugins.linear import experts  # noqa: F401  register torch.ops.pensieve
from ..checkpoints.config import Shard
from .parts import MLP, summed


class SparseMLP(nn.Module):
    """Experts, each a gated MLP. The router chooses some for each token, and weights their
    results. A shared expert takes part in every token, with a weight of its own."""

    def __init__(self, shard: Shard):
        super().__init__()
        config = shard.config
        self.ranks = shard.ranks
        self.per_token = config.experts_per_token
        self.sum_to_1 = config.experts_sum_to_1
        self.gate = (config.gate_limit, config.gate_slope)
        self.router = nn.Linear(config.hidden_size, config.experts, bias=config.router_bias)
        # Each is the rows of all experts (plugins/linear/experts.py), so it is stored and divided
        # like a projection.
        self.up = nn.Linear(
            config.hidden_size, config.experts * 2 * shard.mlp_size, bias=config.mlp_bias
        )
        self.down = nn.Linear(
            shard.mlp_size, config.experts * config.hidden_size, bias=config.mlp_bias
        )
        for weights in (self.up, self.down):  # scales of weights in FP8
            weights.register_parameter("scale", None)
        self.shared = None
        if config.shared_expert_size:
            # of one rank: the ranks' results are added with those of the experts
            self.shared = MLP(Shard(config), shard.shared_expert_size)
            self.shared_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = (
            self.router(x).softmax(dim=-1, dtype=torch.float32).topk(self.per_token, sorted=False)
        )
        if self.sum_to_1:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        up, down = self.up, self.down
        y = torch.ops.pensieve.experts(
            x,
            chosen,
            shares,
            up.weight,
            down.weight,
            up.bias,
            down.bias,
            *self.gate,
            up.scale,
            down.scale,
        )
        if self.shared:
            y += self.shared_gate(x).sigmoid() * self.shared(x)
        return summed(y, self.ranks)
