"""bench_engine: a compiled engine's forward pass beside the reference's, on the CPU, without the time of attention.

    python -m pensieve.scripts.bench_engine [--checkpoint DIR --dtype float32]

Both engines are built from the checkpoint (default: the demo model), opened, and run in turns over the same batches:
one new token a request, or one prompt, of which medians are printed; then all steps of a chat load (`chat_steps`), each
once, of which the sums are. The time inside `write_kv` and `multi_token_attention`, which both call, is taken off. The
last line is JSON. With one thread it is the thread's own CPU time, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..builder.build import build_engine
from ..builder.checkpoints.hugging_face import DEMO_CHECKPOINT
from ..plugins.attention import reference as attention_reference
from ..plugins.torch_ops import register_pool
from ..runtime.engine import Engine, open_engine
from ..scheduler.types import SettingError
from .chat_steps import Part, chat_steps

CHUNK = 32
CONTEXT = 128  # tokens of a row that generates: short, as the time of attention is taken off, not its noise
BATCHES = {
    "1 row generates": [Part(1, CONTEXT)],
    "4 rows generate": [Part(1, CONTEXT)] * 4,
    "16 rows generate": [Part(1, CONTEXT)] * 16,
    "64 rows generate": [Part(1, CONTEXT)] * 64,
    "a prompt of 64": [Part(64, 64)],
    "a prompt of 512": [Part(512, 512)],
}
UNCOUNTED = 3


Clock = Callable[[], float]


class Spent:
    """Seconds of a clock inside the operations that every backend calls."""

    def __init__(self, clock: Clock) -> None:
        self.seconds, self.clock = 0.0, clock
        for name in ("write_kv", "multi_token_attention"):
            setattr(attention_reference, name, self._timed(getattr(attention_reference, name)))

    def _timed(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = self.clock()
            result = operation(*arguments)
            self.seconds += self.clock() - start
            return result

        return timed


class Row(NamedTuple):
    """Milliseconds a step: outside attention, and all of it."""

    batch: str
    reference: float
    inductor: float
    reference_total: float
    inductor_total: float

    @property
    def ratio(self) -> float:
        return self.reference / self.inductor


def arguments(requests: int, new: int, vocab: int, context: int = CONTEXT) -> list[torch.Tensor]:
    """Of `Engine.forward` but the pool: each request computes the end of its context, and samples at the last."""
    return arguments_of([Part(new, max(context, new))] * requests, vocab)


def arguments_of(parts: Sequence[Part], vocab: int) -> list[torch.Tensor]:
    """As `arguments`, each request its own part; chunks are those of the pool's first slots, in order."""
    blocks = [-(-part.context // CHUNK) for part in parts]
    table = torch.zeros(len(parts), max(blocks), dtype=torch.int64)
    positions, slots, segments, rows = [], [], [], []
    first, taken = 0, 0
    for seat, part in enumerate(parts):
        table[seat, : blocks[seat]] = torch.arange(taken, taken + blocks[seat])
        own = torch.arange(part.context - part.new, part.context)
        positions.append(own)
        slots.append(table[seat, own // CHUNK] * CHUNK + own % CHUNK)
        segments.append((first, part.new, 0, part.context, seat))
        first, taken = first + part.new, taken + blocks[seat]
        if part.samples:
            rows.append(first - 1)
    ids = torch.randint(vocab, (first,), generator=torch.Generator().manual_seed(0))
    made = (ids, torch.cat(positions), torch.cat(slots), torch.tensor(segments), table, torch.tensor(rows))
    return [part.int() for part in made]


class StepBench:
    """Both engines, over one pool of `slots` chunks; `step` runs one batch on each."""

    def __init__(self, engines: Sequence[Engine], slots: int, spent: Spent):
        self.engines, self.spent = engines, spent
        self.vocab = engines[0].manifest.vocab_size
        self.handle = register_pool(torch.zeros(engines[0].kv_shape(slots, CHUNK), dtype=engines[0].dtype))

    def step(self, batch: Sequence[torch.Tensor]) -> list[float]:
        """Milliseconds outside attention of each engine, then all of them."""
        arguments: list[Any] = [*batch, self.handle]
        outside, total = [], []
        for engine in self.engines:
            self.spent.seconds = 0.0
            start = self.spent.clock()
            engine.forward(*arguments)
            took = self.spent.clock() - start
            outside.append(1e3 * (took - self.spent.seconds))
            total.append(1e3 * took)
        return outside + total

    def batch(self, name: str, seconds: float) -> Row:
        """Medians of one of the BATCHES."""
        batch = arguments_of(BATCHES[name], self.vocab)
        times: list[list[float]] = []
        deadline = time.perf_counter() + seconds
        while len(times) < UNCOUNTED + 5 or time.perf_counter() < deadline:
            times.append(self.step(batch))
        return Row(name, *map(statistics.median, zip(*times[UNCOUNTED:], strict=True)))

    def chats(self, steps: Sequence[Sequence[Part]]) -> Row:
        """Means over the steps, each as it comes, so what the first of a shape costs is in them."""
        times = [self.step(arguments_of(step, self.vocab)) for step in steps]
        return Row(f"{len(steps)} steps of chats", *map(statistics.fmean, zip(*times, strict=True)))


def slots_of(parts: Sequence[Part]) -> int:
    return sum(-(-part.context // CHUNK) for part in parts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench_engine", description="a compiled forward pass beside the reference's")
    parser.add_argument("--checkpoint", type=Path, default=DEMO_CHECKPOINT, metavar="DIR")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="a batch (default %(default)s)")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as directory:
        try:
            engines = []
            for backend in ("reference", "inductor"):
                build_engine(args.checkpoint, Path(directory) / backend, backend, args.dtype)
                engines.append(open_engine(Path(directory) / backend))
        except SettingError as error:
            print(f"bench_engine: {error}", file=sys.stderr)
            return 2
        steps = chat_steps()
        slots = max(slots_of(parts) for parts in (*BATCHES.values(), *steps))
        bench = StepBench(engines, slots, Spent(time.thread_time if args.threads == 1 else time.perf_counter))
        rows = [bench.batch(name, args.seconds) for name in BATCHES]
        rows.append(bench.chats(steps))
    print("| batch | reference, ms | inductor, ms | ratio | with attention: reference | inductor |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        numbers = (row.reference, row.inductor, row.ratio, row.reference_total, row.inductor_total)
        print(f"| {row.batch} | " + " | ".join(f"{number:.2f}" for number in numbers) + " |")
    print(json.dumps({"dtype": args.dtype, "threads": args.threads, "rows": [row._asdict() for row in rows]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
