"""What tokens of a prompt add to a step of generating rows, and which kernels they add it to.

    python scripts/experiments/mixed_steps.py --engine DIR [--rows 80] [--context 1135] [--tokens 0 38 150 300]

Steps through the executor, as the service has them. Each count of new tokens, at the end of a prompt of `--context`
tokens, is timed beside the rows, then traced: microseconds a layer in which some kernel of a kind ran (kernels of one
kind may run at once), and in which none ran. Prints a table and a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pensieve.runtime.device.cuda import CudaDevice
from pensieve.runtime.engine import open_engine
from pensieve.runtime.measure.step_bench import StepBench
from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.plan import Span, StepPlan

TRACED = 5  # steps
OURS = {"_attend": "attention", "_write_kv": "write_kv", "_norm": "norms", "_silu_gate": "gate"}
PRODUCTS = ("gemm", "nvjet", "cutlass", "splitk")
Interval = tuple[float, float]


class Steps(StepBench):
    def mixed(self, rows: int, context: int, tokens: int) -> StepPlan:
        """`rows` generate at their context; the last `tokens` of another one are known and not computed yet."""
        self._seat([context] * (rows + 1))
        plan = self._generate([context - 1] * rows)
        if not tokens:
            return plan
        known = self._spans([Span(rows, context - tokens, context, context - tokens, True)])
        return replace(plan, spans=known.spans, token_ids=known.token_ids, samples=plan.samples + known.samples)

    def milliseconds(self, plan: StepPlan) -> float:
        return 1e3 * self._step_seconds(plan)

    def kernels(self, plan: StepPlan) -> dict[str, list[Interval]]:
        """Of a few steps one behind the other, by kind, microseconds."""
        self._step_times(plan, 1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            self._step_times(plan, TRACED - 1)  # and the one in flight
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            trace.export_chrome_trace(str(file))
            return by_kind(json.loads(file.read_text())["traceEvents"])


def by_kind(events: Iterable[dict[str, Any]]) -> dict[str, list[Interval]]:
    """The kernels of a Chrome trace; attention's by the threads of a program and the number of programs, its tiles'."""
    found: defaultdict[str, list[Interval]] = defaultdict(list)
    for event in events:
        if event.get("cat") != "kernel":
            continue
        name = event["name"]
        kind = next((kind for part, kind in OURS.items() if part in name), None)
        if kind is None:
            kind = "products" if any(part in name.lower() for part in PRODUCTS) else "others"
        interval = (event["ts"], event["ts"] + event["dur"])
        found[kind].append(interval)
        if kind == "attention":
            found[f"{kind} {event['args']['grid'][0]} x {event['args']['block'][0]}"].append(interval)
    return found


def covered(intervals: Iterable[Interval]) -> float:
    """How long at least one of them lasted."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[80])
    parser.add_argument("--context", type=int, default=1135)
    parser.add_argument("--tokens", type=int, nargs="+", default=[0, 38, 150, 300])
    args = parser.parse_args()
    engine = open_engine(args.engine, "cuda")
    rows, layers = max(args.rows), engine.manifest.layers
    chunks = (rows + 2) * (-(-args.context // 32) + 2) + 1024 // 32
    config = SchedulerConfig(
        gpu_kv_chunks=2 * chunks, host_kv_chunks=64, max_model_len=2 * args.context, max_num_seqs=max(rows + 1, 64)
    )
    report = []
    with Steps(CudaDevice(), engine, config, seconds=0.5) as bench:
        for count in args.rows:
            for tokens in args.tokens:
                plan = bench.mixed(count, args.context, tokens)
                took, kinds = bench.milliseconds(plan), bench.kernels(plan)
                every = [interval for kind in kinds.values() for interval in kind]
                share = 1 / TRACED / layers
                spent = {kind: round(covered(found) * share, 2) for kind, found in sorted(kinds.items())}
                spent["none"] = round((max(end for _, end in every) - min(every)[0] - covered(every)) * share, 2)
                print(f"{count} rows, {tokens} tokens: {took:.2f} ms; us a layer:", flush=True)
                print(*(f"    {kind:24} {time:8.2f}" for kind, time in spent.items()), sep="\n", flush=True)
                report.append({"rows": count, "tokens": tokens, "ms": took, "us_a_layer": spent})
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "context": args.context}
    print(json.dumps({"bench": "mixed_steps", **about, "steps": report}))


if __name__ == "__main__":
    main()
