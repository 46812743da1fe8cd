"""benchmarks.drafts: output tokens/s with and without `--speculate lookup` on recorded replies.

    python -m benchmarks.drafts --data FILE --tokenizer tokenizer.json --profile PROFILE
    python -m benchmarks.drafts --data FILE --tokenizer tokenizer.json --engine DIR --device cuda

Each row plays conversations of the file, one after the other, turn by turn. The steps are those of
the serving loop. Each sampled token is replaced by the recorded one, so what a step computes is
computed as usual, and what comes true is what the recorded model would have said.

With --engine the forward passes run on a device, with --profile alone on the simulator's virtual
one: a step takes what the profile says, and the host --host-ms and --host-us-per-row to apply a
result, plan and launch. While a step runs the host's time is hidden; between two steps it is not.

Texts: `recorded`, and `misleading`, in which no draft ever comes true: each token of a reply is
another one than prompt lookup proposes at that place.

One JSON line for each number of rows, text and setting; measured from the moment at which every row
has begun to generate until `--tokens` tokens a row are generated:

    output_tokens_per_s, ms_per_step, tokens_per_step    of all rows together
    checks, drafted_per_check, accepted_per_check        a check: one row's drafts in one step
    p50_ms, p99_ms   from one result of a row to its next, each with a token or more
    gain             output tokens/s by those without drafts
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from pensieve.runtime.launch.assemble import make_device
from pensieve.runtime.loop import EngineLoop, StepExecutor
from pensieve.scheduler.config import SPARE_STATES, SchedulerConfig, StateConfig
from pensieve.scheduler.cost import CostProfile
from pensieve.scheduler.plan import StepPlan, StepResult
from pensieve.scheduler.scheduler import Scheduler
from pensieve.scheduler.sim.simulator import VirtualDevice
from pensieve.scheduler.turns.drafts import SEARCHED, propose
from pensieve.scheduler.types import Applied, Request, RequestId, SettingError
from pensieve.scripts.command import check_least, exit_status
from pensieve.scripts.simulation.models import read_profile

from .check.drafts import replies, sampled_positions
from .clients import load_encode

SPARE = 1.1  # GPU chunks by those of the rows' longest contexts
HELD_STATES = 4  # of each row, on HOST
PROFILE_SECONDS = 0.1  # for each of some 50 points
TEXTS = ("recorded", "misleading")


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    prompt: array[int]
    reply: array[int]


Conversations = list[list[RecordedTurn]]
Clock = Callable[[], float]


def load(path: Path, encode: Callable[[str], Sequence[int]], longest: int) -> Conversations:
    """The turns of each conversation whose contexts, with the reply, have at most `longest`
    tokens; conversations without such a turn are left out."""
    conversations: Conversations = []
    before = array("i")
    for prompt, reply in replies(path, encode, None):
        if not conversations or prompt[: len(before)] != before:
            conversations.append([])
        before = prompt
        if len(prompt) + len(reply) <= longest:
            conversations[-1].append(RecordedTurn(prompt, reply))
    return [turns for turns in conversations if turns]


def misled(conversations: Conversations) -> Conversations:
    """The same lengths, but no token of a reply is what prompt lookup proposes for it."""
    return [list(_misled(turns)) for turns in conversations]


def _misled(turns: Sequence[RecordedTurn]) -> Iterator[RecordedTurn]:
    own = array("i")  # the conversation, with its new replies
    taken = 0  # tokens of the recorded conversation that it stands for
    for turn in turns:
        own += turn.prompt[taken:]
        last = turn.prompt[-1]
        words = last, next((token for token in reversed(turn.prompt) if token != last), last ^ 1)
        text = "".join(map(chr, own[-SEARCHED:]))
        prompt = own[:]
        for _ in turn.reply:
            expected = propose(text)[:1]
            text = (text + chr(words[0] if chr(words[0]) != expected else words[1]))[-SEARCHED:]
            own.append(ord(text[-1]))
        yield RecordedTurn(prompt, own[len(prompt) :])
        taken = len(turn.prompt) + len(turn.reply)


class VirtualClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class VirtualExecutor:
    """The simulator's device behind the loop, on a virtual clock. A launch takes all of the host's
    time in a pass of the loop."""

    def __init__(
        self, cost: CostProfile, clock: VirtualClock, host_s: float, host_s_per_row: float
    ):
        self._device = VirtualDevice(cost)
        self._clock = clock
        self._host_s = host_s
        self._host_s_per_row = host_s_per_row
        self._launched = deque[tuple[StepPlan, float]]()

    def launch(self, plan: StepPlan) -> None:
        rows = len(plan.generate) + len(plan.spans)
        self._clock.now += self._host_s + rows * self._host_s_per_row
        self._launched.append((plan, self._device.launch(plan, self._clock.now)))

    def wait(self) -> StepResult:
        plan, end = self._launched.popleft()
        self._clock.now = max(self._clock.now, end)
        completed, lower = self._device.reports(self._clock.now)
        tokens = (0,) * len(plan.samples)
        return StepResult(plan.step, plan.samples, tokens, completed, lower)

    def done(self) -> bool:
        return bool(self._launched) and self._launched[0][1] <= self._clock.now

    def close(self) -> None:
        """As the other executor's."""


