"""benchmarks.scheduler: the host's time for one step: planning, launching and applying it, on one
core. The device is one that only lays out what a GPU would read.

A scheduler is filled through normal operation with made-up samples: about 200,000 chunks known
(30,000 GPU slots, 170,000 HOST slots, all taken) and 256 seats. Two kinds of steps are then
measured, each planned before the previous one is applied, as in the serving loop:

    plain     every seat generates; sometimes chunks fill up, and chunks are copied out ahead of
              time
    joining   as plain, and a request with a prompt of a chunk joins
    heavy     nearly all seats generate while conversations return from HOST: at least 100 swap-ins,
              and 200 victims (GPU slots taken back and chunks copied out; HOST drops further chunks
              for them)
    heaviest  as heavy, and a prompt of 3,200 tokens joins in the same step
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import cast

import numpy as np
import torch

from pensieve.plugins.kv_forms.forms import Form
from pensieve.plugins.state.pool import StateShape
from pensieve.runtime.device.protocol import Device, ForwardPass, Ticket
from pensieve.runtime.executor import Executor
from pensieve.runtime.step.buffers import Shapes, StepBuffers
from pensieve.runtime.step.inputs import StepInputs
from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.kv.chunk_store import ChunkStore
from pensieve.scheduler.plan import Lane
from pensieve.scheduler.scheduler import Scheduler
from pensieve.scheduler.types import GREEDY, Request, RequestId, Sampling, Tier
from pensieve.scripts.simulation.models import MODELS, ModelShape

CHUNK_TOKENS = 32
HISTORY_CHUNKS = 50
LONG_PROMPT_TOKENS = 3200
PHASES = ("plan", "launch", "apply", "total")
STEP_S = 0.02  # on the scheduler's clock


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """The number of known chunks and of measured steps, and the definition of a heavy step."""

    gpu_chunks: int = 30_000
    host_chunks: int = 170_000
    seats: int = 256
    plain_steps: int = 500
    heavy_steps: int = 100
    swap_ins: int = 100
    victims: int = 200


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Seconds by phase, and the contents of the step."""

    seconds: tuple[float, float, float]
    joins: int
    generate: int
    tokens: int
    swap_ins: int
    taken_back: int
    copied_out: int
    dropped: int

    @property
    def victims(self) -> int:
        return self.taken_back + self.copied_out

    @property
    def total(self) -> float:
        return sum(self.seconds)


class ModelOfShape:
    """What an executor asks of an engine before its first step."""

    kv_dtype = torch.bfloat16

    def __init__(self, shape: ModelShape):
        self._shape = shape

    def kv_shape(self, slots: int, chunk_tokens: int) -> tuple[int, ...]:
        shape = self._shape
        return (slots, shape.layers, 2, shape.kv_heads, chunk_tokens, shape.head_dim)


class StagingDevice:
    """Lays out and copies the inputs of steps as a GPU's device does, in memory of the host, and
    computes nothing. Each sampled token is 1."""

    def allocate_pool(
        self,
        tier: Tier,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        form: Form | None = None,
        most: int = 0,
    ) -> None:
        """Has no pools."""

    def keep_states(self, slots: int, shape: StateShape) -> None:
        """Has no states."""

    def load(
        self, engine: ForwardPass, seats: int, blocks: int, gates: tuple[int, ...], most_tokens: int
    ) -> None:
        self._buffers = StepBuffers(Shapes(most_tokens, seats, CHUNK_TOKENS), "cpu")

    def copy(self, lane: Lane, sources: np.ndarray, targets: np.ndarray, layers: range) -> None:
        """Copies nothing."""

    def mark(self, lane: Lane, gate: int | None = None) -> Ticket:
        return Ticket()

    def wait(self, lane: Lane, ticket: Ticket) -> None:
        """All work is complete at once."""

    def ready(self, ticket: Ticket) -> bool:
        return True

    def synchronize(self, ticket: Ticket) -> None:
        """All work is complete at once."""

    def upload(self, inputs: StepInputs) -> None:
        self._buffers.upload(inputs)
        self._rows = len(inputs.sample_seats)

    def run(self) -> None:
        """Computes nothing."""

    def sample(self) -> tuple[Ticket, np.ndarray, None]:
        return Ticket(), np.ones(self._rows, np.int32), None


