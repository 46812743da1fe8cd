"""The shared tier of one rank: what it believes, deadlines, slots that stay lent, and the
breaker."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pensieve.runtime.shared import store
from pensieve.runtime.shared.config import DirectoryOptions
from pensieve.runtime.shared.directory import DirectoryEngine
from pensieve.runtime.shared.engine import SharedEngine
from pensieve.runtime.shared.store import (
    DEADLINE_S,
    ERRORS,
    OFF_S,
    TRIAL_AGAIN_S,
    TRIALS_S,
    SharedStore,
)
from pensieve.runtime.shared.trial import READERS, ROUNDS, StoreTrial, try_store
from pensieve.scheduler.plan import KeyBatch, TierReport, TierWork
from pensieve.scheduler.types import Tier

from .doubles import FaultyEngine, VirtualCalls
from .store_tests import (
    SLOTS,
    StoreTests,
    chunk_key,
    finds,
    host_pool,
    reads,
    removals,
    settings,
    writes,
)

ROOT = Path(__file__).parents[3]
PAST = DEADLINE_S + 0.1  # seconds; the predicted time of a few small records is about nothing


class TestStoreOnADirectory(StoreTests):
    @pytest.fixture
    def open_engine(self, tmp_path: Path) -> Callable[[], SharedEngine]:
        return lambda: DirectoryEngine(DirectoryOptions(tmp_path, 2**30))


class Bench:
    def __init__(self) -> None:
        self.engine = FaultyEngine()
        self.calls = VirtualCalls()
        self.pool = host_pool(1)
        self.store = SharedStore(self.engine, settings(), 16, self.pool.__getitem__, self.calls)

    def begin(self, work: TierWork) -> TierReport:
        """Returns the report after all calls have ended or hang."""
        self.store.begin(work)
        self.calls.settle()
        return self.store.take()

    def after(self, seconds: float) -> TierReport:
        self.calls.advance(seconds)
        return self.store.take()

    def let_go(self) -> TierReport:
        """Hanging calls return."""
        self.engine.gate.set()
        self.calls.join()
        return self.store.take()

    @property
    def off(self) -> bool:
        return bool(self.store.counters.off)


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A trial's clock is virtual too: a microsecond passes between two looks. So a busy machine
    does not make the store slow."""
    clock = SimpleNamespace(perf_counter=count(0.0, 1e-6).__next__)
    bench = Bench()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pensieve.runtime.shared.trial.time", clock)
        yield bench
    bench.engine.gate.set()
    bench.calls.join()
    bench.store.close()


def test_a_damaged_record_and_another_chunks_are_rejected_and_removed(bench: Bench) -> None:
    bench.begin(writes(1, 2, 3))
    keys = sorted(bench.engine.records)
    records = bench.engine.records
    records[keys[0]] = records[keys[0]][:-1] + b"\0"
    records[keys[1]] = records[keys[2]]
    report = bench.begin(reads(1, 2, 3))
    assert (report.promoted, report.failed) == ((203,), (201, 202))
    assert list(records) == keys[2:]
    assert bench.store.counters.rejected == 2
    assert not bench.off, "the store itself works"


def test_a_late_call_keeps_its_slots_until_it_returns(bench: Bench) -> None:
    bench.begin(writes(1, 2))
    bench.engine.gate.clear()
    assert bench.begin(reads(1, 2)) == bench.after(DEADLINE_S / 2)
    assert bench.store.busy
    report = bench.after(PAST)
    assert (report.late, report.failed) == ((201, 202), ())
    assert bench.store.counters.lent == 2 and bench.off and not bench.store.busy
    assert bench.after(PAST).late == (), "once"
    report = bench.let_go()
    assert sorted(report.promoted) == [201, 202]
    assert bench.store.counters.lent == 0


