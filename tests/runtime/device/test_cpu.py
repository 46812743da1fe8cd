import random
import threading
import time
from inspect import signature

import numpy as np
import pytest
import torch

from pensieve.runtime.device.cpu import CpuDevice
from pensieve.runtime.device.protocol import Device, Memory
from pensieve.runtime.step.inputs import StepPacker
from pensieve.scheduler.plan import Lane
from pensieve.scheduler.types import InvariantError, SettingError, Tier

from ..fake_engine import FakeEngine, join, next_token, plan, span

LAYERS, SLOTS, CHUNK = 3, 8, 4
ALL = range(LAYERS)


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


@pytest.fixture
def devices():
    """Makes devices with pools of distinct chunks (host slot s holds 100 + s, GPU slot s holds s)
    and closes them."""
    opened = []

    def make(engine=None, gates=(0,), **disturbance) -> CpuDevice:
        device = CpuDevice(**disturbance)
        opened.append(device)
        engine = engine or FakeEngine(LAYERS)
        for tier, first in ((Tier.GPU, 0), (Tier.HOST, 100)):
            device.allocate_pool(tier, engine.kv_shape(SLOTS, CHUNK), engine.dtype)
            device._pools[tier] += torch.arange(first, first + SLOTS).view(-1, 1, 1, 1, 1, 1)
        device.load(engine, seats=2, blocks=4, gates=gates, most_tokens=16)
        return device

    yield make
    for device in opened:
        device.close()


def hold(device: CpuDevice, lane: Lane) -> threading.Event:
    """The lane does nothing more until the event is set."""
    go_on = threading.Event()
    device._issue(lane, lambda: go_on.wait(60))
    return go_on


def delay(slow: Lane, seconds: float = 0.05):
    return lambda lane: seconds if lane is slow else 0.0


def chunk(device: CpuDevice, tier: Tier, slot: int) -> list[float]:
    """The slot's contents, layer by layer; every layer must hold one value."""
    record = device._pools[tier][slot].flatten(1)
    assert torch.equal(record, record[:, :1].expand_as(record))
    return record[:, 0].tolist()


def test_the_protocol_and_nothing_more():
    """One more method is a design discussion."""

    def methods(kind: type) -> dict[str, list[str]]:
        return {
            name: list(signature(method).parameters)
            for name, method in vars(kind).items()
            if callable(method) and not name.startswith("_")
        }

    assert methods(CpuDevice) == methods(Device)


def test_copies_move_whole_records_or_groups_of_layers(devices):
    device = devices()
    device.copy(Lane.IN, slots(3, 4), slots(0, 1), ALL)
    device.copy(Lane.IN, slots(5), slots(2), range(1, 2))
    device.copy(Lane.OUT, slots(6), slots(7), ALL)
    for lane in (Lane.IN, Lane.OUT):
        device.synchronize(device.mark(lane))
    assert chunk(device, Tier.GPU, 0) == [103.0] * 3
    assert chunk(device, Tier.GPU, 1) == [104.0] * 3
    assert chunk(device, Tier.GPU, 2) == [2.0, 105.0, 2.0]
    assert chunk(device, Tier.HOST, 7) == [6.0] * 3


def test_shuffled_pairs_stay_pairs(devices):
    device = devices(shuffle=random.Random(1))
    device.copy(Lane.IN, slots(*range(8)), slots(*reversed(range(8))), ALL)
    device.synchronize(device.mark(Lane.IN))
    assert [chunk(device, Tier.GPU, s)[0] for s in range(8)] == [107.0 - s for s in range(8)]


def test_a_lane_keeps_its_order_and_nothing_blocks_the_caller(devices):
    device = devices(disturb=delay(Lane.IN, 0.05))
    go_on = hold(device, Lane.IN)
    device.copy(Lane.IN, slots(3), slots(0), ALL)
    first = device.mark(Lane.IN)
    device.copy(Lane.IN, slots(4), slots(0), ALL)
    second = device.mark(Lane.IN)
    device.wait(Lane.OUT, second)
    device.copy(Lane.OUT, slots(0), slots(1), ALL)
    last = device.mark(Lane.OUT)
    assert not device.ready(first)
    begin = time.perf_counter()
    go_on.set()
    device.synchronize(second)
    assert device.ready(first)
    assert chunk(device, Tier.GPU, 0) == [104.0] * 3
    device.synchronize(last)
    assert time.perf_counter() - begin >= 0.1
    assert chunk(device, Tier.HOST, 1) == [104.0] * 3  # the wait held the copy out back


def prefill(device: CpuDevice, packer: StepPacker, step: int, write_from: int) -> None:
    """Uploads a batch of one request of five tokens in slots 0 and 1."""
    batch = plan(
        step,
        joins=[join(0)],
        blocks=[(0, 0, (0, 1))],
        spans=[span(0, 4, 5, write_from)],
        token_ids=[11],
    )
    device.upload(packer.pack(batch))


