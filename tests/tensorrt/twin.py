"""A TensorRT in plain PyTorch on the CPU, with TensorRT's documented behaviour and refusals.

`install` puts it in the place of the module `tensorrt`. Enumerations, plain data and the whole of `tensorrt.plugin` are
NVIDIA's bindings. Builders, networks, engines and contexts are twins; each of their calls and assignments is checked
against the signatures of the bindings. Streams are numbers, device memory is memory.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from .base import ALIGNMENT, STREAM, TORCH_TYPES, TWINS, Refused, Twin, Weights, allow, memory, real, values_at
from .network import ELEMENTWISE, ET, REGISTRY, Dimension, DimsExprs, INetworkDefinition, ITensor, PluginCall

__all__ = ["ELEMENTWISE", "ET", "PluginCall", "Refused"]  # re-exported for tests

Ranges = dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


class IOptimizationProfile(Twin, stands_for="IOptimizationProfile"):
    def __init__(self) -> None:
        self._ranges: Ranges = {}

    def set_shape(self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]) -> None:
        if not all(0 <= a <= b <= c for a, b, c in zip(min, opt, max, strict=True)):
            raise ValueError(f"{input}: {min}, {opt}, {max} are not in order")
        self._ranges[input] = (tuple(min), tuple(opt), tuple(max))


class ITimingCache(Twin, stands_for="ITimingCache"):
    def __init__(self, content: bytes):
        self._content = content

    def serialize(self) -> bytes:
        return self._content + b"one build;"


class IBuilderConfig(Twin, stands_for="IBuilderConfig"):
    OTHER_GPU = b"other GPU"

    def __init__(self) -> None:
        self._flags = {real.BuilderFlag.TF32}
        self._profiles: list[IOptimizationProfile] = []
        self._limits: dict[Any, int] = {}
        self._cache: ITimingCache | None = None
        self.max_aux_streams = 4

    def set_flag(self, flag: real.BuilderFlag) -> None:
        self._flags.add(flag)

    def clear_flag(self, flag: real.BuilderFlag) -> None:
        self._flags.discard(flag)

    def set_memory_pool_limit(self, pool: real.MemoryPoolType, pool_size: int) -> None:
        self._limits[pool] = pool_size

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self._profiles.append(profile)
        return len(self._profiles) - 1

    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache:
        return ITimingCache(bytes(serialized_timing_cache))

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        if cache._content == self.OTHER_GPU and not ignore_mismatch:
            return False
        self._cache = cache
        return True

    def get_timing_cache(self) -> ITimingCache | None:
        return self._cache


class Plan:
    """A built network: constants are copied out of the caller's memory; weights that can be refitted are left out."""

    def __init__(self, network: INetworkDefinition, config: IBuilderConfig):
        flags = config._flags
        allow({real.BuilderFlag.REFIT_INDIVIDUAL, real.BuilderFlag.STRIP_PLAN} <= flags, "only stripped plans")
        allow(config.max_aux_streams == 0 and real.BuilderFlag.TF32 not in flags, "one stream, float32 as it is")
        self.inputs, self.outputs = network._inputs, network._outputs
        self.ranges = [profile._ranges for profile in config._profiles]
        for ranges in self.ranges:
            allow(ranges.keys() == self.inputs.keys(), "a profile must know all inputs")
            for name, shapes in ranges.items():
                fixed = [size for size in self.inputs[name].shape if size >= 0]
                for shape in shapes:
                    pairs = zip(shape, self.inputs[name].shape, strict=True)
                    allow(all(known in (-1, size) for size, known in pairs), f"{name}: {shape} is not {fixed}")
        self.constants: dict[int, Tensor] = {}
        self.named: dict[str, tuple[ITensor, tuple[int, ...]]] = {}
        for tensor, weights in network._constants:
            name = network._names.get((weights._address, weights._count))
            if name in network._refittable:
                self.named[name] = (tensor, tensor.shape)
            else:
                self.constants[id(tensor)] = values_at(weights._address, weights._type, tensor.shape).clone()


PLANS: list[Plan] = []
BUILT: list[tuple[INetworkDefinition, IBuilderConfig]] = []


class Builder(Twin, stands_for="Builder"):
    def __init__(self, logger: real.ILogger):
        self._logger = logger

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        allow(bool(flags >> int(real.NetworkDefinitionCreationFlag.STRONGLY_TYPED) & 1), "strongly typed networks only")
        return INetworkDefinition()

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig()

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    def build_serialized_network(self, network: INetworkDefinition, config: IBuilderConfig) -> bytes:
        PLANS.append(Plan(network, config))
        BUILT.append((network, config))
        return b"plan %d" % (len(PLANS) - 1)


