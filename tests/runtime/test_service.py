"""The loop's own decisions, with a scheduler and an executor whose answers are given."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from array import array
from concurrent.futures import Future
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest

from pensieve.runtime.counters import DiskCounters, KVCounters
from pensieve.runtime.device.protocol import TransferSeconds
from pensieve.runtime.messages import (
    Abort,
    Drain,
    Draining,
    Erased,
    Forget,
    Ready,
    StepMessage,
    Submit,
)
from pensieve.runtime.service import LONGEST_WAIT_S, MOST_CHECKED, SHARE_S, Service
from pensieve.scheduler.kv.stats import SchedulerStats
from pensieve.scheduler.types import (
    Applied,
    Erasure,
    ErrorKind,
    FinishReason,
    Request,
    RequestError,
    RequestId,
    RowResult,
    Sampling,
)
from pensieve.scheduler.work import MESSAGE, WorkBudget


class Scheduler(SimpleNamespace):
    """Has `stored` conversations; `calls` records all calls."""

    def __init__(self, **answers: Any):
        super().__init__(
            calls=[], stored={}, erased=[], next_plan=lambda now: None, in_flight=1, **answers
        )
        self.work = WorkBudget()
        self.config = SimpleNamespace(host_kv_growth=0)
        self.awaits_result = False
        self.draft_timing = SimpleNamespace(applied=lambda came, now, waits: None)
        self.has_work = lambda now: False
        self.time_out = lambda now: []
        self.stop = lambda now: None
        self.conversations = Conversations(self)
        disk = {"keys": self.keys, "erase": self.erase, "take_erased": self.take_erased}
        self.lower = SimpleNamespace(unfinished=False, **disk)

    def submit(self, request: Request, now: float) -> None:
        self.calls.append(("add", request.id))

    def abort(self, request: RequestId, now: float) -> None:
        self.calls.append(("abort", request))

    def keys(self, tokens: array[int], salt: bytes, shared: int) -> list[bytes]:
        keys = [salt + bytes(tokens[:end].tolist()) for end in range(4, len(tokens) + 1, 4)]
        return keys[shared // 4 :]

    def erase(self, keys: list[bytes]) -> None:
        self.calls.append(("erase", keys))

    def take_erased(self) -> list[Erasure]:
        erased = self.erased
        self.erased = []
        return erased

    def open_requests(self) -> list[RequestId]:
        return []

    def stats(self) -> SchedulerStats:
        return SchedulerStats()


class Conversations:
    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler

    def __contains__(self, name: str) -> bool:
        return name in self._scheduler.stored

    def delete(self, name: str, shared: int, others: array[int], salt: bytes) -> None:
        self._scheduler.calls.append(("delete", name, shared, others, salt))

    def cut(
        self, name: str, kept: int, shared: int, others: array[int], salt: bytes, now: float
    ) -> None:
        self._scheduler.calls.append(("cut", name, kept, shared, others, salt))


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture
def compiling() -> list[Future[str]]:
    return []


@pytest.fixture
def service(scheduler: Scheduler, compiling: list[Future[str]]) -> Service:
    def begin_grammar(grammar: str) -> Future[str]:
        compiling.append(Future())
        return compiling[-1]

    executor = SimpleNamespace(
        begin_grammar=begin_grammar,
        keep_grammar=lambda request, compiled: scheduler.calls.append((compiled, request)),
        copied_bytes=KVCounters(),
        disk_counters=DiskCounters(spilled=3),
        shared_counters=None,
        transfer_seconds=TransferSeconds,
        wait=lambda: None,
        done=lambda: False,
    )
    return Service(
        scheduler,
        executor,
        multiprocessing.Pipe()[0],
        SimpleNamespace(finished=lambda now, seen: None),
    )


def test_an_end_that_was_kept_back_is_sent_though_no_token_comes_with_it(
    service: Service, scheduler: Scheduler
) -> None:
    """With `--save sync` the disk's time passes between a turn's tokens and its last event."""
    end = RowResult(RequestId(5), finish=FinishReason.LENGTH)
    scheduler.apply = lambda result, now, took: Applied(rows=(end,))
    service._stats_due = time.monotonic() + 60
    service._counters.launched(SimpleNamespace(tokens=0, copies=()))
    service._step()
    message = service._outbox.get(timeout=0)
    assert message.applied.rows == (end,) and message.disk == DiskCounters(spilled=3)


def test_a_client_whose_reply_is_stuck_is_told_at_once(
    service: Service, scheduler: Scheduler
) -> None:
    """The result may bring nothing else: the row was alone, and its token does not count."""
    stuck = RowResult(RequestId(5), error=RequestError(ErrorKind.INTERNAL, "stuck"))
    scheduler.apply = lambda result, now, took: Applied(rows=(stuck,))
    service._stats_due = time.monotonic() + 60
    service._counters.launched(SimpleNamespace(tokens=1, generate=(0,), spans=(), copies=()))
    service._step()
    assert service._outbox.get(timeout=0).applied.rows == (stuck,)


def test_the_grace_time_is_for_saving_too(service: Service, scheduler: Scheduler) -> None:
    assert not service._drained()
    scheduler.lower.unfinished = True
    service._take(Drain(60.0))
    assert not service._drained(), "no request is open, but KV is not on disk yet"
    scheduler.lower.unfinished = False
    assert service._drained()


def test_saving_ends_with_the_grace_time(
    service: Service, scheduler: Scheduler, caplog: Any
) -> None:
    scheduler.lower.unfinished = True
    service._take(Drain(0.0))
    assert service._drained() and "before all KV was spilled" in caplog.text


def test_a_deletion_erases_active_and_inactive_conversations(
    service: Service, scheduler: Scheduler
) -> None:
    tokens = array("i", range(14))
    scheduler.stored = {"active": tokens}
    service._take(Forget("active", tokens, 0, b"s"))
    service._take(Forget("active", tokens, 9, b"s"))
    service._take(Forget("active", tokens, 9, b"s", 8))  # an edit
    service._take(Forget("stored", tokens, 0, b"s"))
    # nine tokens are another's too: two whole chunks
    service._take(Forget("fork", tokens, 9, b"s"))
    service._take(Forget(None, tokens, 9, b"s"))  # a response that is not the last of its line
    whole = [b"s" + bytes(range(end)) for end in (4, 8, 12)]
    assert scheduler.calls == [
        ("delete", "active", 0, tokens, b"s"),
        ("delete", "active", 9, tokens, b"s"),
        ("cut", "active", 8, 9, tokens, b"s"),
        ("erase", whole),
        ("erase", whole[2:]),
        ("erase", whole[2:]),
    ]
    assert service._outbox.empty()
    scheduler.erased = [Erasure.WHOLLY, Erasure.REFUSED]
    scheduler.apply = lambda result, now, took: Applied()
    service._counters.launched(SimpleNamespace(tokens=0, copies=()))
    service._step()
    assert [service._outbox.get(timeout=0) for _ in range(2)] == [
        Erased(Erasure.WHOLLY),
        Erased(Erasure.REFUSED),
    ]


def test_a_deletion_that_ends_without_a_step_is_told(
    service: Service, scheduler: Scheduler
) -> None:
    """The last keys of a long log are looked up while a plan is made; if there is no other work, no
    result follows."""

    def next_plan(now: float) -> None:
        scheduler.erased = [Erasure.WHOLLY]
        scheduler.next_plan = lambda now: None

    scheduler.next_plan = next_plan
    scheduler.in_flight = 0
    service._executor.close = lambda: None
    here, there = multiprocessing.Pipe()
    service = Service(scheduler, service._executor, here, SimpleNamespace(slack=lambda now: 0.0))
    service._wait_for_news = lambda: service.drain(0.0)
    service._inbox.put(Forget(None, array("i", [1]), 0, b""))
    service.run(SimpleNamespace())
    messages = []
    with contextlib.suppress(EOFError):
        while True:
            messages.append(there.recv())
    assert Erased(Erasure.WHOLLY) in messages


@pytest.mark.parametrize(("slots", "checked"), [(MOST_CHECKED - 24, True), (MOST_CHECKED, False)])
def test_an_idle_loop_checks_its_state_if_that_is_quick(
    service: Service, scheduler: Scheduler, slots: int, checked: bool
) -> None:
    def get(timeout: float | None) -> None:
        raise Empty

    service._inbox = SimpleNamespace(get=get, empty=lambda: False)  # type: ignore[assignment]
    scheduler.idle, scheduler.wake_at = True, 0.0
    scheduler.config = SimpleNamespace(
        gpu_kv_chunks=16, most_host_kv_chunks=8, disk_kv_chunks=slots, host_kv_growth=0
    )
    scheduler.check = lambda: scheduler.calls.append("check")
    service._wait_for_news()
    assert scheduler.calls == ["check"] * checked


def test_it_sleeps_no_longer_than_a_clock_can(service: Service, scheduler: Scheduler) -> None:
    """A client's `expect_next_s`, TTL or pin may be any number of seconds."""
    scheduler.wake_at, scheduler.idle = 1e12, False
    threading.Timer(0.1, lambda: service._inbox.put(Drain(0.0))).start()
    service._sleep()
    assert service._drain_until < float("inf")


