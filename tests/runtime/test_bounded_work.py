"""Between two steps the loop does a bounded number of operations, whatever messages are pending.

The operations are counted by themselves, not by the budget. A twin takes all messages at once,
without a bound; in the end both have the same replies and conversations.
"""

from __future__ import annotations

import multiprocessing
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from pensieve.runtime.counters import DiskCounters, KVCounters
from pensieve.runtime.device.protocol import TransferSeconds
from pensieve.runtime.messages import (
    Abort,
    Erased,
    Finish,
    Forget,
    Fork,
    Keep,
    Look,
    StepMessage,
    Submit,
)
from pensieve.runtime.service import Service
from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.kv import chunk_keys
from pensieve.scheduler.kv.chunk_store import ChunkStore
from pensieve.scheduler.plan import Spill, StepPlan, StepResult, Tickets
from pensieve.scheduler.scheduler import Scheduler
from pensieve.scheduler.types import Request, RequestId, Residency
from pensieve.scheduler.work import LARGEST_PIECE, MESSAGE

from ..scheduler.device_model import DeviceModel, disk_report
from ..scheduler.harness import profile

CHUNK = 4
CONFIG = SchedulerConfig(
    gpu_kv_chunks=900,
    host_kv_chunks=600,
    disk_kv_chunks=700,
    max_model_len=2400,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    chunk_tokens=CHUNK,
    owner_kv_chunks=700,
)
LONGEST = 500 * CHUNK  # tokens of a prompt
MOST = 160  # units between two steps; so a piece is not small beside the bound
STREAM = RequestId(1)
ALL_AT_ONCE = 10**9


class Device:
    """An executor on the device model. Disk work has ended with the next result."""

    copied_bytes = KVCounters()
    disk_counters = DiskCounters()
    shared_counters = None
    transfer_seconds = TransferSeconds

    def __init__(self) -> None:
        self.model = DeviceModel(CONFIG.gpu_kv_chunks, CONFIG.host_kv_chunks, CHUNK, CONFIG.windows)
        self._results: deque[StepResult] = deque()

    def begin_grammar(self, grammar: str) -> None:
        return None

    def launch(self, plan: StepPlan) -> None:
        self._results.append(self.model.launch(plan))

    def done(self) -> bool:
        return False

    def wait(self) -> StepResult:
        result = self._results.popleft()
        ended = {True: (), False: ()}
        for slot in list(self.model.work):
            ended[isinstance(self.model.finish(slot, True), Spill)] += (slot,)
        self.model.completed = Tickets(*map(max, self.model.completed, result.completed))
        self.model.applied = result.step
        return replace(result, lower=disk_report(spilled=ended[True], promoted=ended[False]))