class Closable(StepExecutor, Protocol):
    def close(self) -> None: ...


class Replayed:
    """The loop's executor: `inner` computes, and the recorded tokens are the samples."""

    def __init__(self, inner: StepExecutor):
        self._inner = inner
        self._plans = deque[StepPlan]()
        self.texts: dict[RequestId, array[int]] = {}  # prompt and reply
        self.steps = 0  # that are done, with tokens

    def launch(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self._inner.launch(plan)

    def wait(self) -> StepResult:
        result = self._inner.wait()
        plan = self._plans.popleft()
        self.steps += bool(plan.tokens)
        tokens = tuple(
            self.texts[row.request][position]
            for row, position in zip(plan.samples, sampled_positions(plan), strict=True)
        )
        return replace(result, tokens=tokens)

    def done(self) -> bool:
        return self._inner.done()


class Counted:
    """The counts so far: time, steps, tokens, and the scheduler's of drafts."""

    def __init__(self, now: float, steps: int, tokens: int, scheduler: Scheduler):
        stats = scheduler.stats()
        self.seconds = now
        self.steps = steps
        self.tokens = tokens
        self.drafts, self.drafted, self.accepted = stats.drafts, stats.drafted, stats.accepted

    def since(self, begin: Counted) -> dict[str, float]:
        seconds, steps, tokens = (
            self.seconds - begin.seconds,
            self.steps - begin.steps,
            self.tokens - begin.tokens,
        )
        checks = self.drafts - begin.drafts
        return {
            "output_tokens_per_s": round(tokens / seconds, 1),
            "ms_per_step": round(1e3 * seconds / steps, 3),
            "tokens_per_step": round(tokens / steps, 2),
            "checks": checks,
            "drafted_per_check": round((self.drafted - begin.drafted) / max(1, checks), 2),
            "accepted_per_check": round((self.accepted - begin.accepted) / max(1, checks), 2),
        }


class ReplayedRows:
    """`rows` rows, each with one request at any time."""

    def __init__(
        self, conversations: Conversations, rows: int, loop: EngineLoop, executor: Replayed
    ):
        self._conversations = conversations
        self._rows = rows
        self._loop = loop
        self._executor = executor
        self._turns = [self._turns_of(row) for row in range(rows)]
        self._row_of: dict[RequestId, int] = {}
        self._begun: set[int] = set()
        self._ids = self._tokens = 0
        self._last: dict[RequestId, float] = {}  # the time of its last result
        self._gaps = array("d")

    def run(self, tokens: int) -> dict[str, float]:
        """Counts `tokens` tokens a row, then aborts what is left."""
        for row in range(self._rows):
            self._next(row)
        self._until(lambda: len(self._begun) == self._rows)
        begin = self._count()
        self._gaps = array("d")
        self._until(lambda: self._tokens - begin.tokens >= tokens * self._rows)
        counted = self._count().since(begin)
        gaps = sorted(self._gaps)
        for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99)):
            counted[name] = round(1e3 * gaps[int(share * (len(gaps) - 1))], 2)
        scheduler = self._loop.scheduler
        for request in scheduler.open_requests():
            scheduler.abort(request, self._loop.clock())
        while not scheduler.idle:
            self._loop.step()
        return counted

    def _turns_of(self, row: int) -> Iterator[RecordedTurn]:
        number = row
        while True:
            yield from self._conversations[number % len(self._conversations)]
            number += 1

    def _next(self, row: int) -> None:
        turn = next(self._turns[row])
        self._ids += 1
        request = RequestId(self._ids)
        self._row_of[request] = row
        self._executor.texts[request] = turn.prompt + turn.reply
        # rows that play the same conversation share no KV
        message = Request(request, turn.prompt, len(turn.reply), salt=b"%d" % row)
        self._loop.scheduler.add(message, self._loop.clock())

    def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            applied = self._loop.step()
            if applied is not None:
                self._take(applied)

    def _take(self, applied: Applied) -> None:
        now = self._loop.clock()
        for result in applied.results():
            if result.error is not None:
                raise result.error
            row = self._row_of[result.request]
            self._tokens += len(result.tokens)
            if result.tokens:
                self._begun.add(row)
                if result.request in self._last:
                    self._gaps.append(now - self._last[result.request])
                self._last[result.request] = now
            if result.finish is not None:
                self._last.pop(result.request, None)
                del self._executor.texts[result.request]
                self._next(row)

    def _count(self) -> Counted:
        loop = self._loop
        return Counted(loop.clock(), self._executor.steps, self._tokens, loop.scheduler)


