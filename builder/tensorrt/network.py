"""Writes a decoder as a TensorRT network, for any batch: what `Decoder.forward` computes, rounding where it does.

Inputs, int32 but rotary: token_ids, slots [T], rotary [T, R] float32 as `Decoder.rotary` makes it (TensorRT has no
float64), or positions [T] for a learned table, block_table [seats, blocks], sample_rows [R]. Output: logits [R, vocab]
float32. The segments are in the step's work list (`plugins.tensorrt.library.Step`).
"""

from __future__ import annotations

import ctypes
import itertools
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...plugins.tensorrt.library import Library, sizes
from ...scheduler.types import SettingError
from ..checkpoints.config import DecoderConfig, Shard

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int32: 3}  # `PensieveType`
LAYERS = ("add", "subtract", "multiply", "divide", "sqrt", "erf", "relu", "sigmoid", "tanh", "mean", "cast", "project",
          "rows", "columns", "reshape", "beside")  # `PensieveLayer`  # fmt: skip
WRITE_KV, ATTENTION = 0, 1  # `Operation`
ANY = -1  # a size known at run time


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the network, by its number."""

    number: int
    dtype: torch.dtype
    rank: int


class Operations:
    """Layers by short names. Operands are of one type and rank; nothing is cast but where `cast` says so.

    Every layer has a name of its own. What it is given must live until the network is built.
    """

    def __init__(self, library: Library, network: int, weights: Mapping[str, Tensor]):
        self._library, self._network, self._weights = library, network, weights
        self._parameters: dict[tuple[str, int], Value] = {}
        self._held: list[Tensor] = []  # TensorRT keeps addresses only
        self._count = itertools.count()

    def input(self, name: str, dtype: torch.dtype, *shape: int) -> Value:
        number = self._library.call("input", self._network, name.encode(), TYPES[dtype], len(shape), sizes(shape))
        return self._made(number, dtype, len(shape))

    def output(self, x: Value, name: str) -> None:
        if self._library.call("output", self._network, x.number, name.encode()):
            raise SettingError("--backend", self._library.error())

    def parameter(self, name: str, rank: int) -> Value:
        """A weight, with sizes of 1 in front up to `rank` dimensions."""
        made = self._parameters.get((name, rank))
        if made is None:
            tensor = self._weights[name].contiguous()
            shape = (1,) * (rank - tensor.dim()) + tuple(tensor.shape)
            made = self._parameters[name, rank] = self._constant(f"{name}.{rank}", tensor.view(shape))
        return made

    def number(self, value: float, like: Value) -> Value:
        """One value, of the type of `like` and as many dimensions."""
        return self._constant(self._name("number"), torch.full((1,) * like.rank, value, dtype=like.dtype))

    def _constant(self, name: str, tensor: Tensor) -> Value:
        self._held.append(tensor)
        shape = tuple(tensor.shape)
        place = (name.encode(), TYPES[tensor.dtype], len(shape), sizes(shape), tensor.data_ptr())
        return self._made(self._library.call("constant", self._network, *place), tensor.dtype, len(shape))

    def cast(self, x: Value, dtype: torch.dtype) -> Value:
        return x if x.dtype == dtype else self._layer("cast", x, dtype=dtype)

    def add(self, x: Value, y: Value) -> Value:
        return self._layer("add", x, y)

    def subtract(self, x: Value, y: Value) -> Value:
        return self._layer("subtract", x, y)

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
            case "relu":
                return self._layer("relu", x)
            case "silu":
                return self.multiply(x, self._layer("sigmoid", x))
            case "gelu":
                spread = self._layer("erf", self.multiply(x, self.number(math.sqrt(0.5), x)))
            case "gelu_tanh":
                cube = self.multiply(self.multiply(x, x), self.multiply(x, self.number(0.044715, x)))
                inner = self.multiply(self.add(x, cube), self.number(math.sqrt(2 / math.pi), x))
                spread = self._layer("tanh", inner)
            case _:
                raise SettingError("--backend", f"tensorrt's networks have no activation {name}")
        return self.multiply(self.multiply(x, self.number(0.5, x)), self.add(spread, self.number(1.0, x)))

    def project(self, x: Value, weight: Value) -> Value:
        """x [T, in] times the transposed weight [out, in]."""
        return self._layer("project", x, weight)

    def rows(self, x: Value, indices: Value) -> Value:
        return self._layer("rows", x, indices)

    def columns(self, x: Value, first: int, count: int) -> Value:
        """[T, count] of [T, columns]."""
        return self._layer("columns", x, numbers=(first, count))

    def reshape(self, x: Value, *shape: int) -> Value:
        return self._layer("reshape", x, numbers=shape, rank=len(shape))

    def beside(self, parts: Sequence[Value]) -> Value:
        """[T, a + b + ...] of [T, a], [T, b], ..."""
        return self._layer("beside", *parts)

    def plugin(self, plugin: str, name: str, attributes: Sequence[int], *inputs: Value) -> Value:
        """attributes: `Attributes` of native/plugin.cpp."""
        packed = struct.pack(f"{len(attributes)}i", *attributes)
        place = (self._network, name.encode(), plugin.encode(), packed, len(packed), *self._numbers(inputs))
        return self._made(self._library.call("plugin", *place), inputs[0].dtype, 2)

    def _layer(self, kind: str, *inputs: Value, dtype: torch.dtype | None = None, numbers: Sequence[int] = (),
               rank: int | None = None) -> Value:  # fmt: skip
        dtype = inputs[0].dtype if dtype is None else dtype
        name = self._name(kind).encode()
        place = (name, LAYERS.index(kind), TYPES[dtype], *self._numbers(inputs), len(numbers), sizes(tuple(numbers)))
        return self._made(self._library.call("layer", self._network, *place), dtype, rank or inputs[0].rank)

    @staticmethod
    def _numbers(inputs: Sequence[Value]) -> tuple[int, ctypes.Array[ctypes.c_int]]:
        return len(inputs), (ctypes.c_int * len(inputs))(*(x.number for x in inputs))

    def _name(self, kind: str) -> str:
        return f"{kind}.{next(self._count)}"

    def _made(self, number: int, dtype: torch.dtype, rank: int) -> Value:
        if number < 0:
            raise SettingError("--backend", self._library.error())
        return Value(number, dtype, rank)


class _Inputs:
    """What every layer needs to know of the batch."""

    def __init__(self, ops: Operations, config: DecoderConfig):
        self.token_ids = ops.input("token_ids", torch.int32, ANY)
        self.positions: Value | None = None
        self.rotary: Value | None = None
        if config.rotary is None:
            self.positions = ops.input("positions", torch.int32, ANY)
        else:
            self.rotary = ops.input("rotary", torch.float32, ANY, config.rotary.dims)
        self.slots = ops.input("slots", torch.int32, ANY)
        self.block_table = ops.input("block_table", torch.int32, ANY, ANY)
        self.sample_rows = ops.input("sample_rows", torch.int32, ANY)


class DecoderNetwork:
    """Writes itself into the network when it is made, and must live until the network is built.

    weights: on the CPU, in the decoder's dtype. SettingError if TensorRT refuses anything.
    """

    def __init__(self, library: Library, network: int, config: DecoderConfig, weights: Mapping[str, Tensor]):
        self._config, self._shard, self._names = config, Shard(config), frozenset(weights)
        self._ops = Operations(library, network, weights)
        self._inputs = _Inputs(self._ops, config)
        self._ops.output(self._logits(), "logits")

    def _logits(self) -> Value:
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
        return ops.cast(x, torch.float32)

    def _embedded(self) -> Value:
        ops, inputs = self._ops, self._inputs
        x = ops.rows(ops.parameter("embed.weight", 2), inputs.token_ids)
        if "project_in.weight" in self._names:
            x = self._linear(x, "project_in")
        if inputs.positions is not None:
            place = ops.add(inputs.positions, ops.number(self._config.position_offset, inputs.positions))
            x = ops.add(x, ops.rows(ops.parameter("positions.weight", 2), place))
        return x

    def _layer(self, name: str, layer: int, x: Value, change: Value | None) -> tuple[Value, Value | None]:
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

    def _attention(self, name: str, layer: int, x: Value) -> Value:
        ops, inputs = self._ops, self._inputs
        shard, rotary = self._shard, self._config.rotary
        qkv = self._linear(x, f"{name}.attention.qkv")
        if self._config.qk_norm:
            qkv = self._qk_normed(qkv, f"{name}.attention")
        shape = (layer, shard.heads, shard.kv_heads, self._config.head_dim, rotary.dims if rotary else 0)
        angles = () if inputs.rotary is None else (inputs.rotary,)
        q = ops.plugin("PensieveWriteKv", f"{name}.write_kv", (WRITE_KV, *shape), qkv, *angles, inputs.slots)
        o = ops.plugin("PensieveAttention", f"{name}.attend", (ATTENTION, *shape), q, inputs.block_table)
        return self._linear(o, f"{name}.attention.out")

    def _qk_normed(self, qkv: Value, name: str) -> Value:
        ops, head_dim = self._ops, self._config.head_dim
        parts, first = [], 0
        for norm, heads in (("q_norm", self._shard.heads), ("k_norm", self._shard.kv_heads)):
            part = ops.reshape(ops.columns(qkv, first, heads * head_dim), ANY, heads, head_dim)
            parts.append(ops.reshape(self._norm(part, f"{name}.{norm}", rms=True), ANY, heads * head_dim))
            first += heads * head_dim
        parts.append(ops.columns(qkv, first, self._shard.kv_heads * head_dim))
        return ops.beside(parts)

    def _mlp(self, name: str, x: Value) -> Value:
        ops, width = self._ops, self._shard.mlp_size
        x = self._linear(x, f"{name}.mlp.up")
        if self._config.gated:
            gate, up = ops.columns(x, 0, width), ops.columns(x, width, width)
            x = ops.multiply(ops.activate(gate, self._config.activation), up)
        else:
            x = ops.activate(x, self._config.activation)
        return self._linear(x, f"{name}.mlp.down")

    def _linear(self, x: Value, name: str) -> Value:
        x = self._ops.project(x, self._ops.parameter(f"{name}.weight", 2))
        bias = f"{name}.bias"
        return self._ops.add(x, self._ops.parameter(bias, 2)) if bias in self._names else x

    def _norm(self, x: Value, name: str, rms: bool) -> Value:
        """As `norm_reference.norm`: an RMS norm rounds before it is weighted, a layer norm at the end."""
        ops, dtype, rank = self._ops, x.dtype, x.rank
        wide = ops.cast(x, torch.float32)
        if not rms:
            wide = ops.subtract(wide, ops.mean(wide))
        variance = ops.mean(ops.multiply(wide, wide))
        wide = ops.divide(wide, ops.root(ops.add(variance, ops.number(self._config.norm_eps, variance))))
        kept = dtype if rms else torch.float32
        normed = ops.cast(wide, kept)
        for kind, apply in (("weight", ops.multiply), ("bias", ops.add)):
            if f"{name}.{kind}" in self._names:
                normed = apply(normed, ops.cast(ops.parameter(f"{name}.{kind}", rank), kept))
        return ops.cast(normed, dtype)
