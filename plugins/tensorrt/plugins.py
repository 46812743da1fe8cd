"""Our operations as TensorRT plugins, `tensorrt.plugin.op.pensieve.*`. Imports TensorRT, so import this module only
where TensorRT is used.

    write_kv(qkv, rotary, slots, heads=, kv_heads=, layer=) -> q'       qkv [T, (heads + 2 kv_heads) head_dim], fused
    write_kv_unrotated(qkv, slots, heads=, kv_heads=, layer=) -> q'     q' [T, heads head_dim]
    multi_token_attention(q', segments, block_table, heads=, layer=, scale=) -> o [T, heads head_dim]
    vocabulary_embed(token_ids, weight) -> x                            this rank's share of the embeddings
    all_reduce(x) -> x'                                                 the sum over all ranks
    all_gather(x, ranks=, columns=) -> x'                               all ranks' x, side by side, the first `columns`

The plugins call `torch.ops.pensieve` on the stream that TensorRT gives them. TensorRT calls them when a context is
enqueued, in the same thread. So they take the pool from `running`, and the network contains no pool.
"""

# Without annotations from the future: TensorRT needs the classes themselves.

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import tensorrt as trt
import tensorrt.plugin as trtp
import torch
from torch import Tensor

from .. import torch_ops  # noqa: F401  registers torch.ops.pensieve
from ..collectives.protocol import TENSOR_PARALLEL

TORCH_TYPES = {
    trt.float32: torch.float32,
    trt.float16: torch.float16,
    trt.bfloat16: torch.bfloat16,
    trt.int32: torch.int32,
    trt.int64: torch.int64,
}

_of_thread = threading.local()  # .pool, while a block of `running` is open
_building = False


@contextmanager
def running(pool: int) -> Iterator[None]:
    """Work that this thread enqueues in the block uses the pool of this handle. Blocks must not be nested."""
    _of_thread.pool = pool
    try:
        yield
    finally:
        del _of_thread.pool


@contextmanager
def building() -> Iterator[None]:
    """While this is open plugins only clear their outputs: TensorRT may run them to time them, on meaningless
    inputs."""
    global _building
    _building = True
    try:
        yield
    finally:
        _building = False


class _Memory:
    """Bytes on the GPU, in a form that torch accepts without copying."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def memory_at(address: int, size: int) -> Tensor:
    """`size` bytes of the GPU's memory, [size] uint8."""
    return torch.as_tensor(_Memory(address, size), device="cuda")


def current_stream() -> int:
    """The handle of torch's current CUDA stream."""
    return torch.cuda.current_stream().cuda_stream


def on_stream(stream: int) -> AbstractContextManager[None]:
    """A context whose work goes to a CUDA stream, given by its handle."""
    return torch.cuda.stream(torch.cuda.ExternalStream(stream))


