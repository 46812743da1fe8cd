"""Writes one layer of a decoder as a TensorRT network: what `model.Layer` computes, rounding where
it does.

A plan has no weights: they are inputs, so one plan serves all layers of all ranks. Its other inputs
are x [T, hidden], those of a `ForwardBatch` that a layer reads, and rotary [T, R] float32 as
`Decoder.rotary` makes it (TensorRT has no float64). Output: y [T, hidden], the residual sum. The
segments are in the step's work list (`plugins.tensorrt.library.Step`).
"""

from __future__ import annotations

import ctypes
import itertools
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...plugins.tensorrt.library import Library, sizes
from ...scheduler.types import SettingError
from ..checkpoints.config import DecoderConfig, Shard
from ..forward_batch import INPUTS, SIZES

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int32: 3}  # `PensieveType`
LAYERS = ("add", "multiply", "divide", "sqrt", "erf", "sigmoid", "tanh", "mean", "cast", "reshape")
"""By `PensieveLayer`."""
WRITE_KV, ATTENTION, PRODUCT, NORM, SILU_GATE, ALL_REDUCE = range(6)  # `Operation`
PLUGINS = (
    "PensieveWriteKv",
    "PensieveAttention",
    "PensieveProduct",
    "PensieveNorm",
    "PensieveSiluGate",
    "PensieveAllReduce",
)
ANY = -1  # a size known at run time
BATCH_INPUTS = {name: INPUTS[name] for name in ("slots", "block_table")}
"""The inputs of a `ForwardBatch` that a layer reads, by name."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the network, by its number."""

    number: int
    dtype: torch.dtype
    rank: int


class Attributes(NamedTuple):
    """`Attributes` of native/plugin.cpp."""

    operation: int
    type: int
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    rotary_dims: int = 0
    outputs: int = 0
    biased: int = 0
    relu: int = 0
    added: int = 0
    weighted: int = 0


class Operations:
    """Layers by short names. Operands are of one type and rank; nothing is cast but where `cast`
    says so.

    Every layer has a name of its own.
    """

    def __init__(self, library: Library, network: int):
        self._library = library
        self._network = network
        self._held: list[Tensor] = []  # TensorRT keeps addresses only, until the network is built
        self._count = itertools.count()

    def input(self, name: str, dtype: torch.dtype, *shape: int) -> Value:
        number = self._library.call(
            "input", self._network, name.encode(), TYPES[dtype], len(shape), sizes(shape)
        )
        return self._tensor(number, dtype, len(shape))

    def output(self, x: Value, name: str) -> None:
        if self._library.call("output", self._network, x.number, TYPES[x.dtype], name.encode()):
            raise SettingError("--backend", self._library.error())

    def number(self, value: float, like: Value) -> Value:
        """One value, of the type of `like` and as many dimensions."""
        return self.constant(torch.full((1,) * like.rank, value, dtype=like.dtype))

    def constant(self, tensor: Tensor) -> Value:
        self._held.append(tensor)
        shape = tuple(tensor.shape)
        place = (
            self._name("constant").encode(),
            TYPES[tensor.dtype],
            len(shape),
            sizes(shape),
            tensor.data_ptr(),
        )
        return self._tensor(
            self._library.call("constant", self._network, *place), tensor.dtype, len(shape)
        )

    def cast(self, x: Value, dtype: torch.dtype) -> Value:
        return x if x.dtype == dtype else self._layer("cast", x, dtype=dtype)

    def add(self, x: Value, y: Value) -> Value:
        return self._layer("add", x, y)

    def multiply(self, x: Value, y: Value) -> Value:
        return self._layer("multiply", x, y)

    def divide(self, x: Value, y: Value) -> Value:
        return self._layer("divide", x, y)

    def root(self, x: Value) -> Value:
        return self._layer("sqrt", x)

    def mean(self, x: Value) -> Value:
        """Over the last dimension, which is kept, of size 1."""
        return self._layer("mean", x)

    def activate(self, x: Value, name: str) -> Value:
        """Applies the activation in float32, for every type."""
        wide = self.cast(x, torch.float32)
        return self.cast(self._activated(wide, name), x.dtype)

    def _activated(self, x: Value, name: str) -> Value:
        match name:
            case "silu":
                return self.multiply(x, self._layer("sigmoid", x))
            case "gelu":
                spread = self._layer("erf", self.multiply(x, self.number(math.sqrt(0.5), x)))
            case "gelu_tanh":
                cube = self.multiply(
                    self.multiply(x, x), self.multiply(x, self.number(0.044715, x))
                )
                inner = self.multiply(self.add(x, cube), self.number(math.sqrt(2 / math.pi), x))
                spread = self._layer("tanh", inner)
            case _:
                raise SettingError("--backend", f"tensorrt's networks have no activation {name}")
        return self.multiply(
            self.multiply(x, self.number(0.5, x)), self.add(spread, self.number(1.0, x))
        )

    def reshape(self, x: Value, *shape: int) -> Value:
        return self._layer("reshape", x, numbers=shape, rank=len(shape))

    def plugin(self, attributes: Attributes, *inputs: Value) -> list[Value]:
        """The outputs, of the type of the first input."""
        plugin = PLUGINS[attributes.operation]
        packed = struct.pack(f"{len(attributes)}i", *attributes)
        place = (
            self._name(plugin).encode(),
            plugin.encode(),
            packed,
            len(packed),
            *self._numbers(inputs),
        )
        first = self._library.call("plugin", self._network, *place)
        return [self._tensor(first, inputs[0].dtype, 2)] + [
            Value(first + 1, inputs[0].dtype, 2)
        ] * attributes.added

    def _layer(
        self,
        kind: str,
        *inputs: Value,
        dtype: torch.dtype | None = None,
        numbers: Sequence[int] = (),
        rank: int | None = None,
    ) -> Value:
        dtype = inputs[0].dtype if dtype is None else dtype
        name = self._name(kind).encode()
        place = (
            name,
            LAYERS.index(kind),
            TYPES[dtype],
            *self._numbers(inputs),
            len(numbers),
            sizes(tuple(numbers)),
        )
        return self._tensor(
            self._library.call("layer", self._network, *place), dtype, rank or inputs[0].rank
        )

    @staticmethod
    def _numbers(inputs: Sequence[Value]) -> tuple[int, ctypes.Array[ctypes.c_int]]:
        return len(inputs), (ctypes.c_int * len(inputs))(*(x.number for x in inputs))

    def _name(self, kind: str) -> str:
        return f"{kind}.{next(self._count)}"

    def _tensor(self, number: int, dtype: torch.dtype, rank: int) -> Value:
        if number < 0:
            raise SettingError("--backend", self._library.error())
        return Value(number, dtype, rank)


