"""Rank 0's messages and the merging of reports; and its executor, next to a rank that is a thread,
or to none."""

from __future__ import annotations

import gc
import threading
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from itertools import count
from queue import Empty, SimpleQueue
from types import SimpleNamespace

import pytest
import torch

from pensieve.plugins.collectives.protocol import (
    TENSOR_PARALLEL,
    ThreadRanks,
    register_group,
    release_group,
)
from pensieve.runtime import gc_control as garbage
from pensieve.runtime.device.cpu import CpuDevice
from pensieve.runtime.disk.store import DiskSettings
from pensieve.runtime.executor import Executor
from pensieve.runtime.ranks import executor as ranks_executor
from pensieve.runtime.ranks.executor import (
    RankedExecutor,
    RankReport,
    Reports,
    agreed_records,
    follow,
    on_all,
    pack,
    report_of,
    unpack,
)
from pensieve.runtime.ranks.mpi import RankFailed
from pensieve.runtime.step.inputs import StepPacker
from pensieve.runtime.step.sampler import Sampler, SharedSampler, make_sampler
from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.plan import (
    CopyBatch,
    Join,
    KeyAnswer,
    Lane,
    Promotion,
    RowStart,
    Spill,
    StepPlan,
    StepResult,
    Tickets,
    TierReport,
    TierWork,
)
from pensieve.scheduler.types import (
    GREEDY,
    ChunkKey,
    ErrorKind,
    InvariantError,
    RequestError,
    RequestId,
    RowId,
    RowResult,
    Sampling,
    StoredRecord,
    Tier,
)

from ..fake_engine import FakeEngine, copy, join, plan, reply, span

PROMPT = [5, 9, 2, 44, 7, 8, 30, 61]
LAYERS = 5


def test_a_plan_arrives_as_it_was_sent_without_its_sampling():
    copies = CopyBatch(
        Lane.IN, 3, array("i", [1, 2]), array("i", [3, 4]), Tickets(1, 2, 3), gated=True
    )
    row = RowId(RequestId(7), 9)
    sent = StepPlan(
        step=5,
        copies=(copies,),
        after=Tickets(4, 2, 1),
        joins=(
            Join(
                2,
                row,
                Sampling(temperature=1.0, grammar="g", logprobs=3),
                (1,),
                (2,),
                prompt_logprobs=4,
            ),
        ),
        generate=array("i", [0]),
        positions=array("i", [11]),
        blocks=((2, 0, (5, 6)),),
        spans=(span(2, 0, 3, samples=2),),
        token_ids=array("i", [1, 2, 3]),
        samples=(RowId(RequestId(1), 1), row, row),
        scored=array("i", [2, 3]),
        lower=(
            TierWork(
                Tier.DISK,
                spills=(Spill(1, 2, ChunkKey(b"k" * 32), 8),),
                promotions=(Promotion(3, 4, ChunkKey(b"l" * 32)),),
                erased=(8, 9),
            ),
        ),
        ended=(RequestId(5),),
    )
    got = unpack(pack(sent))
    for field in fields(StepPlan):
        if field.name not in ("joins", "samples", "ended"):
            assert getattr(got, field.name) == getattr(sent, field.name)
    (joined,) = got.joins
    assert (joined.seat, joined.sampling, joined.prompt_logprobs) == (2, GREEDY, 4)
    assert not joined.prompt and not joined.reply
    assert len(got.samples) == 3 and not got.ended


def result(step, completed=(0, 0, 0), bad_copies=(), **disk):
    lower = (TierReport(Tier.DISK, **disk),)
    return StepResult(step, (), (), Tickets(*completed), lower, bad_copies)


def report(step, completed=(0, 0, 0), bad_copies=(), **disk):
    return RankReport(step, Tickets(*completed), (TierReport(Tier.DISK, **disk),), bad_copies)


def on_disk(result):
    """The result's report of DISK, perhaps none."""
    return next(iter(result.lower), TierReport(Tier.DISK))


