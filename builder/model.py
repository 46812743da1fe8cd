"""The one definition of the model: a decoder described by its DecoderConfig, over a KV pool named
by a handle.

Eager PyTorch runs it directly (the reference backend); compiled engines are traced from it. It may
be one of several ranks, each with its Shard of the weights. Neither it nor an engine compiled from
it knows which rank it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor, nn

from ..plugins import torch_ops  # noqa: F401  register torch.ops.pensieve
from ..plugins.collectives.protocol import TENSOR_PARALLEL
from ..plugins.linear.cpu_packed import linear
from .checkpoints.config import DecoderConfig, Shard
from .forward_batch import ForwardBatch
from .layers.gated_delta import GatedDelta
from .layers.parts import (
    MLP,
    LayerInputs,
    Projection,
    RowParallelProjection,
    VocabularyEmbedding,
    hidden_norm,
    rms_norm,
)
from .layers.sparse_mlp import SparseMLP
from .quantised import expect_quantised

# An exported decoder takes the batch as it is; compiled code takes its tensors, in the same order.
torch.export.register_dataclass(ForwardBatch, serialized_type_name="pensieve.ForwardBatch")


def rotary_frequencies(config: DecoderConfig) -> Tensor:
    """[rotaries, R / 2] float64, on the CPU; [1, 0] for learned positions."""
    frequencies = [rotary.frequencies() for rotary in config.rotaries] or [[]]
    return torch.tensor(frequencies, dtype=torch.float64, device="cpu")


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
        self.positions = (
            nn.Embedding(config.max_positions + config.position_offset, config.hidden_size)
            if config.rotary is None
            else None
        )
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
            expect_quantised(decoder, weights)
        decoder.load_state_dict(weights, assign=True)
        embeddings = weights["embed.weight"]
        decoder.to(embeddings.device)  # only `frequencies` is left to move
        # Rounded here, because a compiler would compute with the number as it is.
        decoder.embedding_factor = torch.tensor(
            config.embedding_factor, dtype=embeddings.dtype
        ).item()
        return decoder.eval().requires_grad_(False)

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
