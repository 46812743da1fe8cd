"""Conversations that outgrow the context: replies are those of a full forward pass over exactly the
visible tokens.

Sometimes all KV is lost or requests are suspended, and contexts begin again: the reference begins
at the same positions.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from pensieve.builder.build import build_engine
from pensieve.runtime.disk.store import DiskSettings
from pensieve.runtime.engine import open_engine
from tests.models import tiny_checkpoint

from .chatter import Chatter

WINDOWED = "mistral-window", "qwen3-windows"
RUNS = [("llama", "keep"), ("llama", "recompute"), ("opt", "recompute")]
RUNS += [(kind, overflow) for kind in WINDOWED for overflow in ("keep", "recompute")]
EVENTS = (
    "gpu",
    "host",
    "disk",
    "recomputed",
    "new",
    "suspended",
    "dropped",
    "aborted",
    "forked",
    "overflowed",
    "begun anew",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    torch.set_num_threads(1)
    by_kind = {}
    for kind in ("llama", *WINDOWED, "opt"):
        directory = tmp_path_factory.mktemp(kind)
        reference = tiny_checkpoint(kind, directory / "checkpoint")
        build_engine(directory / "checkpoint", directory / "engine")
        by_kind[kind] = (open_engine(directory / "engine"), reference)
    return by_kind


def chat(models, kind, overflow, seed, turns, events=(), **settings):
    """Logs of up to seven windows of 64 tokens, in steps of 32."""
    sizes = dict(max_model_len=64, longest=260, gpu_kv_chunks=17, host_kv_chunks=24) | settings
    return Chatter(*models[kind], seed, overflow=overflow, **sizes).run(turns, events=events)


@pytest.mark.parametrize(("kind", "overflow"), RUNS)
def test_replies_are_those_of_a_pass_with_the_same_visibility(models, kind, overflow):
    events = ["overflowed", *(["moved on"] if overflow != "recompute" else [])]
    counts = chat(models, kind, overflow, 1, 32, events, disturbed=True, openings=(40, 55, 60))
    assert overflow != "recompute" or not counts["moved on"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "overflow"), RUNS)
def test_replies_over_many_windows(models, kind, overflow, tmp_path):
    """With and without ids, pools small and large, a disk, windows that end within a chunk, and
    other ratios."""
    happened = Counter()
    for seed in range(3):
        for ids in (0.0, 0.7, 1.0):
            happened += chat(models, kind, overflow, seed, 70, ids=ids, disturbed=seed == 1)
        happened += chat(models, kind, overflow, seed, 70, max_model_len=68, gpu_kv_chunks=60)
        happened += chat(
            models, kind, overflow, seed, 70, overflow_ratio=0.25, chunk_tokens=4, gpu_kv_chunks=40
        )
        happened += chat(models, kind, overflow, seed, 40, reuse=False, gpu_kv_chunks=60)
        disk = DiskSettings(tmp_path / f"{seed}", 60, "ab")
        happened += chat(
            models, kind, overflow, seed, 70, host_kv_chunks=10, disk_kv_chunks=60, disk=disk
        )
        happened += chat(models, kind, overflow, seed, 70, host_kv_chunks=0, batching="separate")
    for event in EVENTS:
        assert happened[event] > 0, f"{event} never occurred: {dict(happened)}"
    assert (happened["moved on"] > 0) == (overflow != "recompute")