def test_a_gate_is_bound_to_the_mark_before_the_run(devices):
    """A mark after the run does not hold it: why `Transfers.hold_step` insists on the order."""
    packer = StepPacker(2, 4, CHUNK)
    tokens = {}
    for when in ("before", "after"):
        device = devices(disturb=delay(Lane.IN))
        prefill(device, packer, step=1, write_from=4)
        go_on = hold(device, Lane.IN)
        if when == "after":
            device.run()
        device.copy(Lane.IN, slots(3), slots(0), ALL)
        copied = device.mark(Lane.IN, gate=0)
        if when == "before":
            device.run()
            go_on.set()
        sampled, tokens[when], _ = device.sample()
        device.synchronize(sampled)
        assert device.ready(copied) == (when == "before")
        go_on.set()
    digests = sum((11 * 31 + 4 * 17 + layer * 7) % 61 for layer in ALL)
    assert tokens["before"].tolist() == [(4 * 3 * 103 + digests) % 97]
    assert tokens["after"].tolist() == [(4 * 3 * 0 + digests) % 97]


def test_the_last_sample_feeds_the_next_step(devices):
    device = devices()
    packer = StepPacker(2, 4, CHUNK)
    context = [5, 6, 7]
    batch = plan(
        1, joins=[join(1)], blocks=[(1, 0, (0, 1))], spans=[span(1, 0, 3)], token_ids=context
    )
    for step in range(2, 5):
        device.upload(packer.pack(batch))
        device.run()
        sampled, tokens, _ = device.sample()
        device.synchronize(sampled)
        context.append(next_token(context, LAYERS))
        assert tokens.tolist() == context[-1:]
        batch = plan(step, generate={1: len(context) - 1})


class Broken(FakeEngine):
    error = RuntimeError("the engine broke")

    def forward(self, *arguments):
        raise self.error


def test_what_a_lane_raises_reaches_every_waiter_and_issuer(devices):
    device = devices(engine=Broken(LAYERS))
    go_on = hold(device, Lane.COMPUTE)
    before = device.mark(Lane.COMPUTE)
    prefill(device, StepPacker(2, 4, CHUNK), step=1, write_from=0)
    device.run()
    after = device.mark(Lane.COMPUTE)
    device.wait(Lane.OUT, after)  # blocked until the step fails
    device.copy(Lane.OUT, slots(0), slots(0), ALL)
    behind = device.mark(Lane.OUT)
    go_on.set()

    device.synchronize(before)
    for failing in (
        lambda: device.synchronize(behind),
        lambda: device.synchronize(after),
        lambda: device.ready(after),
        lambda: device.copy(Lane.IN, slots(0), slots(0), ALL),
    ):
        with pytest.raises(RuntimeError) as raised:
            failing()
        assert raised.value is Broken.error
    # work that waited for the failed step was not done
    assert chunk(device, Tier.HOST, 0) == [100.0] * 3


def test_close_finishes_work_ends_the_threads_and_is_idempotent(devices):
    before = threading.enumerate()
    device = devices(disturb=delay(Lane.OUT))
    host = device._pools[Tier.HOST]
    device.copy(Lane.OUT, slots(1), slots(0), ALL)
    device.close()
    device.close()
    assert set(threading.enumerate()) <= set(before)
    assert host[0].flatten()[0] == 1.0
    with pytest.raises(InvariantError, match="closed"):
        device.mark(Lane.OUT)


def test_it_looks_for_free_processors_before_each_layer_of_a_step(devices):
    """On the thread whose OpenMP threads compute, and until the device is closed."""
    device = devices()
    seen = []

    class Processors:
        def look(self, now: float) -> None:
            seen.append(threading.current_thread().name)

        def close(self) -> None:
            seen.append("closed")

    device._processors = Processors()
    prefill(device, StepPacker(2, 4, CHUNK), step=1, write_from=4)
    device.run()
    device.close()
    assert seen == ["lane COMPUTE"] * LAYERS + ["closed"]


def test_a_pool_that_does_not_fit_names_its_setting():
    device = CpuDevice()
    memory = device.memory(Tier.HOST)
    assert 0 < memory.free <= memory.total
    for tier, setting in ((Tier.GPU, "--gpu-kv-chunks"), (Tier.HOST, "--host-kv-chunks")):
        with pytest.raises(
            SettingError, match=f"{setting}: .* GiB are free: enough for [0-9]+ chunks"
        ):
            device.allocate_pool(tier, (memory.total // 1024, 2, 2, 1, 32, 64), torch.float32)
    device.close()


def test_a_pool_that_the_process_may_not_have_names_its_setting(monkeypatch):
    """A limit of the process (ulimit -v) is below the host's free memory."""
    monkeypatch.setattr(CpuDevice, "memory", lambda *_: Memory(2**62, 2**62))
    device = CpuDevice()
    with pytest.raises(SettingError, match=r"--host-kv-chunks: .* could not be had"):
        device.allocate_pool(Tier.HOST, (2**45, 2, 2, 1, 32, 64), torch.float32)
    device.close()
