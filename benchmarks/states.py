"""Times a model's layers of linear attention on a GPU beside the time that their bytes need.

    python -m benchmarks.states [--model benchmarks/shapes/qwen3.5-9b.json] [--rows 1 64 128]
        [--prompts 2048]

For steps of that many generating rows, and for prompts of that many tokens: microseconds of a
layer (`layer`), of its two operations on states (`states`), and the least that memory allows, by
this run's copy rate: all weights, states and results of the operations once (`floor`). `step` is
the time of all such layers of the model, in milliseconds. Weights are random, in bfloat16. Some
layers follow each other in a captured graph, which is launched with a cold L2; the median counts.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kernels import ceilings, microseconds
from pensieve.builder.checkpoints.architectures import decoder_config
from pensieve.builder.checkpoints.config import LinearAttention, Shard
from pensieve.builder.checkpoints.hugging_face import read_json
from pensieve.builder.forward_batch import NO_STATE, ForwardBatch
from pensieve.builder.layers.gated_delta import GatedDelta
from pensieve.builder.layers.parts import LayerInputs
from pensieve.builder.states import state_shape
from pensieve.plugins.state.pool import StatePool
from pensieve.plugins.torch_ops import register_pool, release_pool
from pensieve.scripts.command import exit_status

DTYPE = torch.bfloat16
IN_A_ROW = 4  # layers


@dataclass(frozen=True, slots=True)
class StateStep:
    """A step: rows that generate, or the tokens of a prompt that begins at the zero state."""

    rows: int = 0
    prompt: int = 0

    @property
    def name(self) -> str:
        return f"{self.rows} rows" if self.rows else f"prompt of {self.prompt}"

    @property
    def tokens(self) -> int:
        return self.rows or self.prompt

    @property
    def states(self) -> int:
        """Read or written."""
        return 2 * self.rows or 1


class LinearLayers:
    """The first layers of linear attention of a model, with random weights."""

    def __init__(self, path: Path, device: str = "cuda"):
        config = decoder_config(read_json(path, "--model"))
        assert config.linear is not None
        self.linear: LinearAttention = config.linear
        self.shard = Shard(config)
        self.hidden = config.hidden_size
        self.count = config.linear_layers
        self.device = device
        chosen = [layer for layer in range(config.layers) if config.is_linear(layer)][:IN_A_ROW]
        with torch.device(device):
            self.layers = [GatedDelta(self.shard, layer) for layer in chosen]
        for layer in self.layers:
            layer.to(DTYPE).requires_grad_(False)
            layer.a_log.data = torch.empty_like(layer.a_log, dtype=torch.float32).uniform_(-7, 0)
            layer.dt_bias.data = torch.zeros_like(layer.dt_bias, dtype=torch.float32)
            layer.conv.data.normal_(std=0.5)
            assert layer.norm.weight is not None
            layer.norm.weight.data.fill_(1.0)
        shape = state_shape(self.shard, DTYPE)
        assert shape is not None
        self.shape = shape._replace(layers=len(chosen))

    def weight_bytes(self) -> int:
        """Of a layer."""
        return sum(one.nbytes for one in self.layers[0].parameters())

    def state_bytes(self, step: StateStep) -> int:
        """Of the two operations on states of a layer: states, inputs and results."""
        inputs = self.linear.channels + self.linear.channels  # read; of the convolution, written
        results = self.linear.channels + self.linear.value_heads * self.linear.value_dim
        states = step.states * self.shape.layer_bytes
        return states + step.tokens * (inputs + results) * DTYPE.itemsize


class StateStepRun:
    """One step's batch over states of its own."""

    def __init__(self, layers: LinearLayers, step: StateStep):
        device = layers.device
        rows = max(step.rows, 1)
        self.layers = layers
        records = torch.zeros(rows, layers.shape.nbytes, dtype=torch.uint8, device=device)
        self.states = StatePool(records, layers.shape)
        lengths = torch.full((rows,), step.prompt or 1, dtype=torch.int32, device=device)
        numbers = torch.arange(rows, dtype=torch.int32, device=device)
        segments = torch.zeros(rows, 5, dtype=torch.int32, device=device)
        segments[:, 0] = numbers
        segments[:, 1] = lengths
        nothing = torch.zeros(0, dtype=torch.int32, device=device)
        self.batch = ForwardBatch(
            token_ids=nothing,
            positions=nothing,
            slots=nothing,
            segments=segments,
            sample_rows=nothing,
            state_in=numbers if step.rows else torch.full_like(numbers, NO_STATE),
            state_out=numbers,
            block_table=nothing,
        )
        self.states.make_work(step.tokens, rows)
        self.states.list_work(segments, numbers, 1 if step.rows else None)
        no_kv = torch.zeros(1, 1, 2, 1, 1, 1)
        self.handle = register_pool(no_kv, states=self.states)
        self.x = torch.randn(step.tokens, layers.hidden, device=device).to(DTYPE)
        self.qkvz = torch.randn(step.tokens, sum(layers.layers[0].split), device=device).to(DTYPE)
        heads = step.tokens, layers.linear.value_heads
        self.decay = -torch.rand(heads, device=device).mul_(6.0).sub_(6.0).exp_()
        self.beta = torch.rand(heads, device=device)

    def run_layers(self) -> None:
        inputs = LayerInputs(self.batch, self.x, self.handle)
        for layer in self.layers.layers:
            layer(self.x, inputs)

    def run_states(self) -> None:
        for layer in self.layers.layers:
            self.delta(layer)

    def delta(self, layer: GatedDelta) -> Tensor:
        """What `GatedDelta.forward` does with states."""
        batch = self.batch
        states = batch.segments, batch.state_in, batch.state_out, self.handle, layer.place
        qkv, _ = self.qkvz.split(layer.split, dim=1)
        conv = torch.ops.pensieve.causal_conv(qkv, layer.conv, *states)
        q, k, v = conv.split(layer.parts, dim=1)
        delta: Tensor = torch.ops.pensieve.gated_delta(
            q.unflatten(1, (-1, layer.key_dim)),
            k.unflatten(1, (-1, layer.key_dim)),
            v.unflatten(1, (-1, layer.value_dim)),
            self.decay,
            self.beta,
            *states,
        )
        return delta

    def close(self) -> None:
        release_pool(self.handle)