class FilledScheduler:
    def __init__(
        self,
        load: SchedulerLoad,
        sampling: Sampling = GREEDY,
        make_store: Callable[..., ChunkStore] = ChunkStore,
    ):
        """`sampling`: of the rows that generate throughout. `make_store`: as in `Scheduler`."""
        self.load = load
        shape = MODELS["llama-3-8b"]
        cost = shape.cost(
            CHUNK_TOKENS, 16_384, flops_per_s=500e12, memory_bytes_per_s=4e12, link_bytes_per_s=50e9
        )
        config = SchedulerConfig(
            gpu_kv_chunks=load.gpu_chunks,
            host_kv_chunks=load.host_chunks,
            max_model_len=16_384,
            max_num_seqs=load.seats,
            max_num_batched_tokens=8192,
            max_queue=4096,
            conversation_ttl=inf,
        )
        self.scheduler = Scheduler(config, cost, make_store)
        self.executor = Executor(
            cast(Device, StagingDevice()), cast(ForwardPass, ModelOfShape(shape)), config
        )
        self.sampling = sampling
        self.random = random.Random(1)
        self.now = 0.0
        self.requests = 0
        self.conversations = 0
        self.returning = 0
        self._launched = False

    # -- requests

    def add(
        self, conversation: str, prompt: array[int], max_tokens: int, sampling: Sampling = GREEDY
    ) -> None:
        self.requests += 1
        request = Request(
            RequestId(self.requests), prompt, max_tokens, conversation, sampling=sampling
        )
        self.scheduler.add(request, self.now)

    def add_new(self, tokens: int, max_tokens: int, sampling: Sampling = GREEDY) -> None:
        self.conversations += 1
        prompt = array("i", array("H", self.random.randbytes(2 * tokens)))
        self.add(f"c{self.conversations}", prompt, max_tokens, sampling)

    def add_returning(self) -> None:
        """The next conversation in the order of their ages writes a few tokens."""
        self.returning += 1
        name = f"c{self.returning}"
        self.add(name, self.scheduler.conversations.tokens(name) + array("i", range(8)), 1)

    # -- steps

    def step(self) -> MeasuredStep | None:
        """Plans and launches one step, then applies the one before it."""
        self.now += STEP_S
        before = self.scheduler.stats()
        start = time.perf_counter()
        plan = self.scheduler.next_plan(self.now)
        planned = time.perf_counter()
        after = self.scheduler.stats()
        launching = time.perf_counter()
        if plan is not None:
            self.executor.launch(plan)
        launched = time.perf_counter()
        self.end_step()
        applied = time.perf_counter()
        self._launched = plan is not None
        if plan is None:
            return None
        slots_given = sum(len(update.slots) for update in plan.blocks)
        return MeasuredStep(
            seconds=(planned - start, launched - launching, applied - launched),
            joins=len(plan.joins),
            generate=len(plan.generate),
            tokens=plan.tokens,
            swap_ins=after.swapped_in - before.swapped_in,
            taken_back=slots_given + after.slots["gpu"]["free"] - before.slots["gpu"]["free"],
            copied_out=after.swapped_out - before.swapped_out,
            dropped=after.dropped - before.dropped,
        )

    def end_step(self) -> None:
        """Applies the step in flight, if there is one."""
        if self._launched:
            self.scheduler.apply(self.executor.wait(), self.now)
            self._launched = False

    def fill(self) -> None:
        """Conversations of equal length until both tiers are full, then a long reply begins in
        nearly every seat."""
        filled = self.load.gpu_chunks + self.load.host_chunks
        while self.conversations * HISTORY_CHUNKS < filled:
            for _ in range(4):
                self.add_new(HISTORY_CHUNKS * CHUNK_TOKENS, 1)
            self.step()
        self.drain()
        # in the middle of the ages: neither dropped nor still on the GPU
        self.returning = self.conversations // 4
        for _ in range(self.load.seats - 4):
            self.add_new(self.random.randrange(200, 1200), 10_000, self.sampling)
        while self.scheduler.stats().waiting:
            self.step()

    def drain(self) -> None:
        while not self.scheduler.idle:
            self.step()

    def plain(self) -> list[MeasuredStep]:
        return [step for _ in range(self.load.plain_steps) if (step := self.step())]

    def joining(self) -> list[MeasuredStep]:
        """A short prompt joins in each step."""
        steps: list[MeasuredStep] = []
        while len(steps) < self.load.heavy_steps:
            self.add_new(CHUNK_TOKENS, 1, self.sampling)
            step = self.step()
            if step and step.joins:
                steps.append(step)
        return steps

    def heavy(self, prompt_tokens: int) -> list[MeasuredStep]:
        """Two conversations return and a prompt joins in one step; the lighter steps that follow
        are left out."""
        load = self.load
        steps: list[MeasuredStep] = []
        while len(steps) < load.heavy_steps:
            for _ in range(2):
                self.add_returning()
            self.add_new(prompt_tokens, 1)
            for _ in range(3):
                step = self.step()
                if step and step.swap_ins >= load.swap_ins and step.victims >= load.victims:
                    steps.append(step)
        return steps


