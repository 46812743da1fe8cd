"""The one definition of the model: a decoder described by its DecoderConfig, over a KV pool named
by a handle.

Eager PyTorch runs it directly (the reference backend); compiled engines are traced from it. It may
be one of several ranks, each with its Shard of the weights. Neither it nor an engine compiled from
it knows which rank it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..plugins import torch_ops  # noqa: F401  register torch.ops.pensieve
from ..plugins.collectives.protocol import TENSOR_PARALLEL
from ..plugins.linear import experts, fp8, int4, norm_ops  # noqa: F401  register torch.ops.pensieve
from ..plugins.linear.cpu_packed import can_pack, linear, packed
from ..plugins.linear.int4_format import packed_shape
from ..plugins.state import ops as state_ops  # noqa: F401  register torch.ops.pensieve
from .checkpoints.config import DecoderConfig, Shard
from .forward_batch import ForwardBatch

# An exported decoder takes the batch as it is; compiled code takes its tensors, in the same order.
torch.export.register_dataclass(ForwardBatch, serialized_type_name="pensieve.ForwardBatch")

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


def rotary_frequencies(config: DecoderConfig) -> Tensor:
    """[rotaries, R / 2] float64, on the CPU; [1, 0] for learned positions."""
    frequencies = [rotary.frequencies() for rotary in config.rotaries] or [[]]
    return torch.tensor(frequencies, dtype=torch.float64, device="cpu")


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
    zeros of groups in int4: `Decoder.from_weights` sets this up."""

    def __init__(self, inputs: int, outputs: int, bias: bool):
        super().__init__(inputs, outputs, bias)
        self.register_parameter("scale", None)
        self.register_parameter("scales_zeros", None)

    @property
    def is_plain(self) -> bool:
        """Whether its weight is in the model's dtype."""
        return self.scale is None and self.scales_zeros is None

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


class Attention(nn.Module):
    def __init__(self, shard: Shard, layer: int):
        super().__init__()
        config = shard.config
        self.config = config
        self.place = config.place(layer)  # in the pool
        self.gated = config.gated_attention
        # Heads of q, k and v in the fused projection. A gate is like a head behind its query.
        queries = 2 * shard.heads if self.gated else shard.heads
        self.heads = (queries, shard.kv_heads, shard.kv_heads)
        self.qkv = Projection(
            config.hidden_size, sum(self.heads) * config.head_dim, bias=config.qkv_bias
        )
        self.q_norm = rms_norm(config, config.head_dim) if config.qk_norm else nn.Identity()
        self.k_norm = rms_norm(config, config.head_dim) if config.qk_norm else nn.Identity()
        self.out = RowParallelProjection(
            shard, shard.heads * config.head_dim, bias=config.attention_out_bias
        )
        self.window = config.window(layer)
        self.sinks = nn.Parameter(torch.empty(shard.heads)) if config.sinks else None
        rotary = config.rotary_of(layer)
        # among those of `LayerInputs.rotary`
        self.rotary = config.rotaries.index(rotary) if rotary else 0
        self.scale = config.scale(layer)

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        batch, pool = inputs.batch, inputs.pool
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.config.head_dim)).split(self.heads, dim=1)
        if self.gated:
            q, gate = q.unflatten(1, (-1, 2)).unbind(2)
        q = self.q_norm(q)
        k = self.k_norm(k)
        rotary = inputs.rotary[self.rotary]
        q = torch.ops.pensieve.write_kv(q, k, v, rotary, batch.slots, pool, self.place)
        o = torch.ops.pensieve.multi_token_attention(
            q,
            batch.segments,
            batch.block_table,
            pool,
            self.place,
            self.scale,
            self.window,
            self.sinks,
        )
        if self.gated:
            o = o * gate.sigmoid()
        return self.out(o.flatten(1))


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


class Layer(nn.Module):
    def __init__(self, shard: Shard, layer: int):
        super().__init__()
        config = shard.config
        self.norm_first = config.norm_first
        self.attention_norm = hidden_norm(config)
        is_linear = config.is_linear(layer)
        self.attention = GatedDelta(shard, layer) if is_linear else Attention(shard, layer)
        self.mlp_norm = hidden_norm(config)
        self.mlp = SparseMLP(shard) if config.experts else MLP(shard, shard.mlp_size)
        self.attention_result_norm = hidden_norm(config) if config.norm_results else nn.Identity()
        self.mlp_result_norm = hidden_norm(config) if config.norm_results else nn.Identity()

    def forward(
        self, x: Tensor, change: Tensor | None, inputs: LayerInputs
    ) -> tuple[Tensor, Tensor | None]:
        """Takes and returns a residual sum in two parts: the norm that reads it next adds them in
        the same pass."""
        if self.norm_first:
            normed, x = self.attention_norm.of_sum(x, change)
            normed, x = self.mlp_norm.of_sum(
                x, self.attention_result_norm(self.attention(normed, inputs))
            )
            return x, self.mlp_result_norm(self.mlp(normed))
        x, _ = self.attention_norm.of_sum(x, self.attention(x, inputs))
        x, _ = self.mlp_norm.of_sum(x, self.mlp(x))
        return x, None


