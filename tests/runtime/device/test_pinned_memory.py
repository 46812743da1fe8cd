"""Addresses of records, and copies between pools, on memory of this process: the arguments of CUDA
calls, without CUDA."""

import ctypes
import random

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


@pytest.mark.parametrize("seed", range(4))
def test_copies_by_address_equal_copies_by_index(seed):
    dice = random.Random(seed)
    memory = HostMemory()
    pools = [
        PinnedPool(memory, count, RECORD, piece * RECORD) for count, piece in ((20, 3), (15, 15))
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
