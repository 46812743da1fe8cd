"""Addresses of records, and copies between pools, on memory of this process: the arguments of CUDA
calls, without CUDA."""

import ctypes
import logging
import math
import random
import threading

import numpy as np
import pytest

from pensieve.runtime.device.pinned_memory import PinnedPool, Records
from pensieve.scheduler.types import InvariantError

LAYERS, LAYER = 3, 8
RECORD = LAYERS * LAYER


class HostMemory:
    """Stands in for `CudaRuntime`."""

    def __init__(self):
        self.held = {}

    def allocate_pinned(self, size):
        memory = np.zeros(size, np.uint8)
        self.held[memory.ctypes.data] = memory
        return memory.ctypes.data

    def free_pinned(self, address):
        del self.held[address]


class SlowMemory(HostMemory):
    """Pins a piece each time that the test lets it: `pieces` may be pinned, and `reached` is set
    when the next one is asked for. `error`: raised instead."""

    def __init__(self, pieces):
        super().__init__()
        self.pieces = threading.Semaphore(pieces)
        self.reached = threading.Event()
        self.error = None

    def allocate_pinned(self, size):
        if not self.pieces.acquire(blocking=False):
            self.reached.set()
            self.pieces.acquire()
        if self.error is not None:
            raise self.error
        return super().allocate_pinned(size)


def growing(memory, most=20, first=4):
    """A pool of pieces of three slots."""
    return PinnedPool(memory, first, RECORD, most, largest_piece=3 * RECORD)


def slots(*numbers):
    return np.array(numbers, np.int32)


def test_a_pool_is_pinned_in_pieces_that_end_with_whole_records():
    memory = HostMemory()
    pool = PinnedPool(memory, slots=10, record=RECORD, largest_piece=4 * RECORD - 1)
    assert [len(piece) for piece in memory.held.values()] == [3 * RECORD] * 3 + [RECORD]
    pool.free()
    pool.free()
    assert not memory.held
    assert not len(PinnedPool(memory, slots=0, record=RECORD).records.addresses(slots(), 0))


def test_addresses_are_those_counted_by_hand():
    records = Records(np.array([2**40, 2**50], np.uint64), 4, 7, RECORD)
    expected = [(2**50 if slot >= 4 else 2**40) + slot % 4 * RECORD + 5 for slot in (6, 0, 3, 4)]
    assert records.addresses(slots(6, 0, 3, 4), 5).tolist() == expected
    large = Records(np.array([0], np.uint64), 10**6, 10**6, 6_553_600)
    assert large.addresses(slots(999_999), 0).tolist() == [999_999 * 6_553_600], "beyond 32 bits"


@pytest.mark.parametrize("slot", [-1, 7])
def test_no_address_beyond_the_pool(slot):
    records = Records(np.array([2**40, 2**50], np.uint64), 4, 7, RECORD)
    with pytest.raises(InvariantError, match="of a pool of 7"):
        records.addresses(slots(0, slot), 0)