def test_a_signal_that_comes_just_before_a_wait_is_heard_soon(
    service: Service, scheduler: Scheduler
) -> None:
    """The signal does not interrupt the wait; its handler runs after it."""
    waits: list[float | None] = []

    def get(timeout: float | None) -> Drain:
        waits.append(timeout)
        if len(waits) < 3:
            raise Empty
        return Drain(0.0)

    service._inbox = SimpleNamespace(get=get)  # type: ignore[assignment]
    scheduler.wake_at = float("inf")
    service._sleep()
    assert waits == [LONGEST_WAIT_S] * 3
    assert service._drained()


def test_growth_of_the_host_pool_is_told_while_nothing_runs(
    service: Service, scheduler: Scheduler
) -> None:
    sent: list[int] = []

    def get(timeout: float | None) -> Drain:
        if service._executor.host_slots < 8:
            service._executor.host_slots += 2
            raise Empty
        return Drain(0.0)

    def grow_host(slots: int) -> bool:
        sent.append(slots)
        return slots > 4

    service._inbox = SimpleNamespace(get=get)  # type: ignore[assignment]
    service._executor.host_slots = 2
    scheduler.wake_at = float("inf")
    scheduler.grow_host = grow_host
    scheduler.config.host_kv_growth = 6
    service._send = lambda applied: sent.append(0)
    service._sleep()
    assert sent == [4, 6, 0, 8, 0]


