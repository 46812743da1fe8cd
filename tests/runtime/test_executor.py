import os
import random
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace

import pytest

from pensieve.runtime import executor as executor_module
from pensieve.runtime.counters import KVCounters
from pensieve.runtime.device.cpu import CpuDevice
from pensieve.runtime.disk.segments import SystemCalls
from pensieve.runtime.disk.store import DiskSettings
from pensieve.runtime.executor import LOWER_WAIT_SECONDS, MAX_IN_FLIGHT, Executor
from pensieve.runtime.shared import store
from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.plan import CopyBatch, Lane, Promotion, Spill, StepPlan, Tickets, TierWork
from pensieve.scheduler.types import ChunkKey, InvariantError, Sampling, Tier

from .device.test_cpu import hold
from .fake_engine import VOCAB, FakeEngine, copy, join, next_token, plan, reply, span
from .shared.doubles import FaultyEngine
from .shared.store_tests import settings

LAYERS, CHUNK = 5, 4
PROMPT = [5, 9, 2, 44, 7, 8, 30, 61]  # two full chunks
CHUNK_BYTES = LAYERS * 2 * CHUNK * 4


@pytest.fixture
def executors():
    """Makes executors over a CPU device and closes them."""
    opened = []

    def make(engine=None, host_kv_chunks=32, in_first=False, disk=None, shared=None, **disturbance):
        config = SchedulerConfig(
            gpu_kv_chunks=16,
            host_kv_chunks=host_kv_chunks,
            max_model_len=36,
            max_num_seqs=4,
            chunk_tokens=CHUNK,
        )
        device = CpuDevice(**disturbance)
        executor = Executor(
            device,
            engine or FakeEngine(LAYERS),
            config,
            group_layers=2,
            in_first=in_first,
            disk=disk,
            shared=shared,
        )
        opened.append(executor)
        return executor

    yield make
    for executor in opened:
        executor.close()


def delay(*slow: Lane, seconds: float = 0.05):
    return lambda lane: seconds if lane in slow else 0.0


def first_turn(
    step: int = 1, seat: int = 0, slots: tuple[int, ...] = (0, 1, 2), prompt=PROMPT, **more
) -> StepPlan:
    return plan(
        step,
        joins=[join(seat)],
        blocks=[(seat, 0, slots)],
        spans=[span(seat, 0, len(prompt))],
        token_ids=prompt,
        **more,
    )


def second_turn(step: int, seat: int, slots: tuple[int, ...], **more) -> StepPlan:
    """Another two tokens after PROMPT, whose two chunks are in the first two slots."""
    new = span(seat, len(PROMPT), len(PROMPT) + 2)
    return plan(
        step, joins=[join(seat)], blocks=[(seat, 0, slots)], spans=[new], token_ids=[3, 4], **more
    )


SECOND_TURN_TOKEN = next_token([*PROMPT, 3, 4], LAYERS)


def run(executor: Executor, *plans: StepPlan) -> list[tuple[int, ...]]:
    """Launches each plan while the one before runs; the tokens of each."""
    results = []
    for i, step in enumerate(plans):
        executor.launch(step)
        if i:
            results.append(executor.wait())
    results.append(executor.wait())
    assert [r.step for r in results] == [p.step for p in plans]
    assert [r.samples for r in results] == [p.samples for p in plans]
    return [r.tokens for r in results]


def test_generation_feeds_itself_with_steps_in_flight(executors):
    executor = executors(disturb=delay(Lane.COMPUTE, seconds=0.005))
    other = [1, 2, 3]
    plans = [first_turn(), first_turn(2, seat=3, slots=(5, 6), prompt=other, generate={0: 8})]
    plans += [plan(n, generate={3: n, 0: 6 + n}) for n in range(3, 5)]
    tokens = run(executor, *plans)
    first, second = reply(PROMPT, 4, LAYERS), reply(other, 3, LAYERS)
    assert tokens == [
        (first[0],),
        (first[1], second[0]),
        (second[1], first[2]),
        (second[2], first[3]),
    ]


def test_a_gpu_cache_alone(executors):
    assert run(executors(host_kv_chunks=0), first_turn()) == [(next_token(PROMPT, LAYERS),)]


def test_a_prompt_in_pieces_samples_with_the_last(executors):
    executor = executors()
    pieces = [
        plan(
            1,
            joins=[join(2)],
            blocks=[(2, 0, (7, 3))],
            spans=[span(2, 0, 3, samples=False)],
            token_ids=PROMPT[:3],
        ),
        plan(2, spans=[span(2, 3, 8)], token_ids=PROMPT[3:]),
    ]
    assert run(executor, *pieces) == [(), (next_token(PROMPT, LAYERS),)]


