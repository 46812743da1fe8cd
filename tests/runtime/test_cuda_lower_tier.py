"""HOST in another form on a GPU: copies equal the reference's, in order, with any delays, at link
speed."""

import functools
import random

import numpy as np
import pytest
import torch

from pensieve.plugins.kv_forms.forms import FP8, PACKED, record_bytes
from pensieve.runtime.device import compressed_copies as coded_copies
from pensieve.runtime.device import cuda as cuda_device
from pensieve.runtime.device.cpu import CpuDevice
from pensieve.runtime.device.cuda import CudaDevice
from pensieve.runtime.device.pinned_memory import PinnedPool
from pensieve.runtime.executor import MAX_IN_FLIGHT, Executor
from pensieve.scheduler.plan import Lane
from pensieve.scheduler.types import InvariantError, Tier

from .device.test_cuda import (
    KINDS,
    HeldUp,
    cycles_a_second,
    executor_on,
    on_gpu,
    record_plans,
    run,
    save_three,
    three_gated,
)
from .test_lower_tier import FORMS
from .tiny_engine import TinyEngine

SHAPE = (50, 3, 2, 2, 4, 16)
HOST_SLOTS = 35


@pytest.fixture
def closing():
    """Closes the objects passed to it, at the end."""
    opened = []
    yield lambda one: opened.append(one) or one
    for one in opened:
        one.close()


class HeldUpTwice(HeldUp):
    """Delays either stream of a lane that codes."""

    def _hold_up(self, lane):
        super()._hold_up(lane)
        if lane in self._coded and (seconds := self._delay(lane)):
            with torch.cuda.stream(self._coded[lane].entry):
                torch.cuda._sleep(int(seconds * cycles_a_second()))


def pools(device: CudaDevice, form=FP8, dtype=torch.float32) -> tuple[torch.Tensor, ...]:
    """Makes both pools; returns their contents: random chunks, and records of others."""
    device.allocate_pool(Tier.GPU, SHAPE, dtype)
    device.allocate_pool(Tier.HOST, (HOST_SLOTS, *SHAPE[1:]), dtype, form)
    torch.cuda.synchronize()
    on_gpu = torch.randn(SHAPE).to(dtype)
    on_host = form.encode(torch.randn(HOST_SLOTS, *SHAPE[1:]).to(dtype))
    device._pool.copy_(on_gpu)
    for slot in range(HOST_SLOTS):
        device._host.record(slot)[:] = on_host[slot].flatten().numpy()
    torch.cuda.synchronize()
    return on_gpu, on_host


def host_records(device: CudaDevice, host_slots=HOST_SLOTS) -> torch.Tensor:
    torch.cuda.synchronize()
    return torch.from_numpy(np.stack([device._host.record(slot) for slot in range(host_slots)]))


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


@on_gpu
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "one by one"])
@pytest.mark.parametrize(("form", "dtype"), FORMS)
def test_random_copies_equal_the_references(closing, monkeypatch, form, dtype, batched):
    """Through halves of four records, from pieces of six, without waits in between."""
    record = record_bytes(SHAPE, dtype, form)
    monkeypatch.setattr(
        cuda_device, "PinnedPool", functools.partial(PinnedPool, largest_piece=6 * record)
    )
    monkeypatch.setattr(coded_copies, "HALF_BYTES", 4 * record)
    device = closing(CudaDevice(batched_copies=batched))
    on_gpu, on_host = pools(device, form, dtype)
    dice = np.random.default_rng(1)
    for _ in range(40):
        lane = Lane(int(dice.choice([Lane.IN, Lane.OUT])))
        other = Lane.OUT if lane is Lane.IN else Lane.IN
        device.wait(lane, device.mark(other))
        count, first = int(dice.integers(0, 30)), int(dice.integers(3))
        gpu_slots, host_slots = (
            dice.permutation(most)[:count].astype(np.int32) for most in (50, HOST_SLOTS)
        )
        layers = range(first, int(dice.integers(first + 1, 4)))
        chosen = slice(layers.start, layers.stop)
        if not count:
            device.copy(lane, gpu_slots, host_slots, layers)
        elif lane is Lane.IN:
            device.copy(lane, host_slots.copy(), gpu_slots.copy(), layers)
            on_gpu[gpu_slots, chosen] = form.decode(on_host[host_slots, chosen], SHAPE, dtype)
        else:
            device.copy(lane, gpu_slots.copy(), host_slots.copy(), layers)
            on_host[host_slots, chosen] = form.encode(on_gpu[gpu_slots, chosen])
    for lane in (Lane.IN, Lane.OUT):
        device.synchronize(device.mark(lane))
    assert torch.equal(host_records(device), on_host.flatten(1))
    assert torch.equal(device._pool.cpu(), on_gpu)


