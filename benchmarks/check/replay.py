"""replay: compares a real run with a simulated one of the same conversations, by the sources of
prompts' tokens.

    python -m benchmarks.check.replay

CachedAttention's workload in small: an eighth of its lengths, think times of seconds, and tiers
whose ratio to the working set is about that of its GPUs, 128 GB of host memory and 2 TB of disk
(`paper`). The real run is the serving loop without HTTP: scheduler, executor, CPU device and disk
store. The simulator gets the same sessions and settings, and the costs of steps, copies and the
disk on this machine. These are measured just before. Each step's cost is raised by the mean excess
in the real run, where the loop and others share the machine. Exit status 1 if the two differ by
more than 3 points.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from pensieve.builder.build import build_random_engine
from pensieve.runtime.device.cpu import CpuDevice
from pensieve.runtime.disk.speed import measure_disk
from pensieve.runtime.disk.store import DiskSettings
from pensieve.runtime.engine import Engine, open_engine
from pensieve.runtime.executor import Executor
from pensieve.runtime.loop import EngineLoop
from pensieve.runtime.measure.profile import profile_engine
from pensieve.runtime.measure.step_bench import StepBench
from pensieve.scheduler.config import EVICTION_POLICIES, SchedulerConfig
from pensieve.scheduler.context_window import KEEP
from pensieve.scheduler.cost import CostProfile
from pensieve.scheduler.plan import StepPlan, StepResult
from pensieve.scheduler.sim.simulator import Content, Report, Session, Simulator, VirtualDevice
from pensieve.scheduler.types import SettingError, Usage
from pensieve.scripts.command import check_above_0, check_least, exit_status
from pensieve.scripts.simulation.traces import ChatStatistics, synthetic

CHAT = ChatStatistics(turns=5.75, input_tokens=20.2, output_tokens=42.2)
WINDOW, CHUNK_TOKENS = 512, 16
TTL_THINKS = 12  # a conversation's KV lives this many mean think times, as in `paper`
WITHIN = 3.0  # points
SMALL_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2 * WINDOW,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
PROFILE_SECONDS = 0.02  # for each of some 50 points


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="replay", description=__doc__.partition("\n")[0])
    option = parser.add_argument
    option("--engine", type=Path, metavar="DIR", help="(default: a small model of random weights)")
    option("--sessions", type=int, default=30, metavar="N", help="(default %(default)s)")
    option(
        "--sessions-per-s", type=float, default=0.5, metavar="RATE", help="(default %(default)s)"
    )
    option("--think-s", type=float, default=8.0, metavar="S", help="mean (default %(default)s)")
    option(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of starts, lengths and tokens (default %(default)s)",
    )
    option(
        "--gpu-kv-chunks",
        type=int,
        default=96,
        metavar="N",
        help="of 16 tokens (default %(default)s)",
    )
    option("--host-kv-chunks", type=int, default=96, metavar="N", help="(default %(default)s)")
    option("--disk-kv-chunks", type=int, default=400, metavar="N", help="(default %(default)s)")
    option("--eviction", choices=EVICTION_POLICIES, default="lru", help="(default %(default)s)")
    option("--json", action="store_true", help="one JSON line instead of the table")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    torch.set_num_threads(1)  # so that measurement and serving compute alike
    return exit_status("replay", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    real, simulated = replay(args)
    apart = max(
        abs(a - b) for a, b in zip(shares(real.usage), shares(simulated.usage), strict=True)
    )
    if args.json:
        print(
            json.dumps(
                {
                    "bench": "replay",
                    "real": asdict(real),
                    "simulated": asdict(simulated),
                    "points": apart,
                }
            )
        )
    else:
        print(f"{real.requests} turns; of their prompts' tokens, %")
        print(
            f"{'':10}"
            + "".join(f"{field.name:>11}" for field in fields(Usage))
            + f"{'hit %':>9}{'TTFT ms':>9}"
        )
        for name, report in (("real", real), ("simulated", simulated)):
            cells = "".join(f"{share:11.1f}" for share in shares(report.usage))
            print(f"{name:10}{cells}{100 * report.hit_rate:9.1f}{1e3 * report.ttft_p50:9.1f}")
        print(f"at most {apart:.1f} points apart")
    return int(apart > WITHIN)


def shares(usage: Usage) -> tuple[float, ...]:
    """Percent of the prompts' tokens, in the order of the fields."""
    counts = [getattr(usage, field.name) for field in fields(Usage)]
    return tuple(100 * count / sum(counts) for count in counts)