def test_the_slowest_rank_says_what_is_complete():
    reports = Reports(2)
    assert reports.merged(result(1, (1, 4, 2))).completed == (0, 0, 0) and reports.late(1) == [1, 2]
    reports.take(1, report(1, (1, 3, 5)))
    reports.take(2, report(1, (1, 4, 2)))
    assert reports.late(1) == [] and reports.late(2) == [1, 2]
    assert reports.merged(result(2, (2, 9, 9))).completed == (1, 3, 2)


def test_what_is_late_on_a_rank_is_told_at_once_and_ends_on_all_ranks_later():
    reports = Reports(2)

    def merged(step, **own):
        lower = (TierReport(Tier.SHARED, **own),) if own else ()
        (shared,) = reports.merged(replace(result(step), lower=lower)).lower or (
            TierReport(Tier.SHARED),
        )
        return shared

    reports.take(1, report(1)._replace(lower=(TierReport(Tier.SHARED, late=(4,)),)))
    answer = KeyAnswer(3, (True, False))
    first = merged(1, promoted=(4, 5), looked_up=(answer,), read_seconds=0.5)
    assert (first.late, first.promoted, first.failed) == ((4,), (), ())
    assert (first.looked_up, first.read_seconds) == ((answer,), 0.5)
    for rank in (1, 2):
        ended = TierReport(Tier.SHARED, promoted=(4, 5))
        reports.take(rank, report(2)._replace(lower=(ended,)))
    second = merged(2)
    assert (second.late, second.promoted, second.looked_up) == ((), (4, 5), ())


def test_host_has_the_slots_that_all_ranks_have_pinned(leader):
    """Before their first reports none: the scheduler counts those of the start by itself."""
    _, executor = leader
    executor._device._pools[Tier.HOST] = torch.zeros(9, 1)
    assert executor.host_slots == 0
    for told, agreed in ((3, 3), (20, 9)):
        executor._reports.take(1, report(1)._replace(host_slots=told))
        assert executor.host_slots == agreed


def test_disk_work_is_done_once_all_ranks_have_done_it_and_failed_if_one_has():
    reports = Reports(2)
    first = on_disk(reports.merged(result(1, spilled=(4, 5), promoted=(6,), failed=(7,))))
    assert (first.spilled, first.promoted, first.failed) == ((), (), ())
    reports.take(1, report(1, promoted=(7,), spilled=(4,), failed=(5,)))
    reports.take(2, report(1, promoted=(6, 7), spilled=(4,)))
    second = on_disk(reports.merged(result(2)))
    # of 5 and 6 others are still at it
    assert (second.spilled, second.promoted, second.failed) == ((4,), (), (7,))
    reports.take(1, report(2, promoted=(6,)))
    reports.take(2, report(2, failed=(5,)))
    third = on_disk(reports.merged(result(3)))
    assert (third.spilled, third.promoted, third.failed) == ((), (6,), (5,))
    reports.take(1, report(3, spilled=(4,)))  # the slot is used again
    assert on_disk(reports.merged(result(4, spilled=(4,)))).spilled == ()


def test_what_one_rank_cannot_erase_is_not_erased():
    reports = Reports(2)
    reports.take(1, report(1, erase_failed=(4,)))
    reports.take(2, report(1, erase_failed=(4, 7)))
    assert sorted(on_disk(reports.merged(result(1, erase_failed=(9,)))).erase_failed) == [4, 7, 9]
    assert on_disk(reports.merged(result(2))).erase_failed == ()


def test_a_copy_that_is_none_on_one_rank_is_none():
    """It is reported at the latest with the ticket that covers it, and once."""
    reports = Reports(2)
    reports.take(1, report(1, (1, 0, 4), bad_copies=(3, 5)))
    assert reports.merged(result(1, (1, 0, 4), bad_copies=(5, 8))).bad_copies == (5, 8, 3)
    reports.take(2, report(1, (1, 0, 4), bad_copies=(9,)))
    told = reports.merged(result(2, (2, 0, 4)))
    assert (told.bad_copies, told.completed.swap_out) == ((9,), 4)
    assert reports.merged(result(3, (3, 0, 4))).bad_copies == ()


