"""The order of coded copies, on streams of this process that do their work in any order that events
allow."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections import deque

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from pensieve.plugins.kv_forms import fp8_kernel as kv_fp8_kernel
from pensieve.plugins.kv_forms import host_copy_kernel
from pensieve.plugins.kv_forms.forms import FP8, record_bytes
from pensieve.plugins.kv_forms.fp8_reference import decode, encode, layer_bytes
from pensieve.runtime.device import compressed_copies as coded_copies
from pensieve.runtime.device.pinned_memory import PinnedPool
from pensieve.scheduler.plan import Lane

from .test_pinned_memory import HostMemory

SHAPE = (40, 3, 2, 1, 4, 16)
HOST_SLOTS = 30
RECORD = record_bytes(SHAPE, torch.float32, FP8)


class Event:
    def __init__(self):
        self.recorded = self.done = 0

    def record(self, stream):
        self.recorded += 1
        stream.work.append(lambda number=self.recorded: setattr(self, "done", number))

    def query(self):
        return self.done == self.recorded


class Stream:
    """Does one piece of work after the other, on command; a wait is work that cannot be done
    yet."""

    def __init__(self, streams):
        self.work = deque()
        self.cuda_stream = self  # the driver's stand-in needs no handle
        streams.append(self)

    def wait_event(self, event):
        self.work.append((event, event.recorded))

    def wait_stream(self, stream):
        assert stream is None, "memory is made in order"

    def step(self):
        match self.work[0]:
            case event, number if event.done < number:
                return
            case [_, _]:
                pass
            case work:
                work()
        self.work.popleft()


class Streams(list):
    """All of them, and the one that kernels are launched on; None does its work at once."""

    current = None

    @contextlib.contextmanager
    def use(self, stream):
        before = self.current
        self.current = stream
        yield
        self.current = before

    def launch(self, work):
        work() if self.current is None else self.current.work.append(work)

    def step(self, dice):
        if busy := [stream for stream in self if stream.work]:
            dice.choice(busy).step()

    def run(self, dice):
        while any(stream.work for stream in self):
            self.step(dice)


@pytest.fixture
def streams(monkeypatch):
    created = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(created))
    monkeypatch.setattr(torch.cuda, "stream", created.use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: created.current)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(coded_copies, "Event", Event)
    monkeypatch.setattr(coded_copies, "HALF_BYTES", 4 * RECORD - 1)

    def copy_words(target, source):
        created.launch(lambda: target.copy_(source))

    def encode_here(pool, slots, layers, records):
        created.launch(
            lambda: records.copy_(encode(pool[slots.long(), layers.start : layers.stop]))
        )

    def decode_here(records, slots, layers, pool):
        def work():
            pool[slots.long(), layers.start : layers.stop] = decode(records, pool.shape, pool.dtype)

        created.launch(work)

    monkeypatch.setattr(host_copy_kernel, "copy_words", copy_words)
    monkeypatch.setattr(kv_fp8_kernel, "encode", encode_here)
    monkeypatch.setattr(kv_fp8_kernel, "decode", decode_here)
    return created


def copy_batch(targets, sources, sizes, stream):
    def work():
        for target, source, size in zip(
            targets.tolist(), sources.tolist(), sizes.tolist(), strict=True
        ):
            ctypes.memmove(target, source, size)

    stream.work.append(work)


def random_copies(streams, seed):
    """Returns whether both pools end like numpy's, after copies on each lane that wait for all of
    the other's."""
    dice = random.Random(seed)
    host = PinnedPool(HostMemory(), HOST_SLOTS, RECORD, largest_piece=7 * RECORD)
    pool = torch.zeros(SHAPE)
    lane_streams = {lane: torch.cuda.Stream() for lane in (Lane.IN, Lane.OUT)}
    lanes = {
        lane: coded_copies.CodedCopies(lane, FP8, pool, host.records, stream, copy_batch)
        for lane, stream in lane_streams.items()
    }
    streams.run(dice)
    pool.copy_(torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)))
    on_gpu = pool.clone()
    on_host = torch.zeros(HOST_SLOTS, SHAPE[1], layer_bytes(SHAPE), dtype=torch.uint8)
    for _ in range(12):
        lane, other = dice.sample((Lane.IN, Lane.OUT), 2)
        ticket = Event()
        ticket.record(lane_streams[other])
        for stream in (lane_streams[lane], lanes[lane].entry):
            stream.wait_event(ticket)
        count, first = dice.randrange(1, 20), dice.randrange(3)
        layers = range(first, dice.randrange(first + 1, 4))
        gpu_slots, host_slots = (
            np.array(dice.sample(range(most), count), np.int32) for most in (40, HOST_SLOTS)
        )
        groups = [range(layer, layer + 1) for layer in layers] if dice.random() < 0.5 else [layers]
        for group in groups:
            lanes[lane].copy(gpu_slots, host_slots, group)
        chosen = slice(layers.start, layers.stop)
        if lane is Lane.OUT:
            on_host[host_slots, chosen] = encode(on_gpu[gpu_slots, chosen])
        else:
            on_gpu[gpu_slots, chosen] = decode(on_host[host_slots, chosen], SHAPE, torch.float32)
        for _ in range(dice.randrange(20)):
            streams.step(dice)
    streams.run(dice)
    records = np.stack([host.record(slot) for slot in range(HOST_SLOTS)])
    return torch.equal(pool, on_gpu) and np.array_equal(records, on_host.flatten(1).numpy())


def test_any_order_that_events_allow_is_right(streams):
    assert all(random_copies(streams, seed) for seed in range(12))


@pytest.mark.parametrize("ignored", ["emptied", "filled"])
def test_the_order_is_what_makes_it_right(streams, monkeypatch, ignored):
    """Shows that the test above can fail: without the wait for one of a half's events, the copied
    data is wrong."""
    wait_event = Stream.wait_event
    make_half = coded_copies._Half.__init__
    events = []

    def remember(half, *arguments):
        make_half(half, *arguments)
        events.append(getattr(half, ignored))

    def wrong(seed):
        try:
            return not random_copies(streams, seed)
        except IndexError:  # slots that were not there yet
            return True
        finally:
            streams.clear()

    monkeypatch.setattr(coded_copies._Half, "__init__", remember)
    monkeypatch.setattr(
        Stream, "wait_event", lambda stream, event: event in events or wait_event(stream, event)
    )
    assert any(wrong(seed) for seed in range(12))