def as_torch(x: trtp.Tensor) -> Tensor:
    """A tensor on the same memory. All our tensors are dense: without a named format TensorRT assumes linear ones."""
    dtype = TORCH_TYPES[x.dtype]
    shape = tuple(x.shape)
    return memory_at(x.data_ptr, math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


def _fill(outputs: tuple[trtp.Tensor], stream: int, compute: Callable[[], Tensor]) -> None:
    """Computes the one output, on the stream."""
    with on_stream(stream):
        out = as_torch(outputs[0])
        if _building:
            out.zero_()
        else:
            out.copy_(compute())


def _write_kv(qkv: Tensor, rotary: Tensor, slots: Tensor, heads: int, kv_heads: int, layer: int) -> Tensor:
    q, k, v = qkv.unflatten(1, (heads + 2 * kv_heads, -1)).split((heads, kv_heads, kv_heads), dim=1)
    return torch.ops.pensieve.write_kv(q, k, v, rotary, slots, _of_thread.pool, layer).flatten(1)


def _queries(qkv: trtp.TensorDesc, heads: int, kv_heads: int) -> trtp.TensorDesc:
    tokens, columns = qkv.shape_expr
    return trtp.from_shape_expr((tokens, columns // (heads + 2 * kv_heads) * heads), qkv.dtype)


@trtp.register("pensieve::write_kv")
def _(
    qkv: trtp.TensorDesc, rotary: trtp.TensorDesc, slots: trtp.TensorDesc, heads: int, kv_heads: int, layer: int
) -> trtp.TensorDesc:
    return _queries(qkv, heads, kv_heads)


@trtp.impl("pensieve::write_kv")
def _(
    qkv: trtp.Tensor,
    rotary: trtp.Tensor,
    slots: trtp.Tensor,
    heads: int,
    kv_heads: int,
    layer: int,
    outputs: tuple[trtp.Tensor],
    stream: int,
) -> None:
    def compute() -> Tensor:
        return _write_kv(as_torch(qkv), as_torch(rotary), as_torch(slots), heads, kv_heads, layer)

    _fill(outputs, stream, compute)


@trtp.register("pensieve::write_kv_unrotated")
def _(qkv: trtp.TensorDesc, slots: trtp.TensorDesc, heads: int, kv_heads: int, layer: int) -> trtp.TensorDesc:
    return _queries(qkv, heads, kv_heads)


@trtp.impl("pensieve::write_kv_unrotated")
def _(
    qkv: trtp.Tensor,
    slots: trtp.Tensor,
    heads: int,
    kv_heads: int,
    layer: int,
    outputs: tuple[trtp.Tensor],
    stream: int,
) -> None:
    def compute() -> Tensor:
        fused = as_torch(qkv)
        no_angles = fused.new_empty((len(fused), 0), dtype=torch.float32)
        return _write_kv(fused, no_angles, as_torch(slots), heads, kv_heads, layer)

    _fill(outputs, stream, compute)


@trtp.register("pensieve::multi_token_attention")
def _(
    q: trtp.TensorDesc, segments: trtp.TensorDesc, block_table: trtp.TensorDesc, heads: int, layer: int, scale: float
) -> trtp.TensorDesc:
    return q.like()


@trtp.impl("pensieve::multi_token_attention")
def _(
    q: trtp.Tensor,
    segments: trtp.Tensor,
    block_table: trtp.Tensor,
    heads: int,
    layer: int,
    scale: float,
    outputs: tuple[trtp.Tensor],
    stream: int,
) -> None:
    def compute() -> Tensor:
        queries, pool = as_torch(q).unflatten(1, (heads, -1)), _of_thread.pool
        batch = (as_torch(segments), as_torch(block_table))
        return torch.ops.pensieve.multi_token_attention(queries, *batch, pool, layer, scale).flatten(1)

    _fill(outputs, stream, compute)


@trtp.register("pensieve::vocabulary_embed")
def _(token_ids: trtp.TensorDesc, weight: trtp.TensorDesc) -> trtp.TensorDesc:
    return trtp.from_shape_expr((token_ids.shape_expr[0], weight.shape_expr[1]), weight.dtype)


@trtp.impl("pensieve::vocabulary_embed")
def _(token_ids: trtp.Tensor, weight: trtp.Tensor, outputs: tuple[trtp.Tensor], stream: int) -> None:
    def compute() -> Tensor:
        return torch.ops.pensieve.vocabulary_embed(as_torch(token_ids), as_torch(weight), TENSOR_PARALLEL)

    _fill(outputs, stream, compute)


@trtp.register("pensieve::all_reduce")
def _(x: trtp.TensorDesc) -> trtp.TensorDesc:
    return x.like()


@trtp.impl("pensieve::all_reduce")
def _(x: trtp.Tensor, outputs: tuple[trtp.Tensor], stream: int) -> None:
    _fill(outputs, stream, lambda: torch.ops.pensieve.all_reduce(as_torch(x), TENSOR_PARALLEL))


@trtp.register("pensieve::all_gather")
def _(x: trtp.TensorDesc, ranks: int, columns: int) -> trtp.TensorDesc:
    return trtp.from_shape_expr((x.shape_expr[0], columns), x.dtype)


@trtp.impl("pensieve::all_gather")
def _(x: trtp.Tensor, ranks: int, columns: int, outputs: tuple[trtp.Tensor], stream: int) -> None:
    def compute() -> Tensor:
        return torch.ops.pensieve.all_gather(as_torch(x), ranks, TENSOR_PARALLEL)[:, :columns]

    _fill(outputs, stream, compute)