def test_only_rank_0_knows_which_rows_are_stuck():
    """It alone follows grammars; the others obey its next plan."""
    reports = Reports(2)
    row = RowId(RequestId(3), 4)
    rows = {row: RowResult(row.request, error=RequestError(ErrorKind.INTERNAL, "stuck"))}
    reports.take(1, report(1))
    assert reports.merged(replace(result(1), rows=rows)).rows == rows
    assert "rows" not in RankReport._fields


def test_a_record_from_earlier_is_there_if_all_ranks_have_their_part_of_it():
    def record(slot, key, age=1.0):
        return StoredRecord(slot, ChunkKey(key * 32), 8, age)

    first = [record(0, b"a"), record(1, b"b"), record(2, b"c")]
    second = [record(2, b"d"), record(1, b"b", age=9.0), record(0, b"a")]
    assert on_all([first, second]) == first[:2]
    assert on_all([first, second, []]) == []


class Gathered:
    """Two ranks that gather, each in its own thread."""

    def __init__(self):
        self._met = threading.Barrier(2)
        self._values = [None, None]

    def as_rank(self, rank):
        def gather(value):
            self._values[rank] = value
            self._met.wait(10)
            return self._values

        return SimpleNamespace(gather=gather)


def test_a_record_that_only_one_rank_has_is_erased_at_the_start(tmp_path):
    """Else it would outlive its conversation: no scheduler knows of it, so no deletion reaches
    it."""
    config = replace(CONFIG, disk_kv_chunks=8)

    def opened(rank):
        disk = DiskSettings(tmp_path, 8, "ab", ranks=2, rank=rank)
        return Executor(CpuDevice(), FakeEngine(LAYERS), config, 2, disk=disk)

    left = {0: {0: b"a", 1: b"b", 2: b"c"}, 1: {1: b"b", 2: b"d", 3: b"e"}}
    for rank, slots in left.items():
        executor = opened(rank)
        spills = tuple(Spill(slot, slot, ChunkKey(key * 32), 4) for slot, key in slots.items())
        executor.launch(replace(plan(1), lower=(TierWork(Tier.DISK, spills),)))
        written = on_disk(executor.wait()).spilled
        for step in count(2):
            if len(written) == len(spills):
                break
            executor.launch(plan(step))
            written += on_disk(executor.wait()).spilled
        executor.close()
    for _ in range(2):
        executors = [opened(rank) for rank in (0, 1)]
        ranks = Gathered()
        with ThreadPoolExecutor(2) as threads:
            agreed = list(threads.map(agreed_records, map(ranks.as_rank, (0, 1)), executors))
        assert [
            [(record.slot, record.key[:1]) for record in records[Tier.DISK]] for records in agreed
        ] == [[(1, b"b")]] * 2
        for executor in executors:
            assert [record.slot for record in executor.stored_records()[Tier.DISK]] == [1]
            executor.close()


class Pipes:
    """Both sides of `Ranks` between two ranks."""

    size = 2

    def __init__(self):
        self.plans: SimpleQueue[bytes] = SimpleQueue()
        self.waiting: SimpleQueue[tuple] = SimpleQueue()
        self.failure = None
        self.stopped = False

    def gather(self, value):
        return [value, value]

    def send(self, packed):
        self.plans.put(packed)

    def stop(self):
        self.stopped = True
        self.plans.put(b"")

    def receive(self):
        try:
            return self.plans.get_nowait()
        except Empty:
            return None

    def report(self, report):
        self.waiting.put((1, report))

    def reports(self):
        if self.failure:
            raise RankFailed(self.failure)
        while not self.waiting.empty():
            yield self.waiting.get()


CONFIG = SchedulerConfig(
    gpu_kv_chunks=16, host_kv_chunks=32, max_model_len=36, max_num_seqs=4, chunk_tokens=4
)


