"""Disk reload = cold: replies are those of plain transformers through spills, restarts, and a disk
that returns wrong data.

Pools are so small that spilling never stops. The system's calls fail on purpose.
`tests/runtime/disk/test_store.py` checks the records themselves; this file checks that no wrong
token follows.
"""

from __future__ import annotations

import pytest
import torch

from pensieve.builder.build import build_engine
from pensieve.runtime.disk.record import record_bytes
from pensieve.runtime.disk.store import DiskSettings
from pensieve.runtime.engine import open_engine
from tests.models import tiny_checkpoint

from .bad_disk import ON_READ, ON_WRITE, BadDisk
from .chatter import Chatter

SLOTS = 60
SETTINGS = dict(gpu_kv_chunks=29, host_kv_chunks=14, disk_kv_chunks=SLOTS)
TURNS = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("llama")
    reference = tiny_checkpoint("llama", directory / "checkpoint")
    build_engine(directory / "checkpoint", directory / "engine")
    return open_engine(directory / "engine"), reference


@pytest.mark.parametrize(
    "save", ["async", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("sync", "off"))]
)
def test_replies_with_a_disk(model, tmp_path, save):
    chatter = Chatter(*model, 1, disk=DiskSettings(tmp_path, SLOTS, "ab"), save=save, **SETTINGS)
    chatter.run(2 * TURNS if save == "off" else TURNS, events=("disk", "gpu"))


@pytest.mark.parametrize(
    "disturbed", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "disturbed"]
)
def test_replies_across_restarts_in_the_middle_of_turns(model, tmp_path, disturbed):
    chatter = Chatter(
        *model, 2, disk=DiskSettings(tmp_path, SLOTS, "ab"), disturbed=disturbed, **SETTINGS
    )
    assert chatter.run(2 * TURNS, restarts=5, events=["disk"])["restarted"] == 5


@pytest.mark.parametrize(
    "seed", [3, pytest.param(4, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)]
)
def test_replies_with_a_disk_that_lies(model, tmp_path, seed, monkeypatch):
    """Torn, flipped and misdirected writes, refusals and slow reads, across restarts."""
    turns = 2 * TURNS if seed == 3 else 10 * TURNS
    monkeypatch.setattr("pensieve.scheduler.kv.disk_tier.BACKOFF_S", 0.05)
    engine, reference = model
    disk = BadDisk(seed, SLOTS, record_bytes(engine.chunk_bytes(8)))
    chatter = Chatter(
        engine,
        reference,
        seed,
        disk=DiskSettings(tmp_path, SLOTS, "ab", system=disk.calls),
        **SETTINGS,
    )

    def every_fault():
        return all(disk.happened[kind] for kind in (*ON_READ, *ON_WRITE))

    counts = chatter.run(turns, restarts=3, events=["disk"], also=every_fault)
    print(dict(disk.happened), dict(counts))
    assert every_fault()