@on_gpu
def test_issuing_waits_for_nothing_and_lanes_wait_for_each_other(closing, monkeypatch):
    """Out, in again to other slots, and out from there, each after the one before, with every
    stream late."""
    monkeypatch.setattr(coded_copies, "HALF_BYTES", 2 * record_bytes(SHAPE, torch.float32, FP8))
    device = closing(HeldUpTwice(lambda lane: 0.02))
    on_gpu, _ = pools(device)
    far, near = slots(*range(20, 30)), slots(*range(10))
    device.copy(Lane.OUT, near, near, range(3))  # torch's caches are filled
    device.synchronize(device.mark(Lane.OUT))
    torch.cuda.set_sync_debug_mode("error")
    try:
        device.copy(Lane.OUT, near, near, range(3))
        first = device.mark(Lane.OUT)
        device.wait(Lane.IN, first)
        device.copy(Lane.IN, near, far, range(3))
        second = device.mark(Lane.IN)
        device.wait(Lane.OUT, second)
        device.copy(Lane.OUT, far, far, range(3))
        third = device.mark(Lane.OUT)
        assert not any(device.ready(ticket) for ticket in (first, second, third))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    device.synchronize(third)
    assert device.ready(first) and device.ready(second)
    codes = FP8.encode(on_gpu[:10])
    records = host_records(device)
    # perhaps by other scales: the values count
    again = FP8.decode(records[20:30].view_as(codes), SHAPE, torch.float32)
    assert torch.equal(records[:10], codes.flatten(1)) and torch.equal(
        again, FP8.decode(codes, SHAPE, torch.float32)
    )
    assert torch.equal(device._pool[20:30].cpu(), FP8.decode(codes, SHAPE, torch.float32))


@on_gpu
def test_slots_that_do_not_exist_are_refused(closing):
    for sources, targets in ((slots(50), slots(0)), (slots(0), slots(HOST_SLOTS))):
        device = closing(CudaDevice())
        pools(device)
        with pytest.raises(InvariantError, match="of a pool of"):
            device.copy(Lane.OUT, sources, targets, range(3))


@on_gpu
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_hazard_gates_hold_steps_until_layers_are_decoded(closing, kind, eager):
    """Every group of layers arrives late, for three steps that run one and the same graph."""
    device = HeldUpTwice(enforce_eager=eager)
    executor = closing(executor_on(device, TinyEngine(kind, "cuda"), FP8))
    run(executor, save_three())
    wanted = run(executor, three_gated())

    late = HeldUpTwice(enforce_eager=eager)
    executor = closing(executor_on(late, TinyEngine(kind, "cuda"), FP8))
    run(executor, save_three())
    late._delay = lambda lane: 0.05 if lane is Lane.IN else 0.0
    assert run(executor, three_gated(), in_flight=MAX_IN_FLIGHT) == wanted

    # The CPU's KV differ in their last bits, and so some of their codes.
    twin = CpuDevice()
    run(closing(executor_on(twin, TinyEngine(kind), FP8)), save_three())
    equal = host_records(late, 6) == twin._pools[Tier.HOST][:6].flatten(1)
    assert equal.float().mean() > 0.99