def layer_inputs(
    config: DecoderConfig, weights: Mapping[str, Tensor], layer: int, ranks: int = 1
) -> dict[str, Tensor]:
    """A layer's weights, of one of the ranks, as the network takes them: matrices [out, in],
    vectors [1, size].

    A gated MLP without `silu_gate` has its two projections apart. The norms of q and k are one
    weight [1, heads, head_dim] for the heads of q, k and v: ones for v.
    """
    prefix = f"layers.{layer}."
    own = {
        name.removeprefix(prefix): tensor
        for name, tensor in weights.items()
        if name.startswith(prefix)
    }
    if config.gated and not config.silu_gated:
        for kind in ("weight", "bias"):
            if f"mlp.up.{kind}" in own:
                own[f"mlp.gate.{kind}"], own[f"mlp.up.{kind}"] = own[f"mlp.up.{kind}"].chunk(2)
    shaped = {
        name: tensor if tensor.dim() == 2 else tensor.view(1, -1) for name, tensor in own.items()
    }
    if config.qk_norm:
        shard = Shard(config, ranks)
        q, k = (shaped.pop(f"attention.{name}_norm.weight") for name in "qk")
        parts = (
            q.expand(shard.heads, -1),
            k.expand(shard.kv_heads, -1),
            q.new_ones(shard.kv_heads, config.head_dim),
        )
        shaped["attention.qk_norm.weight"] = torch.cat(parts).unsqueeze(0)
    return shaped