def test_draws_are_a_function_of_seed_and_position(executors):
    """A request that recomputes its context in another seat, beside others, continues with the same
    tokens."""
    hot = Sampling(temperature=50.0, top_k=0, top_p=1.0, seed=11)

    def continued(executor: Executor, seat: int, prompt: list[int], count: int) -> list[int]:
        start = plan(
            1,
            joins=[join(seat, hot)],
            blocks=[(seat, 0, (2, 4, 6, 8))],
            spans=[span(seat, 0, len(prompt))],
            token_ids=prompt,
        )
        more = [plan(n, generate={seat: len(prompt) + n - 2}) for n in range(2, count + 1)]
        return [tokens[0] for tokens in run(executor, start, *more)]

    whole = continued(executors(), 1, PROMPT, 6)
    assert len(set(whole)) > 3 and max(whole) < VOCAB
    assert continued(executors(), 3, PROMPT + whole[:2], 4) == whole[2:]


def test_a_plan_without_tokens_copies_and_is_complete_with_its_copies(executors):
    executor = executors(disturb=delay(Lane.OUT))
    run(executor, first_turn())
    executor.launch(plan(2, copies=[copy(Lane.OUT, 1, {0: 3, 1: 4}, Tickets(1, 0, 0))]))
    result = executor.wait()
    assert (result.tokens, result.samples, result.completed) == ((), (), Tickets(2, 0, 1))
    assert executor.copied_bytes == KVCounters(swap_in=0, swap_out=2 * CHUNK_BYTES)


def test_hazard_out_copy_waits_for_the_step_that_wrote_the_kv(executors):
    executor = executors(disturb=delay(Lane.COMPUTE))
    tokens = run(
        executor,
        first_turn(),
        plan(2, copies=[copy(Lane.OUT, 1, {0: 0, 1: 1}, Tickets(1, 0, 0))]),
        second_turn(
            3, 1, (8, 9, 10), copies=[copy(Lane.IN, 1, {0: 8, 1: 9}, Tickets(0, 0, 1), gated=True)]
        ),
    )
    assert tokens == [(next_token(PROMPT, LAYERS),), (), (SECOND_TURN_TOKEN,)]


def test_hazard_slot_reuse_waits_for_the_out_copy_still_reading(executors):
    executor = executors(disturb=delay(Lane.OUT))
    tokens = run(
        executor,
        first_turn(),
        first_turn(
            2,
            seat=1,
            prompt=PROMPT[::-1],  # into the same slots
            copies=[copy(Lane.OUT, 1, {0: 0, 1: 1}, Tickets(1, 0, 0))],
            after=Tickets(0, 0, 1),
        ),
        second_turn(
            3, 2, (8, 9, 10), copies=[copy(Lane.IN, 1, {0: 8, 1: 9}, Tickets(0, 0, 1), gated=True)]
        ),
    )
    assert tokens[1:] == [(next_token(PROMPT[::-1], LAYERS),), (SECOND_TURN_TOKEN,)]


def pass_lane(executor: Executor, lane: Lane) -> None:
    """Waits until the lane has done all that it has to do."""
    executor._device.synchronize(executor._device.mark(lane))


@pytest.mark.parametrize("gated", [True, False])
def test_hazard_swap_in_delayed_and_the_step_waits(executors, gated):
    executor = executors(disturb=delay(Lane.IN, seconds=0.1))
    run(executor, first_turn(), plan(2, copies=[copy(Lane.OUT, 1, {0: 0, 1: 1}, Tickets(1, 0, 0))]))
    go_on = hold(executor._device, Lane.IN)
    back = copy(Lane.IN, 1, {0: 8, 1: 9}, Tickets(0, 0, 1), gated)
    executor.launch(
        second_turn(3, 1, (8, 9, 10), copies=[back], after=Tickets(0, 0 if gated else 1, 0))
    )
    assert not executor.done()  # the launch did not wait
    begin = time.perf_counter()
    go_on.set()
    result = executor.wait()
    assert result.tokens == (SECOND_TURN_TOKEN,)
    assert result.completed == Tickets(3, 1, 1)
    # three groups of layers, or whole records
    assert time.perf_counter() - begin >= (0.3 if gated else 0.1)