def summary(steps: Sequence[MeasuredStep]) -> dict[str, float]:
    """Median and 99th percentile by phase, milliseconds; means of the steps' contents."""
    rows = [(*step.seconds, step.total) for step in steps]
    figures: dict[str, float] = {"steps": len(steps)}
    for name, column in zip(PHASES, zip(*rows, strict=True), strict=True):
        figures[f"{name}_ms_p50"] = round(1e3 * statistics.median(column), 4)
        figures[f"{name}_ms_p99"] = round(1e3 * statistics.quantiles(column, n=100)[98], 4)
    for name in ("generate", "tokens", "swap_ins", "taken_back", "copied_out", "dropped"):
        figures[name] = round(statistics.fmean(getattr(step, name) for step in steps), 1)
    return figures


def show(title: str, figures: dict[str, float]) -> None:
    print(
        f"{title}: {figures['steps']} steps, on average {figures['generate']} generating, "
        f"{figures['tokens']} tokens, "
        f"{figures['swap_ins']} swapped in, {figures['taken_back']} GPU slots taken back, "
        f"{figures['copied_out']} copied out, {figures['dropped']} dropped"
    )
    for name in PHASES:
        print(
            f"  {name:<6} p50 {figures[f'{name}_ms_p50']:7.3f} ms   p99 "
            f"{figures[f'{name}_ms_p99']:7.3f} ms"
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.scheduler", description="Host time of a step: plan, launch, apply."
    )
    parser.add_argument(
        "--plain-steps", type=int, default=500, metavar="N", help="default %(default)s"
    )
    parser.add_argument(
        "--heavy-steps", type=int, default=100, metavar="N", help="default %(default)s"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="of the rows that generate throughout; above 0 with top-p 0.9 (default %(default)s)",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="print where the time goes (and measure slower steps)",
    )
    args = parser.parse_args(argv)

    sampling = Sampling(args.temperature, top_p=0.9) if args.temperature else GREEDY
    bench = FilledScheduler(
        SchedulerLoad(plain_steps=args.plain_steps, heavy_steps=args.heavy_steps), sampling
    )
    start = time.perf_counter()
    bench.fill()
    slots = bench.scheduler.stats().slots
    print(f"filled in {time.perf_counter() - start:.1f} s; {slots}")
    gc.collect()
    gc.freeze()  # later collections examine the steps' objects only, not the filled scheduler

    results = {}
    kinds = {
        "plain": bench.plain,
        "joining": bench.joining,
        "heavy": lambda: bench.heavy(CHUNK_TOKENS),
        "heaviest": lambda: bench.heavy(LONG_PROMPT_TOKENS),
    }
    for title, measure in kinds.items():
        profiler = cProfile.Profile()
        if args.profile:
            profiler.enable()
        steps = measure()
        profiler.disable()
        results[title] = summary(steps)
        show(title, results[title])
        if args.profile:
            pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    print(json.dumps({"bench": "scheduler", **results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