@torch.inference_mode()
def measure(layers: LinearLayers, step: StateStep, flush: Tensor, tb_s: float) -> dict[str, float]:
    """Microseconds of a layer by name."""
    measured = StateStepRun(layers, step)
    times = {
        name: microseconds(run, flush, 9) / len(layers.layers)
        for name, run in (("layer", measured.run_layers), ("states", measured.run_states))
    }
    measured.close()
    state_floor = layers.state_bytes(step) / tb_s / 1e6
    return times | {
        "state_floor": state_floor,
        "floor": state_floor + layers.weight_bytes() / tb_s / 1e6,
        "step_ms": times["layer"] * layers.count / 1e3,
    }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.states", description="times layers of linear attention"
    )
    parser.add_argument(
        "--model", default="benchmarks/shapes/qwen3.5-27b.json", help="a config.json"
    )
    parser.add_argument("--rows", nargs="*", type=int, default=(1, 64, 128), help="that generate")
    parser.add_argument("--prompts", nargs="*", type=int, default=(2048,), help="their tokens")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    return exit_status("benchmarks.states", lambda: run(options))


def run(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    layers = LinearLayers(Path(options.model))
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda")
    limits = ceilings(flush)
    report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, **limits}
    print(f"{report['gpu']}: copy {limits['copy_tb_s']:.2f} TB/s; {layers.count} linear layers")
    steps = [*(StateStep(rows=n) for n in options.rows)]
    steps += [StateStep(prompt=n) for n in options.prompts]
    print("step              states us   floor  of floor   layer us   floor  of floor  step ms")
    results = []
    for step in steps:
        row = measure(layers, step, flush, limits["copy_tb_s"])
        print(
            f"{step.name:16} {row['states']:10.1f} {row['state_floor']:7.1f} "
            f"{row['state_floor'] / row['states']:9.2f} {row['layer']:10.1f} {row['floor']:7.1f} "
            f"{row['floor'] / row['layer']:9.2f} {row['step_ms']:8.2f}",
            flush=True,
        )
        results.append({"step": step.name, **row})
    print(json.dumps({**report, "model": options.model, "results": results}))


if __name__ == "__main__":
    sys.exit(main())