def replay(args: argparse.Namespace) -> tuple[Report, Report]:
    """The real run and the simulated one. Raises SettingError."""
    check_least(args, sessions=1)
    check_above_0(args, ("sessions_per_s", "think_s"))
    sessions = synthetic(
        CHAT,
        conversations=args.sessions,
        sessions_per_s=args.sessions_per_s,
        think_s=args.think_s,
        seed=args.seed,
    )
    config = SchedulerConfig(
        gpu_kv_chunks=args.gpu_kv_chunks,
        host_kv_chunks=args.host_kv_chunks,
        disk_kv_chunks=args.disk_kv_chunks,
        max_model_len=WINDOW,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        chunk_tokens=CHUNK_TOKENS,
        eviction=args.eviction,
        conversation_ttl=TTL_THINKS * args.think_s,
        overflow=KEEP,
    )
    with tempfile.TemporaryDirectory() as folder:
        engine = open_engine(args.engine or small_engine(Path(folder)), "cpu")
        cost = measured_cost(engine, config, Path(folder))
        disk = DiskSettings(Path(folder) / "kv", config.disk_kv_chunks, engine.manifest.fingerprint)
        executor = Executor(CpuDevice(), engine, config, disk=disk)
        try:
            run = Replay(config, cost, sessions, executor, engine.vocab_size)
            real = run.run()
        finally:
            executor.close()
    device = VirtualDevice(slowed(cost, run.delay_s))
    return real, Simulator(config, cost, sessions, device=device, truncate=True).run()


def small_engine(directory: Path) -> Path:
    (directory / "config.json").write_text(json.dumps(SMALL_MODEL))
    build_random_engine(directory / "config.json", directory / "engine")
    return directory / "engine"


def measured_cost(engine: Engine, config: SchedulerConfig, directory: Path) -> CostProfile:
    """Costs of steps and copies measured like `pensieve profile`, of the disk like `pensieve
    serve`."""
    pools: dict[str, Any] = dict(
        gpu_kv_chunks=2 * config.chunks(WINDOW) + config.gpu_kv_chunks,
        host_kv_chunks=64,
        disk_kv_chunks=0,
    )
    with StepBench(CpuDevice(), engine, replace(config, **pools), PROFILE_SECONDS) as bench:
        cost = profile_engine(bench, engine, lambda _: None).cost
    speed = measure_disk(directory, cost.chunk_bytes)
    if speed is None:
        raise SettingError("--disk-kv-chunks", f"{directory} takes no records")
    return replace(cost, disk_read_bytes_per_s=speed.read, disk_write_bytes_per_s=speed.write)


def slowed(cost: CostProfile, seconds: float) -> CostProfile:
    """Each step takes `seconds` seconds more (or less)."""
    return replace(
        cost, steps=tuple((tokens, max(0.0, took + seconds)) for tokens, took in cost.steps)
    )


class RandomContent(Content):
    """Token ids in the model's vocabulary."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self._vocab_size = vocab_size
        self._dice = random.Random(0)

    def fresh(self, count: int) -> array[int]:
        return array("i", (self._dice.randrange(self._vocab_size) for _ in range(count)))


class Replay(Simulator):
    """The same run on a real device, in real time: tokens are computed and sampled.

    The creator of the executor closes it. `busy_s` is the predicted time of the steps.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cost: CostProfile,
        sessions: Sequence[Session],
        executor: Executor,
        vocab_size: int,
    ):
        super().__init__(config, cost, sessions, truncate=True, content=RandomContent(vocab_size))
        self._executor = executor
        self._took = self._ended = self._began = 0.0

    @property
    def delay_s(self) -> float:
        """The mean difference between the real and the predicted seconds of a step."""
        return (self._took - self._device.busy_s) / self._steps

    def run(self) -> Report:
        scheduler = self.scheduler
        self._began = time.monotonic() - self.now

        def clock() -> float:
            self.now = time.monotonic() - self._began
            return self.now

        loop = EngineLoop(scheduler, self, clock=clock)
        while self._arrivals or not scheduler.idle:
            clock()
            while self._arrivals and self._arrivals[0][0] <= self.now:
                self._add(*heapq.heappop(self._arrivals))
            applied = loop.step()
            if applied is not None:
                self._take(applied)
            elif loop.idle:
                time.sleep(max(0.0, min(self._arrivals[0][0], scheduler.wake_at) - self.now))
        scheduler.check()
        return self._report()

    # -- the loop's executor: the real one, with the virtual device for the prediction

    def launch(self, plan: StepPlan) -> None:
        self._executor.launch(plan)
        self._device.launch(plan, self.now)
        self._launched.append((plan, self.now))

    def wait(self) -> StepResult:
        result = self._executor.wait()
        now = time.monotonic() - self._began
        done, launched = self._launched.popleft()
        if done.tokens:  # it began when it was launched, or when the step before it ended
            self._took += now - max(launched, self._ended)
            self._steps += 1
        self._ended = now
        return result

    def done(self) -> bool:
        return self._executor.done()


if __name__ == "__main__":
    sys.exit(main())
