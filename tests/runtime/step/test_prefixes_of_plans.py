"""The rows that plans of random conversations put side by side, compared with the device model's
tables of slots."""

from collections import Counter
from math import ceil, log2

import pytest

from pensieve.runtime.step import prefixes
from pensieve.runtime.step.inputs import StepPacker
from pensieve.scheduler.context_window import OVERFLOW_MODES

from ...scheduler.device_model import DeviceModel
from ...scheduler.driver import Driver

CHUNK = 4
UNIT = 2  # chunks that are shared together
KEYS = UNIT * CHUNK
BAND = 4 * KEYS


class PackingModel(DeviceModel):
    """Packs each plan too, and compares which rows share what."""

    seen: Counter[str]
    packer: StepPacker

    def launch(self, plan):
        result = super().launch(plan)
        inputs = self.packer.pack(plan)
        rows = inputs.segments[: inputs.generated]
        units = [self.units(seat) for seat in rows[:, 4]]
        bands = [ceil(log2(max(length, BAND))) for length in rows[:, 3]]
        firsts = [own[0] for own in units if own]
        if inputs.sharing is None:
            assert len(firsts) == len(set(firsts))
            return result
        order, shared = inputs.sharing.T.tolist()
        assert sorted(order) == list(range(inputs.generated)) and shared[0] == 0
        for before, row, keys in zip(order[:-1], order[1:], shared[1:], strict=True):
            equal = 0 if bands[before] != bands[row] else common(units[before], units[row])
            assert keys == equal * KEYS
        self.seen["shared keys"] += sum(shared)
        self.seen["steps without"] += not any(shared)
        return result

    def units(self, seat):
        slots = self.tables[seat]
        return [tuple(slots[i : i + UNIT]) for i in range(0, len(slots) - UNIT + 1, UNIT)]


def common(one, other):
    """Count of equal leading units."""
    equal = 0
    while equal < min(len(one), len(other)) and one[equal] == other[equal]:
        equal += 1
    return equal


class PackingDriver(Driver):
    def _new_device(self):
        model = super()._new_device()
        model.__class__ = PackingModel
        model.seen = self.seen
        model.packer = StepPacker(
            self.config.max_num_seqs, self.config.max_model_len // CHUNK + 1, CHUNK
        )
        return model

    def __init__(self, seen, **settings):
        self.seen = seen
        super().__init__(**settings)


@pytest.fixture(scope="module")
def seen():
    return Counter()


@pytest.mark.parametrize("seed", range(6))
def test_plans_of_random_conversations(seed, seen, monkeypatch):
    """With suspended rows, branches, forks, contexts that overflow and a disk."""
    monkeypatch.setattr(prefixes, "SHARED_KEYS", KEYS)
    monkeypatch.setattr(prefixes, "BAND_KEYS", BAND)
    PackingDriver(
        seen,
        seed=seed,
        gpu_kv_chunks=(20, 40, 72)[seed % 3],
        host_kv_chunks=(16, 60)[seed % 2],
        disk_kv_chunks=(0, 60)[seed // 2 % 2],
        overflow=OVERFLOW_MODES[seed % 2],
        chunk_tokens=CHUNK,
    ).play(800, seen)


def test_everything_happened(seen):
    assert seen["shared keys"] > 500 and seen["steps without"] and seen["suspensions"]