def test_slots_that_host_gains_are_told_before_each_plan(
    service: Service, scheduler: Scheduler
) -> None:
    scheduler.config.host_kv_growth = 6
    scheduler.grow_host = lambda slots: scheduler.calls.append(("host", slots))
    scheduler.next_plan = lambda now: scheduler.calls.append("plan")
    scheduler.in_flight = 0
    service._wait_for_news = lambda: None  # type: ignore[method-assign]
    for service._executor.host_slots in (4, 7):
        service._step()
    assert scheduler.calls == [("host", 4), "plan", ("host", 7), "plan"]


def submit(service: Service, number: int, grammar: str | None = None) -> None:
    request = Request(RequestId(number), array("i", [1]), 5, sampling=Sampling(grammar=grammar))
    service._take(Submit(request))


def test_a_grammar_is_compiled_before_its_request_is_added_without_delaying_others(
    service: Service, scheduler: Scheduler, compiling: list[Future[str]]
) -> None:
    for number, grammar in enumerate(("new", None, "other", "third")):
        submit(service, number, grammar)
    assert scheduler.calls == [("add", 1)] and len(compiling) == 3
    compiling[1].set_result("compiled")
    service._take(service._inbox.get(timeout=0))
    assert scheduler.calls[1:] == [("add", 2), ("compiled", 2)]
    service._take(Abort(RequestId(0)))
    compiling[0].set_result("compiled")
    service._take(service._inbox.get(timeout=0))
    assert scheduler.calls[3:] == [("abort", 0)], "its client is gone"
    compiling[2].set_exception(MemoryError("none is left"))
    with pytest.raises(MemoryError):
        service._take(service._inbox.get(timeout=0))


