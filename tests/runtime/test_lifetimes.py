"""Data that others still read or write is not touched: buffers in turn, slots until they are
erased, pools until threads end.

Each test fails if the wait that it checks is removed.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import ClassVar

import pytest

from pensieve.runtime.device.cpu import CpuDevice
from pensieve.runtime.disk import segments as disk_files
from pensieve.runtime.disk.segments import SystemCalls
from pensieve.runtime.disk.store import DiskSettings
from pensieve.runtime.executor import MAX_IN_FLIGHT, Executor
from pensieve.runtime.step import buffers as step_buffers
from pensieve.runtime.step.buffers import Staging
from pensieve.scheduler.config import SchedulerConfig
from pensieve.scheduler.plan import Promotion, Spill, TierWork
from pensieve.scheduler.types import ChunkKey, Tier

from .fake_engine import FakeEngine, plan

KEY = ChunkKey(b"k" * 32)


class FakeEvent:
    """An event that the device has not passed: work that depends on it must wait."""

    instances: ClassVar[list[FakeEvent]] = []

    def __init__(self):
        self.waits = 0
        self.instances.append(self)

    def record(self):
        pass

    def query(self):
        return False

    def synchronize(self):
        self.waits += 1


def test_a_pinned_buffer_is_written_again_only_when_the_device_has_passed_it(monkeypatch):
    monkeypatch.setattr(FakeEvent, "instances", [])
    monkeypatch.setattr(step_buffers.torch.cuda, "Event", FakeEvent)
    empty = step_buffers.torch.empty
    monkeypatch.setattr(
        step_buffers.torch, "empty", lambda *size, pin_memory=False, **more: empty(*size, **more)
    )
    staging = Staging(pinned=True)
    taken = []
    for step in range(2 * MAX_IN_FLIGHT):
        taken.append(staging.take(8).data_ptr())
        before = sum(event.waits for event in FakeEvent.instances)
        again = taken[-1] in taken[:-1]
        assert before == max(0, step + 1 - step_buffers.STAGED) and again == (before > 0)
        staging.issued()
    # The steps in flight and the one that is being written have a buffer each.
    assert len(set(taken[-MAX_IN_FLIGHT - 1 :])) == MAX_IN_FLIGHT + 1


@pytest.fixture
def executors(tmp_path):
    opened = []

    def make(system: SystemCalls) -> Executor:
        config = SchedulerConfig(
            gpu_kv_chunks=4, host_kv_chunks=4, max_num_seqs=2, max_model_len=8, chunk_tokens=4
        )
        disk = DiskSettings(tmp_path, slots=8, engine="ab", system=system)
        opened.append(Executor(CpuDevice(), FakeEngine(), config, disk=disk))
        return opened[-1]

    yield make
    for executor in opened:
        executor.close()


def spill(executor: Executor, slot: int) -> int:
    """The last step, with a record in the DISK slot."""
    executor.launch(
        replace(plan(1), lower=(TierWork(Tier.DISK, spills=(Spill(0, slot, KEY, 4),)),))
    )
    step = 1
    spilled = executor.wait().lower[0].spilled
    while not spilled:
        executor.launch(plan(step := step + 1))
        spilled = executor.wait().lower[0].spilled
    return step


def test_a_plan_that_erases_is_done_when_that_is_done(executors):
    """Then its slots are free: later data in them must not be erased, and earlier data not be
    read."""
    gate, began = threading.Event(), threading.Event()

    def slow(file, buffers, offset):
        if not any(map(any, buffers)):  # zeros: an erasure
            began.set()
            gate.wait(60)
        return os.pwritev(file, buffers, offset)

    executor = executors(SystemCalls(write=slow))
    executor.launch(
        replace(plan(spill(executor, 5) + 1), lower=(TierWork(Tier.DISK, erased=(5,)),))
    )
    assert began.wait(60)
    waiting = threading.Thread(target=executor.wait)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    gate.set()
    waiting.join(60)
    assert not waiting.is_alive() and executor.stored_records()[Tier.DISK] == []


def test_what_is_erased_is_flushed(executors, monkeypatch):
    """Or it would be there again after a loss of power."""
    calls = []

    def write(file, buffers, offset):
        calls.append("written")
        return os.pwritev(file, buffers, offset)

    executor = executors(SystemCalls(write=write))
    spill(executor, 5)
    flush = os.fdatasync
    monkeypatch.setattr(
        disk_files.os, "fdatasync", lambda file: (calls.append("flushed"), flush(file))
    )
    executor.erase_records(Tier.DISK, [5])
    assert calls[-2:] == ["written", "flushed"]


def test_what_cannot_be_flushed_is_not_erased(executors, monkeypatch):
    """Its slot is not to be used again, and the deletion reports the failure."""

    def fail(file):
        raise OSError(5, "input/output error")

    executor = executors(SystemCalls())
    step = spill(executor, 5)
    monkeypatch.setattr(disk_files.os, "fdatasync", fail)
    executor.launch(replace(plan(step + 1), lower=(TierWork(Tier.DISK, erased=(5,)),)))
    assert executor.wait().lower[0].erase_failed == (5,)


def test_the_pools_stay_until_the_disk_s_threads_have_ended(executors, monkeypatch):
    """They write to HOST: of memory that is gone the system would make an end of the process."""
    gate = threading.Event()
    reading = threading.Event()
    order = []

    def slow(file, buffers, offset):
        if offset:
            reading.set()
            gate.wait(60)
            order.append("read")
        return os.preadv(file, buffers, offset)

    executor = executors(SystemCalls(read=slow))
    close = CpuDevice.close

    def noted(device, **options):
        order.append("closed")
        close(device, **options)

    monkeypatch.setattr(CpuDevice, "close", noted)
    executor.launch(
        replace(
            plan(spill(executor, 5) + 1),
            lower=(TierWork(Tier.DISK, promotions=(Promotion(5, 1, KEY),)),),
        )
    )
    assert reading.wait(60)
    closing = threading.Thread(target=executor.close)
    closing.start()
    closing.join(0.05)
    gate.set()
    closing.join(60)
    assert order[:2] == ["read", "closed"]