def config_for(
    args: argparse.Namespace, chunk_tokens: int, states: StateConfig | None
) -> SchedulerConfig:
    """The same pools for all runs: those of the most rows. HOST has room for states only."""
    chunks = -(-args.context // chunk_tokens) * max(args.rows)
    return SchedulerConfig(
        gpu_kv_chunks=int(SPARE * chunks) + args.max_num_seqs,
        host_kv_chunks=0 if states is None else HELD_STATES * max(args.rows) * states.chunks,
        max_model_len=args.context,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        chunk_tokens=chunk_tokens,
        generation_reserve=0.0,
        states=states,
    )


class Simulated:
    """Makes executors of the virtual device."""

    def __init__(self, args: argparse.Namespace):
        self.cost, _ = read_profile(args.profile)
        states = None
        if args.state_chunks:
            states = StateConfig(args.state_chunks, args.max_num_seqs + SPARE_STATES)
        self.config = config_for(args, self.cost.chunk_tokens, states)
        self.vocab_size = sys.maxunicode
        self._host = 1e-3 * args.host_ms, 1e-6 * args.host_us_per_row

    def executor(self, _: SchedulerConfig) -> tuple[Closable, Clock]:
        clock = VirtualClock()
        return VirtualExecutor(self.cost, clock, *self._host), clock

    def close(self) -> None:
        """Nothing is open."""


class Real:
    """Makes executors of an engine on one device."""

    def __init__(self, args: argparse.Namespace):
        from pensieve.runtime.engine import open_engine
        from pensieve.runtime.launch.sizing import estimated_cost
        from pensieve.runtime.measure.profile import profile_engine
        from pensieve.runtime.measure.step_bench import StepBench

        from . import loop

        self._engine = open_engine(args.engine, args.device)
        self.vocab_size = self._engine.vocab_size
        size = args.chunk_tokens
        shape = self._engine.state_shape
        states = None
        if shape is not None:
            record = self._engine.chunk_bytes(size)
            states = StateConfig.of_size(shape.nbytes, record, size, args.max_num_seqs)
        self.config = config = config_for(args, size, states)
        if args.profile is not None:
            self.cost, _ = read_profile(args.profile)
        elif states is not None:
            self.cost = estimated_cost(self._engine, config)
        else:
            seats = max(config.max_num_seqs, config.max_num_batched_tokens // config.chunk_tokens)
            needed = seats + config.chunks(config.max_model_len)
            pools = replace(
                config, gpu_kv_chunks=max(needed, config.gpu_kv_chunks), host_kv_chunks=64
            )
            device = make_device(args.device)
            with StepBench(device, self._engine, pools, PROFILE_SECONDS) as bench:
                self.cost = profile_engine(bench, self._engine, lambda _: None).cost
        self._device = loop.make_device(args.device)

    def executor(self, config: SchedulerConfig) -> tuple[Closable, Clock]:
        from pensieve.runtime.executor import Executor

        states = self._engine.state_shape
        return Executor(self._device, self._engine, config, states=states), time.monotonic

    def close(self) -> None:
        self._device.end()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="drafts", description=__doc__.partition("\n")[0])
    option = parser.add_argument
    option("--data", type=Path, required=True, metavar="FILE", help="conversations, one a line")
    option("--tokenizer", required=True, metavar="FILE", help="a model's tokenizer.json")
    option(
        "--profile",
        type=Path,
        metavar="FILE",
        help="costs of steps (default: measured, or estimated if there are states)",
    )
    option("--engine", type=Path, metavar="DIR", help="(default: simulated)")
    option("--device", default="cpu", choices=("cpu", "cuda"), help="(default %(default)s)")
    option("--rows", type=int, nargs="+", default=[1, 8, 32, 64], help="(default 1 8 32 64)")
    option("--tokens", type=int, default=500, help="counted, a row (default %(default)s)")
    option(
        "--context", type=int, default=8192, help="the longest that is played (default %(default)s)"
    )
    option("--texts", nargs="+", default=list(TEXTS), choices=TEXTS)
    option("--max-num-seqs", type=int, default=256, help="(default %(default)s)")
    option("--max-num-batched-tokens", type=int, default=1024, help="(default %(default)s)")
    option(
        "--state-chunks",
        type=int,
        metavar="N",
        help="simulated: chunks of KV in the bytes of a recurrent state (default: it has none)",
    )
    option("--chunk-tokens", type=int, default=32, help="of --engine (default %(default)s)")
    option(
        "--host-ms",
        type=float,
        default=1.1,
        help="simulated: a step's work on the host (default %(default)s)",
    )
    option("--host-us-per-row", type=float, default=8.0, help="(default %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return exit_status("drafts", lambda: run(args, partial(print, flush=True)))


def run(args: argparse.Namespace, say: Callable[[str], Any]) -> None:
    check_least(args, tokens=1, context=64)
    if min(args.rows) < 1 or max(args.rows) > args.max_num_seqs:
        raise SettingError("--rows", f"must be 1 to --max-num-seqs ({args.max_num_seqs})")
    if args.engine is None and args.profile is None:
        raise SettingError("--profile", "is needed without --engine")
    if not Path(args.tokenizer).is_file():
        raise SettingError("--tokenizer", f"there is no file {args.tokenizer}")
    machine = Simulated(args) if args.engine is None else Real(args)
    try:
        encode = load_encode(args.tokenizer)
        assert encode is not None  # as there is a path
        size = machine.vocab_size
        recorded = load(args.data, lambda text: [i % size for i in encode(text)], args.context)
        if not recorded:
            raise SettingError("--context", f"no reply ends within {args.context} tokens")
        for text in args.texts:
            conversations = recorded if text == "recorded" else misled(recorded)
            for rows in args.rows:
                without = 0.0
                for speculate in ("off", "lookup"):
                    config = replace(machine.config, speculate=speculate)
                    counted = play(machine, config, conversations, rows, args.tokens)
                    speed = counted["output_tokens_per_s"]
                    line = {
                        "bench": "drafts",
                        "simulated": args.engine is None,
                        "text": text,
                        "rows": rows,
                        "speculate": speculate,
                        **counted,
                    }
                    without = without or speed
                    say(json.dumps(line | {"gain": round(speed / without, 3)}))
    finally:
        machine.close()


def play(
    machine: Simulated | Real,
    config: SchedulerConfig,
    conversations: Conversations,
    rows: int,
    tokens: int,
) -> dict[str, float]:
    inner, clock = machine.executor(config)
    try:
        executor = Replayed(inner)
        loop = EngineLoop(Scheduler(config, machine.cost), executor, clock=clock)
        return ReplayedRows(conversations, rows, loop, executor).run(tokens)
    finally:
        inner.close()


if __name__ == "__main__":
    sys.exit(main())