def turn():
    """A prompt, three further tokens, and copies of their KV."""
    first = plan(
        1, joins=[join(0)], blocks=[(0, 0, (0, 1, 2))], spans=[span(0, 0, 8)], token_ids=PROMPT
    )
    out = copy(Lane.OUT, 3, {0: 4, 1: 5}, Tickets(compute=1))
    return [
        first,
        plan(2, generate={0: 8}, copies=[out]),
        *(plan(n, generate={0: 6 + n}) for n in (3, 4)),
    ]


def test_another_rank_executes_rank_0_s_plans_and_ends_with_it(monkeypatch):
    looks = []
    monkeypatch.setattr(garbage, "DUE", 0)
    monkeypatch.setattr(
        garbage.GarbageCollector,
        "collect_new",
        lambda _: looks.append((other.in_flight, gc.isenabled())),
    )
    pipes = Pipes()
    other = Executor(
        CpuDevice(disturb=lambda lane: 0.02 * (lane is Lane.OUT)), FakeEngine(LAYERS), CONFIG, 2
    )
    follower = threading.Thread(target=follow, args=(pipes, other), daemon=True)
    follower.start()
    leader = RankedExecutor(pipes, CpuDevice(), FakeEngine(LAYERS), CONFIG, group_layers=2)
    tokens, completed = [], []
    for step in turn():
        leader.launch(step)
        if step.step > 1:  # two are in flight
            done = leader.wait()
            tokens += done.tokens
            completed.append(done.completed.compute)
    tokens += leader.wait().tokens
    assert tokens == reply(PROMPT, 4, LAYERS)
    assert completed == sorted(completed)
    assert all(ticket <= launched for launched, ticket in enumerate(completed, start=2))
    leader.close()
    follower.join(60)
    assert not follower.is_alive()
    assert (
        len(looks) == 4
        and all(in_flight and not enabled for in_flight, enabled in looks)
        and gc.isenabled()
    )
    with pytest.raises(InvariantError, match="closed"):
        other.launch(plan(5, generate={0: 11}))


@pytest.fixture
def leader():
    pipes = Pipes()
    executor = RankedExecutor(pipes, CpuDevice(), FakeEngine(LAYERS), CONFIG, group_layers=2)
    yield pipes, executor
    Executor.close(executor)


def test_what_fails_elsewhere_is_raised_where_rank_0_waits(leader):
    pipes, executor = leader
    executor.launch(turn()[0])
    pipes.failure = "rank 1: ZeroDivisionError: so"
    with pytest.raises(RankFailed, match="rank 1: ZeroDivisionError: so"):
        executor.wait()
    executor.close()
    assert not pipes.stopped  # the other rank may no longer receive


def test_a_rank_that_does_not_report_is_not_waited_for(leader, monkeypatch):
    _, executor = leader
    first, second, *_ = turn()
    executor.launch(first)
    assert executor.wait().tokens  # nothing before it to be reported
    executor.launch(second)
    while not executor.done():  # the step itself is not late
        time.sleep(0.001)
    monkeypatch.setattr(ranks_executor, "OVERDUE_SECONDS", 0.2)
    with pytest.raises(RankFailed, match=r"ranks \[1\] have not reported step 1 after 0.2 s"):
        executor.wait()


def test_what_is_erased_is_so_on_every_rank_before_its_plan_is_done(tmp_path, monkeypatch):
    """Rank 1 is a step behind, which any other plan would allow."""
    pipes = Pipes()
    disk = DiskSettings(tmp_path, slots=4, engine="ab")
    executor = RankedExecutor(pipes, CpuDevice(), FakeEngine(LAYERS), CONFIG, disk=disk)
    executor.launch(plan(1))
    done = executor.wait()
    pipes.report(report_of(done, 0))
    executor.launch(replace(plan(2), lower=(TierWork(Tier.DISK, erased=(3,)),)))
    while not executor.done():  # the step itself is not late
        time.sleep(0.001)
    monkeypatch.setattr(ranks_executor, "OVERDUE_SECONDS", 0.2)
    with pytest.raises(RankFailed, match=r"ranks \[1\] have not reported step 2"):
        executor.wait()
    Executor.close(executor)


