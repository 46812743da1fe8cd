"""Networks layer by layer: TensorRT's documented behaviour of each, and its refusals."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .base import FLOATS, INDICES, STREAM, TORCH_TYPES, DataType, Twin, Weights, allow, real

ET, UT, AT, RT, MT = (
    real.ElementWiseOperation,
    real.UnaryOperation,
    real.ActivationType,
    real.ReduceOperation,
    real.MatrixOperation,
)

ELEMENTWISE = {
    ET.SUM: torch.add,
    ET.SUB: torch.sub,
    ET.PROD: torch.mul,
    ET.MIN: torch.minimum,
}
UNARY = {UT.SQRT: torch.sqrt, UT.RECIP: torch.reciprocal}
ACTIVATIONS = {
    AT.RELU: torch.relu,
    AT.SIGMOID: torch.sigmoid,
    AT.GELU_ERF: F.gelu,
    AT.GELU_TANH: functools.partial(F.gelu, approximate="tanh"),
}


class ITensor(Twin, stands_for="ITensor"):
    """`_compute` gives its value from those of `_sources`."""

    def __init__(self, dtype: DataType, shape: Sequence[int], sources: Sequence[ITensor], compute: Callable[..., Any]):
        self._dtype, self._shape, self._sources, self._compute = dtype, tuple(shape), list(sources), compute

    @property
    def dtype(self) -> DataType:
        return self._dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape


class Layer(Twin, stands_for="ILayer"):
    def __init__(self, output: ITensor):
        self._output = output

    def get_output(self, index: int) -> ITensor:
        assert index == 0
        return self._output


class SliceLayer(Layer, stands_for="ISliceLayer"):
    def set_input(self, index: int, tensor: ITensor) -> None:
        allow(index == 2 and tensor.dtype in INDICES and len(tensor.shape) == 1, "a slice's size is a 1-D index tensor")
        self._output._sources.append(tensor)


class ShuffleLayer(Layer, stands_for="IShuffleLayer"):
    @property
    def reshape_dims(self) -> tuple[int, ...]:
        return self._output._shape

    @reshape_dims.setter
    def reshape_dims(self, value: tuple[int, ...]) -> None:
        allow(value.count(-1) <= 1, "two sizes to be inferred")
        self._output._shape = tuple(value)


class ConcatenationLayer(Layer, stands_for="IConcatenationLayer"):
    axis: int


class Dimension:
    """A dimension known at run time only: reading its value is an error."""

    def __init__(self, size: int):
        self._size = size


class ExprBuilder:
    OPERATIONS: ClassVar = {
        real.DimensionOperation.FLOOR_DIV: int.__floordiv__,
        real.DimensionOperation.PROD: int.__mul__,
        real.DimensionOperation.SUM: int.__add__,
    }

    def constant(self, value: int) -> Dimension:
        return Dimension(value)

    def operation(self, op: Any, first: Dimension, second: Dimension) -> Dimension:
        return Dimension(self.OPERATIONS[op](first._size, second._size))


class DimsExprs(list[Any]):
    def __init__(self, length: int):
        super().__init__([None] * length)


class PluginRegistry(Twin, stands_for="IPluginRegistry"):
    def __init__(self) -> None:
        self._creators: dict[tuple[str, ...], Any] = {}

    def register_creator(self, creator: Any, plugin_namespace: str) -> bool:
        self._creators[creator.name, creator.plugin_version, plugin_namespace] = creator
        return True

    def get_creator(self, type: str, version: str, plugin_namespace: str) -> Any:
        return self._creators[type, version, plugin_namespace]


REGISTRY = PluginRegistry()
_shapes_lock = threading.Lock()  # the bindings keep the builder of dimensions in one place


class PluginCall:
    """A plugin in a network, as loaded from a plan: rebuilt from its serialised fields."""

    def __init__(self, plugin: Any):
        self._plugin = plugin
        self._namespace, self._name = plugin.plugin_namespace, plugin.plugin_name
        kept = {name: plugin.attrs[name] for name in plugin.impl_attr_names}
        self._fields = [SimpleNamespace(name=name, data=np.array([value])) for name, value in kept.items()]

    def __call__(self, *inputs: Tensor) -> Tensor:
        types = [dtype for x in inputs for dtype, kind in TORCH_TYPES.items() if kind == x.dtype]
        with _shapes_lock:
            self._plugin.input_types = types
            dims = [[Dimension(size) for size in x.shape] for x in inputs]
            (shape,) = self._plugin.get_output_shapes(dims, [], ExprBuilder())
            (dtype,) = self._plugin.get_output_data_types(types, [x.dim() for x in inputs])
            creator = REGISTRY.get_creator(self._name, "1", self._namespace)
            plugin = creator.create_plugin(self._name, self._namespace, self._fields, real.TensorRTPhase.RUNTIME)
        inputs = tuple(x.contiguous() for x in inputs)
        out = torch.full([expr._size for expr in shape], -7, dtype=TORCH_TYPES[dtype])
        tensors = (*inputs, out)
        described = [_described(x, kind) for x, kind in zip(tensors, [*types, dtype], strict=True)]
        strides, addresses = [x.stride() for x in tensors], [x.data_ptr() for x in tensors]
        plugin.enqueue(
            described[:-1], described[-1:], addresses[:-1], addresses[-1:], strides[:-1], strides[-1:], STREAM
        )
        return out


def _described(x: Tensor, dtype: DataType) -> Any:
    described = real.PluginTensorDesc()
    described.dims, described.type, described.format = tuple(x.shape), dtype, real.TensorFormat.LINEAR
    return described


class INetworkDefinition(Twin, stands_for="INetworkDefinition"):
    def __init__(self) -> None:
        self._inputs: dict[str, ITensor] = {}
        self._outputs: list[ITensor] = []
        self._constants: list[tuple[ITensor, Weights]] = []
        self._names: dict[tuple[int, int], str] = {}
        self._refittable: set[str] = set()

    def add_input(self, name: str, dtype: DataType, shape: Sequence[int]) -> ITensor:
        allow(name not in self._inputs, f"two inputs are called {name}")
        self._inputs[name] = ITensor(dtype, shape, [], lambda: None)
        return self._inputs[name]

    def mark_output(self, tensor: ITensor) -> None:
        self._outputs.append(tensor)

    def add_constant(self, shape: Sequence[int], weights: Weights) -> Layer:
        allow(math.prod(shape) == weights._count, "a constant has as many values as its shape says")
        made = ITensor(weights._type, shape, [], lambda: None)
        self._constants.append((made, weights))
        return Layer(made)

    def set_weights_name(self, weights: Weights, name: str) -> bool:
        key = (weights._address, weights._count)
        if name in self._names.values() or key not in {(w._address, w._count) for _, w in self._constants}:
            return False
        self._names[key] = name
        return True

    def mark_weights_refittable(self, name: str) -> bool:
        self._refittable.add(name)
        return name in self._names.values()

    def add_cast(self, input: ITensor, to_type: DataType) -> Layer:
        return _layer(to_type, input.shape, [input], lambda x: x.to(TORCH_TYPES[to_type]))

    def add_elementwise(self, input1: ITensor, input2: ITensor, op: ET) -> Layer:
        allow(input1.dtype == input2.dtype, f"operands of {op} are {input1.dtype} and {input2.dtype}")
        allow(len(input1.shape) == len(input2.shape), f"operands of {op} have different ranks")

        def compute(x: Tensor, y: Tensor) -> Tensor:
            pairs = zip(x.shape, y.shape, strict=True)
            allow(all(a == b or 1 in (a, b) for a, b in pairs), f"{list(x.shape)} and {list(y.shape)} do not match")
            return ELEMENTWISE[op](x, y)

        shape = [max(a, b) if -1 not in (a, b) else -1 for a, b in zip(input1.shape, input2.shape, strict=True)]
        return _layer(input1.dtype, shape, [input1, input2], compute)

    def add_unary(self, input: ITensor, op: UT) -> Layer:
        allow(input.dtype in FLOATS, f"{op} of {input.dtype}")
        return _layer(input.dtype, input.shape, [input], UNARY[op])

    def add_activation(self, input: ITensor, type: AT) -> Layer:
        allow(input.dtype in FLOATS, f"{type} of {input.dtype}")
        return _layer(input.dtype, input.shape, [input], ACTIVATIONS[type])

    def add_reduce(self, input: ITensor, op: RT, axes: int, keep_dims: bool) -> Layer:
        rank = len(input.shape)
        allow(op == RT.AVG and input.dtype in FLOATS and 0 < axes < 1 << rank and keep_dims, "only such means")
        dims = [axis for axis in range(rank) if axes >> axis & 1]
        shape = [1 if axis in dims else size for axis, size in enumerate(input.shape)]
        return _layer(input.dtype, shape, [input], lambda x: x.mean(dims, keepdim=True))

    def add_matrix_multiply(self, input0: ITensor, op0: MT, input1: ITensor, op1: MT) -> Layer:
        allow(input0.dtype == input1.dtype and input0.dtype in FLOATS, f"{input0.dtype} times {input1.dtype}")
        allow(len(input0.shape) == len(input1.shape) >= 2, "matrices of different ranks")
        allow(MT.VECTOR not in (op0, op1), "no vectors")

        def compute(x: Tensor, y: Tensor) -> Tensor:
            x, y = (t.mT if op == MT.TRANSPOSE else t for t, op in ((x, op0), (y, op1)))
            allow(x.shape[-1] == y.shape[-2], f"{list(x.shape)} times {list(y.shape)}")
            return x @ y

        columns = input1.shape[-2] if op1 == MT.TRANSPOSE else input1.shape[-1]
        return _layer(input0.dtype, (*input0.shape[:-1], columns), [input0, input1], compute)

    def add_gather(self, input: ITensor, indices: ITensor, axis: int) -> Layer:
        allow(indices.dtype in INDICES and axis == 0 and len(indices.shape) == 1, "rows by 1-D indices")

        def compute(x: Tensor, rows: Tensor) -> Tensor:
            allow(bool(((rows >= 0) & (rows < len(x))).all()), "an index is out of range")
            return x[rows.long()]

        return _layer(input.dtype, (*indices.shape, *input.shape[1:]), [input, indices], compute)

    def add_shape(self, input: ITensor) -> Layer:
        return _layer(DataType.INT64, (len(input.shape),), [input], lambda x: torch.tensor(x.shape))

    def add_slice(
        self, input: ITensor, start: Sequence[int], shape: Sequence[int], stride: Sequence[int]
    ) -> SliceLayer:
        rank = len(input.shape)
        allow(len(start) == len(shape) == len(stride) == rank, "start, shape and stride have the input's rank")
        allow(set(stride) == {1}, "only strides of 1")

        def compute(x: Tensor, size: Tensor | None = None) -> Tensor:
            sizes = list(shape) if size is None else size.tolist()
            bounds = [(first, first + count) for first, count in zip(start, sizes, strict=True)]
            inside = all(0 <= a <= b <= there for (a, b), there in zip(bounds, x.shape, strict=True))
            allow(inside, f"{bounds} of {list(x.shape)}")
            return x[tuple(slice(a, b) for a, b in bounds)]

        return SliceLayer(ITensor(input.dtype, (-1,) * rank, [input], compute))

    def add_shuffle(self, input: ITensor) -> ShuffleLayer:
        layer = ShuffleLayer(ITensor(input.dtype, (), [input], lambda x: x.reshape(layer.reshape_dims)))
        return layer

    def add_concatenation(self, inputs: Sequence[ITensor]) -> ConcatenationLayer:
        allow(len({x.dtype for x in inputs}) == 1, "parts of different types")
        layer = ConcatenationLayer(
            ITensor(inputs[0].dtype, (-1,) * len(inputs[0].shape), inputs, lambda *parts: torch.cat(parts, layer.axis))
        )
        return layer

    def add_plugin(self, func: Callable[[], Any]) -> Layer:
        inputs, shape_inputs, plugin = func()
        allow(not shape_inputs, "no shape inputs")
        (dtype,) = plugin.get_output_data_types([x.dtype for x in inputs], [len(x.shape) for x in inputs])
        dims = [[Dimension(size) for size in x.shape] for x in inputs]
        with _shapes_lock:
            (shape,) = plugin.get_output_shapes(dims, [], ExprBuilder())
        return _layer(dtype, (-1,) * len(shape), inputs, PluginCall(plugin))


def _layer(dtype: DataType, shape: Sequence[int], sources: Sequence[ITensor], compute: Callable[..., Any]) -> Layer:
    return Layer(ITensor(dtype, shape, sources, compute))
