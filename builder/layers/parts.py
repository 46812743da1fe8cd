"""The parts of which layers are made: norms, projections, and the ordinary MLP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...plugins.collectives.protocol import TENSOR_PARALLEL
from ...plugins.linear import fp8, int4, norm_ops  # noqa: F401  register torch.ops.pensieve
from ...plugins.linear.cpu_packed import linear
from ..checkpoints.config import DecoderConfig, Shard
from ..forward_batch import ForwardBatch

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class Norm(nn.Module):
    """RMS norm or layer norm, accumulated in float32; the caller chooses its parameters."""

    def __init__(
        self,
        size: int,
        eps: float,
        rms: bool,
        weight: bool = True,
        bias: bool = False,
        plus_one: bool = False,
    ):
        super().__init__()
        self.eps = eps
        self.rms = rms
        self.plus_one = plus_one
        self.weight = nn.Parameter(torch.empty(size)) if weight else None
        self.bias = nn.Parameter(torch.empty(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.pensieve.norm(x, self.weight, self.bias, self.eps, self.rms, self.plus_one)

    def of_sum(self, x: Tensor, change: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns (norm of x + change, x + change) in one pass; None: no change."""
        if change is None:
            return self(x), x
        return torch.ops.pensieve.add_norm(
            x, change, self.weight, self.bias, self.eps, self.rms, self.plus_one
        )


def rms_norm(config: DecoderConfig, size: int) -> Norm:
    return Norm(size, config.norm_eps, rms=True, plus_one=config.norm_plus_one)


def hidden_norm(config: DecoderConfig) -> Norm:
    if config.norm == "rms":
        return rms_norm(config, config.hidden_size)
    return Norm(
        config.hidden_size,
        config.norm_eps,
        rms=False,
        weight=config.norm_affine,
        bias=config.norm_affine,
    )


class LayerInputs(NamedTuple):
    """What every layer gets: the inputs of `Decoder.forward`, and the result of
    `Decoder.rotary`."""

    batch: ForwardBatch
    rotary: Tensor
    pool: int


def summed(x: Tensor, ranks: int) -> Tensor:
    """The sum of the ranks' partial results."""
    return x if ranks == 1 else torch.ops.pensieve.all_reduce(x, TENSOR_PARALLEL)


class VocabularyEmbedding(nn.Embedding):
    """Embeddings of tokens; a rank holds its part of the vocabulary."""

    def __init__(self, shard: Shard):
        super().__init__(shard.vocab_rows, shard.config.embedding_size)
        self.ranks = shard.ranks

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.ranks == 1:
            return super().forward(token_ids)
        share = torch.ops.pensieve.vocabulary_embed(token_ids, self.weight, TENSOR_PARALLEL)
        return summed(share, self.ranks)


class Projection(nn.Linear):
    """A projection of a layer. With a scale for each output its weight is in FP8, with scales and
    zeros of groups in int4: `expect_quantised` sets this up."""

    def __init__(self, inputs: int, outputs: int, bias: bool):
        super().__init__(inputs, outputs, bias)
        self.register_parameter("scale", None)
        self.register_parameter("scales_zeros", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.scales_zeros is not None:
            return torch.ops.pensieve.int4_linear(x, self.weight, self.scales_zeros, self.bias)
        if self.scale is not None:
            return torch.ops.pensieve.fp8_linear(x, self.weight, self.scale, self.bias)
        return linear(x, self.weight, self.bias)


class RowParallelProjection(Projection):
    """A projection whose input is divided among the ranks: their partial results are added."""

    def __init__(self, shard: Shard, inputs: int, bias: bool):
        super().__init__(inputs, shard.config.hidden_size, bias)
        self.ranks = shard.ranks

    def forward(self, x: Tensor) -> Tensor:
        return summed(super().forward(x), self.ranks)


class MLP(nn.Module):
    def __init__(self, shard: Shard, size: int):
        """size: the width on a rank."""
        super().__init__()
        config = shard.config
        self.gated = config.gated
        self.activation = ACTIVATIONS[config.activation]
        self.silu_gated = config.silu_gated
        width = 2 * size if config.gated else size  # gate, then up
        self.up = Projection(config.hidden_size, width, bias=config.mlp_bias)
        self.down = RowParallelProjection(shard, size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.silu_gated:
            return self.down(torch.ops.pensieve.silu_gate(x))
        if self.gated:
            gate, up = x.chunk(2, dim=-1)
            return self.down(self.activation(gate) * up)
        return self.down(self.activation(x))
