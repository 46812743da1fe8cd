"""A twin of the library behind `plugins/tensorrt/library.py`: it builds a network, and runs it in
PyTorch.

As TensorRT does, it rounds every layer's result to the type that the layer was given, and refuses
operands of different types or ranks, names that are used twice, and anything that its documentation
forbids.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from pensieve.builder.tensorrt.network import (
    ALL_REDUCE,
    ATTENTION,
    LAYERS,
    NORM,
    PLUGINS,
    PRODUCT,
    SILU_GATE,
    TYPES,
    WRITE_KV,
    Attributes,
)
from pensieve.plugins.attention.reference import multi_token_attention, write_kv
from pensieve.plugins.linear.norm_reference import norm, silu_gate

OF_NUMBERS = {number: dtype for dtype, number in TYPES.items()}
COMPUTE: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "multiply": torch.mul,
    "divide": torch.div,
    "sqrt": torch.sqrt,
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "mean": lambda x: x.mean(-1, keepdim=True),
    "cast": lambda x: x,
    "reshape": lambda x, *shape: x.reshape(shape),
}
STREAM = 77
FREE = (
    "network_new",
    "bytes_free",
    "engine_load",
    "engine_free",
    "context_new",
    "context_free",
    "set_shape",
    "set_address",
    "enqueue_layers",
)
"""Functions whose first argument is not an object that there is one of here."""

OF_FLOATS = ("divide", "sqrt", "erf", "sigmoid", "tanh", "mean")


def values_at(address: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The memory at an address."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype).view(shape)


class Step(threading.local):
    """What the library has of the step that a thread enqueues: its segments (of the work list),
    its pool, its layer, and the function that adds the ranks' results."""

    segments = torch.empty(0)
    pool = torch.empty(0)
    layer = 0
    all_reduce: Callable[..., int] | None = None


class Batch(dict[str, Tensor]):
    """The network's inputs by name, and the memory that its plugins work in."""

    def __init__(self, inputs: Mapping[str, Tensor], segments: Tensor, pool: Tensor):
        super().__init__(inputs)
        self.segments = segments
        self.pool = pool


class Context:
    """An execution context."""

    def __init__(self, engine: int, profile: int):
        self.engine = engine
        self.profile = profile
        self.steps = 0
        self.freed = False
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}