def test_while_it_is_off_all_work_fails_at_once(bench: Bench) -> None:
    bench.begin(writes(1, 2))
    bench.engine.gate.clear()
    bench.begin(reads(1))
    bench.store.begin(reads(2))  # no thread has begun it when the first is late
    bench.calls.now += PAST
    report = bench.store.take()
    assert (report.late, report.failed) == ((201,), (202,))
    before = list(bench.engine.calls)
    assert bench.begin(reads(2)).failed == (202,)
    assert bench.begin(writes(3)).failed == (103,)
    assert bench.begin(finds(1)).looked_up == ((7, ()),)
    assert bench.begin(removals(1)).removed == ((8, ()),)
    assert bench.engine.calls == before


@pytest.mark.parametrize("work", [reads(1), writes(1), finds(1), removals(1)])
def test_errors_in_a_row_switch_it_off_and_a_probe_on(bench: Bench, work: TierWork) -> None:
    bench.engine.fails = True
    for number in range(ERRORS):
        assert not bench.off, number
        bench.begin(work)
    assert bench.off
    for _ in range(3):
        bench.after(OFF_S)
        assert bench.off and bench.engine.calls[-1] == "exists"
    bench.engine.fails = False
    bench.after(OFF_S)
    assert not bench.off
    assert bench.begin(writes(1)).spilled == (101,)
    calls = list(bench.engine.calls)
    bench.after(10 * OFF_S)
    assert bench.engine.calls == calls, "no more probes"


def test_a_success_between_errors_keeps_it_on(bench: Bench) -> None:
    for _ in range(ERRORS):
        bench.engine.fails = True
        for _ in range(ERRORS - 1):
            bench.begin(writes(1))
        bench.engine.fails = False
        bench.begin(writes(1))
    assert not bench.off


def test_a_probe_that_hangs_is_followed_by_another(bench: Bench) -> None:
    bench.engine.gate.clear()
    assert bench.begin(finds(1)).looked_up == ()
    assert bench.after(PAST).looked_up == ((7, ()),)
    assert bench.off
    bench.after(OFF_S)
    probes = bench.engine.calls.count("exists")
    bench.after(OFF_S)
    assert bench.engine.calls.count("exists") == probes + 1
    bench.let_go()
    bench.after(OFF_S)
    assert not bench.off


def test_it_stays_off_while_too_many_slots_are_lent(bench: Bench) -> None:
    bench.store._most_lent = SLOTS - 1
    bench.begin(writes(*range(SLOTS)))
    bench.engine.gate.clear()
    bench.begin(reads(*range(SLOTS)))
    bench.after(PAST)
    assert bench.store.counters.lent == SLOTS
    hung = bench.engine.gate
    bench.engine.gate = type(hung)()
    bench.engine.gate.set()  # new calls are answered; the old one still hangs
    bench.after(OFF_S)
    bench.after(OFF_S)
    assert bench.off
    hung.set()
    bench.calls.join()
    bench.store.take()
    bench.after(OFF_S)
    assert not bench.off


def test_a_full_store_is_no_error(bench: Bench) -> None:
    bench.engine.full = True
    for _ in range(2 * ERRORS):
        assert bench.begin(writes(1)).failed == (101,)
    assert not bench.off and bench.store.counters.refused == 2 * ERRORS


def test_questions_that_wait_for_others_are_not_late(bench: Bench) -> None:
    reports = []

    def spend(keys: int) -> None:
        bench.calls.now += 0.02
        reports.append(bench.store.take())

    bench.engine.spends = spend
    for number in range(100):
        bench.store.begin(finds(number))
        bench.store.begin(removals(number))
    bench.calls.settle()
    reports.append(bench.store.take())
    assert sum((report.looked_up for report in reports), ()) == ((7, (False,)),) * 100
    assert sum((report.removed for report in reports), ()) == ((8, (True,)),) * 100
    assert not bench.off


def removal(number: int, *keys: int) -> TierWork:
    batch = KeyBatch(number, tuple(map(chunk_key, keys)))
    return TierWork(Tier.SHARED, removals=(batch,))


