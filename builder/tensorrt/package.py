"""Runs a decoder whose layers are a plan of TensorRT with our plugins."""

from __future__ import annotations

import ctypes
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...plugins.attention.work_list import WorkList
from ...plugins.collectives.protocol import TENSOR_PARALLEL, registered_group
from ...plugins.tensorrt.kernels import Norms, write_kernels
from ...plugins.tensorrt.library import AllReduce, Library, Step, load_library, sizes
from ...plugins.torch_ops import KVPool, pool_of
from ...scheduler.types import InvariantError
from ..checkpoints.config import DecoderConfig, Shard
from ..layers.parts import LayerInputs
from ..model import Decoder
from .network import BATCH_INPUTS, layer_inputs

MOST_TOKENS = 4096
"""Of a step. Memory for a layer of the largest step is taken when the plan is loaded."""

ALIGNMENT = 256  # bytes, of the addresses that TensorRT is given


class Sizes(NamedTuple):
    """The sizes in which a plan's inputs may differ."""

    tokens: int
    seats: int
    blocks: int

    def shapes(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """Of all inputs of the network but its weights."""
        shapes: dict[str, tuple[int, ...]] = {"x": (self.tokens, config.hidden_size)}
        for name, one in BATCH_INPUTS.items():
            shapes[name] = one.shape(self._asdict())
        if config.rotary:
            shapes["rotary"] = (self.tokens, config.rotary.dims)
        return shapes


class OptimizationProfile(NamedTuple):
    """The largest sizes of a plan's context, and the sizes at which it is fastest."""

    usual: Sizes
    most: Sizes


LEAST = Sizes(1, 1, 1)


def profiles(config: DecoderConfig, most_tokens: int) -> tuple[OptimizationProfile, ...]:
    """By ascending tokens: the first that holds a step is taken."""
    few = min(256, most_tokens)
    return (
        OptimizationProfile(Sizes(min(64, few), 64, 128), Sizes(few, 4096, 2**17)),
        OptimizationProfile(Sizes(most_tokens, 64, 128), Sizes(most_tokens, 4096, 2**17)),
    )


def load_decoder(
    path: Path,
    config: DecoderConfig,
    weights: Mapping[str, Tensor],
    ranks: int = 1,
    most_tokens: int = MOST_TOKENS,
) -> Decoder:
    """The decoder of one of the ranks, with its weights, whose layers the plan computes.
    Embedding, last norm and head are the reference's.

    All calls are of one thread. RuntimeError if the file is no plan for this GPU, TensorRT, model
    and number of ranks.
    """
    decoder = Decoder.from_weights(config, weights, ranks)
    decoder.layers = nn.ModuleList([TensorRTLayers(path, config, weights, ranks, most_tokens)])
    return decoder


class TensorRTLayers(nn.Module):
    """All layers of a decoder, in the place of `model.Layer`: the plan runs once for each.

    There is one execution context for each profile. A CUDA graph keeps the addresses and sizes it
    was captured with.
    """

    def __init__(
        self,
        path: Path,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        ranks: int,
        most_tokens: int,
    ):
        super().__init__()
        self._config = config
        self._ranks = ranks
        self._library = load_library()
        plan = path.read_bytes()
        self._engine = self._library.make("engine_load", plan, len(plan))
        self._contexts: list[int] = []
        _when_gone(self, _free, self._library, self._contexts, self._engine)
        inputs = [
            {
                name: _aligned(tensor)
                for name, tensor in layer_inputs(config, weights, layer, ranks).items()
            }
            for layer in range(config.layers)
        ]
        _check_plan(self._library, self._engine, inputs[0], ranks)
        embedding = weights["embed.weight"]
        self._sums = _RankSums(config.hidden_size, embedding.dtype) if ranks > 1 else None
        size = max(ALIGNMENT, self._library.call("engine_memory", self._engine))
        memory = torch.empty(size, dtype=torch.uint8, device=embedding.device)
        self._memory = memory  # contexts run one after the other: shared
        self._profiles = profiles(config, most_tokens)
        stream = torch.cuda.current_stream()
        for i in range(len(self._profiles)):
            arguments = (self._engine, i, memory.data_ptr(), stream.cuda_stream)
            self._contexts.append(self._library.make("context_new", *arguments))
        stream.synchronize()
        self._weights = [tensor for layer in inputs for tensor in layer.values()]
        addresses = [tensor.data_ptr() for tensor in self._weights]
        names = [name.encode() for name in inputs[0]]
        self._names = (ctypes.c_char_p * len(names))(*names)
        self._addresses = (ctypes.c_void_p * len(addresses))(*addresses)
        self._kernels: dict[int, _PoolKernels] = {}  # of each pool, by its handle

    def forward(self, x: Tensor, change: None, inputs: LayerInputs) -> tuple[Tensor, None]:
        """Computes what `model.Layer` does, on the current stream. Overwrites x."""
        batch, rotary, pool = inputs
        now = Sizes(len(x), *batch.block_table.shape)
        context = self._context(now.tokens)
        given = {"rotary": rotary[0]} | {name: getattr(batch, name) for name in BATCH_INPUTS}
        x = _aligned(x)
        held = [x, torch.empty_like(x)]
        for name, shape in now.shapes(self._config).items():
            self._library.do("set_shape", context, name.encode(), len(shape), sizes(shape))
            if name in given:
                held.append(_aligned(given[name]))
                self._library.do("set_address", context, name.encode(), held[-1].data_ptr())
        if pool not in self._kernels:
            self._kernels[pool] = _PoolKernels(
                self._library, pool_of(pool), x.dtype, self._config, self._ranks, self._sums
            )
        layers, (kernels, step) = self._config.layers, self._kernels[pool].of_step()
        weights = (len(self._names), self._names, self._addresses)
        buffers = (held[0].data_ptr(), held[1].data_ptr())
        stream = torch.cuda.current_stream().cuda_stream
        arguments = (context, kernels, step, layers, *weights, *buffers, stream)
        try:
            self._library.do("enqueue_layers", *arguments)
        except RuntimeError as error:
            failure = None if self._sums is None else self._sums.failure
            raise failure or error from None
        return held[layers % 2], None

    def _context(self, tokens: int) -> int:
        for profile, context in zip(self._profiles, self._contexts, strict=True):
            if tokens <= profile.most.tokens:
                return context
        raise RuntimeError(
            f"the plan was made for up to {self._profiles[-1].most.tokens} tokens a step, not "
            f"{tokens}"
        )


def _when_gone(owner: object, free: Callable[..., object], *arguments: object) -> None:
    """Has `free` called when nothing refers to the owner any more, but not at exit: CUDA may be
    gone by then."""
    weakref.finalize(owner, free, *arguments).atexit = False


def _free(library: Library, contexts: list[int], engine: int) -> None:
    for context in contexts:
        library.call("context_free", context)
    library.call("engine_free", engine)


def _check_plan(library: Library, engine: int, inputs: Mapping[str, Tensor], ranks: int) -> None:
    """RuntimeError if the plan takes other weights than a layer of this rank has."""
    for name, tensor in inputs.items():
        shape = sizes((0,) * tensor.dim())
        count = library.call("engine_shape", engine, name.encode(), len(shape), shape)
        taken = list(shape[:count]) if count >= 0 else "none"
        if taken != list(tensor.shape):
            raise RuntimeError(
                f"a layer of one of {ranks} ranks has {name} {list(tensor.shape)}, and the plan "
                f"takes {taken}: it was built for another model or number of ranks"
            )


class _RankSums:
    """The ranks' sums inside a step, for the plugin: made by the group that all backends use, on
    the step's thread and stream. A CUDA graph records them, so its replays do not come here."""

    def __init__(self, width: int, dtype: torch.dtype):
        self._width = width
        self._dtype = dtype
        self.failure: BaseException | None = None  # why the plugin's last call failed
        self.call = AllReduce(self._add)

    def _add(self, x: int, total: int, tokens: int, stream: int | None) -> int:
        group = registered_group(TENSOR_PARALLEL)
        try:
            if group is None or (stream or 0) != torch.cuda.current_stream().cuda_stream:
                raise InvariantError("the plan's sums need the step's stream, and a group of ranks")
            shape = (tokens, self._width)
            group.all_reduce(*(memory_at(place, shape, self._dtype) for place in (x, total)))
        except BaseException as error:  # ctypes would drop it: the step raises it
            self.failure = error
            return 1
        return 0


class _Memory:
    """Memory of the current GPU, for torch."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 2,
        }


def memory_at(address: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A tensor over memory of the current GPU that the caller keeps alive."""
    memory = _Memory(address, shape[0] * shape[1] * dtype.itemsize)
    return torch.as_tensor(memory, device="cuda").view(dtype).view(shape)


def kernel_sizes(config: DecoderConfig, ranks: int = 1) -> tuple[int, Norms, int]:
    """(rotary_dims, norms, silu_width) of `write_kernels`."""
    rms = config.norm == "rms"
    weighted = rms or config.norm_affine
    norms = Norms(config.hidden_size, config.norm_eps, rms, weighted, weighted and not rms)
    return (
        config.rotary.dims if config.rotary else 0,
        norms,
        Shard(config, ranks).mlp_size if config.silu_gated else 0,
    )


class _PoolKernels:
    """The kernels for one pool, and its step's memory as the library wants it."""

    def __init__(
        self,
        library: Library,
        kv: KVPool,
        dtype: torch.dtype,
        config: DecoderConfig,
        ranks: int,
        sums: _RankSums | None,
    ):
        assert kv.work is not None  # by register_pool
        self._library = library
        self._work = kv.work
        with tempfile.TemporaryDirectory() as folder:
            write_kernels(Path(folder), kv.tensor, kv.work, dtype, *kernel_sizes(config, ranks))
            self._kernels = library.make("load_kernels", folder.encode())
        _when_gone(self, library.call, "unload_kernels", self._kernels)
        self._step = step_of(
            kv.tensor, kv.work, [kv.events.get(layer, 0) for layer in range(config.layers)]
        )
        if sums is not None:
            self._step.all_reduce = sums.call

    def of_step(self) -> tuple[int, Any]:
        """The kernels, and a pointer to the memory of the step that is enqueued now."""
        self._step.longest = self._work.longest
        return self._kernels, ctypes.byref(self._step)


def step_of(pool: Tensor, work: WorkList, events: list[int]) -> Step:
    """events: handles of the CUDA events that layers wait for, 0 for none. What is given must
    outlive the result."""
    fields = (work.partial, work.lse, work.counters, work.covered)
    step = Step(pool.data_ptr(), *(tensor.data_ptr() for tensor in fields))
    for kind in range(len(work.tiles)):
        step.items[kind] = work.items[kind].data_ptr()
        step.arrivals[kind] = work.arrivals[kind].data_ptr()
    step.gates = (ctypes.c_void_p * len(events))(*(event or None for event in events))
    step.longest = work.longest
    return step


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x
