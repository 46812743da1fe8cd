"""Writes a decoder as a strongly typed TensorRT network for any batch. It computes `Decoder.forward`, with the same
roundings. Imports TensorRT, so import this module only where TensorRT is used.

Inputs, int32 except rotary: token_ids, slots [T], rotary [T, R] float32 from `Decoder.rotary` (TensorRT has no
float64), or positions [T] for a learned table, segments [S, 5], block_table [seats, blocks], sample_rows [R]. Output:
logits [R, vocab] float32. Weights have the names of Decoder's parameters and can be refitted one by one, so one plan
serves all ranks, each with its own weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorrt as trt
import tensorrt.plugin as trtp
import torch
from torch import Tensor

from ...plugins.tensorrt import plugins as tensorrt_plugins  # noqa: F401  registers tensorrt.plugin.op.pensieve
from ...plugins.tensorrt.plugins import TORCH_TYPES
from ...scheduler.types import SettingError
from ..checkpoints.config import DecoderConfig, Shard

TENSORRT_TYPES = {theirs: ours for ours, theirs in TORCH_TYPES.items()}

ACTIVATIONS = {
    "relu": trt.ActivationType.RELU,
    "gelu": trt.ActivationType.GELU_ERF,
    "gelu_tanh": trt.ActivationType.GELU_TANH,
    "silu": trt.ActivationType.SIGMOID,  # multiplied by its input
}
ANY = -1  # a size known at run time
MANY = 2**31 - 1  # more tokens than any batch has

PLUGINS = trtp.op.pensieve


class Operations:
    """Layers by short names. Operands have one type; only `cast` converts."""

    def __init__(self, network: trt.INetworkDefinition, weights: Mapping[str, Tensor]):
        self._network, self._weights = network, weights
        self._parameters: dict[tuple[str, int], trt.ITensor] = {}
        self._held: list[Tensor] = []  # the network keeps addresses only

    def input(self, name: str, dtype: trt.DataType, *shape: int) -> trt.ITensor:
        return self._network.add_input(name, dtype, shape)

    def output(self, x: trt.ITensor, name: str) -> None:
        x.name = name
        self._network.mark_output(x)

    def parameter(self, name: str, rank: int) -> trt.ITensor:
        """A weight under its name, with leading sizes of 1 up to `rank` dimensions."""
        made = self._parameters.get((name, rank))
        if made is None:
            tensor = self._weights[name].contiguous()
            made, values = self._constant(tensor, (1,) * (rank - tensor.dim()) + tuple(tensor.shape))
            if not (self._network.set_weights_name(values, name) and self._network.mark_weights_refittable(name)):
                raise SettingError("--backend", f"TensorRT refuses to name the weight {name}; its log says why")
            self._parameters[name, rank] = made
        return made

    def number(self, value: float, like: trt.ITensor) -> trt.ITensor:
        """One value, with the type and the number of dimensions of `like`."""
        rank = len(like.shape)
        return self._constant(torch.full((1,) * rank, value, dtype=TORCH_TYPES[like.dtype]), (1,) * rank)[0]

    def _constant(self, tensor: Tensor, shape: tuple[int, ...]) -> tuple[trt.ITensor, trt.Weights]:
        self._held.append(tensor)
        values = trt.Weights(TENSORRT_TYPES[tensor.dtype], tensor.data_ptr(), tensor.numel())
        return self._made(self._network.add_constant(shape, values)), values

    def cast(self, x: trt.ITensor, dtype: trt.DataType) -> trt.ITensor:
        return x if x.dtype == dtype else self._made(self._network.add_cast(x, dtype))

    def add(self, x: trt.ITensor, y: trt.ITensor) -> trt.ITensor:
        return self._made(self._network.add_elementwise(x, y, trt.ElementWiseOperation.SUM))

    def subtract(self, x: trt.ITensor, y: trt.ITensor) -> trt.ITensor:
        return self._made(self._network.add_elementwise(x, y, trt.ElementWiseOperation.SUB))

    def multiply(self, x: trt.ITensor, y: trt.ITensor) -> trt.ITensor:
        return self._made(self._network.add_elementwise(x, y, trt.ElementWiseOperation.PROD))

    def inverse_root(self, x: trt.ITensor) -> trt.ITensor:
        root = self._made(self._network.add_unary(x, trt.UnaryOperation.SQRT))
        return self._made(self._network.add_unary(root, trt.UnaryOperation.RECIP))

    def mean(self, x: trt.ITensor) -> trt.ITensor:
        """The mean over the last dimension, which becomes 1."""
        last = 1 << (len(x.shape) - 1)
        return self._made(self._network.add_reduce(x, trt.ReduceOperation.AVG, last, True))

    def activate(self, x: trt.ITensor, name: str) -> trt.ITensor:
        """Computed in float32 for every type."""
        wide = self.cast(x, trt.float32)
        active = self._made(self._network.add_activation(wide, ACTIVATIONS[name]))
        return self.cast(self.multiply(active, wide) if name == "silu" else active, x.dtype)

    def project(self, x: trt.ITensor, weight: trt.ITensor) -> trt.ITensor:
        """x [T, in] times the transposed weight [out, in]."""
        none, transposed = trt.MatrixOperation.NONE, trt.MatrixOperation.TRANSPOSE
        return self._made(self._network.add_matrix_multiply(x, none, weight, transposed))

    def rows(self, x: trt.ITensor, indices: trt.ITensor) -> trt.ITensor:
        return self._made(self._network.add_gather(x, indices, 0))

    def columns(self, x: trt.ITensor, first: int, count: int) -> trt.ITensor:
        """[T, count] of [T, columns]. The size of a slice is a tensor: the minimum of the actual size and [all,
        count]."""
        there = self._made(self._network.add_shape(x))
        wanted, _ = self._constant(torch.tensor([MANY, count]), (2,))
        size = self._made(self._network.add_elementwise(there, wanted, trt.ElementWiseOperation.MIN))
        layer = self._network.add_slice(x, (0, first), (0, 0), (1, 1))
        columns = self._made(layer)
        layer.set_input(2, size)  # in place of (0, 0)
        return columns

    def reshape(self, x: trt.ITensor, *shape: int) -> trt.ITensor:
        layer = self._network.add_shuffle(x)
        reshaped = self._made(layer)
        layer.reshape_dims = shape
        return reshaped

    def beside(self, parts: Sequence[trt.ITensor]) -> trt.ITensor:
        """[T, a + b + ...] of [T, a], [T, b], ..."""
        layer = self._network.add_concatenation(parts)
        joined = self._made(layer)
        layer.axis = 1
        return joined

    def plugin(self, call: object) -> trt.ITensor:
        """The single output of a call of a function in PLUGINS."""
        return self._made(self._network.add_plugin(call))

    @staticmethod
    def _made(layer: trt.ILayer | None) -> trt.ITensor:
        if layer is None:
            raise SettingError("--backend", "TensorRT refuses a layer of this decoder; its log says why")
        return layer.get_output(0)


class _Inputs:
    """The parts of a batch that every layer needs."""

    def __init__(self, ops: Operations, config: DecoderConfig):
        self.token_ids = ops.input("token_ids", trt.int32, ANY)
        if config.rotary is None:
            self.positions, self.rotary = ops.input("positions", trt.int32, ANY), None
        else:
            self.positions, self.rotary = None, ops.input("rotary", trt.float32, ANY, config.rotary.dims)
        self.slots = ops.input("slots", trt.int32, ANY)
        self.segments = ops.input("segments", trt.int32, ANY, 5)
        self.block_table = ops.input("block_table", trt.int32, ANY, ANY)
        self.sample_rows = ops.input("sample_rows", trt.int32, ANY)


class DecoderNetwork:
    """Writes itself into the network when it is made, and must stay alive until the network is built.

    weights: one rank's, on the CPU, in the decoder's dtype. SettingError if TensorRT refuses a layer.
    """

    def __init__(
        self, network: trt.INetworkDefinition, config: DecoderConfig, weights: Mapping[str, Tensor], ranks: int = 1
    ):
        self._config, self._shard = config, Shard(config, ranks)
        self._ranks, self._names = ranks, frozenset(weights)
        self._ops = Operations(network, weights)
        self._inputs = _Inputs(self._ops, config)
        self._ops.output(self._logits(), "logits")

    def _logits(self) -> trt.ITensor:
        ops, inputs = self._ops, self._inputs
        x = self._embedded()
        change = None
        for i in range(self._config.layers):
            x, change = self._layer(f"layers.{i}", i, x, change)
        x = ops.rows(x, inputs.sample_rows)
        if change is not None:
            x = ops.add(x, ops.rows(change, inputs.sample_rows))
            if self._config.final_norm:
                x = self._norm(x, "norm", self._config.norm == "rms")
        if "project_out.weight" in self._names:
            x = self._linear(x, "project_out")
        x = self._linear(x, "embed" if self._config.tied_embeddings else "head")
        if self._ranks > 1:
            x = ops.plugin(PLUGINS.all_gather(x, ranks=self._ranks, columns=self._config.vocab_size))
        return ops.cast(x, trt.float32)

    def _embedded(self) -> trt.ITensor:
        ops, inputs = self._ops, self._inputs
        table = ops.parameter("embed.weight", 2)
        if self._ranks == 1:
            x = ops.rows(table, inputs.token_ids)
        else:
            x = self._summed(ops.plugin(PLUGINS.vocabulary_embed(inputs.token_ids, table)))
        if "project_in.weight" in self._names:
            x = self._linear(x, "project_in")
        if inputs.positions is not None:
            place = ops.add(inputs.positions, ops.number(self._config.position_offset, inputs.positions))
            x = ops.add(x, ops.rows(ops.parameter("positions.weight", 2), place))
        return x

    def _layer(
        self, name: str, layer: int, x: trt.ITensor, change: trt.ITensor | None
    ) -> tuple[trt.ITensor, trt.ITensor | None]:
        """As `model.Layer`: takes and returns a residual sum in two parts."""
        rms = self._config.norm == "rms"
        first, second = f"{name}.attention_norm", f"{name}.mlp_norm"
        if self._config.norm_first:
            x = x if change is None else self._ops.add(x, change)
            x = self._ops.add(x, self._attention(name, layer, self._norm(x, first, rms)))
            return x, self._mlp(name, self._norm(x, second, rms))
        x = self._norm(self._ops.add(x, self._attention(name, layer, x)), first, rms)
        x = self._norm(self._ops.add(x, self._mlp(name, x)), second, rms)
        return x, None

    def _attention(self, name: str, layer: int, x: trt.ITensor) -> trt.ITensor:
        ops, inputs = self._ops, self._inputs
        heads, kv_heads, scale = self._shard.heads, self._shard.kv_heads, self._config.head_dim**-0.5
        qkv = self._linear(x, f"{name}.attention.qkv")
        if self._config.qk_norm:
            qkv = self._qk_normed(qkv, f"{name}.attention")
        if inputs.rotary is None:
            call = PLUGINS.write_kv_unrotated(qkv, inputs.slots, heads=heads, kv_heads=kv_heads, layer=layer)
        else:
            call = PLUGINS.write_kv(qkv, inputs.rotary, inputs.slots, heads=heads, kv_heads=kv_heads, layer=layer)
        q = ops.plugin(call)
        batch = (inputs.segments, inputs.block_table)
        o = ops.plugin(PLUGINS.multi_token_attention(q, *batch, heads=heads, layer=layer, scale=scale))
        return self._summed(self._linear(o, f"{name}.attention.out"))

    def _qk_normed(self, qkv: trt.ITensor, name: str) -> trt.ITensor:
        ops, head_dim = self._ops, self._config.head_dim
        parts, first = [], 0
        for norm, heads in (("q_norm", self._shard.heads), ("k_norm", self._shard.kv_heads)):
            part = ops.reshape(ops.columns(qkv, first, heads * head_dim), ANY, heads, head_dim)
            parts.append(ops.reshape(self._norm(part, f"{name}.{norm}", rms=True), ANY, heads * head_dim))
            first += heads * head_dim
        parts.append(ops.columns(qkv, first, self._shard.kv_heads * head_dim))
        return ops.beside(parts)

    def _mlp(self, name: str, x: trt.ITensor) -> trt.ITensor:
        ops, width = self._ops, self._shard.mlp_size
        x = self._linear(x, f"{name}.mlp.up")
        if self._config.gated:
            gate, up = ops.columns(x, 0, width), ops.columns(x, width, width)
            x = ops.multiply(ops.activate(gate, self._config.activation), up)
        else:
            x = ops.activate(x, self._config.activation)
        return self._summed(self._linear(x, f"{name}.mlp.down"))

    def _linear(self, x: trt.ITensor, name: str) -> trt.ITensor:
        x = self._ops.project(x, self._ops.parameter(f"{name}.weight", 2))
        bias = f"{name}.bias"
        return self._ops.add(x, self._ops.parameter(bias, 2)) if bias in self._names else x

    def _summed(self, x: trt.ITensor) -> trt.ITensor:
        return x if self._ranks == 1 else self._ops.plugin(PLUGINS.all_reduce(x))

    def _norm(self, x: trt.ITensor, name: str, rms: bool) -> trt.ITensor:
        """As `norm_reference.norm`: an RMS norm rounds before it is weighted, a layer norm at the end."""
        ops, dtype, rank = self._ops, x.dtype, len(x.shape)
        wide = ops.cast(x, trt.float32)
        if not rms:
            wide = ops.subtract(wide, ops.mean(wide))
        variance = ops.mean(ops.multiply(wide, wide))
        wide = ops.multiply(wide, ops.inverse_root(ops.add(variance, ops.number(self._config.norm_eps, variance))))
        kept = dtype if rms else trt.float32
        normed = ops.cast(wide, kept)
        for kind, apply in (("weight", ops.multiply), ("bias", ops.add)):
            if f"{name}.{kind}" in self._names:
                normed = apply(normed, ops.cast(ops.parameter(f"{name}.{kind}", rank), kept))
        return ops.cast(normed, dtype)