def test_the_hazards_would_be_seen_without_gates_and_tickets(executors, monkeypatch):
    """The tests above have teeth: with the waits taken away the same plans give other tokens."""
    monkeypatch.setattr(CpuDevice, "_pass_gate", lambda self, layer: None)
    executor = executors()
    run(executor, first_turn(), plan(2, copies=[copy(Lane.OUT, 1, {0: 0, 1: 1}, Tickets(1, 0, 0))]))
    back = copy(Lane.IN, 1, {0: 8, 1: 9}, Tickets(0, 0, 1), gated=True)
    go_on = hold(executor._device, Lane.IN)
    executor.launch(second_turn(3, 1, (8, 9, 10), copies=[back]))
    pass_lane(executor, Lane.COMPUTE)
    go_on.set()
    assert executor.wait().tokens != (SECOND_TURN_TOKEN,)

    monkeypatch.setattr(CpuDevice, "wait", lambda self, lane, ticket: None)
    executor = executors()
    copies = [
        copy(Lane.OUT, 1, {0: 0, 1: 1}, Tickets(1, 0, 0)),
        copy(Lane.IN, 1, {0: 8, 1: 9}, Tickets(0, 0, 1), gated=True),
    ]
    go_on = hold(executor._device, Lane.COMPUTE)
    executor.launch(first_turn())
    executor.launch(second_turn(2, 1, (8, 9, 10), copies=copies))
    pass_lane(executor, Lane.OUT)
    go_on.set()
    executor.wait()
    assert executor.wait().tokens != (SECOND_TURN_TOKEN,)


def test_hazard_block_table_changed_while_a_step_in_flight_reads_it(executors):
    """A seat goes to another request while its former owner's last step has not begun."""
    executor = executors(disturb=delay(Lane.COMPUTE, seconds=0.02))
    tokens = run(
        executor,
        first_turn(),
        plan(2, generate={0: 8}),
        first_turn(3, seat=0, slots=(4, 5), prompt=PROMPT[:6]),
    )
    first = reply(PROMPT, 2, LAYERS)
    assert tokens == [(first[0],), (first[1],), (next_token(PROMPT[:6], LAYERS),)]


class Broken(FakeEngine):
    error = RuntimeError("the engine broke")

    def forward(self, *arguments):
        raise self.error


@pytest.mark.parametrize("lane", list(Lane))
def test_hazard_one_lane_raises_and_no_other_hangs(executors, lane):
    before = threading.enumerate()
    executor = executors(engine=Broken(LAYERS) if lane is Lane.COMPUTE else None)
    go_on = hold(executor._device, lane)
    nowhere = {0: 1000}
    copies = {
        Lane.COMPUTE: [],
        Lane.IN: [copy(Lane.IN, 1, nowhere, gated=True)],
        Lane.OUT: [copy(Lane.OUT, 1, nowhere)],
    }[lane]
    after = Tickets(0, 0, 1) if lane is Lane.OUT else Tickets()
    executor.launch(first_turn(copies=copies, after=after))
    go_on.set()
    with pytest.raises((RuntimeError, IndexError)) as first:
        executor.wait()
    with pytest.raises(type(first.value)) as second:
        executor.launch(plan(2, generate={0: 8}))
    assert second.value is first.value
    executor.close()
    assert set(threading.enumerate()) <= set(before)


def test_launching_or_waiting_too_often_is_refused(executors):
    executor = executors()
    with pytest.raises(InvariantError, match="no step is in flight"):
        executor.wait()
    for n in range(1, MAX_IN_FLIGHT + 1):
        executor.launch(plan(n))
    with pytest.raises(InvariantError, match="steps in flight"):
        executor.launch(plan(MAX_IN_FLIGHT + 1))


@pytest.mark.parametrize("hangs", [False, True])
def test_host_memory_is_kept_while_a_call_to_the_shared_store_hangs(executors, monkeypatch, hangs):
    engine = FaultyEngine()
    in_use = []
    close = CpuDevice.close

    def closed(device, host_in_use=False):
        in_use.append(host_in_use)
        close(device, host_in_use)

    monkeypatch.setattr(executor_module, "open_engine", lambda config: engine)
    monkeypatch.setattr(store, "CLOSE_S", 0.01 if hangs else 60.0)
    monkeypatch.setattr(CpuDevice, "close", closed)
    if hangs:
        engine.gate.clear()
    executor = executors(shared=settings())
    while not engine.calls:
        time.sleep(0.001)
    executor.close()
    assert in_use == [hangs]
    engine.gate.set()


@dataclass
class Conversation:
    log: list[int] = field(default_factory=list)
    # slots of its chunks, all but the last token's KV
    host: list[int] = field(default_factory=list)
    saved: int = 0  # the OUT ticket that wrote them