def test_removals_that_wait_go_in_one_call(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own answer. Finds go one by one."""
    monkeypatch.setattr(store, "REMOVALS_AT_ONCE", 3)
    bench.begin(writes(1, 2, 3, 4, 5))
    sizes = list[int]()
    bench.engine.spends = sizes.append
    bench.engine.calls.clear()
    for number, keys in enumerate([(1,), (2, 3), (6, 4), (5,), (7,)]):
        bench.store.begin(removal(number, *keys))
    bench.store.begin(finds(1))
    bench.store.begin(finds(2))
    bench.calls.settle()
    report = bench.store.take()
    yes = (True,)
    assert report.removed == ((0, yes), (1, yes * 2), (2, yes * 2), (3, yes), (4, yes))
    assert bench.engine.calls == ["remove", "remove", "exists", "exists"]
    assert sizes == [5, 2, 1, 1]
    assert not bench.engine.records and not bench.store.busy
    assert bench.store.counters.removed == 7


def test_removals_that_fail_together_fail_each(bench: Bench) -> None:
    bench.engine.fails = True
    bench.store.begin(removal(1, 1, 2))
    bench.store.begin(removal(2, 3))
    bench.calls.settle()
    assert bench.store.take().removed == ((1, (False, False)), (2, (False,)))
    assert bench.store.counters.errors == 1


@pytest.mark.parametrize("ask", [finds, removals])
def test_seconds_per_key_are_learned(bench: Bench, ask: Callable[..., TierWork]) -> None:
    def spend(keys: int) -> None:
        bench.calls.now += 0.005 * keys
        reports.append(bench.store.take())

    reports = []
    bench.engine.spends = spend
    bench.begin(ask(*range(1000)))
    assert bench.off and reports[-1].looked_up + reports[-1].removed == ((reports_of(ask), ()),)
    bench.after(OFF_S)
    assert not bench.off
    report = bench.begin(ask(*range(1000)))
    ((_, answer),) = report.looked_up + report.removed
    assert len(answer) == 1000 and not bench.off


def reports_of(ask: Callable[..., TierWork]) -> int:
    work = ask(1)
    return (*work.finds, *work.removals)[0].number


def test_questions_that_no_thread_has_begun_end_when_it_goes_off(bench: Bench) -> None:
    bench.engine.gate.clear()
    bench.begin(finds(1))
    bench.store.begin(removals(2))
    bench.calls.now += PAST
    report = bench.store.take()
    assert (report.looked_up, report.removed) == (((7, ()),), ((8, ()),))
    bench.calls.settle()
    assert "remove" not in bench.engine.calls and not bench.store.busy


def test_a_question_is_late_if_no_thread_of_its_lane_is_free(bench: Bench) -> None:
    bench.store.begin(removals(1))
    bench.calls.now += PAST
    assert bench.store.take().removed == ((8, ()),)
    assert bench.off


def test_the_speed_follows_the_calls(bench: Bench) -> None:
    first = bench.begin(writes(1)).read_seconds
    for _ in range(100):
        bench.store.begin(reads(1))
        bench.calls.now += 0.25
        bench.calls.settle()
        report = bench.store.take()
    assert first < 0.001
    assert report.read_seconds == pytest.approx(0.25, rel=0.01)


@pytest.mark.parametrize("work", [reads, writes])
def test_a_store_slower_than_believed_is_learned(
    bench: Bench, work: Callable[..., TierWork], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes off some times, not for ever. No trial tells its speed."""
    monkeypatch.setattr(store, "TRIAL_AGAIN_S", 1e9)

    def spend(keys: int) -> None:
        bench.calls.now += 3.0 * keys
        bench.store.take()

    bench.engine.spends = spend
    offs = 0
    for _ in range(30):
        bench.begin(work(1))
        offs += bench.off
        bench.engine.spends, held = (lambda keys: None), bench.engine.spends
        bench.after(OFF_S)  # the probe is quick
        bench.engine.spends = held
    assert 5 < offs < 20
    before = bench.store.counters.late
    bench.begin(work(1))
    assert bench.store.counters.late == before


def test_a_speed_that_a_hang_has_lowered_is_measured_again(bench: Bench) -> None:
    before = bench.begin(writes(1)).read_seconds
    bench.engine.gate.clear()
    bench.store.begin(reads(1))
    bench.store.begin(reads(2))
    bench.calls.settle()
    assert bench.after(PAST).read_seconds == pytest.approx(2 * before), "once for both"
    bench.let_go()
    bench.after(OFF_S)
    assert not bench.off
    assert "remove" not in bench.engine.calls
    bench.after(TRIAL_AGAIN_S)
    assert bench.engine.calls.count("remove") == ROUNDS


def test_a_speed_that_one_slow_call_has_lowered_is_measured_again(bench: Bench) -> None:
    """A call can be slow because the machine is busy. Reads are then worth less than computing, so
    no other one would ever show that the store is fast."""
    before = bench.begin(writes(1)).read_seconds
    bench.store.begin(reads(1))
    bench.calls.now += 0.9 * DEADLINE_S
    bench.calls.settle()
    assert bench.store.take().read_seconds > 100 * before
    assert not bench.off and bench.store.counters.late == 0
    bench.after(TRIAL_AGAIN_S)
    assert bench.engine.calls.count("remove") == ROUNDS
    assert bench.store.take().read_seconds < 100 * before


def trials(bench: Bench) -> int:
    return bench.engine.calls.count("remove") // ROUNDS


def test_a_trial_that_fails_is_made_again(bench: Bench) -> None:
    bench.engine.full = True
    bench.store.measure()
    for _ in range(3):
        bench.after(TRIAL_AGAIN_S)
    assert bench.store.take().read_seconds == bench.begin(finds(1)).read_seconds
    before = bench.engine.calls.count("remove")
    bench.engine.full = False
    bench.after(TRIAL_AGAIN_S)
    assert bench.engine.calls.count("remove") == before + ROUNDS


def test_a_trial_without_memory_fails(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(record_bytes: int) -> np.ndarray:
        raise MemoryError

    monkeypatch.setattr(store, "trial_memory", refuses)
    bench.store.measure()
    bench.calls.settle()
    bench.store.take()
    monkeypatch.undo()
    bench.after(TRIAL_AGAIN_S)
    assert trials(bench) == 1


def test_a_first_trial_on_a_busy_machine_is_not_the_last_word(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "try_store", lambda *_: StoreTrial(1e6, 1e6))
    bench.store.measure()
    bench.calls.settle()
    slow = bench.store.take().read_seconds
    monkeypatch.undo()
    bench.after(TRIAL_AGAIN_S)
    assert bench.store.take().read_seconds < slow / 10


def test_the_speed_is_measured_now_and_then(bench: Bench) -> None:
    """Reads may have become worth less than computing without being much slower."""
    bench.store.measure()
    bench.calls.settle()
    bench.after(TRIAL_AGAIN_S)
    assert trials(bench) == 2
    bench.after(TRIAL_AGAIN_S)
    assert trials(bench) == 2
    bench.after(TRIALS_S)
    assert trials(bench) == 3
    assert len(bench.engine.buffers) == 1, "its memory may be registered for good"


def test_a_few_reads_are_shared_by_all_threads(bench: Bench) -> None:
    numbers = range(1, READERS)
    bench.begin(writes(*numbers))
    bench.begin(reads(*numbers))
    assert bench.engine.calls.count("get") == len(numbers)


def test_all_work_is_reported_once(bench: Bench) -> None:
    random = np.random.default_rng(5)
    begun: list[int] = []
    ended: list[int] = []
    late: list[int] = []

    def take() -> None:
        report = bench.store.take()
        ended.extend((*report.spilled, *report.promoted, *report.failed))
        late.extend(report.late)

    slots = iter(range(10**6))
    for _ in range(300):
        match random.integers(6):
            case 0:
                bench.engine.gate.clear()
            case 1:
                bench.engine.gate.set()
                bench.calls.join()
            case 2:
                bench.engine.fails = bool(random.integers(2))
            case 3:
                bench.calls.advance(float(random.random()))
            case _:
                number = int(random.integers(SLOTS))
                work = writes(number) if random.integers(2) else reads(number)
                slot = next(slots)
                begun.append(slot)
                bench.store.begin(
                    work._replace(
                        spills=tuple(one._replace(slot=slot) for one in work.spills),
                        promotions=tuple(one._replace(slot=slot) for one in work.promotions),
                    )
                )
                if random.integers(3):
                    bench.calls.settle()
        take()
    bench.calls.settle()
    bench.engine.gate.set()
    bench.calls.join()
    take()
    assert sorted(ended) == begun
    assert len(set(late)) == len(late) > 0
    assert bench.store.counters.lent == 0


def trial(bench: Bench) -> None:
    bench.store.measure()
    bench.calls.settle()


def probe(bench: Bench) -> None:
    bench.begin(finds(1))
    bench.after(PAST)
    bench.let_go()
    bench.engine.gate.clear()
    bench.after(OFF_S)


@pytest.mark.parametrize(
    "call",
    [
        lambda bench: bench.begin(reads(1)),
        lambda bench: bench.begin(writes(1)),
        lambda bench: bench.begin(finds(1)),
        lambda bench: bench.begin(removals(1)),
        trial,
        probe,
    ],
)
def test_the_engine_is_not_closed_under_a_call(
    bench: Bench, call: Callable[[Bench], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "CLOSE_S", 0.01)
    bench.engine.gate.clear()
    call(bench)
    assert not bench.store.close()
    assert "close" not in bench.engine.calls
    bench.let_go()
    assert bench.store.close()
    assert bench.engine.calls[-1] == "close"


def test_a_trial_counts_the_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take all the time here: a second of each record."""
    summed = list[memoryview]()
    clock = SimpleNamespace(perf_counter=lambda: float(len(summed)))
    monkeypatch.setattr("pensieve.runtime.shared.trial.checksum", summed.append)
    monkeypatch.setattr("pensieve.runtime.shared.trial.time", clock)
    assert try_store(FaultyEngine(), 4096) == (4096.0, 4096.0, "")


HANGING_TRIAL = """
import threading
from pensieve.runtime.shared.calls import CallThreads
from pensieve.runtime.shared.trial import WRITERS, try_store
from tests.runtime.shared.doubles import FaultyEngine

engine = FaultyEngine()
entered = threading.Barrier(WRITERS + 1)
engine.spends = lambda keys: entered.wait(60)
engine.gate.clear()
calls = CallThreads({"find": 1})
calls.submit("find", lambda: try_store(engine, 4096))
entered.wait(60)
calls.close()
"""


def test_a_trial_that_hangs_does_not_keep_the_process_from_ending() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGING_TRIAL], timeout=50, cwd=ROOT)
    assert ended.returncode == 0


def test_registration_that_hangs_does_not_hold_up_the_loop(bench: Bench) -> None:
    bench.engine.registration_hangs = True
    bench.engine.gate.clear()
    bench.store.begin(writes(1))
    for settle in (bench.calls.settle, bench.store.take):
        thread = threading.Thread(target=settle, daemon=True)
        thread.start()
        thread.join(10)
        held = thread.is_alive()
        if held:
            bench.engine.gate.set()
        assert not held
    bench.calls.now += PAST
    assert bench.store.take().late == (101,)
    assert bench.let_go().spilled == (101,)
    bench.begin(writes(1))
    assert len(bench.engine.buffers) == len(set(bench.engine.buffers)) == 2