def test_a_request_whose_grammar_is_being_compiled_is_open(
    service: Service, scheduler: Scheduler, compiling: list[Future[str]]
) -> None:
    """Draining lets it run; it is refused at the end of the grace time."""
    submit(service, 7, "new")
    service._take(Drain(60.0))
    assert not service._drained()
    service._take(Drain(0.0))
    assert service._drained()
    messages = [service._outbox.get(timeout=0) for _ in range(3)]
    assert messages[:2] == [Draining(), Draining()]
    assert isinstance(messages[2], StepMessage)
    assert messages[2].applied.rows == (RowResult(RequestId(7), finish=FinishReason.ABORT),)


def test_a_request_that_comes_while_the_plan_can_wait_is_in_it(
    service: Service, scheduler: Scheduler
) -> None:
    def next_plan(now: float) -> None:
        scheduler.calls.append("plan")
        service._inbox.put(Drain(0.0))

    request = Request(RequestId(1), array("i", [1]), 5)

    deadline = 0.0

    def slack(now: float) -> float:
        nonlocal deadline
        if not deadline:
            deadline = now + 100.0
            threading.Timer(0.1, lambda: service._inbox.put(Submit(request))).start()
        return 0.0 if ("add", 1) in scheduler.calls else deadline - now

    pace: Any = SimpleNamespace(slack=slack)
    executor: Any = service._executor
    executor.close = lambda: None
    ours, _theirs = multiprocessing.Pipe()
    service = Service(service._scheduler, executor, ours, pace)
    scheduler.next_plan = next_plan
    scheduler.in_flight = 0
    scheduler.time_out = lambda now: []
    began = time.monotonic()
    service.run(Ready("", 1, 1, (), "", 32, 1))
    assert scheduler.calls == [("add", 1), "plan"] and time.monotonic() - began < 60


def test_work_in_pieces_goes_on_while_the_device_computes(
    service: Service, scheduler: Scheduler
) -> None:
    """A step whose time has come is not kept waiting: no further share is done before it."""

    def next_plan(now: float) -> None:
        scheduler.calls.append("plan")
        service.drain(0.0)

    scheduler.has_work = lambda now: True
    scheduler.go_on = lambda now: scheduler.calls.append("share")
    executor: Any = service._executor
    executor.close = lambda: None
    pace: Any = SimpleNamespace(slack=lambda now: 0.1 if len(scheduler.calls) < 3 else SHARE_S)
    ours, _theirs = multiprocessing.Pipe()
    service = Service(service._scheduler, executor, ours, pace)
    scheduler.next_plan = next_plan
    scheduler.in_flight = 0
    scheduler.time_out = lambda now: []
    service.run(Ready("", 1, 1, (), "", 32, 1))
    assert scheduler.calls == ["share"] * 3 + ["plan"]


def test_messages_wait_for_the_next_step_when_the_budget_is_used_up(
    service: Service, scheduler: Scheduler
) -> None:
    scheduler.work.left = 3 * MESSAGE
    for number in range(5):
        service._inbox.put(Abort(RequestId(number)))
    service._send = lambda applied: None  # type: ignore[method-assign]
    service._take_messages()
    assert scheduler.calls == [("abort", 0), ("abort", 1), ("abort", 2)]
    scheduler.work.renew()
    service._take_messages()
    assert len(scheduler.calls) == 5