class Decoder(nn.Module):
    """The forward pass of one rank. Several ranks need a group registered as TENSOR_PARALLEL, and
    run side by side.

    SettingError('--tensor-parallel', ...) if the decoder cannot be divided among so many ranks.
    """

    frequencies: Tensor

    def __init__(self, config: DecoderConfig, ranks: int = 1):
        super().__init__()
        self.config = config
        self.ranks = ranks
        self.embedding_factor = config.embedding_factor
        shard = Shard(config, ranks)
        self.embed = VocabularyEmbedding(shard)
        projected = config.embedding_size != config.hidden_size
        self.project_in = (
            nn.Linear(config.embedding_size, config.hidden_size, bias=False) if projected else None
        )
        self.project_out = (
            nn.Linear(config.hidden_size, config.embedding_size, bias=False) if projected else None
        )
        if config.rotary is None:
            self.positions: nn.Embedding | None = nn.Embedding(
                config.max_positions + config.position_offset, config.hidden_size
            )
        else:
            self.positions = None
        self.register_buffer("frequencies", rotary_frequencies(config), persistent=False)
        self.layers = nn.ModuleList(Layer(shard, i) for i in range(config.layers))
        self.norm = hidden_norm(config) if config.final_norm else None
        self.head = (
            None
            if config.tied_embeddings
            else nn.Linear(config.embedding_size, shard.vocab_rows, bias=False)
        )

    @classmethod
    def from_weights(
        cls, config: DecoderConfig, weights: Mapping[str, Tensor], ranks: int = 1
    ) -> Self:
        """Uses one rank's tensors without copying, in their dtype, on their device; RuntimeError if
        one does not fit. Projections that have a scale are in FP8, those with scales and zeros in
        int4."""
        with torch.device("meta"):
            decoder = cls(config, ranks)
            for name in weights:
                module, _, kind = name.rpartition(".")
                if kind in ("scale", "scales_zeros"):
                    projection = decoder.get_submodule(module)
                    setattr(
                        projection,
                        kind,
                        nn.Parameter(torch.empty_like(weights[name], device="meta"), False),
                    )
                    if kind == "scales_zeros":
                        assert isinstance(projection, Projection)
                        shape = packed_shape(projection.out_features, projection.in_features)
                        projection.weight = nn.Parameter(
                            torch.empty(shape, dtype=torch.int32), False
                        )
        decoder.load_state_dict(weights, assign=True)
        embeddings = weights["embed.weight"]
        decoder.to(embeddings.device)  # only `frequencies` is left to move
        # Rounded here, because a compiler would compute with the number as it is.
        decoder.embedding_factor = torch.tensor(
            config.embedding_factor, dtype=embeddings.dtype
        ).item()
        return decoder.eval().requires_grad_(False)

    def pack(self) -> None:
        """Puts weights into the order that this CPU multiplies fastest, where it has one.

        Embeddings that are also the head's weight are then kept twice. A packed decoder cannot be
        exported.
        """
        if not can_pack(self.embed.weight.dtype):
            return
        if self.head is None:
            rows, width = self.embed.weight.shape
            self.head = nn.Linear(width, rows, bias=False, device="meta")
            self.head.weight = self.embed.weight
        projections = [
            module
            for module in self.modules()
            if isinstance(module, Projection) and module.is_plain
        ]
        for module in (self.head, *projections):
            module.weight = nn.Parameter(packed(module.weight), requires_grad=False)

    def rotary(self, positions: Tensor) -> Tensor:
        """Returns [rotaries, T, R] float32, for each of `config.rotaries`: cosines, then sines, of
        angles computed in float64. [1, T, 0] for learned positions."""
        angles = positions.double().unsqueeze(1) * self.frequencies.unsqueeze(1)
        return torch.cat((angles.cos(), angles.sin()), dim=2).float()

    def forward(self, batch: ForwardBatch, pool: int) -> Tensor:
        """Computes the batch's tokens; their KV is written to the pool.

        pool: a handle from `plugins.torch_ops.register_pool`.
        Returns logits [R, vocab] float32, on every rank those of the whole vocabulary.
        """
        x = self.embed(batch.token_ids)
        if self.embedding_factor != 1.0:
            x = x * self.embedding_factor
        if self.project_in is not None:
            x = self.project_in(x)
        if self.positions is not None:
            x = x + self.positions(batch.positions + self.config.position_offset)
        inputs = LayerInputs(batch, self.rotary(batch.positions), pool)
        change = None
        for layer in self.layers:
            x, change = layer(x, change, inputs)
        x = self._final(x, change, batch.sample_rows)
        if self.project_out is not None:
            x = self.project_out(x)
        head = self.embed if self.head is None else self.head
        return self._of_all_tokens(linear(x, head.weight)).float()

    def _of_all_tokens(self, logits: Tensor) -> Tensor:
        """The logits of the whole vocabulary, without the padding of the last ranks' part."""
        if self.ranks == 1:
            return logits
        gathered = torch.ops.pensieve.all_gather(logits, self.ranks, TENSOR_PARALLEL)
        if gathered.shape[1] == self.config.vocab_size:
            return gathered
        # Not `contiguous`: in compiled code its result would depend on whether there is exactly one
        # row.
        return gathered[:, : self.config.vocab_size].clone(memory_format=torch.contiguous_format)

    def _final(self, x: Tensor, change: Tensor | None, rows: Tensor) -> Tensor:
        """Some rows of the last layer's sum, normalised. A model that normalises after each sum has
        no last norm."""
        x = x[rows]
        change = None if change is None else change[rows]
        if self.norm is None:
            return x if change is None else x + change
        normed, _ = self.norm.of_sum(x, change)
        return normed