class TwinLibrary:
    """One network: nodes are (type, rank, function of the batch and of the nodes before).

    norms   eps and kind of the layers' norms; the library has them in its kernels
    fails   functions that fail
    """

    version = (8, 5, 3)

    def __init__(self) -> None:
        self.nodes: list[tuple[torch.dtype, int, Callable[[Batch, list[Tensor]], Tensor]]] = []
        self.names: set[str] = set()
        self.inputs: dict[str, torch.dtype] = {}
        self.sizes: dict[str, tuple[int, ...]] = {}  # of the inputs; -1: known at run time
        self.outputs: dict[str, int] = {}
        self.profiles: list[dict[str, tuple[tuple[int, ...], ...]]] = []
        self.engines = 0
        self.contexts: list[Context] = []
        self.step = Step()
        self.norms = 1e-5, False
        self.workspace = -1
        self.fails = frozenset[str]()

    def run(self, batch: Batch) -> dict[str, Tensor]:
        values: list[Tensor] = []
        for dtype, rank, compute in self.nodes:
            value = compute(batch, values)
            assert value.dim() == rank, (value.shape, rank)
            values.append(value.to(dtype))
        return {name: values[number] for name, number in self.outputs.items()}

    def call(self, name: str, *arguments: Any) -> int:
        if name in self.fails:
            return {"network_new": 0, "build": 1, "profile": 1, "output": 1}.get(name, -1)
        return getattr(self, f"_{name}")(*arguments[name not in FREE :])

    def do(self, name: str, *arguments: Any) -> None:
        if name in self.fails or self.call(name, *arguments):
            raise RuntimeError(self.error())

    def make(self, name: str, *arguments: Any) -> int:
        result = 0 if name in self.fails else self.call(name, *arguments)
        if not result:
            raise RuntimeError(self.error())
        return result

    def error(self) -> str:
        return "TensorRT cannot do it: the twin was told so"

    def _network_new(self) -> int:
        return 1

    def _network_free(self) -> None:
        """Constants are no longer read."""

    def _profile(self) -> int:
        self.profiles.append({})
        return 0

    def _profile_input(self, name: bytes, rank: int, *shapes: Any) -> int:
        least, usual, most = (tuple(shape) for shape in shapes)
        assert (
            all(a <= b <= c for a, b, c in zip(least, usual, most, strict=True))
            and len(least) == rank
        )
        self.profiles[-1][name.decode()] = least, usual, most
        return 0

    def _build(self, workspace: int, cache: bytes, size: int, plan: Any, times: Any) -> int:
        varying = {name for name, shape in self.sizes.items() if -1 in shape}
        assert all(set(profile) == varying for profile in self.profiles) and len(cache) == size
        self.workspace = workspace
        for target, content in ((plan._obj, b"plan"), (times._obj, cache + b"one build;")):
            held = ctypes.create_string_buffer(content, len(content))
            self._held.append(held)
            target.data = ctypes.addressof(held)
            target.size = len(content)
        return 0

    _held: ClassVar[list[Any]] = []

    def _bytes_free(self, content: Any) -> None:
        content._obj.data = None

    def _engine_load(self, plan: bytes, size: int) -> int:
        if plan != b"plan" or size != 4:
            return 0
        self.engines += 1
        return self.engines

    def _engine_shape(self, name: bytes, most: int, shape: Any) -> int:
        there = self.sizes.get(name.decode())
        if there is None or len(there) > most:
            return -1
        shape[: len(there)] = there
        return len(there)

    def _engine_memory(self) -> int:
        return 4096

    def _context_new(self, engine: int, profile: int, memory: int, stream: int) -> int:
        assert memory and stream == STREAM
        self.contexts.append(Context(engine, profile))
        return len(self.contexts)

    def _context_free(self, context: int) -> None:
        self.contexts[context - 1].freed = True

    def _engine_free(self, engine: int) -> None:
        assert all(context.freed for context in self.contexts if context.engine == engine)

    def _set_shape(self, context: int, name: bytes, rank: int, shape: Any) -> int:
        one = self.contexts[context - 1]
        least, _, most = self.profiles[one.profile][name.decode()]
        assert (
            all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True))
            and len(shape) == rank
        )
        one.shapes[name.decode()] = tuple(shape)
        return 0

    def _set_address(self, context: int, name: bytes, address: int) -> int:
        self.contexts[context - 1].addresses[name.decode()] = address
        return 0

    def _enqueue_layers(
        self,
        context: int,
        kernels: Any,
        step: Any,
        layers: int,
        count: int,
        names: Any,
        weights: Any,
        x: int,
        y: int,
        stream: int,
    ) -> int:
        one = self.contexts[context - 1]
        assert stream == STREAM
        for self.step.layer in range(layers):
            one.addresses |= {
                names[i].decode(): weights[self.step.layer * count + i] for i in range(count)
            }
            one.addresses |= {"x": x, "y": y}
            self._enqueue(one)
            x, y = y, x
        return 0

    def _enqueue(self, one: Context) -> None:
        assert set(one.addresses) == {*self.inputs, *self.outputs}
        shapes = self.sizes | one.shapes
        inputs = {
            name: values_at(one.addresses[name], dtype, shapes[name])
            for name, dtype in self.inputs.items()
        }
        for name, result in self.run(Batch(inputs, self.step.segments, self.step.pool)).items():
            values_at(one.addresses[name], result.dtype, tuple(result.shape)).copy_(result)
        one.steps += 1

    def _add(
        self, name: bytes, dtype: torch.dtype, rank: int, compute: Callable[..., Tensor]
    ) -> int:
        assert name not in self.names, f"{name!r} is used twice"
        self.names.add(name)
        self.nodes.append((dtype, rank, compute))
        return len(self.nodes) - 1

    def _input(self, name: bytes, kind: int, rank: int, shape: Any) -> int:
        def given(batch: Batch, values: list[Tensor]) -> Tensor:
            value = batch[name.decode()]
            assert value.dtype == OF_NUMBERS[kind] and len(shape) == rank
            assert all(size in (-1, there) for size, there in zip(shape, value.shape, strict=True))
            return value

        self.inputs[name.decode()], self.sizes[name.decode()] = OF_NUMBERS[kind], tuple(shape)
        return self._add(name, OF_NUMBERS[kind], rank, given)

    def _constant(self, name: bytes, kind: int, rank: int, shape: Any, address: int) -> int:
        dtype = OF_NUMBERS[kind]
        sizes = tuple(shape)
        value = values_at(address, dtype, sizes).clone()
        return self._add(name, dtype, rank, lambda *_: value)

    def _layer(
        self, name: bytes, kind: int, dtype: int, count: int, inputs: Any, size: int, numbers: Any
    ) -> int:
        layer = LAYERS[kind]
        chosen = list(inputs)
        given = list(numbers)
        assert (len(chosen), len(given)) == (count, size)
        kinds = [self.nodes[i][0] for i in chosen]
        ranks = [self.nodes[i][1] for i in chosen]
        assert len(set(kinds)) == len(set(ranks)) == 1, (name, kinds, ranks)
        assert layer == "cast" or OF_NUMBERS[dtype] == kinds[0]
        assert layer not in OF_FLOATS or kinds[0].is_floating_point
        rank = len(given) if layer == "reshape" else ranks[0]
        compute = COMPUTE[layer]
        return self._add(
            name,
            OF_NUMBERS[dtype],
            rank,
            lambda _, values: compute(*(values[i] for i in chosen), *given),
        )

    def _plugin(
        self, name: bytes, plugin: bytes, attributes: bytes, size: int, count: int, inputs: Any
    ) -> int:
        """`Plugin` of native/plugin.cpp."""
        assert len(attributes) == size == 44
        a = Attributes(*struct.unpack("11i", attributes))
        assert plugin.decode() == PLUGINS[a.operation]
        chosen = list(inputs)
        assert len(chosen) == count
        kinds = [self.nodes[i][0] for i in chosen[1:]]
        dtype = self.nodes[chosen[0]][0]
        assert dtype == OF_NUMBERS[a.type]
        heads, kv_heads, head_dim, rotary_dims = a.heads, a.kv_heads, a.head_dim, a.rotary_dims

        def written(batch: Batch, values: list[Tensor]) -> Tensor:
            qkv, *angles, slots = (values[i] for i in chosen)
            rotary = angles[0] if angles else torch.empty(len(qkv), 0)
            assert (
                rotary.shape[1] == rotary_dims and qkv.shape[1] == (heads + 2 * kv_heads) * head_dim
            )
            parts = qkv.unflatten(1, (-1, head_dim)).split((heads, kv_heads, kv_heads), dim=1)
            return write_kv(*parts, rotary, slots, batch.pool, self.step.layer).flatten(1)

        def attended(batch: Batch, values: list[Tensor]) -> Tensor:
            q, table = (values[i] for i in chosen)
            parts = q.unflatten(1, (heads, head_dim))
            return multi_token_attention(
                parts, batch.segments, table, batch.pool, self.step.layer, head_dim**-0.5
            ).flatten(1)

        def multiplied(batch: Batch, values: list[Tensor]) -> Tensor:
            x, weight, *bias = (values[i] for i in chosen)
            assert len(weight) == a.outputs and len(bias) == a.biased
            y = torch.nn.functional.linear(x, weight, bias[0].view(-1) if bias else None)
            return y.relu() if a.relu else y

        def gated(batch: Batch, values: list[Tensor]) -> Tensor:
            return silu_gate(values[chosen[0]])

        def summed(batch: Batch, values: list[Tensor]) -> Tensor:
            return values[chosen[0]] + values[chosen[1]] if a.added else values[chosen[0]]

        def normed(batch: Batch, values: list[Tensor]) -> Tensor:
            *_, weight, bias = (
                None,
                None,
                *(values[i].view(-1) for i in chosen[1 + a.added :]),
                *[None] * (2 - given),
            )
            return norm(summed(batch, values), weight, bias, *self.norms)

        def added(batch: Batch, values: list[Tensor]) -> Tensor:
            x = values[chosen[0]].contiguous()
            total = torch.empty_like(x)
            assert self.step.all_reduce is not None
            if self.step.all_reduce(x.data_ptr(), total.data_ptr(), len(x), STREAM):
                raise RuntimeError(self.error())
            return total

        given = a.weighted + a.biased
        computes, expected = {
            WRITE_KV: (written, [torch.float32] * bool(rotary_dims) + [torch.int32]),
            ATTENTION: (attended, [torch.int32]),
            PRODUCT: (multiplied, [dtype] * (1 + a.biased)),
            NORM: (normed, [dtype] * (a.added + given)),
            SILU_GATE: (gated, []),
            ALL_REDUCE: (added, []),
        }[a.operation]
        assert kinds == expected
        number = self._add(name, dtype, 2, computes)
        if a.added:
            self._add(name + b".sum", dtype, 2, summed)
        return number

    def _output(self, number: int, kind: int, name: bytes) -> int:
        assert self.nodes[number][0] == OF_NUMBERS[kind]
        self.outputs[name.decode()] = number
        return 0