class Hanging(FakeEngine):
    def __init__(self):
        super().__init__(LAYERS)
        self.goes_on = threading.Event()

    def forward(self, *arguments):
        self.goes_on.wait(60)
        return super().forward(*arguments)


def test_a_step_that_hangs_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(ranks_executor, "OVERDUE_SECONDS", 0.1)
    engine = Hanging()
    executor = RankedExecutor(Pipes(), CpuDevice(), engine, CONFIG, group_layers=2)
    executor.launch(turn()[0])
    with pytest.raises(RankFailed, match="step 1 is not complete"):
        executor.wait()
    engine.goes_on.set()
    Executor.close(executor)


def test_another_rank_waits_for_a_plan_for_ever_but_not_for_a_step(monkeypatch):
    """Rank 0 takes part in the step, and may be the rank that hangs."""
    monkeypatch.setattr(ranks_executor, "OVERDUE_SECONDS", 0.1)
    monkeypatch.setattr(ranks_executor, "FAREWELL_SECONDS", 0.1)
    pipes = Pipes()
    engine = Hanging()
    other = Executor(CpuDevice(), engine, CONFIG, 2)
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(follow, pipes, other)
        with pytest.raises(TimeoutError):
            following.result(timeout=0.5)
        pipes.send(pack(turn()[0]))
        with pytest.raises(RankFailed, match="no step is complete"):
            following.result(timeout=30)
    engine.goes_on.set()
    other.close()


@pytest.fixture
def group():
    ranks = ThreadRanks(2)
    register_group(TENSOR_PARALLEL, ranks)
    yield ranks
    release_group(TENSOR_PARALLEL)


def test_rank_0_draws_for_all(group):
    """It has inputs that the others lack: the rows' sampling settings, and the grammars' masks."""
    logits = torch.randn(2, FakeEngine.vocab_size)
    sent = plan(
        1,
        joins=[join(0, Sampling(temperature=5.0, seed=3)), join(1)],
        blocks=[(0, 0, (0,)), (1, 0, (1,))],
        spans=[span(0, 0, 2), span(1, 0, 3)],
        token_ids=[1, 2, 3, 4, 5],
    )
    inputs = [StepPacker(4, 2, 4).pack(seen).sampling for seen in (sent, unpack(pack(sent)))]
    expected = Sampler(FakeEngine.vocab_size).sample(logits.clone(), inputs[0])[0]

    def work(rank):
        sampler = make_sampler(FakeEngine.vocab_size)
        assert isinstance(sampler, SharedSampler)
        return sampler.sample(logits.clone(), inputs[rank])[0]

    for drawn in group.run(work):
        assert torch.equal(drawn, expected) and drawn.dtype == expected.dtype


def test_scored_rows_are_no_draws_on_any_rank(group):
    wants = Join(0, RowId(RequestId(1), 1), GREEDY, prompt_logprobs=2)
    sent = plan(
        1,
        joins=[wants],
        blocks=[(0, 0, (0,))],
        spans=[span(0, 0, 3)._replace(scores=True)],
        token_ids=[1, 2, 3],
    )
    sent = unpack(pack(StepPlan(**{field.name: getattr(sent, field.name) for field in fields(sent)}
                                | {"scored": array("i", [2, 3])})))  # fmt: skip
    inputs = StepPacker(4, 2, 4).pack(sent)
    logits = torch.randn(len(inputs.sample_rows), FakeEngine.vocab_size)

    def work(rank):
        return make_sampler(FakeEngine.vocab_size).sample(logits.clone(), inputs.sampling)

    (drawn, scores), (told, none) = group.run(work)
    assert torch.equal(drawn, told) and len(drawn) == 1
    assert len(scores.logprobs) == 2 and none is None


def test_where_a_row_begins_is_sent_too():
    """Otherwise the other ranks would attend to positions that the row no longer sees."""
    sent = replace(plan(3), origins=(RowStart(2, 8, 4),))
    assert unpack(pack(sent)).origins == sent.origins
