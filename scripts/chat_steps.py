"""Batches of a chat load, as the scheduler forms them: what `bench_engine` replays on both engines."""

from __future__ import annotations

import random
from array import array
from typing import NamedTuple

from ..scheduler.config import SchedulerConfig
from ..scheduler.cost import analytic_profile
from ..scheduler.plan import StepPlan, StepResult
from ..scheduler.scheduler import Scheduler
from ..scheduler.types import Request, RequestId

MEAN_INPUT, MEAN_OUTPUT = 37.8, 204.6  # tokens of ShareGPT's turns (Pensieve, table 3)
STEP_S = 0.01
MEAN_THINK_S = MEAN_OUTPUT * STEP_S  # as long as a reply takes: about half of the users wait for one
LONGEST = 4 * 1024  # tokens of a context
CHUNK_TOKENS = 32


class Part(NamedTuple):
    """One request's share of a step: its `new` last tokens of `context`, and whether the last of them is sampled."""

    new: int
    context: int
    samples: bool = True


class _Users:
    """Each plays one conversation: writes a token of their own (what is equal would be shared), reads, thinks."""

    def __init__(self, users: int, turns: int, seed: int):
        self._draw = random.Random(seed)
        self._turns = [turns] * users
        self._due = [self._draw.expovariate(1 / MEAN_THINK_S) for _ in range(users)]

    def next_due(self) -> float:
        """When somebody writes next; infinity when all are done or wait."""
        return min(self._due)

    def send(self, scheduler: Scheduler, now: float) -> None:
        for user, due in enumerate(self._due):
            if due <= now:
                name = f"user {user}"
                history = scheduler.conversations.tokens(name) if name in scheduler.conversations else array("i")
                prompt = history + array("i", [user]) * self._length(MEAN_INPUT)
                request = RequestId(self._turns[user] * len(self._turns) + user)
                scheduler.add(Request(request, prompt, self._length(MEAN_OUTPUT), name), now)
                self._due[user] = float("inf")

    def answered(self, request: RequestId, now: float) -> None:
        user = request % len(self._turns)
        self._turns[user] -= 1
        if self._turns[user]:
            self._due[user] = now + self._draw.expovariate(1 / MEAN_THINK_S)

    def _length(self, mean: float) -> int:
        return 1 + int(self._draw.expovariate(1 / mean))


def chat_steps(users: int = 8, turns: int = 2, seed: int = 0) -> list[tuple[Part, ...]]:
    """The steps of `users` conversations of `turns` turns each, on a clock of `STEP_S` a step; nothing is evicted."""
    chunks = 2 * users * LONGEST // CHUNK_TOKENS
    config = SchedulerConfig(gpu_kv_chunks=chunks, host_kv_chunks=0, max_model_len=LONGEST, max_num_seqs=users)
    cost = analytic_profile(  # nothing is evicted, loaded or recomputed: what it says changes nothing
        chunk_tokens=CHUNK_TOKENS,
        parameters=5_000_000,
        layers=6,
        attention_width=512,
        chunk_bytes=2**19,
        max_context=LONGEST,
        flops_per_s=50e9,
        link_bytes_per_s=5e9,
        step_base_seconds=STEP_S / 2,
    )
    scheduler, load = Scheduler(config, cost), _Users(users, turns, seed)
    steps: list[tuple[Part, ...]] = []
    now = 0.0
    while load.next_due() < float("inf") or not scheduler.idle:
        now += STEP_S
        load.send(scheduler, now)
        plan = scheduler.next_plan(now)
        if plan is None:
            now = max(now, load.next_due())
            continue
        if plan.tokens:
            steps.append(parts(plan))
        applied = scheduler.apply(StepResult(plan.step, plan.samples, (1,) * len(plan.samples)), now)
        for event in applied.events:
            if event.finish is not None:
                load.answered(event.request, now)
    return steps


def parts(plan: StepPlan) -> tuple[Part, ...]:
    """What each seat computes, in the batch's order of tokens."""
    generated = [Part(1, position + 1) for position in plan.positions]
    return (*generated, *(Part(span.end - span.start, span.end, span.samples) for span in plan.spans))