class LayerNetwork:
    """Writes itself into the network when it is made, and must live until the network is built.

    inputs: of `layer_inputs`, of any layer of any of the ranks; their shapes and types count.
    SettingError if TensorRT refuses anything.
    """

    def __init__(
        self,
        library: Library,
        network: int,
        config: DecoderConfig,
        inputs: Mapping[str, Tensor],
        ranks: int = 1,
    ):
        self._config = config
        self._shard = Shard(config, ranks)
        self._ops = ops = Operations(library, network)
        self._weights = {
            name: ops.input(name, tensor.dtype, *tensor.shape) for name, tensor in inputs.items()
        }
        self._outputs = {name: len(tensor) for name, tensor in inputs.items()}
        x = ops.input("x", inputs["mlp.down.weight"].dtype, ANY, config.hidden_size)
        self._batch = {}
        for name, one in BATCH_INPUTS.items():
            self._batch[name] = ops.input(name, torch.int32, *one.shape(dict.fromkeys(SIZES, ANY)))
        dims = config.rotary.dims if config.rotary else 0
        self._angles = [ops.input("rotary", torch.float32, ANY, dims)] if dims else []
        self._type = TYPES[x.dtype]
        self._heads = (self._shard.heads, self._shard.kv_heads, config.head_dim, dims)
        ops.output(self._layer(x), "y")

    def _layer(self, x: Value) -> Value:
        if self._config.norm_first:
            normed, x = self._norm(
                "mlp_norm", x, self._attention(self._norm("attention_norm", x)[0])
            )
            return self._ops.add(x, self._mlp(normed))
        x, _ = self._norm("attention_norm", x, self._attention(x))
        return self._norm("mlp_norm", x, self._mlp(x))[0]

    def _norm(self, name: str, *summed: Value) -> list[Value]:
        """The norm of one value, or of the sum of two, and that sum."""
        weights = [self._weights.get(f"{name}.{kind}") for kind in ("weight", "bias")]
        given = [int(weight is not None) for weight in weights]
        attributes = Attributes(
            NORM, self._type, added=len(summed) - 1, weighted=given[0], biased=given[1]
        )
        return self._ops.plugin(attributes, *summed, *filter(None, weights))

    def _attention(self, x: Value) -> Value:
        ops = self._ops
        qkv = self._linear(x, "attention.qkv")
        if self._config.qk_norm:
            qkv = self._qk_normed(qkv)
        written = (qkv, *self._angles, self._batch["slots"])
        [q] = ops.plugin(Attributes(WRITE_KV, self._type, *self._heads), *written)
        [o] = ops.plugin(
            Attributes(ATTENTION, self._type, *self._heads), q, self._batch["block_table"]
        )
        return self._summed(self._linear(o, "attention.out"))

    def _qk_normed(self, qkv: Value) -> Value:
        """The heads of q and k by RMS norms. Those of v are divided by 1, so that no tensor is cut
        into q, k and v."""
        ops = self._ops
        shard = self._shard
        head_dim = self._config.head_dim
        heads = shard.heads + 2 * shard.kv_heads
        normed = torch.ones(1, heads, 1)
        normed[:, heads - shard.kv_heads :] = 0
        x = ops.reshape(qkv, ANY, heads, head_dim)
        wide = ops.cast(x, torch.float32)
        variance = ops.mean(ops.multiply(wide, wide))
        root = ops.root(ops.add(variance, ops.number(self._config.norm_eps, variance)))
        divisor = ops.add(ops.multiply(root, ops.constant(normed)), ops.constant(1 - normed))
        x = ops.multiply(
            ops.cast(ops.divide(wide, divisor), x.dtype), self._weights["attention.qk_norm.weight"]
        )
        return ops.reshape(x, ANY, heads * head_dim)

    def _mlp(self, x: Value) -> Value:
        ops = self._ops
        activation = self._config.activation
        gated = self._config.gated
        if self._config.silu_gated:
            width = self._outputs["mlp.up.weight"] // 2
            [x] = ops.plugin(
                Attributes(SILU_GATE, self._type, outputs=width), self._linear(x, "mlp.up")
            )
            return self._summed(self._linear(x, "mlp.down"))
        active = self._linear(x, "mlp.gate" if gated else "mlp.up", relu=activation == "relu")
        if activation != "relu":
            active = ops.activate(active, activation)
        x = ops.multiply(active, self._linear(x, "mlp.up")) if gated else active
        return self._summed(self._linear(x, "mlp.down"))

    def _summed(self, x: Value) -> Value:
        """The sum of the ranks' partial results."""
        if self._shard.ranks > 1:
            [x] = self._ops.plugin(Attributes(ALL_REDUCE, self._type), x)
        return x

    def _linear(self, x: Value, name: str, relu: bool = False) -> Value:
        inputs = [
            self._weights[f"{name}.{kind}"]
            for kind in ("weight", "bias")
            if f"{name}.{kind}" in self._weights
        ]
        size = self._outputs[f"{name}.weight"]
        attributes = Attributes(
            PRODUCT, self._type, outputs=size, biased=len(inputs) - 1, relu=relu
        )
        [x] = self._ops.plugin(attributes, x, *inputs)
        return x
