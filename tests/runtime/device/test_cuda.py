"""The device protocol on a GPU, against the CPU's: copies, tickets, gates inside graphs, the
sampler, whole runs.

Copies and steps are held up on the GPU itself, by a kernel that spins.
"""

from __future__ import annotations

import functools
import itertools
import random
import threading
import time
from array import array
from collections import Counter
from inspect import signature

import numpy as np
import pytest
import torch

from pensieve.runtime.device import cuda as cuda_device
from pensieve.runtime.device import pinned_memory
from pensieve.runtime.device.cpu import CpuDevice
from pensieve.runtime.device.cuda import CudaDevice
from pensieve.runtime.device.memory import host_memory
from pensieve.runtime.device.pinned_memory import PinnedPool
from pensieve.runtime.device.protocol import Device
from pensieve.runtime.executor import MAX_IN_FLIGHT, Executor
from pensieve.runtime.step import prefixes
from pensieve.runtime.step.buffers import Shapes, StepBuffers
from pensieve.runtime.step.inputs import StepPacker
from pensieve.runtime.step.sampler import Sampler
from pensieve.runtime.step.sampling_inputs import Mask
from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.plan import Lane, Tickets
from pensieve.scheduler.types import GREEDY, InvariantError, Sampling, SettingError, Tier
from tests.end_to_end.chatter import Chatter

from ..fake_engine import copy, join, plan, span
from ..tiny_engine import Reference, TinyEngine

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CHUNK, SLOTS, HOST_SLOTS = 8, 40, 30
KINDS = ("llama", "opt")
EVENTS = (
    "gpu",
    "host",
    "recomputed",
    "new",
    "disjoint",
    "suspended",
    "dropped",
    "aborted",
    "branched",
)


def on_gpu(test):
    return functools.reduce(lambda marked, mark: mark(marked), gpu, test)