class TinyScheduler:
    """Conversations take turns in two seats; between turns their KV is on the host. Slots are given
    away at once: `busy` remembers the tickets that a slot's next user must wait for."""

    def __init__(self, executor: Executor, rng: random.Random):
        self.executor = executor
        self.rng = rng
        self.conversations = [Conversation() for _ in range(4)]
        self.gpu, self.host = deque(range(16)), deque(range(32))
        self.busy_gpu = dict.fromkeys(range(16), Tickets())
        self.busy_host = dict.fromkeys(range(32), Tickets())
        self.step = self.ins = self.outs = 0
        self.swap_out: list[CopyBatch] = []  # goes with the next step
        self.in_flight: deque[list[Conversation]] = deque()

    def launch(self, who: list[Conversation], **contents) -> None:
        self.step += 1
        self.executor.launch(plan(self.step, **contents))
        self.in_flight.append(who)
        if len(self.in_flight) > 1:
            self.collect()

    def collect(self) -> None:
        for conversation, token in zip(
            self.in_flight.popleft(), self.executor.wait().tokens, strict=True
        ):
            assert token == next_token(conversation.log, LAYERS)
            conversation.log.append(token)

    def round(self) -> None:
        """A turn of two conversations side by side."""
        who = self.rng.sample(self.conversations, 2)
        generated = self.rng.randrange(4)
        gated = self.rng.random() < 0.7
        pairs = {}
        after_in = [Tickets()]
        after = [Tickets()]
        blocks, spans, token_ids, held = [], [], [], []
        for seat, conversation in enumerate(who):
            if len(conversation.log) > 20:
                self.forget(conversation)
            computed = max(len(conversation.log) - 1, 0)
            conversation.log += [self.rng.randrange(VOCAB) for _ in range(self.rng.randrange(1, 8))]
            end = len(conversation.log)
            slots = [self.gpu.popleft() for _ in range(-(-(end + generated) // CHUNK))]
            loaded = slots[: len(conversation.host)]
            pairs |= dict(zip(conversation.host, loaded, strict=True))
            after_in += [Tickets(0, 0, conversation.saved), *(self.busy_gpu[s] for s in loaded)]
            after += [self.busy_gpu[s] for s in slots[len(loaded) :]]
            blocks.append((seat, 0, tuple(slots)))
            spans.append(span(seat, computed, end))
            token_ids += conversation.log[computed:]
            held.append(slots)
        copies = self.swap_out
        if pairs:
            self.ins += 1
            copies = [*copies, copy(Lane.IN, self.ins, pairs, latest(after_in), gated)]
            after += [] if gated else [Tickets(0, self.ins, 0)]
            self.host.extend(pairs)
            self.busy_host |= dict.fromkeys(pairs, Tickets(0, self.ins, 0))
        ends = [len(conversation.log) for conversation in who]
        given = {
            "joins": [join(0), join(1)],
            "blocks": blocks,
            "spans": spans,
            "token_ids": token_ids,
        }
        self.launch(who, copies=copies, after=latest(after), **given)
        for n in range(generated):
            self.launch(who, generate={seat: end + n for seat, end in enumerate(ends)})
        self.save(who, held)
        while self.in_flight:  # the next turn needs the logs
            self.collect()

    def save(self, who: list[Conversation], held: list[list[int]]) -> None:
        self.outs += 1
        pairs = {}
        after = [Tickets(self.step, 0, 0)]
        for conversation, slots in zip(who, held, strict=True):
            conversation.host = [self.host.popleft() for _ in slots]
            conversation.saved = self.outs
            after += [self.busy_host[s] for s in conversation.host]
            pairs |= dict(zip(slots, conversation.host, strict=True))
        self.busy_gpu |= dict.fromkeys(pairs, Tickets(self.step, 0, self.outs))
        self.gpu.extend(pairs)
        self.swap_out = [copy(Lane.OUT, self.outs, pairs, latest(after))]

    def forget(self, conversation: Conversation) -> None:
        self.busy_host |= dict.fromkeys(conversation.host, Tickets(0, 0, conversation.saved))
        self.host.extend(conversation.host)
        conversation.log, conversation.host = [], []


def latest(tickets: list[Tickets]) -> Tickets:
    return Tickets(*map(max, zip(*tickets, strict=True)))


@pytest.mark.parametrize("in_first", [False, True], ids=["duplex", "in-first"])
@pytest.mark.parametrize("seed", range(4))
def test_random_turns_with_copies_delayed_and_reordered(executors, seed, in_first):
    rng = random.Random(seed)
    executor = executors(
        in_first=in_first,
        disturb=lambda lane: rng.choice((0.0, 0.0, 0.001, 0.003)),
        shuffle=random.Random(seed),
    )
    scheduler = TinyScheduler(executor, rng)
    for _ in range(25):
        scheduler.round()
    copied = scheduler.executor.copied_bytes
    assert copied.swap_in > 0 and copied.swap_out > 0


# -- the disk


def disk_settings(tmp_path, **changes) -> DiskSettings:
    return DiskSettings(**dict(directory=tmp_path, slots=8, engine="ab") | changes)


def key(number: int) -> ChunkKey:
    return ChunkKey(bytes([number]) * 32)


def disk_work(executor: Executor, step: int, **work) -> tuple[list[int], list[int], list[int]]:
    """(spilled, promoted, failed) of a plan with this work and of the next ones, until all is
    reported."""
    got: tuple[list[int], list[int], list[int]] = ([], [], [])
    executor.launch(replace(plan(step), lower=(TierWork(Tier.DISK, **work),)))
    while sum(map(len, got)) < sum(map(len, work.values())):
        result = executor.wait()
        (report,) = result.lower
        for slots, more in zip(got, report[1:4], strict=True):
            slots += more
        step += 1
        executor.launch(plan(step))
    executor.wait()
    return tuple(map(sorted, got))


def test_kv_from_the_disk_is_as_good_as_from_the_host(executors, tmp_path):
    """Computed, copied out, spilled, its HOST slots overwritten, promoted elsewhere, copied in, and
    gone on with."""
    executor = executors(disk=disk_settings(tmp_path))
    run(executor, first_turn(), plan(2, copies=[copy(Lane.OUT, 1, {0: 3, 1: 4}, Tickets(1, 0, 0))]))
    spills = (Spill(3, 6, key(0), CHUNK), Spill(4, 7, key(1), 2 * CHUNK))
    assert disk_work(executor, 3, spills=spills) == ([6, 7], [], [])
    run(
        executor,
        first_turn(101, seat=2, prompt=PROMPT[::-1], slots=(5, 6, 7)),
        plan(102, copies=[copy(Lane.OUT, 2, {5: 3, 6: 4}, Tickets(101, 0, 0))]),
    )
    promotions = (Promotion(6, 8, key(0)), Promotion(7, 9, key(1)))
    assert disk_work(executor, 103, promotions=promotions) == ([], [6, 7], [])
    back = copy(Lane.IN, 1, {8: 8, 9: 9}, Tickets(0, 0, 2), gated=True)
    assert run(executor, second_turn(201, 1, (8, 9, 10), copies=[back])) == [(SECOND_TURN_TOKEN,)]


def test_a_new_executor_finds_the_records_but_not_those_erased(executors, tmp_path):
    executor = executors(disk=disk_settings(tmp_path))
    disk_work(executor, 1, spills=(Spill(0, 5, key(7), CHUNK), Spill(0, 2, key(8), CHUNK)))
    executor.launch(replace(plan(101), lower=(TierWork(Tier.DISK, erased=(2,)),)))
    executor.wait()
    executor.close()
    (record,) = executors(disk=disk_settings(tmp_path)).stored_records()[Tier.DISK]
    assert (record.slot, record.key, record.end) == (5, key(7), CHUNK)
    assert executors(disk=disk_settings(tmp_path, engine="cd")).stored_records()[Tier.DISK] == []


def test_a_plan_without_anything_waits_for_the_disk_a_little(executors, tmp_path):
    """The loop neither spins nor hangs while it is slow; a plan with tokens does not wait at
    all."""
    gate = threading.Event()

    def slow(file, buffers, offset):
        gate.wait(60)
        return os.preadv(file, buffers, offset)

    executor = executors(disk=disk_settings(tmp_path, system=SystemCalls(read=slow)))
    disk_work(executor, 1, spills=(Spill(0, 5, key(7), CHUNK),))
    executor.launch(
        replace(plan(3000), lower=(TierWork(Tier.DISK, promotions=(Promotion(5, 1, key(7)),)),))
    )
    executor.wait()
    began = time.perf_counter()
    for step in range(3001, 3011):
        executor.launch(plan(step))
        assert executor.wait().lower[0].promoted == ()
    assert time.perf_counter() - began >= 10 * LOWER_WAIT_SECONDS
    assert run(executor, first_turn(3011)) == [(next_token(PROMPT, LAYERS),)]
    gate.set()
    promoted = ()
    step = 3011
    while not promoted:
        executor.launch(plan(step := step + 1))
        promoted = executor.wait().lower[0].promoted
    assert promoted == (5,)


def test_work_for_a_disk_that_is_not_there(executors):
    with pytest.raises(InvariantError, match="tier that does not exist"):
        executors().launch(replace(plan(1), lower=(TierWork(Tier.DISK, erased=(1,)),)))