@on_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_equal_plans_bring_equal_tokens_with_any_delay(closing, monkeypatch, kind):
    """Plans of random conversations on the CPU, with everything in them; twice, once with
    delays."""
    conversation, plans, _ = record_plans(kind, 4, monkeypatch)
    dice = random.Random(4)
    tokens = []
    for delay in (lambda lane: 0.0, lambda lane: dice.choice((0.0, 0.0, 0.002))):
        device = HeldUpTwice(delay)
        executor = closing(
            Executor(
                device, TinyEngine(kind, "cuda"), conversation.config, group_layers=1, host_form=FP8
            )
        )
        tokens.append(run(executor, plans, in_flight=2))
        assert executor.copied_bytes.swap_in > 0 and executor.copied_bytes.swap_out > 0
    assert tokens[0] == tokens[1]


SPEED_SHAPE = (600, 40, 2, 10, 32, 128)  # Llama-2-13B with 10 KV heads
COPIED = 250  # chunks


def gigabytes_a_second(device: CudaDevice, form, lanes: tuple[Lane, ...], group: int) -> float:
    """Of records, of the slowest of the lanes, which copy at the same time by groups of layers."""
    dice = np.random.default_rng(0)
    chosen = {
        lane: dice.permutation(600)[: 2 * COPIED].astype(np.int32) for lane in (Lane.IN, Lane.OUT)
    }
    start = torch.cuda.Event(enable_timing=True)
    start.record(device._streams[Lane.COMPUTE])
    for lane in lanes:
        device._streams[lane].wait_event(start)
        if lane in device._coded:
            device._coded[lane].entry.wait_event(start)
    for first in range(0, 40, group):
        for lane in lanes:
            half = slice(0, COPIED) if lane is Lane.IN else slice(COPIED, 2 * COPIED)
            gpu_slots = chosen[Lane.IN][half].copy()
            host_slots = chosen[Lane.OUT][half].copy()
            device.copy(lane, gpu_slots, host_slots, range(first, first + group))
    ends = []
    for lane in lanes:
        end = torch.cuda.Event(enable_timing=True)
        end.record(device._streams[lane])
        ends.append(end)
    torch.cuda.synchronize()
    seconds = max(start.elapsed_time(end) for end in ends) / 1e3
    return COPIED * record_bytes(SPEED_SHAPE, torch.bfloat16, form) / seconds / 1e9


@on_gpu
@pytest.mark.parametrize("form", [FP8, PACKED], ids=["fp8", "packed"])
def test_coded_copies_are_nearly_as_quick_as_plain_ones(closing, form):
    """Bytes a second over the link, each way alone and both. Other tests may use the link at the
    same time: the two kinds of copies are measured in turn, and the bound is loose."""
    devices = {}
    for kind in (None, form):
        devices[kind] = device = closing(CudaDevice())
        device.allocate_pool(Tier.GPU, SPEED_SHAPE, torch.bfloat16)
        device.allocate_pool(Tier.HOST, SPEED_SHAPE, torch.bfloat16, kind)
        device._pool.normal_()
    torch.cuda.synchronize()
    ratios = {}
    for name, lanes, group in (
        ("in, groups of 4 layers", (Lane.IN,), 4),
        ("in, whole", (Lane.IN,), 40),
        ("out, whole", (Lane.OUT,), 40),
        ("both, groups of 4 layers", (Lane.IN, Lane.OUT), 4),
    ):
        speeds = {None: 0.0, form: 0.0}
        for _ in range(6):
            for kind, device in devices.items():
                speeds[kind] = max(speeds[kind], gigabytes_a_second(device, kind, lanes, group))
        print(f"{name}: {speeds[form]:.1f} GB/s, plain {speeds[None]:.1f} GB/s")
        ratios[name] = speeds[form] / speeds[None]
    assert min(ratios.values()) > 0.4, ratios