def test_a_pool_grows_by_pieces_and_a_rest_and_each_is_usable_at_once():
    memory = SlowMemory(pieces=3)
    pool = growing(memory)
    assert pool.records.slots == 6, "whole pieces from the start"
    pool.grow(lambda: math.inf)
    for usable in (9, 12, 15, 18):
        assert memory.reached.wait(60)
        assert pool.records.slots == usable
        pool.record(usable - 1)[:] = usable
        with pytest.raises(InvariantError, match=f"of a pool of {usable}"):
            pool.records.addresses(slots(usable), 0)
        memory.reached.clear()
        memory.pieces.release()
    pool._thread.join()
    assert pool.records.slots == 20
    assert [len(piece) // RECORD for piece in memory.held.values()] == [3] * 6 + [2]
    assert [pool.record(slot)[0] for slot in (8, 11, 14, 17, 19)] == [9, 12, 15, 18, 0]


def test_pieces_are_small_only_where_the_pool_grows():
    record = 10 * 2**20
    assert PinnedPool(HostMemory(), 1, record).records.slots_a_piece == 409
    assert PinnedPool(HostMemory(), 1, record, most=3).records.slots_a_piece == 1
    assert PinnedPool(HostMemory(), 1, 5 * 2**20, most=3).records.slots == 3


@pytest.mark.parametrize("why", ["memory is short", "cudaHostAlloc failed"])
def test_growth_that_ends_early_warns_once_and_keeps_what_is_there(caplog, why):
    memory = SlowMemory(pieces=3)
    pool = growing(memory)
    room = [10 * RECORD]
    pool.grow(lambda: room[0])
    assert memory.reached.wait(60)
    if why == "memory is short":
        room[0] = 3 * RECORD - 1
    else:
        memory.error = RuntimeError(why)
    memory.pieces.release()
    with caplog.at_level(logging.WARNING):
        pool._thread.join()
    assert pool.records.slots == (12 if why == "memory is short" else 9)
    (told,) = caplog.messages
    assert told.startswith("the host cache stays at") and told.endswith(why)
    pool.record(8)[:] = 1
    pool.free()
    assert not memory.held


def test_the_end_of_a_growing_pool_waits_for_one_piece_and_frees_all(caplog):
    memory = SlowMemory(pieces=4)
    pool = growing(memory, most=3000)
    pool.grow(lambda: math.inf)
    assert memory.reached.wait(60)
    freeing = threading.Thread(target=pool.free)
    freeing.start()
    assert pool._stopped.wait(60)
    memory.pieces.release(1000)
    freeing.join(60)
    assert not freeing.is_alive() and not memory.held and pool.records.slots == 15
    assert not caplog.records, "it was not short of memory"


def test_a_growing_pool_ends_at_once_if_the_driver_hangs():
    memory = SlowMemory(pieces=4)
    pool = growing(memory, most=3000)
    pool.grow(lambda: math.inf)
    assert memory.reached.wait(60)
    freeing = threading.Thread(target=pool.free, args=(False,), daemon=True)
    freeing.start()
    freeing.join(10)
    ended = not freeing.is_alive()
    memory.pieces.release(1000)
    assert ended
    pool._thread.join(60)
    assert not pool._thread.is_alive() and pool.records.slots == 15, "it pins no more"


@pytest.mark.parametrize("seed", range(4))
def test_copies_beside_growth_equal_copies_by_index(seed):
    """Slots of all pieces that are there, old and new."""
    dice = random.Random(seed)
    memory = SlowMemory(pieces=1)
    pool = growing(memory, most=50, first=3)
    pool.grow(lambda: math.inf)
    twin = np.zeros((50, RECORD), np.uint8)
    while pool.records.slots < 50:
        assert memory.reached.wait(60)
        usable = pool.records.slots
        for _ in range(5):
            pairs = dice.randint(1, usable // 2)
            both = dice.sample(range(usable), 2 * pairs)
            sources, targets = slots(*both[:pairs]), slots(*both[pairs:])
            for slot in sources:
                pool.record(slot)[:] = twin[slot] = dice.randrange(256)
            for target, source in zip(
                pool.records.addresses(targets, 0).tolist(),
                pool.records.addresses(sources, 0).tolist(),
                strict=True,
            ):
                ctypes.memmove(target, source, RECORD)
            twin[targets] = twin[sources]
        assert all(np.array_equal(pool.record(slot), twin[slot]) for slot in range(usable))
        memory.reached.clear()
        memory.pieces.release()
        if usable >= 48:
            pool._thread.join(60)


@pytest.mark.parametrize("seed", range(4))
def test_copies_by_address_equal_copies_by_index(seed):
    dice = random.Random(seed)
    memory = HostMemory()
    pools = [
        PinnedPool(memory, count, RECORD, largest_piece=piece * RECORD)
        for count, piece in ((20, 3), (15, 15))
    ]
    twins = []
    for pool, count in zip(pools, (20, 15), strict=True):
        twin = np.random.default_rng(count).integers(0, 256, (count, LAYERS, LAYER), np.uint8)
        for slot in range(count):
            pool.record(slot)[:] = twin[slot].ravel()
        twins.append(twin)
    for _ in range(10):
        source, target = dice.sample((0, 1), 2)
        pairs = dice.randint(1, 10)
        sources = slots(*dice.sample(range(len(twins[source])), pairs))
        targets = slots(*dice.sample(range(len(twins[target])), pairs))
        first = dice.randrange(LAYERS)
        stop = dice.randint(first + 1, LAYERS)
        twins[target][targets, first:stop] = twins[source][sources, first:stop]
        offset = first * LAYER
        size = (stop - first) * LAYER
        to = pools[target].records.addresses(targets, offset)
        for one, other in zip(
            to.tolist(), pools[source].records.addresses(sources, offset).tolist(), strict=True
        ):
            ctypes.memmove(one, other, size)
    for pool, twin in zip(pools, twins, strict=True):
        assert all(
            np.array_equal(pool.record(slot), twin[slot].ravel()) for slot in range(len(twin))
        )
