"""Runs a plan of TensorRT with our plugins."""

from __future__ import annotations

import ctypes
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ...plugins.attention.work_list import WorkList
from ...plugins.tensorrt.kernels import write_kernels
from ...plugins.tensorrt.library import Library, Step, load_library, sizes
from ...plugins.torch_ops import KVPool, pool_of
from ..checkpoints.config import DecoderConfig

MOST_TOKENS = 4096
"""Of a step. Memory for the plan's largest step is taken when it is loaded."""

ALIGNMENT = 256  # bytes, of the addresses that TensorRT is given


class Sizes(NamedTuple):
    """The sizes in which a plan's inputs may differ."""

    tokens: int
    rows: int
    seats: int
    blocks: int

    def shapes(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """Of all inputs of the network."""
        of_tokens = {"rotary": (self.tokens, config.rotary.dims)} if config.rotary else {"positions": (self.tokens,)}
        return {
            "token_ids": (self.tokens,),
            **of_tokens,
            "slots": (self.tokens,),
            "block_table": (self.seats, self.blocks),
            "sample_rows": (self.rows,),
        }


class Profile(NamedTuple):
    """The largest sizes of a plan's context, and the sizes at which it is fastest."""

    usual: Sizes
    most: Sizes


LEAST = Sizes(1, 1, 1, 1)


def profiles(config: DecoderConfig, most_tokens: int) -> tuple[Profile, ...]:
    """By ascending tokens: the first that holds a step is taken."""
    few = min(256, most_tokens)
    return (
        Profile(Sizes(min(64, few), min(64, few), 64, 128), Sizes(few, few, 4096, 2**17)),
        Profile(Sizes(most_tokens, min(64, most_tokens), 64, 128), Sizes(most_tokens, most_tokens, 4096, 2**17)),
    )


class TensorRTPackage:
    """The forward pass of a decoder. All calls are of one thread.

    One execution context for each profile: a CUDA graph keeps the addresses and sizes that it was captured with.
    """

    def __init__(self, path: Path, config: DecoderConfig, most_tokens: int = MOST_TOKENS, device: str = "cuda"):
        """RuntimeError if the file is no plan for this GPU and TensorRT."""
        self._config, self._library = config, load_library()
        plan = path.read_bytes()
        self._engine = self._library.make("engine_load", plan, len(plan))
        size = max(ALIGNMENT, self._library.call("engine_memory", self._engine))
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)  # contexts run one after the other: shared
        self._profiles = profiles(config, most_tokens)
        stream = torch.cuda.current_stream()
        self._contexts = [
            self._library.make("context_new", self._engine, i, self._memory.data_ptr(), stream.cuda_stream)
            for i in range(len(self._profiles))
        ]
        stream.synchronize()
        _when_gone(self, _free, self._library, self._contexts, self._engine)
        frequencies = config.rotary.frequencies() if config.rotary else []
        self._frequencies = torch.tensor(frequencies, dtype=torch.float64, device=device)
        self._kernels: dict[int, _Kernels] = {}  # of each pool, by its handle

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        segments: Tensor,
        block_table: Tensor,
        sample_rows: Tensor,
        pool: int,
    ) -> Tensor:
        """As `Decoder.forward`, on the current stream."""
        if not len(sample_rows):  # no output has a size of 0
            return self(token_ids, positions, slots, segments, block_table, sample_rows.new_zeros(1), pool)[:0]
        inputs = {
            "token_ids": token_ids,
            "slots": slots,
            "block_table": block_table,
            "sample_rows": sample_rows,
            **self._of_positions(positions),
        }
        now = Sizes(len(token_ids), len(sample_rows), *block_table.shape)
        context = self._context(now.tokens)
        logits = sample_rows.new_empty((len(sample_rows), self._config.vocab_size), dtype=torch.float32)
        held = {name: _aligned(tensor) for name, tensor in inputs.items()}
        for name, shape in now.shapes(self._config).items():
            self._library.do("set_shape", context, name.encode(), len(shape), sizes(shape))
        for name, tensor in (held | {"logits": logits}).items():
            self._library.do("set_address", context, name.encode(), tensor.data_ptr())
        if pool not in self._kernels:
            self._kernels[pool] = _Kernels(self._library, pool_of(pool), self._config)
        with self._kernels[pool].of_thread():
            self._library.do("enqueue", context, torch.cuda.current_stream().cuda_stream)
        return logits

    def _context(self, tokens: int) -> int:
        for profile, context in zip(self._profiles, self._contexts, strict=True):
            if tokens <= profile.most.tokens:
                return context
        raise RuntimeError(f"the plan was made for up to {self._profiles[-1].most.tokens} tokens a step, not {tokens}")

    def _of_positions(self, positions: Tensor) -> Mapping[str, Tensor]:
        if self._config.rotary is None:
            return {"positions": positions}
        angles = positions.double().unsqueeze(1) * self._frequencies
        return {"rotary": torch.cat((angles.cos(), angles.sin()), dim=1).float()}


def _when_gone(owner: object, free: Callable[..., object], *arguments: object) -> None:
    """Has `free` called when nothing refers to the owner any more, but not at exit: CUDA may be gone by then."""
    weakref.finalize(owner, free, *arguments).atexit = False


def _free(library: Library, contexts: list[int], engine: int) -> None:
    for context in contexts:
        library.call("context_free", context)
    library.call("engine_free", engine)


class _Kernels:
    """The kernels for one pool, and its step's memory as the library wants it."""

    def __init__(self, library: Library, kv: KVPool, config: DecoderConfig):
        assert kv.work is not None  # by register_pool
        self._library, self._work = library, kv.work
        with tempfile.TemporaryDirectory() as folder:
            write_kernels(Path(folder), kv.tensor, kv.work, config.rotary.dims if config.rotary else 0)
            self._kernels = library.make("load_kernels", folder.encode())
        _when_gone(self, library.call, "unload_kernels", self._kernels)
        self._step = step_of(kv.tensor, kv.work, [kv.events.get(layer, 0) for layer in range(config.layers)])

    def of_thread(self) -> _Running:
        self._step.longest = self._work.longest
        return _Running(self._library, self._kernels, self._step)


class _Running:
    """While it is entered, plans that this thread enqueues work with these kernels and this step."""

    def __init__(self, library: Library, kernels: int, step: Step):
        self._library, self._kernels, self._step = library, kernels, step

    def __enter__(self) -> None:
        self._library.call("run_on", self._kernels, ctypes.byref(self._step))

    def __exit__(self, *reason: object) -> None:
        self._library.call("run_on", None, None)


def step_of(pool: Tensor, work: WorkList, events: list[int]) -> Step:
    """events: handles of the CUDA events that layers wait for, 0 for none. What is given must outlive the result."""
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