class Loop:
    """A service whose passes the test makes. `operations`: counted since the start, by kind."""

    def __init__(self, most: int):
        self.scheduler = Scheduler(CONFIG, profile(CHUNK))
        self.scheduler.work.most = self.scheduler.work.left = most
        timing: Any = SimpleNamespace(
            slack=lambda now: 0.0, launched=lambda *_: None, finished=lambda *_: None
        )
        device: Any = Device()
        self.service = Service(self.scheduler, device, multiprocessing.Pipe()[0], timing)
        self.service._wait_for_news = lambda: None  # type: ignore[method-assign]
        self.replies: dict[RequestId, list[int]] = {}
        self.ended: set[RequestId] = set()
        self.erased = self.passes = 0
        self.looked: list[Residency] = []

    def pend(self, *messages: Any) -> None:
        for message in messages:
            self.service._inbox.put(message)

    def one_pass(self) -> None:
        """Between two steps, and the step."""
        self.service._take_messages()
        self.service._step()
        self.passes += 1
        if self.passes % 9 == 0:
            self.scheduler.check()
        while not self.service._outbox.empty():
            self._hear(self.service._outbox.get())

    def rest(self) -> None:
        """Passes until nothing is left to do but the stream."""
        while not self.resting:
            self.one_pass()

    @property
    def resting(self) -> bool:
        work = self.scheduler.has_work(time.monotonic()) or self.scheduler.lower.unfinished
        return (
            self.service._inbox.empty()
            and not work
            and self.scheduler.open_requests() in ([], [STREAM])
        )

    def _hear(self, message: Any) -> None:
        if isinstance(message, StepMessage):
            for row in message.applied.results():
                assert row.error is None
                self.replies.setdefault(row.request, []).extend(row.tokens)
                if row.finish is not None:
                    self.ended.add(row.request)
                    self.pend(Finish(row.request, len(self.replies[row.request])))
        elif isinstance(message, Erased):
            self.erased += 1
        elif isinstance(message, Residency):
            self.looked.append(message)

    def conversations(self) -> dict[str, Any]:
        stored = self.scheduler.conversations
        states = {}
        for name, conversation in stored._by_id.items():
            states[name] = conversation.tokens.tolist(), conversation.pinned, conversation.ttl
        return states


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what is done to chunks: hashed, claimed, pinned, marked, dropped, released, and put
    into the queue."""
    counts: Counter[str] = Counter()

    def counted(
        owner: Any, name: str, size: Callable[[tuple[Any, ...]], int] = lambda _: 1
    ) -> None:
        original = getattr(owner, name)

        def call(*args: Any) -> Any:
            counts[name] += size(args)
            return original(*args)

        monkeypatch.setattr(owner, name, call)

    counted(chunk_keys, "chunk_key")
    for name in ("claim", "unclaim", "change_pins", "change_over_quota", "delete", "touch"):
        counted(ChunkStore, name)
    for name in ("unpin", "end_wait"):
        counted(ChunkStore, name, lambda args: len(args[1]))
    return counts


def ids(random: Random, count: int) -> array[int]:
    return array("i", [random.randrange(97) for _ in range(count)])


def size(random: Random) -> int:
    return random.choice((1, 3, 9, 60, random.randint(1, LONGEST), LONGEST))


class Story:
    """Random messages of every kind. What they do does not depend on the number of steps between
    them: a conversation gets no message after a turn of it, and only long replies are aborted."""

    def __init__(self, seed: int):
        self.random = Random(seed)
        self.number = int(STREAM)
        self.logs = {f"old {n}": ids(self.random, size(self.random)) for n in range(8)}
        self.left = dict(self.logs)

    def request(
        self, prompt: array[int], most: int, conversation: str | None = None, **fields: Any
    ) -> Submit:
        self.number += 1
        owner = self.random.choice("ab")
        return Submit(
            Request(RequestId(self.number), prompt, most, conversation, owner=owner, **fields)
        )

    def opening(self) -> Iterator[Any]:
        yield Submit(Request(STREAM, array("i", [1, 2, 3]), 2000))
        for name, log in self.logs.items():
            yield self.request(log, 1, name)

    def messages(self) -> Iterator[Any]:
        for number in range(60):
            yield from self.message(number)

    def message(self, number: int) -> Iterator[Any]:
        random, left = self.random, self.left
        name = random.choice(sorted(left)) if left else ""
        kind = random.choice(("call", "turn", "abort", "forget", "fork", "keep", "look"))
        if kind == "call":
            prompt = ids(random, size(random))
            for choice in range(random.choice((1, 2, 5))):
                yield self.request(
                    prompt, random.randint(1, 5), choice=choice, confirm=random.random() < 0.5
                )
        elif kind == "turn":
            history = left.pop(name, array("i"))
            prompt = history[: random.choice((0, 1, len(history) // 2, len(history)))] + ids(
                random, 5
            )
            yield self.request(prompt, random.randint(1, 5), name or f"new {number}")
        elif kind == "abort":
            yield (submitted := self.request(ids(random, size(random)), 300))
            yield Abort(submitted.request.id)
        elif kind == "look":
            yield Look(random.randrange(3))
        elif kind == "keep" and name:
            yield Keep(name, random.choice((None, 1e6)), random.choice((0.0, 1e6)))
        elif kind == "fork" and name:
            left[f"fork {number}"] = left[name]
            yield Fork(name, f"fork {number}")
        elif kind == "forget":
            log = left.pop(name) if name else ids(random, size(random))
            other = ids(random, 40) if random.random() < 0.3 else log
            shared = random.choice((0, len(log) // 2))
            kept = random.randint(0, shared) if random.random() < 0.5 else 0
            yield Forget(name or None, other, shared, b"", kept)
            if name and random.random() < 0.5:
                left[name] = log[:kept]


def play(seed: int, most: int, operations: Counter[str]) -> tuple[Loop, int]:
    """The loop after the story, and the most operations between two steps."""
    loop = Loop(most)
    story = Story(seed)
    largest = 0
    loop.pend(*story.opening())
    loop.rest()
    loop.pend(*story.messages())
    go_on = loop.scheduler.go_on
    counted = Counter[str]()

    def go_on_counted(now: float) -> None:
        before = operations.total()
        go_on(now)
        counted["share"] = operations.total() - before

    loop.scheduler.go_on = go_on_counted  # type: ignore[method-assign]
    while not loop.resting:
        before = operations.total()
        loop.service._take_messages()
        between = operations.total() - before
        spent = loop.scheduler.work.spent
        assert spent <= most + LARGEST_PIECE + MESSAGE + LONGEST // CHUNK
        loop.one_pass()
        largest = max(largest, between + counted["share"])
    loop.scheduler.check()
    return loop, largest


@pytest.mark.parametrize("seed", range(4))
def test_work_between_two_steps_is_bounded_and_ends_as_if_done_at_once(
    seed: int, operations: Counter[str]
) -> None:
    bounded, largest = play(seed, MOST, operations)
    eager, most = play(seed, ALL_AT_ONCE, operations)
    one_turn = 3 * LONGEST // CHUNK  # the end of a turn: its chunks are claimed and released
    assert largest <= 2 * (MOST + LARGEST_PIECE + MESSAGE) + one_turn
    assert most > 4 * largest, "the story is large enough to show it"
    for loop in (bounded, eager):
        del loop.replies[STREAM]
    assert bounded.ended == eager.ended
    assert {key: bounded.replies[key] for key in bounded.ended} == {
        key: eager.replies[key] for key in eager.ended
    }
    assert bounded.conversations() == eager.conversations()
    assert bounded.erased == eager.erased and len(bounded.looked) == len(eager.looked)
