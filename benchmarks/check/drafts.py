"""drafts: counts what `--speculate lookup` gives on recorded conversations, without a model.

    python -m benchmarks.check.drafts tokenizer.json FILE...

The scheduler generates each reply of the files again, alone, and the recorded tokens are its
samples. It decides for steps of an 8B model and without a pause between two of them, so it drafts
wherever that saves a step. `benchmarks.drafts` counts time. A file has one conversation a line:
`messages: [{role, content}]`; it may be gzipped. Messages are encoded one by one, without a chat
template.
"""

from __future__ import annotations

import argparse
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pensieve.runtime.loop import EngineLoop
from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.cost_estimate import analytic_profile
from pensieve.scheduler.plan import StepPlan, StepResult
from pensieve.scheduler.scheduler import Scheduler
from pensieve.scheduler.types import Request, RequestId, SettingError
from pensieve.scripts.command import exit_status
from pensieve.scripts.simulation.traces import message_text, parse_json, read_lines

from ..clients import load_encode

CHUNK = 32
COST = analytic_profile(
    chunk_tokens=CHUNK,
    parameters=8 * 10**9,
    layers=32,
    attention_width=4096,
    chunk_bytes=4 * 2**20,
    max_context=2**20,
    flops_per_s=5e14,
    link_bytes_per_s=5e10,
    step_base_seconds=5e-3,
)


@dataclass
class Counts:
    """Counts of replies: their tokens and steps, checks, drafted tokens, and accepted ones."""

    tokens: int = 0
    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0

    def row(self, name: str) -> str:
        of_check = (
            f"{self.accepted / max(1, self.drafts):.2f} of {self.drafted / max(1, self.drafts):.2f}"
        )
        each = self.tokens / self.steps
        return f"| {name} | {self.tokens:,} | {self.drafts:,} | {of_check} | {each:.2f} |"


HEADER = (
    "| conversations | reply tokens | checks of drafts | accepted of drafted, each "
    "| tokens/step |\n|---|---|---|---|---|"
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="drafts", description="Count the tokens that prompt lookup gives in a step."
    )
    parser.add_argument("tokenizer", metavar="TOKENIZER", help="a model's tokenizer.json")
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="conversations, one a line"
    )
    parser.add_argument(
        "--conversations", type=int, metavar="N", help="of each file, the first N (default: all)"
    )
    args = parser.parse_args(argv)
    return exit_status("drafts", lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    if not Path(args.tokenizer).is_file():
        raise SettingError("TOKENIZER", f"there is no file {args.tokenizer}")
    encode = load_encode(args.tokenizer)
    assert encode is not None  # as there is a path
    print(HEADER)
    for path in args.files:
        counts = count(list(replies(path, encode, args.conversations)))
        print(counts.row(path.name.partition(".")[0]), flush=True)


def replies(
    path: Path, encode: Callable[[str], Sequence[int]], most: int | None
) -> Iterator[tuple[array[int], array[int]]]:
    """Yields (everything before it, reply) for each message of an assistant. SettingError names a
    wrong line."""
    for number, (where, line) in enumerate(read_lines(path)):
        if number == most:
            return
        before = array("i")
        spoken = parse_json(line, where)
        if not isinstance(spoken, dict) or not isinstance(spoken.get("messages"), list):
            raise SettingError("FILE", f"{where}: needs an object with messages")
        for message in spoken["messages"]:
            tokens = array("i", encode(message_text(message, where)))
            if message["role"] == "assistant" and before and tokens:
                yield before[:], tokens
            before += tokens


class Recorded:
    """The loop's executor: it samples the tokens that were recorded."""

    def __init__(self) -> None:
        self.tokens = array("i")  # prompt and reply
        self._launched = deque[StepPlan]()
        self.steps = 0

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(plan)
        self.steps += 1

    def wait(self) -> StepResult:
        plan = self._launched.popleft()
        return StepResult(
            plan.step, plan.samples, tuple(self.tokens[end] for end in sampled_positions(plan))
        )

    def done(self) -> bool:
        return bool(self._launched)


def sampled_positions(plan: StepPlan) -> list[int]:
    """The position of each sample of the plan."""
    ends = [position + 1 for position in plan.positions]
    for span in plan.spans:
        ends += range(span.end - span.samples + 1, span.end + 1)
    return ends


def count(generated: Sequence[tuple[array[int], array[int]]]) -> Counts:
    """Generates these (prompt, reply), one after the other, and counts the steps."""
    longest = max((len(prompt) + len(reply) for prompt, reply in generated), default=1)
    chunks = 2 * (longest // CHUNK + 2)
    config = SchedulerConfig(
        chunks, 0, longest, max_num_batched_tokens=longest + 64, reuse=False, speculate="lookup"
    )
    scheduler = Scheduler(config, COST)
    recorded = Recorded()
    loop = EngineLoop(scheduler, recorded, clock=lambda: 0.0)
    scheduler.draft_timing.turnaround = 0.0
    for number, (prompt, reply) in enumerate(generated, 1):
        recorded.tokens = prompt + reply
        scheduler.add(Request(RequestId(number), prompt, len(reply)), 0.0)
        while not scheduler.idle:
            loop.step()
    stats = scheduler.stats()
    tokens = sum(len(reply) for _, reply in generated)
    return Counts(tokens, recorded.steps, stats.drafts, stats.drafted, stats.accepted)


if __name__ == "__main__":
    sys.exit(main())
