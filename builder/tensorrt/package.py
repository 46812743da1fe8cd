"""Runs a plan that `compile.py` made; it has no weights, which are put into it here. Imports TensorRT."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import tensorrt as trt
import torch
from torch import Tensor

from ...plugins.tensorrt import plugins as tensorrt_plugins
from ..checkpoints.config import DecoderConfig
from .network import TENSORRT_TYPES

ALIGNMENT = 256  # bytes; alignment of addresses passed to TensorRT
MOST_RECENT = 64
"""Batch sizes whose contexts are kept without a graph: more than a device runs before it captures."""

SAID = {
    trt.ILogger.Severity.INTERNAL_ERROR: logging.CRITICAL,
    trt.ILogger.Severity.ERROR: logging.ERROR,
    trt.ILogger.Severity.WARNING: logging.WARNING,
}
log = logging.getLogger(__name__)


class Logger(trt.ILogger):  # type: ignore[misc]
    """Sends errors and warnings to Python's logging: only this program may write to the standard output."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)

    def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
        if severity in SAID:
            log.log(SAID[severity], "TensorRT: %s", msg)


class Sizes(NamedTuple):
    """The variable sizes of a plan's inputs."""

    tokens: int
    segments: int
    rows: int
    seats: int
    blocks: int

    def shapes(self, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
        """The shapes of all inputs of the network."""
        of_tokens = {"rotary": (self.tokens, config.rotary.dims)} if config.rotary else {"positions": (self.tokens,)}
        return {
            "token_ids": (self.tokens,),
            **of_tokens,
            "slots": (self.tokens,),
            "segments": (self.segments, 5),
            "block_table": (self.seats, self.blocks),
            "sample_rows": (self.rows,),
        }


class TensorRTPackage:
    """The forward pass of a decoder. The plan has its own copy of the weights; the given ones may be freed.

    Each batch size has an execution context. It is run once before it is captured in a CUDA graph, and belongs to that
    graph afterwards: TensorRT requires both. Contexts run one after the other, so they share their memory. All calls
    come from one thread.
    """

    def __init__(self, path: Path, config: DecoderConfig, weights: Mapping[str, Tensor], device: str = "cuda"):
        """weights: on the host or on the device. RuntimeError if the file is not a plan for this GPU and decoder."""
        self._config = config
        self._logger = Logger()  # must outlive the objects that use it
        self._runtime = trt.Runtime(self._logger)
        self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise RuntimeError("TensorRT cannot read the plan; its log says why")
        self._refit(weights)
        frequencies = config.rotary.frequencies() if config.rotary else []
        self._frequencies = torch.tensor(frequencies, dtype=torch.float64, device=device)
        self._memory = torch.empty(max(1, self._engine.device_memory_size_v2), dtype=torch.uint8, device=device)
        self._most_tokens = [  # of each profile
            self._engine.get_tensor_profile_shape("token_ids", profile)[2][0]
            for profile in range(self._engine.num_optimization_profiles)
        ]
        self._captured: list[trt.IExecutionContext] = []  # graphs use them as long as this object lives
        self._recent: OrderedDict[Sizes, trt.IExecutionContext] = OrderedDict()

    def _refit(self, weights: Mapping[str, Tensor]) -> None:
        refitter = trt.Refitter(self._engine, self._logger)
        held = {name: tensor.contiguous() for name, tensor in weights.items()}
        if lost := sorted(set(held) - set(refitter.get_all_weights())):
            raise RuntimeError(f"the plan does not take {', '.join(lost[:5])}: TensorRT has optimised them away")
        for name, tensor in held.items():
            values = trt.Weights(TENSORRT_TYPES[tensor.dtype], tensor.data_ptr(), tensor.numel())
            place = trt.TensorLocation.DEVICE if tensor.is_cuda else trt.TensorLocation.HOST
            _check(refitter.set_named_weights(name, values, place), f"take the weight {name}")
        _check(refitter.refit_cuda_engine(), f"put in all weights, {', '.join(refitter.get_missing_weights()[:5])}")

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
        if not len(sample_rows):  # TensorRT has no outputs of size 0
            return self(token_ids, positions, slots, segments, block_table, sample_rows.new_zeros(1), pool)[:0]
        inputs = {
            "token_ids": token_ids,
            "slots": slots,
            "segments": segments,
            "block_table": block_table,
            "sample_rows": sample_rows,
            **self._of_positions(positions),
        }
        context = self._context(Sizes(len(token_ids), len(segments), len(sample_rows), *block_table.shape))
        logits = sample_rows.new_empty((len(sample_rows), self._config.vocab_size), dtype=torch.float32)
        held = {name: _aligned(tensor) for name, tensor in inputs.items()}
        for name, tensor in (held | {"logits": logits}).items():
            _check(context.set_tensor_address(name, tensor.data_ptr()), f"take {name}")
        with tensorrt_plugins.running(pool):
            _check(context.execute_async_v3(tensorrt_plugins.current_stream()), "run the step")
        return logits

    def _of_positions(self, positions: Tensor) -> dict[str, Tensor]:
        if self._config.rotary is None:
            return {"positions": positions}
        angles = positions.double().unsqueeze(1) * self._frequencies
        return {"rotary": torch.cat((angles.cos(), angles.sin()), dim=1).float()}

    def _context(self, sizes: Sizes) -> trt.IExecutionContext:
        """Returns a context with these sizes."""
        if torch.cuda.is_current_stream_capturing():
            context = self._recent.pop(sizes, None)
            if context is None:
                raise RuntimeError(f"a step of {sizes} must have run lately before it is captured")
            self._captured.append(context)
            return context
        context = self._recent.pop(sizes, None) or self._new_context(sizes)
        self._recent[sizes] = context
        if len(self._recent) > MOST_RECENT:
            torch.cuda.synchronize()  # its last step may not be over
            self._recent.popitem(last=False)
        return context

    def _new_context(self, sizes: Sizes) -> trt.IExecutionContext:
        fitting = (i for i, most in enumerate(self._most_tokens) if sizes.tokens <= most)
        profile = next(fitting, None)
        if profile is None:
            raise RuntimeError(
                f"the plan was made for up to {max(self._most_tokens)} tokens a step, not {sizes.tokens}"
            )
        context = self._engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise RuntimeError("TensorRT cannot make an execution context; its log says why")
        context.set_device_memory(self._memory.data_ptr(), self._memory.numel())
        stream = tensorrt_plugins.current_stream()
        _check(context.set_optimization_profile_async(profile, stream), f"choose profile {profile}")
        for name, shape in sizes.shapes(self._config).items():
            _check(context.set_input_shape(name, shape), f"take {name} of the shape {list(shape)}")
        return context


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def _check(done: bool, what: str) -> None:
    if not done:
        raise RuntimeError(f"TensorRT cannot {what}; its log says why")