def test_the_protocol_and_nothing_more():
    """One more method is a design discussion."""

    def methods(kind: type) -> dict[str, list[str]]:
        return {
            name: list(signature(method).parameters)
            for name, method in vars(kind).items()
            if callable(method) and not name.startswith("_")
        }

    assert methods(CudaDevice) == methods(Device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_setting_is_named():
    with pytest.raises(SettingError, match="--device: torch finds no NVIDIA GPU"):
        CudaDevice()


@functools.cache
def cycles_a_second() -> float:
    """Clock cycles of the spinning kernel per second."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)
    begin.record()
    torch.cuda._sleep(20_000_000)
    end.record()
    end.synchronize()
    return 20_000_000 / begin.elapsed_time(end) * 1e3


class HeldUp(CudaDevice):
    """Each piece of work of a lane begins only after `delay(lane)` seconds on that lane."""

    def __init__(self, delay=lambda lane: 0.0, **options):
        super().__init__(**options)
        self._delay = delay
        cycles_a_second()

    def _hold_up(self, lane):
        if seconds := self._delay(lane):
            with torch.cuda.stream(self._streams[lane]):
                torch.cuda._sleep(int(seconds * cycles_a_second()))

    def hold(self, lane):
        """Work that is given to the lane from now on waits until the result of this is called. If
        nobody calls it, the work waits for a minute."""
        from cuda.bindings import driver

        flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        at_least = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        stream = self._streams[lane].cuda_stream
        (status,) = driver.cuStreamWaitValue32(stream, flag.data_ptr(), 1, at_least)
        assert status == driver.CUresult.CUDA_SUCCESS
        late = threading.Timer(60.0, flag.fill_, [1])
        late.start()

        def go():
            late.cancel()
            flag.fill_(1)

        return go

    def copy(self, lane, sources, targets, layers):
        self._hold_up(lane)
        super().copy(lane, sources, targets, layers)

    def run(self):
        self._hold_up(Lane.COMPUTE)
        super().run()


def delay(*slow: Lane, seconds: float = 0.05):
    return lambda lane: seconds if lane in slow else 0.0


@pytest.fixture
def closing():
    """Closes the objects passed to it, at the end."""
    opened = []
    yield lambda one: opened.append(one) or one
    for one in opened:
        one.close()


# Copies and tickets.


def pools(
    device: CudaDevice, shape=(50, 3, 2, 1, 4, 16), host_slots=35
) -> tuple[torch.Tensor, np.ndarray]:
    """Makes both pools, full of distinct numbers; returns their contents."""
    device.allocate_pool(Tier.GPU, shape, torch.float32)
    device.allocate_pool(Tier.HOST, (host_slots, *shape[1:]), torch.float32)
    on_device = torch.randn(shape)
    device._pool.copy_(on_device)
    on_host = np.random.default_rng(0).standard_normal((host_slots, *shape[1:]), np.float32)
    for slot in range(host_slots):
        device._host.record(slot)[:] = on_host[slot].ravel().view(np.uint8)
    torch.cuda.synchronize()
    return on_device.numpy().copy(), on_host


def contents(device: CudaDevice, host_slots=35) -> tuple[np.ndarray, np.ndarray]:
    torch.cuda.synchronize()
    shape = device._pool.shape[1:]
    host = np.stack(
        [device._host.record(slot).view(np.float32).reshape(shape) for slot in range(host_slots)]
    )
    return device._pool.cpu().numpy(), host


@on_gpu
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "one by one"])
def test_random_copies_equal_numpys(closing, monkeypatch, batched):
    dice = np.random.default_rng(1)
    # 6 slots
    monkeypatch.setattr(
        cuda_device, "PinnedPool", functools.partial(PinnedPool, largest_piece=10_000)
    )
    device = closing(CudaDevice(batched_copies=batched))
    on_device, on_host = pools(device)
    assert len(device._host.records.pieces) > 1
    for _ in range(30):
        lane = Lane(int(dice.choice([Lane.IN, Lane.OUT])))
        count = int(dice.integers(0, 30))
        gpu_slots, host_slots = (
            dice.permutation(most)[:count].astype(np.int32) for most in (50, 35)
        )
        first = int(dice.integers(3))
        layers = range(first, int(dice.integers(first + 1, 4)))
        if lane is Lane.IN:
            device.copy(lane, host_slots, gpu_slots, layers)
            on_device[gpu_slots, layers.start : layers.stop] = on_host[
                host_slots, layers.start : layers.stop
            ]
        else:
            device.copy(lane, gpu_slots, host_slots, layers)
            on_host[host_slots, layers.start : layers.stop] = on_device[
                gpu_slots, layers.start : layers.stop
            ]
        device.synchronize(device.mark(lane))
    for got, wanted in zip(contents(device), (on_device, on_host), strict=True):
        assert np.array_equal(got, wanted)


def growing(device: CudaDevice, most: int, record: int) -> None:
    """Makes pools of records of that size, with two slots on HOST that may become `most`, one in a
    piece."""
    shape = (50, 3, 2, 1, 4, record // 96)
    device.allocate_pool(Tier.GPU, shape, torch.float32)
    device.allocate_pool(Tier.HOST, (2, *shape[1:]), torch.float32, most=most)
    assert device.host_slots == 2 and device._host.records.slots_a_piece == 1


def await_slots(device: CudaDevice, slots: int) -> None:
    while device.host_slots < slots:
        assert device._host._thread.is_alive()
        time.sleep(1e-4)


@on_gpu
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "one by one"])
def test_random_copies_beside_growth_equal_numpys(closing, monkeypatch, batched):
    """Copies across pieces, while more are pinned."""
    dice = np.random.default_rng(2)
    most = 300
    record = 96 * 1000
    monkeypatch.setattr(pinned_memory, "GROWING_PIECE", record)
    device = closing(CudaDevice(batched_copies=batched))
    growing(device, most, record)
    on_device = np.zeros((50, record), np.uint8)
    on_host = np.zeros((most, record), np.uint8)
    device._host.grow(lambda: 2**60)
    at_work = 0
    while device.host_slots < most or at_work < 20:
        usable = device.host_slots
        at_work += 1
        lane = Lane(int(dice.choice([Lane.IN, Lane.OUT])))
        count = int(dice.integers(1, min(usable, 50)))
        gpu_slots = dice.permutation(50)[:count].astype(np.int32)
        host_slots = dice.permutation(usable)[:count].astype(np.int32)
        if lane is Lane.IN:
            for slot in host_slots:
                on_host[slot] = dice.integers(256)
                device.record(slot)[:] = on_host[slot]
            device.copy(lane, host_slots.copy(), gpu_slots.copy(), range(3))
            on_device[gpu_slots] = on_host[host_slots]
        else:
            device.copy(lane, gpu_slots.copy(), host_slots.copy(), range(3))
            on_host[host_slots] = on_device[gpu_slots]
        device.synchronize(device.mark(lane))
    torch.cuda.synchronize()
    pool = device._pool.cpu().numpy().reshape(50, -1).view(np.uint8)
    assert np.array_equal(pool, on_device)
    assert all(np.array_equal(device.record(slot), on_host[slot]) for slot in range(most))


@on_gpu
def test_a_close_during_growth_frees_what_is_pinned(monkeypatch):
    most = 20_000  # 36 GiB: never reached
    record = 96 * 20_000
    monkeypatch.setattr(pinned_memory, "GROWING_PIECE", record)
    device = CudaDevice()
    growing(device, most, record)
    pool = device._host
    held = host_memory().free
    pool.grow()
    await_slots(device, 100)
    copied = np.arange(50, dtype=np.int32)
    device.copy(Lane.OUT, copied, copied + 50, range(3))
    began = time.monotonic()
    device.close()
    print(f"closed after {1e3 * (time.monotonic() - began):.0f} ms")
    assert not pool._thread.is_alive() and not pool._addresses
    assert pool.records.slots < most
    print(f"{(held - host_memory().free) / 2**20:.0f} MiB more in use than before")


@on_gpu
def test_copies_go_on_beside_growth(closing):
    """Prints by how much pinning delays another thread's copies."""
    device = closing(CudaDevice())
    record = 96 * 2**14
    shape = (50, 3, 2, 1, 4, record // 96)
    device.allocate_pool(Tier.GPU, shape, torch.float32)
    device.allocate_pool(Tier.HOST, (50, *shape[1:]), torch.float32, most=2000)
    slots = np.arange(50, dtype=np.int32)

    def seconds(rounds=200) -> list[float]:
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            device.copy(Lane.OUT, slots, slots, range(3))
            device.synchronize(device.mark(Lane.OUT))
            times.append(time.perf_counter() - began)
        return sorted(times)

    alone = seconds()
    device._host.grow(lambda: 2**60)
    beside = seconds()
    grown = device.host_slots
    for name, times in (("alone", alone), ("beside growth", beside)):
        print(f"{name}: p50 {1e3 * times[100]:.2f} ms, p99 {1e3 * times[197]:.2f} ms")
    assert grown > 60


@on_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_replies_while_the_host_pool_grows(monkeypatch, kind):
    engine = TinyEngine(kind, "cuda")
    monkeypatch.setattr(pinned_memory, "GROWING_PIECE", 2 * engine.chunk_bytes(8))
    monkeypatch.setattr(pinned_memory, "LEAST_GAP", 0.02)
    settings = dict(gpu_kv_chunks=27, host_kv_chunks=4, host_kv_growth=60)
    chatter = Chatter(engine, Reference(kind), 12, make_device=lambda **_: HeldUp(), **settings)
    counts = chatter.run(50, events=["host"])
    assert counts["grown"] > 5 and chatter.scheduler.config.most_host_kv_chunks == 64


@on_gpu
def test_more_copies_than_a_call_takes(closing):
    device = closing(CudaDevice())
    slots = 2500
    _, on_host = pools(device, (slots, 2, 2, 1, 4, 16), slots)
    order = np.random.default_rng(2).permutation(slots).astype(np.int32)
    device.copy(Lane.IN, order, np.arange(slots, dtype=np.int32), range(1, 2))
    device.synchronize(device.mark(Lane.IN))
    assert np.array_equal(contents(device, slots)[0][:, 1], on_host[order, 1])


@on_gpu
def test_a_lane_keeps_its_order_and_waits_for_other_lanes(closing):
    device = closing(HeldUp(delay(Lane.IN, seconds=0.1)))
    _, on_host = pools(device)
    zero, one = np.array([0], np.int32), np.array([1], np.int32)
    begin = time.perf_counter()
    device.copy(Lane.IN, zero, zero, range(3))
    first = device.mark(Lane.IN)
    device.copy(Lane.IN, one, zero, range(3))
    second = device.mark(Lane.IN)
    device.wait(Lane.OUT, second)
    device.copy(Lane.OUT, zero, one, range(3))
    last = device.mark(Lane.OUT)
    assert not device.ready(first) and not device.ready(last), "issuing waited for the device"
    device.synchronize(last)
    assert time.perf_counter() - begin > 0.15
    assert device.ready(first) and device.ready(second)
    waited = device.transfer_seconds()
    # 0.1 s, and twice that for the second
    assert waited.queued_in.copies == 2 and waited.queued_in.seconds > 0.2
    assert waited.queued_out.copies == 1 and waited.queued_out.seconds > 0.15
    on_device, host = contents(device)
    assert np.array_equal(on_device[0], on_host[1]) and np.array_equal(host[1], on_host[1])


@on_gpu
def test_what_hangs_is_named_and_ends_the_device(closing, monkeypatch):
    device = closing(HeldUp(delay(Lane.IN, seconds=3.0)))
    pools(device)
    lane = device._streams[Lane.IN]
    monkeypatch.setattr(cuda_device, "OVERDUE_SECONDS", 0.1)
    zero = np.array([0], np.int32)
    device.copy(Lane.IN, zero, zero, range(2))
    device.wait(Lane.COMPUTE, device.mark(Lane.IN))
    step = device.mark(Lane.COMPUTE)
    with pytest.raises(
        InvariantError, match="lane IN, not past the copy of layers 0 to 1 of 1 chunks"
    ) as first:
        device.synchronize(step)
    assert "lane COMPUTE is not past its start after 0.1 s" in str(first.value)
    with pytest.raises(InvariantError) as second:
        device.mark(Lane.OUT)
    assert second.value is first.value
    device.close()
    device.close()
    assert not lane.query(), "closing waited for what hangs"
    torch.cuda.synchronize()


@on_gpu
def test_pools_that_do_not_fit_name_their_settings(closing):
    device = closing(CudaDevice())
    for tier, setting in ((Tier.GPU, "--gpu-kv-chunks"), (Tier.HOST, "--host-kv-chunks")):
        memory = device.memory(tier)
        assert 0 < memory.free <= memory.total
        with pytest.raises(
            SettingError, match=f"{setting}: .* GiB are free: enough for [0-9]+ chunks"
        ):
            device.allocate_pool(tier, (memory.total // 1024, 2, 2, 1, 32, 64), torch.float32)


@on_gpu
def test_closing_gives_everything_back():
    device = CudaDevice()
    pools(device)
    device.close()
    device.close()
    with pytest.raises(InvariantError, match="closed"):
        device.mark(Lane.OUT)


# Steps. The results of plans are compared with the CPU device's.


def executor_on(device: Device, engine: TinyEngine, host_form=None, **settings) -> Executor:
    defaults = dict(
        gpu_kv_chunks=SLOTS,
        host_kv_chunks=HOST_SLOTS,
        max_model_len=100,
        max_num_seqs=6,
        max_num_batched_tokens=48,
        chunk_tokens=CHUNK,
    )
    return Executor(
        device,
        engine,
        SchedulerConfig(**(defaults | settings)),
        group_layers=2,
        host_form=host_form,
    )


def run(executor: Executor, plans, in_flight=1) -> list[tuple[int, ...]]:
    """The tokens of each plan; at most `in_flight` plans are in flight at once."""
    tokens = []
    launched = 0
    for step in plans:
        if launched == in_flight:
            tokens.append(executor.wait().tokens)
            launched -= 1
        executor.launch(step)
        launched += 1
    return [*tokens, *(executor.wait().tokens for _ in range(launched))]


PROMPTS = [[(17 * seat + 5 * at) % 160 for at in range(20 + seat)] for seat in range(3)]


def save_three() -> list:
    """Three requests are computed one by one; their two whole chunks each go to the host."""
    plans = []
    for seat, prompt in enumerate(PROMPTS):
        slots = tuple(range(3 * seat, 3 * seat + 3))
        plans.append(
            plan(
                seat + 1,
                joins=[join(seat)],
                blocks=[(seat, 0, slots)],
                spans=[span(seat, 0, len(prompt))],
                token_ids=prompt,
            )
        )
    pairs = {3 * seat + chunk: 2 * seat + chunk for seat in range(3) for chunk in range(2)}
    return [*plans, plan(4, copies=[copy(Lane.OUT, 1, pairs, Tickets(3, 0, 0))])]


def three_gated() -> list:
    """Their next turns, in other seats and slots: each step waits for its own swap-in."""
    plans = []
    for index, prompt in enumerate(PROMPTS):
        seat = 3 + index
        slots = tuple(range(20 + 4 * index, 24 + 4 * index))
        back = copy(
            Lane.IN,
            index + 1,
            {2 * index: slots[0], 2 * index + 1: slots[1]},
            Tickets(0, 0, 1),
            gated=True,
        )
        new = [*prompt[16:], 3, 1, 4]
        plans.append(
            plan(
                5 + index,
                joins=[join(seat)],
                blocks=[(seat, 0, slots)],
                spans=[span(seat, 16, 16 + len(new))],
                token_ids=new,
                copies=[back],
            )
        )
    return plans


@functools.cache
def expected_after_reload(kind: str) -> list[tuple[int, ...]]:
    executor = executor_on(CpuDevice(), TinyEngine(kind))
    run(executor, save_three())
    tokens = run(executor, three_gated())
    executor.close()
    return tokens


@on_gpu
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_hazard_gates_hold_three_steps_in_flight(closing, kind, eager):
    """Every group of layers arrives about 50 ms after the one before, and the first one after three
    steps, which run one and the same graph, are issued."""
    before = closing(executor_on(HeldUp(enforce_eager=eager), TinyEngine(kind, "cuda")))
    # compiles the kernels, which takes longer than a launch may
    run(before, [*save_three(), *three_gated()])
    device = HeldUp(enforce_eager=eager)
    executor = closing(executor_on(device, TinyEngine(kind, "cuda")))
    run(executor, save_three())
    device._delay = delay(Lane.IN)
    go = device.hold(Lane.IN)
    plans = three_gated()
    for step in plans:
        executor.launch(step)
    assert not executor.done(), "issuing waited for the device"
    go()
    assert [executor.wait().tokens for _ in plans] == expected_after_reload(kind)


@on_gpu
def test_the_hazard_would_be_seen_without_gates(closing, monkeypatch):
    """The test above has teeth: with the gates taken away the same plans give other tokens."""
    monkeypatch.setattr(CudaDevice, "_pass_gate", lambda self, layer: None)
    device = HeldUp()
    executor = closing(executor_on(device, TinyEngine("llama", "cuda")))
    run(executor, save_three())
    device._delay = delay(Lane.IN)
    assert run(executor, three_gated(), in_flight=MAX_IN_FLIGHT) != expected_after_reload("llama")


def generation(steps: int, sampling=GREEDY) -> list:
    """Three requests join one after the other and generate."""
    plans = []
    ends = {}
    for step in range(1, steps + 1):
        fed = dict(ends)
        more = {}
        if step <= 3:
            seat = step - 1
            prompt = PROMPTS[step - 1]
            more = dict(
                joins=[join(seat, sampling)],
                blocks=[(seat, 0, tuple(range(10 * seat, 10 * seat + 10)))],
                spans=[span(seat, 0, len(prompt))],
                token_ids=prompt,
            )
            ends[seat] = len(prompt) - 1
        plans.append(plan(step, generate=fed, **more))
        ends = {seat: end + 1 for seat, end in ends.items()}
    return plans


WISHES = {
    "greedy": Sampling(),
    "drawn": Sampling(temperature=1.2, seed=11, top_k=40, top_p=0.95),
    "penalised": Sampling(temperature=0.9, seed=5, repetition_penalty=1.2, frequency_penalty=0.4),
    "scored": Sampling(logprobs=3, logit_bias=((7, 4.0), (9, -4.0))),
}


@on_gpu
@pytest.mark.parametrize("wish", WISHES)
def test_hazard_a_step_in_flight_keeps_its_inputs(closing, wish):
    """Steps are delayed, so later ones are uploaded long before they run: tokens equal the CPU's.
    The host never waits."""
    plans = generation(12, WISHES[wish])
    twin = closing(executor_on(CpuDevice(), TinyEngine("llama")))
    executor = closing(
        executor_on(HeldUp(delay(Lane.COMPUTE, seconds=0.02)), TinyEngine("llama", "cuda"))
    )
    wanted = run(twin, plans)
    got = run(executor, plans[:6], in_flight=MAX_IN_FLIGHT)
    # any call that makes the host wait for the device raises
    torch.cuda.set_sync_debug_mode("error")
    try:
        got += run(executor, plans[6:], in_flight=MAX_IN_FLIGHT)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert got == wanted


@on_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_graphs_step_equals_the_eager_one_to_the_bit(closing, kind):
    plans = [*generation(8), plan(9), plan(10, generate={2: 27})]
    graphs, eager = (HeldUp(enforce_eager=mode) for mode in (False, True))
    executors = [
        closing(executor_on(device, TinyEngine(kind, "cuda"))) for device in (graphs, eager)
    ]
    replayed = []
    monitored = graphs._graphs.replay
    graphs._graphs.replay = lambda shape: replayed.append(monitored(shape)) or replayed[-1]
    for step in plans:
        for executor in executors:
            run(executor, [step])
        if step.tokens:
            rows = len(step.samples)
            difference = (graphs._logits[:rows] - eager._logits[:rows]).abs().max().item()
            assert difference == 0.0, (
                f"step {step.step} of {step.tokens} tokens differs by {difference}"
            )
    assert all(replayed) and len(replayed) == 9


@on_gpu
def test_the_sampler_draws_the_tokens_that_the_cpus_draws():
    """Greedy and drawn, with every filter, penalties, biases, a mask and scores."""
    vocabulary, seats = 5000, 40
    dice = random.Random(3)
    bits = (
        np.random.default_rng(3)
        .integers(-(2**31), 2**31, (2, -(-vocabulary // 32)), np.int64)
        .astype(np.int32)
    )
    wishes = [GREEDY]
    wishes += [
        Sampling(
            temperature=dice.choice([0.0, 0.5, 1.0, 3.0]),
            top_k=dice.choice([0, 1, 50, 6000]),
            top_p=dice.choice([0.3, 0.9, 1.0]),
            min_p=dice.choice([0.0, 0.05]),
            seed=seed,
            repetition_penalty=dice.choice([1.0, 1.3]),
            presence_penalty=dice.choice([0.0, 0.5]),
            logit_bias=dice.choice([(), ((1, 3.0), (4999, 2.0))]),
            logprobs=dice.choice([None, 0, 5]),
        )
        for seed in range(seats - 1)
    ]
    joins = [
        join(seat, wish)._replace(prompt=range(seat), reply=(7, 7, seat))
        if wish.penalised
        else join(seat, wish)
        for seat, wish in enumerate(wishes)
    ]
    packer = StepPacker(seats, 1, 32)
    buffers = StepBuffers(Shapes(seats, seats, 32), "cuda")
    samplers = Sampler(vocabulary), Sampler(vocabulary, "cuda", buffers.place)
    for step in range(1, 9):
        more = (
            dict(joins=joins, blocks=[(seat, 0, (seat,)) for seat in range(seats)])
            if step == 1
            else {}
        )
        batch = plan(step, generate=dict.fromkeys(range(seats), step), **more)
        inputs = packer.pack(batch, Mask(np.array([0, 3]), bits) if step % 2 else None)
        logits = torch.randn(seats, vocabulary, generator=torch.Generator().manual_seed(step)) * 4
        with torch.inference_mode():
            buffers.upload(inputs)
            outcomes = []
            for sampler, own in zip(samplers, (logits.clone(), logits.cuda()), strict=True):
                sampler.start(inputs.sampling.starts)
                outcomes.append(sampler.sample(own, inputs.sampling))
        (tokens, scores), (other, other_scores) = outcomes
        assert other.tolist() == tokens.tolist()
        assert other_scores.ranks.tolist() == scores.ranks.tolist()
        assert other_scores.top_ids.tolist() == scores.top_ids.tolist()
        assert torch.allclose(other_scores.logprobs.cpu(), scores.logprobs, atol=1e-5)


# Whole runs, with pools so small that everything happens.


def record_plans(kind: str, seed: int, monkeypatch) -> tuple[Chatter, list, list]:
    """Random conversations on the CPU: the chatter, every plan and its tokens."""
    conversation = Chatter(
        TinyEngine(kind), Reference(kind), seed, gpu_kv_chunks=27, host_kv_chunks=20
    )
    plans, tokens = [], []
    launch, wait = conversation.executor.launch, conversation.executor.wait

    def recorded_wait():
        result = wait()
        tokens.append(result.tokens)
        return result

    monkeypatch.setattr(
        conversation.executor, "launch", lambda step: plans.append(step) or launch(step)
    )
    monkeypatch.setattr(conversation.executor, "wait", recorded_wait)
    counts = conversation.run(60)
    assert all(counts[event] > 0 for event in ("gpu", "host", "recomputed", "dropped")), counts
    return conversation, plans, tokens


@on_gpu
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_cpus_plans_bring_the_same_tokens(closing, monkeypatch, kind, eager):
    conversation, plans, wanted = record_plans(kind, 4, monkeypatch)
    random_delays = random.Random(4)
    device = HeldUp(lambda lane: random_delays.choice((0.0, 0.0, 0.002)), enforce_eager=eager)
    executor = closing(
        Executor(device, TinyEngine(kind, "cuda"), conversation.config, group_layers=1)
    )
    got = run(executor, plans, in_flight=2)
    different = [
        index for index, pair in enumerate(zip(got, wanted, strict=True)) if pair[0] != pair[1]
    ]
    assert not different, (
        f"{len(different)} of {len(plans)} steps differ; the first, {plans[different[0]]}, brought "
        f"{got[different[0]]} "
        f"instead of {wanted[different[0]]}"
    )
    copied = executor.copied_bytes
    assert copied.swap_in > 0 and copied.swap_out > 0


@on_gpu
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_replies_are_those_of_the_whole_context(eager):
    """Cold = GPU hit = host reload = recomputed = suspended and resumed, and each of them
    happens."""
    assert not torch.backends.cuda.matmul.allow_tf32
    happened: Counter[str] = Counter()
    for seed, (kind, batching, held_up) in enumerate(
        itertools.product(KINDS, ("unified", "separate"), (False, True))
    ):
        delays = random.Random(9)
        choices = (0.0, 0.0, 0.002, 0.006) if held_up else (0.0,)
        settings = dict(
            batching=batching,
            gpu_kv_chunks=27,
            make_device=lambda delays=delays, choices=choices, **_: HeldUp(
                lambda lane: delays.choice(choices), enforce_eager=eager
            ),
        )
        engine = TinyEngine(kind, "cuda")
        print(kind, batching, "held up" if held_up else "")
        happened.update(Chatter(engine, Reference(kind), 2 * seed + eager, **settings).run(50))
    print(dict(happened))
    assert happened["replies"] > 50
    for event in EVENTS:
        assert happened[event] > 0, f"{event} never occurred"


@on_gpu
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_replies_of_rows_that_share_chunks(monkeypatch, kind, eager):
    """Every conversation opens with the same tokens, and splits are so short that rows are
    stacked."""
    from pensieve.plugins.attention import work_list

    for name, size in {"SMALLEST_SPLIT": 16, "LARGEST_SPLIT": 16, "TOKENS_PER_ROW": 1}.items():
        monkeypatch.setattr(work_list, name, size)
    monkeypatch.setattr(prefixes, "SHARED_KEYS", 16)
    monkeypatch.setattr(prefixes, "BAND_KEYS", 256)
    shared = []

    class Counting(CudaDevice):
        def upload(self, inputs):
            shared.append(inputs.sharing is not None)
            super().upload(inputs)

    settings = dict(
        gpu_kv_chunks=27, openings=(48,), make_device=lambda **_: Counting(enforce_eager=eager)
    )
    Chatter(TinyEngine(kind, "cuda"), Reference(kind), 5, **settings).run(50)
    assert sum(shared) > 50


@on_gpu
def test_more_rows_than_seats_run_without_a_graph(closing):
    """Every position of a prompt is scored: as many rows as tokens."""
    wish = Sampling(logprobs=1)
    prompt = PROMPTS[0]
    scored = span(0, 0, len(prompt))._replace(scores=True)
    results = []
    for device, engine in (
        (CpuDevice(), TinyEngine("llama")),
        (CudaDevice(), TinyEngine("llama", "cuda")),
    ):
        executor = closing(executor_on(device, engine))
        base = plan(
            1,
            joins=[join(0, wish)._replace(prompt_logprobs=2)],
            blocks=[(0, 0, (4, 1, 7))],
            spans=[scored],
            token_ids=prompt,
        )
        object.__setattr__(base, "scored", array("i", prompt[1:]))
        executor.launch(base)
        results.append(executor.wait())
    wanted, got = results
    assert got.tokens == wanted.tokens
    (own_row,) = got.rows.values()
    (other_row,) = wanted.rows.values()
    for own, other in zip(own_row.prompt_logprobs, other_row.prompt_logprobs, strict=True):
        assert (own.rank, own.top_ids) == (other.rank, other.top_ids)
        assert abs(own.logprob - other.logprob) < 1e-4