class IExecutionContext(Twin, stands_for="IExecutionContext"):
    def __init__(self, engine: ICudaEngine):
        self._engine, self._profile, self._memory = engine, 0, 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._steps = 0

    def set_device_memory(self, memory: int, size: int) -> None:
        allow(
            memory % ALIGNMENT == 0 and size >= self._engine.device_memory_size_v2,
            "device memory: aligned, large enough",
        )
        self._memory = memory

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        allow(stream_handle == STREAM, "the current stream")
        self._profile = profile_index
        self._shapes.clear()  # as documented
        return 0 <= profile_index < self._engine.num_optimization_profiles

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        least, _, most = self._engine._plan.ranges[self._profile][name]
        self._shapes[name] = shape
        return all(a <= size <= b for a, size, b in zip(least, shape, most, strict=True))

    def set_tensor_address(self, name: str, memory: int) -> bool:
        allow(memory % ALIGNMENT == 0 and memory != 0, f"the address of {name}")
        self._addresses[name] = memory
        return name in {*self._engine._plan.inputs, *(x.name for x in self._engine._plan.outputs)}

    def execute_async_v3(self, stream_handle: int) -> bool:
        plan = self._engine._plan
        allow(stream_handle == STREAM and self._memory != 0, "a stream and device memory")
        allow(self._shapes.keys() == plan.inputs.keys() <= self._addresses.keys(), "all inputs, their shapes")
        known = dict(self._engine._constants)
        for name, tensor in plan.inputs.items():
            known[id(tensor)] = values_at(self._addresses[name], tensor.dtype, self._shapes[name])
        for output in plan.outputs:
            value = _evaluate(output, known)
            memory(self._addresses[output.name], value.nbytes).copy_(value.contiguous().view(-1).view(torch.uint8))
        self._steps += 1
        return True


def _evaluate(tensor: ITensor, known: dict[int, Tensor]) -> Tensor:
    """Layer by layer, without recursion: networks are deep."""
    waiting = [tensor]
    while waiting:
        last = waiting[-1]
        missing = [source for source in last._sources if id(source) not in known]
        if id(last) in known:
            waiting.pop()
        elif missing:
            waiting += missing
        else:
            value = last._compute(*(known[id(source)] for source in last._sources))
            allow(value.dtype == TORCH_TYPES[last.dtype], f"a layer promised {last.dtype} and gave {value.dtype}")
            allow(value.dim() == len(last.shape), f"a layer promised {last.shape} and gave {list(value.shape)}")
            known[id(last)] = value
    return known[id(tensor)]


class ICudaEngine(Twin, stands_for="ICudaEngine"):
    def __init__(self, plan: Plan):
        self._plan = plan
        self._constants = dict(plan.constants)
        self._contexts: list[IExecutionContext] = []

    @property
    def device_memory_size_v2(self) -> int:
        return 4096

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._plan.ranges)

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        return list(self._plan.ranges[profile_index][name])

    def create_execution_context(self, strategy: real.ExecutionContextAllocationStrategy) -> IExecutionContext:
        allow(strategy == real.ExecutionContextAllocationStrategy.USER_MANAGED, "memory is the user's")
        self._contexts.append(IExecutionContext(self))
        return self._contexts[-1]


class Runtime(Twin, stands_for="Runtime"):
    def __init__(self, logger: real.ILogger):
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> ICudaEngine | None:
        word, _, number = bytes(serialized_engine).partition(b" ")
        return ICudaEngine(PLANS[int(number)]) if word == b"plan" else None


class Refitter(Twin, stands_for="Refitter"):
    def __init__(self, engine: ICudaEngine, logger: real.ILogger):
        self._engine, self._set = engine, {}

    def get_all_weights(self) -> list[str]:
        return list(self._engine._plan.named)

    def set_named_weights(self, name: str, weights: Weights, location: real.TensorLocation) -> bool:
        allow(location == real.TensorLocation.HOST, "nothing is on a device here")
        tensor, shape = self._engine._plan.named[name]
        self._set[name] = weights
        return weights._type == tensor.dtype and weights._count == math.prod(shape)

    def get_missing_weights(self) -> list[str]:
        return [name for name in self._engine._plan.named if name not in self._set]

    def refit_cuda_engine(self) -> bool:
        for name, weights in self._set.items():
            tensor, shape = self._engine._plan.named[name]
            self._engine._constants[id(tensor)] = values_at(weights._address, weights._type, shape).clone()
        return not self.get_missing_weights()


@contextmanager
def install() -> Iterator[ModuleType]:
    """While this is open the module `tensorrt` is the twin; our modules that import it are unloaded afterwards."""
    module = ModuleType("tensorrt")
    vars(module).update({name: value for name, value in vars(real).items() if not name.startswith("__")})
    module.__version__ = real.__version__
    vars(module).update(TWINS)
    module.IDimensionExpr, module.DimsExprs = Dimension, DimsExprs
    module.get_plugin_registry = lambda: REGISTRY
    before = set(sys.modules)
    sys.modules["tensorrt"] = module
    try:
        module.plugin = importlib.import_module("tensorrt_bindings.plugin")
        sys.modules["tensorrt.plugin"] = module.plugin
        yield module
    finally:
        for name in set(sys.modules) - before:
            if "tensorrt" in name and not name.startswith("tests."):
                parent, _, child = name.rpartition(".")
                del sys.modules[name]
                vars(sys.modules.get(parent, module)).pop(child, None)


@contextmanager
def as_on_a_gpu(plugins: ModuleType) -> Iterator[None]:
    """Lets `tensorrt.plugins` run on the CPU: device memory is host memory, and there is one stream."""

    def on_stream(stream: int) -> Any:
        assert stream == STREAM
        return nullcontext()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugins, "memory_at", memory)
        patch.setattr(plugins, "current_stream", lambda: STREAM)
        patch.setattr(plugins, "on_stream", on_stream)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        yield
